"""Mistakes in configurations: each kind in each format, its place and remedy, and all of them at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.config import Timeouts, load
from shoal.errors import ConfigError, Mistake

WHOLE_FROM_1 = "must be a whole number, 1 or more"
WHOLE_FROM_0 = "must be a whole number, 0 or more"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mistakes(text: str, name: str = "my.conf", *settings: str) -> list[Mistake]:
    """All mistakes of a file with this text; none if it is right."""
    Path(name).write_text(text, encoding="utf-8")
    try:
        load(name, settings)
    except ConfigError as error:
        return list(error.mistakes)
    return []


def told(text: str, name: str = "my.conf", *settings: str) -> list[str]:
    return [str(mistake) for mistake in mistakes(text, name, *settings)]


# One kind at a time


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *(
            (name, "0", WHOLE_FROM_1)
            for name in ("nworker_groups", "nworkers_per_group", "nservers_per_group")
        ),
        *((name, "0", WHOLE_FROM_1) for name in ("nworkers_per_procs", "nservers_per_procs", "sync_freq")),
        *((name, "-1", WHOLE_FROM_0) for name in ("nserver_groups", "max_delay", "poll_time")),
        ("start_port", "65536", "must be a port number, 0 to 65535"),
        ("start_port", "-1", "must be a port number, 0 to 65535"),
        ("nworker_groups", "1.5", WHOLE_FROM_1),
        ("nworker_groups", "true", WHOLE_FROM_1),
        ("nworker_groups", '"3"', WHOLE_FROM_1),
        ("max_delay", "true", WHOLE_FROM_0),
        ("nserver_groups", "false", WHOLE_FROM_0),
        ("server_worker_separate", '"true"', "must be true or false"),
        ("share_memory", "2", "must be true or false"),
        ("workspace", "3", "must be text, in quotes"),
        ("transport", '"udp"', "must be one of auto, ipc, tcp"),
        ("slicer", "3", "must be one of balanced, singa"),
    ],
)
def test_types_and_ranges_in_every_format(field: str, value: str, expected: str) -> None:
    name = f"cluster.{field}"
    texts = {
        "my.conf": (f"cluster {{\n  {field}: {value}\n}}", f"my.conf:2:3: {name}"),
        "my.yaml": (f"cluster:\n  {field}: {value}\n", f"my.yaml:2:3: {name}"),
        "my.toml": (f"[cluster]\n{field} = {value}\n", f"my.toml: {name}"),
    }
    for file, (text, place) in texts.items():
        assert mistakes(text, file) == [Mistake(place, value, expected)]
    assert mistakes("", "my.conf", f"{name}={value}") == [Mistake(f"--set {name}", value, expected)]


def test_flags_may_not_be_numbers_except_as_protobuf_has_it() -> None:
    assert told("cluster { share_memory: 0 }") == []
    assert told("cluster: {share_memory: 0}", "my.yaml") == [
        "my.yaml:1:11: cluster.share_memory: 0: must be true or false"
    ]


@pytest.mark.parametrize("field", list(Timeouts.model_fields))
@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan", "true", '"3"', "null", "[3]"])
def test_timeouts(field: str, value: str) -> None:
    [mistake] = mistakes(f"timeouts:\n  {field}: {value}\n", "my.yaml")
    assert mistake.place == f"my.yaml:2:3: timeouts.{field}"
    assert mistake.expected == "must be a number of seconds above 0"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("seed", "-1", "must be a whole number from 0, below 2**63"),
        ("seed", str(2**63), "must be a whole number from 0, below 2**63"),
        ("allow_optimizers", "mine", "must be a list of names, each MODULE:CLASS"),
        ("allow_optimizers", "[mine:Lion, 3]", "must be a list of names, each MODULE:CLASS"),
        ("cluster", "3", "must be a section with fields"),
        ("timeouts", "", "must be a section with fields"),
    ],
)
def test_the_top_level(field: str, value: str, expected: str) -> None:
    [mistake] = mistakes(f"{field}: {value}\n", "my.yaml")
    assert (mistake.place, mistake.expected) == (f"my.yaml:1:1: {field}", expected)


@pytest.mark.parametrize(
    ("wrong", "expected", "nearest"),
    [
        ("cluster.nworkr_groups", "is not a field of cluster", "cluster.nworker_groups"),
        ("timeouts.vlaues", "is not a field of timeouts", "timeouts.values"),
        ("cluster.zzz", "is not a field of cluster", None),
        ("sede", "is not a section or a field", "seed"),
        ("zzz", "is not a section or a field", None),
        ("nworkers_per_group", "belongs inside cluster", "cluster.nworkers_per_group"),
        ("flush", "belongs inside timeouts", "timeouts.flush"),
        ("nworkers_per_grop", "is not a section or a field", "cluster.nworkers_per_group"),
    ],
)
def test_unknown_names_in_every_format(wrong: str, expected: str, nearest: str | None) -> None:
    section, _, leaf = wrong.rpartition(".")
    texts = {
        "my.conf": f"{section} {{ {leaf}: 2 }}" if section else f"{leaf}: 2",
        "my.yaml": f"{section}: {{{leaf}: 2}}" if section else f"{leaf}: 2",
        "my.toml": f"{section and f'[{section}]'}\n{leaf} = 2",
    }
    for file, text in texts.items():
        [mistake] = mistakes(text, file)
        assert re.fullmatch(rf"{file}(:1:\d+)?: {re.escape(wrong)}", mistake.place)
        assert (mistake.value, mistake.expected, mistake.nearest) == ("2", expected, nearest)
    assert mistakes("", "my.conf", f"{wrong}=2") == [Mistake(f"--set {wrong}", "2", expected, nearest)]


def test_values_of_a_choice_have_a_nearest_name() -> None:
    assert told("cluster { transport: tpc }") == [
        "my.conf:1:11: cluster.transport: tpc: must be one of auto, ipc, tcp (did you mean tcp?)"
    ]
    assert told('cluster { slicer: "singa" }')[0].endswith(
        "must be one of balanced, singa (did you mean singa?)"
    )


IMPOSSIBLE = [
    (
        {"nworker_groups": 3, "nserver_groups": 2},
        "nworker_groups",
        "must be a multiple of nserver_groups, which is 2",
    ),
    ({"nserver_groups": 2}, "nworker_groups", "must be a multiple of nserver_groups, which is 2"),
    (
        {"nworker_groups": 3, "nworkers_per_procs": 2},
        "nworkers_per_procs",
        "must divide the number of workers, nworker_groups x nworkers_per_group = 3",
    ),
    (
        {"nservers_per_group": 3, "nservers_per_procs": 2},
        "nservers_per_procs",
        "must divide the number of servers, nserver_groups x nservers_per_group = 3",
    ),
    (
        {"nserver_groups": 0, "server_worker_separate": True},
        "server_worker_separate",
        "must be false when nserver_groups is 0: each worker then has its server beside it",
    ),
]


@pytest.mark.parametrize(("block", "field", "expected"), IMPOSSIBLE)
def test_impossible_topologies(block: dict[str, int], field: str, expected: str) -> None:
    [mistake] = mistakes(json.dumps({"cluster": block}), "my.yaml")
    assert mistake.place.endswith(f": cluster.{field}") and mistake.place.startswith("my.yaml:")
    assert (mistake.value, mistake.expected) == (json.dumps(block.get(field, 1)), expected)


def test_mixed_placement_says_all_that_it_needs() -> None:
    block = {
        **{"nworker_groups": 2, "nserver_groups": 2, "nworkers_per_group": 4, "nservers_per_group": 4},
        **{"nworkers_per_procs": 2, "nservers_per_procs": 2, "server_worker_separate": True},
        **{"slicer": "singa", "server_placement": "mixed"},
    }
    found = mistakes(json.dumps({"cluster": block}), "my.yaml")
    assert {mistake.place.rpartition("cluster.")[2]: mistake.expected for mistake in found} == {
        "nservers_per_group": "must be 5 or more with server_placement mixed: "
        "one beside each worker, and further ones",
        "nworker_groups": "must be 1 with server_placement mixed",
        "nserver_groups": "must be 1 with server_placement mixed",
        "nworkers_per_procs": "must be 1 with server_placement mixed",
        "nservers_per_procs": "must be 1 with server_placement mixed",
        "server_worker_separate": "must be false with server_placement mixed",
        "slicer": 'must be "balanced" with server_placement mixed',
    }
    assert mistakes(json.dumps({"cluster": {**block, "server_placement": "auto"}}), "my.yaml") == []
    right = "cluster { nworkers_per_group: 4 nservers_per_group: 5 server_placement: mixed }"
    assert mistakes(right) == []


def test_counts_that_are_not_known_are_not_held_against_others() -> None:
    misspelt = "cluster: {nworker_grups: 4, nserver_groups: 2}"
    assert [mistake.nearest for mistake in mistakes(misspelt, "my.yaml")] == ["cluster.nworker_groups"]
    assert len(mistakes("cluster { nserver_groups: 2 nworker_groups: four }")) == 1
    assert len(mistakes("cluster { nserver_groups: 2\n nworker_groups 4 }")) == 1
    assert len(mistakes("nworker_groups: 4 cluster { nserver_groups: 2 }")) == 1
    assert len(mistakes("cluster: [", "my.yaml", "cluster.nserver_groups=2")) == 1


# Syntax


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed 3", ['my.conf:1:6: 3: must be ":" or "{" after seed']),
        ("seed:", ["my.conf:1:6: end of file: must be a value for seed"]),
        ("cluster {\n sync_freq:\n}", ["my.conf:3:1: }: must be a value for cluster.sync_freq"]),
        ("}\nseed: 3", ["my.conf:1:1: }: must be the name of a field"]),
        ("cluster {", ['my.conf:1:1: cluster: {: must be closed with "}"']),
        ("zzz { a { b: 1 }", ['my.conf:1:1: zzz: {: must be closed with "}"', "zzz"]),
        ("seed: 1\nseed: 2", ["my.conf:2:1: seed: 2: is given twice"]),
        ("cluster {}\ncluster {}", ["my.conf:2:1: cluster: { … }: is given twice"]),
        ("allow_optimizers: ['a' 'b' 3]", ['my.conf:1:28: 3: must be "," or "]"']),
        ("allow_optimizers: ['a',", ["my.conf:1:24: end of file: must be a value for allow_optimizers"]),
        ("seed { x: 1 }", ["my.conf:1:1: seed: { … }: must be a whole number from 0, below 2**63"]),
        ("cluster: 3", ["my.conf:1:1: cluster: 3: must be a section with fields"]),
        ("cluster { workspace: here }", ["my.conf:1:11: cluster.workspace: here: must be text, in quotes"]),
        ('cluster { workspace: "a }', ['cluster.workspace: "a }: must be text', 'must be closed with "}"']),
    ],
)
def test_protobuf_syntax(text: str, expected: list[str]) -> None:
    found = told(text)
    assert len(found) == len(expected)
    assert all(any(part in line for line in found) for part in expected), found


def test_reading_goes_on_behind_a_mistake() -> None:
    text = "cluster {\n nworker_groups 3 sync_freq: 0\n max_delay: -1\n}\n!\nseed: -1"
    assert [line.partition(": ")[0] for line in told(text)] == [
        "my.conf:2:17",
        "my.conf:5:1",
        "my.conf:3:2",
        "my.conf:6:1",
    ]


@pytest.mark.parametrize(
    ("file", "text", "start"),
    [
        ("my.yaml", "cluster:\n  a: [1\nseed: 3", "my.yaml:3:5: "),
        ("my.yaml", "seed: 1\n---\nseed: 2", "my.yaml:2:1: "),
        ("my.yaml", "seed: !!python/object:os.system 3", "my.yaml:1:7: could not determine a constructor"),
        ("my.yaml", "seed: 2001-99-99", "my.yaml: month must be in 1..12"),
        ("my.yaml", "seed: \a", "my.yaml: unacceptable character"),
        ("my.yaml", "[" * 5000, "my.yaml: maximum recursion"),
        ("my.yaml", "[1, 2]", "my.yaml: [1, 2]: must be sections with fields"),
        ("my.yaml", "cluster:\n  sync_freq: 1\n  sync_freq: 2", "my.yaml:3:3: cluster.sync_freq: "),
        ("my.yaml", "3: 4", "my.yaml:1:1: 3: "),
        ("my.yaml", "cluster: {3: 4}", "my.yaml:1:11: cluster.3: "),
        ("my.toml", "seed = 1\nseed = 2", "my.toml:2: Cannot overwrite a value"),
        ("my.toml", "seed = x\n", "my.toml:1:8: Invalid value"),
        ("my.toml", "seed = 1\n[cluster", "my.toml:2: "),
        ("my.toml", "seed = " + "[" * 5000, "my.toml: maximum recursion"),
    ],
)
def test_yaml_and_toml_syntax(file: str, text: str, start: str) -> None:
    [line] = told(text, file)
    assert line.startswith(start)


def test_settings() -> None:
    settings = ["cluster", "cluster=3", "clustr.slicer=singa", "seed.x=3", "=", "timeouts.start=[", "seed=-1"]
    assert told("", "my.conf", *settings) == [
        '--set cluster: "cluster": must be NAME=VALUE',
        "--set cluster: 3: is a section: name one of its fields",
        "--set clustr.slicer: singa: is not a section or a field (did you mean cluster.slicer?)",
        "--set seed.x: 3: is not a section or a field (did you mean seed?)",
        "--set : : is not a section or a field",
        "--set timeouts.start: [: must be a number of seconds above 0",
        "--set seed: -1: must be a whole number from 0, below 2**63",
    ]
    assert told("cluster: 3", "my.yaml", "cluster.sync_freq=1") == [
        "my.yaml:1:1: cluster: 3: must be a section with fields"
    ]


# Files


def test_a_file_that_is_not_there_lists_the_presets() -> None:
    for source in ("downpuor", "Downpour"):
        with pytest.raises(ConfigError) as caught:
            load(source)
        expected = "must be a file or one of the presets sandblaster, allreduce, downpour, hogwild"
        [mistake] = caught.value.mistakes
        assert mistake == Mistake(source, "no such file or directory", expected, "downpour")


def test_files_that_cannot_be_read() -> None:
    Path("folder").mkdir()
    Path("my.yaml").write_bytes(b"seed: \xff")
    Path("my.json").write_text("{}")
    for source, said in {
        "folder": "is a directory: must be a file or",
        "my.yaml": "byte 6 is not UTF-8: must be a text file",
        "my.json": "must be a file that ends in one of .conf, .prototxt, .pbtxt, .yaml, .yml, .toml",
        "a\0b": "null",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            load(source, ["seed=3"])


# All at once


def test_all_mistakes_at_once_protobuf() -> None:
    text = """\
