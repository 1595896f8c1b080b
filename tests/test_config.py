"""Reading configurations: what is accepted in each format, and that protobuf agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory, text_format
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import PRESETS, Cluster, Config, Timeouts, load, readers, schema


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, name: str = "my.conf", *settings: str) -> Config:
    """The configuration of a file with this text."""
    Path(name).write_text(text, encoding="utf-8")
    return load(name, settings)


# What is accepted


def test_documented_blocks_are_presets_and_files() -> None:
    data = Path(__file__).with_name("data")
    assert list(PRESETS) == ["sandblaster", "allreduce", "downpour", "hogwild"]
    for preset in PRESETS:
        assert load(preset) == load(str(data / f"{preset}.conf"))
    assert load("downpour").cluster == Cluster(
        nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True
    )


def test_a_block_pasted_from_the_documentation() -> None:
    block = (
        "cluster {\n nworker_groups: 1\n nserver_groups: 1\n nworkers_per_group: 3\n"
        " nservers_per_group: 2\n server_worker_separate: true\n}"
    )
    assert read(block) == load("sandblaster")


def test_defaults() -> None:
    config = read("")
    assert config == Config()
    assert config.cluster.model_dump() == {
        "nworker_groups": 1,
        "nserver_groups": 1,
        "nworkers_per_group": 1,
        "nservers_per_group": 1,
        "nworkers_per_procs": 1,
        "nservers_per_procs": 1,
        "server_worker_separate": False,
        "server_placement": "auto",
        "sync_freq": 1,
        "workspace": None,
        "start_port": 0,
        "share_memory": True,
        "poll_time": 100,
        "max_delay": None,
        "chunk_bytes": 0,
        "transport": "auto",
        "security": "curve",
        "interface": None,
        "hosts": (),
        "slicer": "balanced",
        "staleness_rate": False,
        "delay_compensation": 0.0,
        "group_scale": "sum",
        "warmup_steps": 0,
        "server_dtype": "same",
        "data": "dealt",
        "wire_dtype": "float32",
        "topk_fraction": 0.01,
    }
    assert config.timeouts == Timeouts(
        start=60, values=300, flush=60, ask=1, evaluate=3600, finish=86400, replay=120
    )
    assert (config.seed, config.allow_optimizers) == (0, ())


EVERYTHING = Config(
    cluster=Cluster(
        nworker_groups=4, nserver_groups=2, max_delay=0, transport="tcp", workspace="a b", poll_time=5
    ),
    timeouts=Timeouts(start=0.5, flush=7),
    seed=2**40,
    allow_optimizers=("mine:Lion", "mine:Sophia"),
)

PROTOBUF = """
# every kind of value
cluster: <
  nworker_groups: 4; nserver_groups: 0x2, max_delay: 0
  transport: tcp workspace: "a" ' b'
  poll_time: 5 server_worker_separate: f