nworkers_per_group: 2
cluster {
  nworker_groups: 3
  nserver_groups: 2
  nworkrs_per_procs: 4
  sync_freq: zero
  max_delay -1
  transport: tpc
}
timeouts { start: 0 }
seed: -1
optimizer { type: kSGD }
"""
    found = mistakes(text, "my.conf", "cluster.x=1", "cluster.slicer=sing")
    assert len(found) == 11
    assert {mistake.place.partition(": ")[0] for mistake in found} == {
        *(f"my.conf:{line}" for line in ("1:1", "3:3", "5:3", "6:3", "7:13", "8:3", "10:12", "11:1", "12:1")),
        *("--set cluster.x", "--set cluster.slicer"),
    }


def test_all_mistakes_at_once_yaml_and_toml() -> None:
    block = {"nworker_groups": 3, "nserver_groups": 2, "sync_freq": "1", "transport": "tpc", "zzz": 1}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in block.items())
    yaml = json.dumps({"cluster": block, "timeouts": {"start": 0}, "seed": True, "flush": 1})
    toml = f"seed = true\nflush = 1\n[cluster]\n{lines}\n[timeouts]\nstart = 0\n"
    for file, text in {"my.yaml": yaml, "my.toml": toml}.items():
        found = mistakes(text, file)
        assert {mistake.place.rpartition(" ")[2] for mistake in found} == {
            *(f"cluster.{field}" for field in ("nworker_groups", "sync_freq", "transport", "zzz")),
            *("timeouts.start", "seed", "flush"),
        }
        assert len(found) == 7


def test_values_in_messages_are_short() -> None:
    [mistake] = mistakes(json.dumps({"seed": "x" * 500}), "my.yaml")
    assert len(mistake.value) == 40
    [mistake] = mistakes("seed: &a [1, *a, *a]", "my.yaml")
    assert len(mistake.value) <= 40 and mistake.value.startswith("[1, [1, ")