>
timeouts { start: .5 flush: 7 }
seed: 1099511627776
allow_optimizers: ["mine:Lion", 'mine:Sophia']
"""
YAML = """
cluster: {nworker_groups: 4, nserver_groups: 2, max_delay: 0, transport: tcp, workspace: a b, poll_time: 5}
timeouts: {start: 0.5, flush: 7}
seed: 1099511627776
allow_optimizers: [mine:Lion, mine:Sophia]
"""
TOML = """
seed = 1099511627776
allow_optimizers = ["mine:Lion", "mine:Sophia"]
[cluster]
nworker_groups = 4
nserver_groups = 2
max_delay = 0
transport = "tcp"
workspace = "a b"
poll_time = 5
[timeouts]
start = 0.5
flush = 7
"""


@pytest.mark.parametrize("suffix", [".conf", ".prototxt", ".pbtxt", ".yaml", ".yml", ".toml", ".TOML"])
def test_every_format_says_the_same(suffix: str) -> None:
    texts = {".yaml": YAML, ".yml": YAML, ".toml": TOML}
    assert read(texts.get(suffix.lower(), PROTOBUF), f"my{suffix}") == EVERYTHING


def test_repeated_fields_add_up_in_protobuf_text() -> None:
    config = read('allow_optimizers: "m:A" allow_optimizers: ["m:B", "m:C"] allow_optimizers: []')
    assert config.allow_optimizers == ("m:A", "m:B", "m:C")


def test_a_byte_order_mark_is_no_mistake() -> None:
    Path("my.yaml").write_text("seed: 3", encoding="utf-8-sig")
    assert load("my.yaml").seed == 3


def test_settings_win_and_are_yaml() -> None:
    settings = ["cluster.nworker_groups=4", "cluster.nworker_groups=6", "timeouts.start=2.5", "seed=7"]
    config = load(
        "hogwild", [*settings, "allow_optimizers=[m:A, m:B]", "cluster.transport=ipc", "cluster.max_delay=2"]
    )
    assert (config.cluster.nworker_groups, config.cluster.nserver_groups) == (6, 3)
    assert (config.timeouts.start, config.seed, config.allow_optimizers) == (2.5, 7, ("m:A", "m:B"))
    assert (config.cluster.transport, config.cluster.max_delay) == ("ipc", 2)
    assert load("hogwild", ["cluster.workspace=a=b"]).cluster.workspace == "a=b"
    assert load("hogwild", ["cluster.max_delay=2", "cluster.max_delay=null"]).cluster.max_delay is None


def test_a_setting_can_mend_a_file() -> None:
    assert read("cluster { nworker_groups: 0 }", "my.conf", "cluster.nworker_groups=1") == Config()


# The schema and its protobuf description agree


def test_protobuf_description_has_the_schema_s_fields_and_defaults() -> None:
    described: dict[str, Any] = {}
    for name, field in readers.descriptor().fields_by_name.items():
        described[name] = field
        for leaf, inner in field.message_type.fields_by_name.items() if field.message_type else ():
            described[f"{name}.{leaf}"] = inner
    assert described.keys() == schema.FIELDS.keys()
    for name, field in described.items():
        if field.has_default_value:
            default = field.default_value
            default = field.enum_type.values_by_number[default].name if field.enum_type else default
            assert default == schema.FIELDS[name].default, name


def test_compiled_description_is_current(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    folder = Path(readers.__file__).parent
    out = tmp_path / "shoal.pb"
    arguments = ["protoc", f"--proto_path={folder}", f"--descriptor_set_out={out}", "shoal.proto"]
    assert protoc.main(arguments) == 0
    assert out.read_bytes() == (folder / "shoal.pb").read_bytes(), "run scripts/descriptors"


# Against protobuf's own parser

PIECES = [
    *("cluster", "timeouts", "seed", "allow_optimizers", "nworker_groups", "transport", "workspace", "start"),
    *("share_memory", "nope", ":", ":", ":", "{", "}", "<", ">", "[", "]", ",", ";", "1", "-1", "0x2", "010"),
    *("3.5", "inf", "true", "t", "tcp", '"a"', "'b'", '"open', '"\\q"', "\n", "\n", "# why\n", "é", "(", "-"),
]
STATEMENTS = [
    *(
        "cluster {",
        "cluster: <",
        "timeouts {",
        "}",
        ">",
        "nworker_groups: 2",
        "seed: 4",
        'allow_optimizers: "a"',
    ),
    *(
        "allow_optimizers: ['b', 'c']",
        "transport: tcp;",
        "workspace: 'a' \"b\",",
        "start: 2",
        "share_memory: 0",
    ),
]


def compare_with_protobuf(text: str) -> None:
    document = readers.read("my.conf", ".conf", text)
    message = message_factory.GetMessageClass(readers.descriptor())()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError:
        return
    assert not document.mistakes
    assert document.values == plain(message)


def plain(message: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type:
            values[field.name] = plain(value)
        elif field.enum_type:
            values[field.name] = field.enum_type.values_by_number[value].name
        else:
            values[field.name] = list(value) if field.is_repeated else value
    return values


KINDS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_STRING: st.text(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 1),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
}


@st.composite
def messages(draw: st.DrawFn, kind: Any) -> Any:
    """Any message of this kind, in range or not."""
    message: Any = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type:
            getattr(message, field.name).SetInParent()
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(KINDS[field.cpp_type])))
        else:
            setattr(message, field.name, draw(KINDS[field.cpp_type]))
    return message


@given(messages(readers.descriptor()), st.booleans(), st.booleans(), st.booleans())
def test_whatever_protobuf_writes_is_read_back(message: Any, line: bool, pointy: bool, short: bool) -> None:
    text = text_format.MessageToString(
        message, as_one_line=line, pointy_brackets=pointy, use_short_repeated_primitives=short
    )
    document = readers.read("my.conf", ".conf", text)
    assert not document.mistakes
    assert document.values == plain(message)


def all_or_nothing(text: str) -> None:
    """Whatever the text, reading ends; what the reader takes without complaint, protobuf takes too."""
    document = readers.read("my.conf", ".conf", text)
    found = document.mistakes + schema.mistakes(document.values, document.place, whole=True)
    if not found:
        text_format.Parse(text, message_factory.GetMessageClass(readers.descriptor())())


@given(st.lists(st.sampled_from(PIECES)).map(" ".join))
def test_any_tokens(text: str) -> None:
    compare_with_protobuf(text)
    all_or_nothing(text)


@given(st.lists(st.sampled_from(STATEMENTS)).map(" ".join))
def test_any_statements(text: str) -> None:
    compare_with_protobuf(text)
    all_or_nothing(text)


@given(st.text(), st.sampled_from(list(readers.READERS)))
def test_any_text(text: str, suffix: str) -> None:
    document = readers.read("my", suffix, text)
    schema.mistakes(document.values, document.place, whole=not document.mistakes)
