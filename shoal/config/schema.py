"""What a configuration may say: fields, types, ranges, and which counts fit together.

A field's description is its expectation in messages. Every check here reads values and nothing else.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shoal.errors import Mistake

MEMBERS = 4096  # more on one machine is a slip of the keyboard
LAST_PORT = 65535
MIXED = {  # what server_placement mixed needs: one group, a host for each worker, parts as weighed
    "nworker_groups": 1,
    "nserver_groups": 1,
    "nworkers_per_procs": 1,
    "nservers_per_procs": 1,
    "server_worker_separate": False,
    "slicer": "balanced",
}
CLASS = r"^[\w.]+:\w+$"
MEMBERS_OF_A_HOST = r"^(worker|server) \d+\.\d+(, *(worker|server) \d+\.\d+)*$"

Count = Annotated[StrictInt, Field(ge=1, description="must be a whole number, 1 or more")]
Whole = Annotated[StrictInt, Field(ge=0, description="must be a whole number, 0 or more")]
Delay = Annotated[StrictInt | None, Field(ge=0, description="must be a whole number, 0 or more")]
Port = Annotated[StrictInt, Field(ge=0, le=LAST_PORT, description=f"must be a port number, 0 to {LAST_PORT}")]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63, description="must be a whole number from 0, below 2**63")]
Switch = Annotated[StrictBool, Field(description="must be true or false")]
Text = Annotated[StrictStr | None, Field(pattern=r"^[^\x00]*$", description="must be text, in quotes")]
Class = Annotated[StrictStr, Field(pattern=CLASS)]
Names = Annotated[tuple[Class, ...], Field(description="must be a list of names, each MODULE:CLASS")]
Seconds = Annotated[
    float, Strict(), Field(gt=0, allow_inf_nan=False, description="must be a number of seconds above 0")
]
Transport = Annotated[Literal["auto", "ipc", "tcp"], Field(description="must be one of auto, ipc, tcp")]
Factor = Annotated[
    float, Strict(), Field(ge=0, allow_inf_nan=False, description="must be a number, 0 or more")
]
Scale = Annotated[Literal["sum", "mean"], Field(description="must be one of sum, mean")]
WireDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "int8", "topk"],
    Field(description="must be one of float32, bfloat16, float16, int8, topk"),
]
Fraction = Annotated[
    float, Strict(), Field(gt=0, le=1, description="must be a number above 0, 1 at the most")
]
ServerDtype = Annotated[Literal["same", "float32"], Field(description="must be one of same, float32")]
Data = Annotated[Literal["dealt", "leased"], Field(description="must be one of dealt, leased")]
Security = Annotated[Literal["curve", "trusted"], Field(description="must be one of curve, trusted")]
Together = Annotated[StrictStr, Field(pattern=MEMBERS_OF_A_HOST)]
Hosts = Annotated[
    tuple[Together, ...],
    Field(description="must be a list of machines, each with its members, as in worker 0.0, server 0.0"),
]
Placement = Annotated[Literal["auto", "mixed"], Field(description="must be one of auto, mixed")]
Slicer = Annotated[Literal["balanced", "singa"], Field(description="must be one of balanced, singa")]

SECTION = "must be a section with fields"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cluster(_Section):
    """Groups, members and how they are placed; SINGA's names and defaults first, then Shoal's own.

    ``nserver_groups 0`` gives each worker group as many servers as it has workers, each beside its
    worker and never synchronised; ``nservers_per_group`` and ``nservers_per_procs`` then say nothing.
    ``server_placement mixed`` has one server beside each worker and the others on further hosts, each with
    the part of the model that suits its place.
    ``start_port`` is the first tcp port, 0 = any. ``poll_time`` is accepted and has no effect.
    ``max_delay`` is in steps; None = no bound. ``chunk_bytes`` 0 leaves the size to the plan. What
    ``staleness_rate``, ``delay_compensation`` and ``group_scale`` do to an update is in
    ``shoal.asynchrony``; ``warmup_steps`` are worker group 0's.
    ``security``, ``interface`` and ``hosts`` are for runs on several machines: whether their wires are locked
    or everyone on the network is trusted, at which interface or network they listen, who is where.
    ``data`` is whether each group has a fixed part of an epoch or leases it block by block.
    """

    nworker_groups: Count = 1
    nserver_groups: Whole = 1
    nworkers_per_group: Count = 1
    nservers_per_group: Count = 1
    nworkers_per_procs: Count = 1
    nservers_per_procs: Count = 1
    server_worker_separate: Switch = False
    server_placement: Placement = "auto"
    sync_freq: Count = 1
    workspace: Text = None
    start_port: Port = 0
    share_memory: Switch = True
    poll_time: Whole = 100
    max_delay: Delay = None
    chunk_bytes: Whole = 0
    transport: Transport = "auto"
    security: Security = "curve"
    interface: Text = None
    hosts: Hosts = ()
    slicer: Slicer = "balanced"
    staleness_rate: Switch = False
    delay_compensation: Factor = 0.0
    group_scale: Scale = "sum"
    warmup_steps: Whole = 0
    server_dtype: ServerDtype = "same"
    wire_dtype: WireDtype = "float32"
    topk_fraction: Fraction = 0.01
    data: Data = "dealt"


class Timeouts(_Section):
    """How long each kind of wait may take, in seconds.

    ``ask`` is how long a worker waits before it asks after a missing reply; ``evaluate`` how long
    peers wait for an evaluation; ``finish`` how long a finished worker waits for slower groups, or another
    group for the end of the first one's warm-up; ``replay`` how long a server waits for the message that is
    next in its schedule; ``heartbeat`` how long a machine may give no sign of life before its members count
    as gone.
    """

    start: Seconds = 60.0
    values: Seconds = 300.0
    flush: Seconds = 60.0
    ask: Seconds = 1.0
    evaluate: Seconds = 3600.0
    finish: Seconds = 86400.0
    replay: Seconds = 120.0
    heartbeat: Seconds = 10.0


class Config(_Section):
    """A whole configuration. ``allow_optimizers`` names classes outside torch.optim that servers may run."""

    cluster: Cluster = Field(default=Cluster(), description=SECTION)
    timeouts: Timeouts = Field(default=Timeouts(), description=SECTION)
    seed: Seed = 0
    allow_optimizers: Names = ()


SECTIONS: dict[str, type[BaseModel]] = {"cluster": Cluster, "timeouts": Timeouts}
FIELDS: dict[str, FieldInfo] = dict(Config.model_fields) | {
    f"{section}.{leaf}": field
    for section, model in SECTIONS.items()
    for leaf, field in model.model_fields.items()
}


class Impossibility(NamedTuple):
    """Counts that do not fit together: the fields concerned, the one to change first."""

    fields: tuple[str, ...]
    value: object
    expected: str


def impossibilities(cluster: Cluster) -> Iterator[Impossibility]:
    """What no placement can satisfy in a block whose fields are each in range."""
    workers = cluster.nworker_groups * cluster.nworkers_per_group
    servers = cluster.nserver_groups * cluster.nservers_per_group
    if workers % cluster.nworkers_per_procs:
        yield Impossibility(
            ("nworkers_per_procs", "nworker_groups", "nworkers_per_group"),
            cluster.nworkers_per_procs,
            f"must divide the number of workers, nworker_groups x nworkers_per_group = {workers}",
        )
    if servers % cluster.nservers_per_procs:
        yield Impossibility(
            ("nservers_per_procs", "nserver_groups", "nservers_per_group"),
            cluster.nservers_per_procs,
            f"must divide the number of servers, nserver_groups x nservers_per_group = {servers}",
        )
    if cluster.nserver_groups and cluster.nworker_groups % cluster.nserver_groups:
        yield Impossibility(
            ("nworker_groups", "nserver_groups"),
            cluster.nworker_groups,
            f"must be a multiple of nserver_groups, which is {cluster.nserver_groups}",
        )
    if not cluster.nserver_groups and cluster.server_worker_separate:
        yield Impossibility(
            ("server_worker_separate", "nserver_groups"),
            True,
            "must be false when nserver_groups is 0: each worker then has its server beside it",
        )
    if workers + (servers or workers) > MEMBERS:
        yield Impossibility(
            ("nworker_groups", "nworkers_per_group", "nserver_groups", "nservers_per_group"),
            cluster.nworker_groups,
            f"makes {workers} workers and {servers or workers} servers: one machine takes {MEMBERS} members",
        )
    last = cluster.start_port + 2 * (servers or workers) - 1
    if cluster.transport == "tcp" and cluster.start_port and last > LAST_PORT:
        yield Impossibility(
            ("start_port", "nserver_groups", "nservers_per_group", "transport"),
            cluster.start_port,
            f"must leave two ports for each server: the last would be {last}, and there are {LAST_PORT}",
        )
    if cluster.server_placement == "mixed":
        yield from _not_mixed(cluster)


def _not_mixed(cluster: Cluster) -> Iterator[Impossibility]:
    """What keeps the servers of one group from being both beside its workers and on further hosts."""
    least = cluster.nworkers_per_group + 1
    if cluster.nservers_per_group < least:
        yield Impossibility(
            ("nservers_per_group", "nworkers_per_group", "server_placement"),
            cluster.nservers_per_group,
            f"must be {least} or more with server_placement mixed: one beside each worker, and further ones",
        )
    for field, needed in MIXED.items():
        if getattr(cluster, field) != needed:
            value = getattr(cluster, field)
            expected = f"must be {shown(needed)} with server_placement mixed"
            yield Impossibility((field, "server_placement"), value, expected)


def mistakes(values: Mapping[str, object], place: Callable[[str], str], *, whole: bool) -> list[Mistake]:
    """All mistakes in a configuration that has been read.

    Args:
        values: sections and fields by name.
        place: where a dotted name stands, for messages.
        whole: whether everything was readable. If not, a field that is missing has no known value,
            and what it might be is not held against the others.
    """
    found: list[Mistake] = []
    broken: set[str | None] = set()  # names whose values are not known, misspelt ones among them
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            mistake, name = _mistake(detail, place)
            found.append(mistake)
            broken |= {name, mistake.nearest}
    block = values.get("cluster", {})
    given = {f"cluster.{leaf}": value for leaf, value in block.items()} if isinstance(block, Mapping) else {}
    good = {name for name in FIELDS if name not in broken and (name in given or whole)}
    cluster = Cluster.model_validate({name.partition(".")[2]: given[name] for name in good & given.keys()})
    for problem in impossibilities(cluster):
        if good.issuperset(f"cluster.{leaf}" for leaf in problem.fields):
            where = place(f"cluster.{problem.fields[0]}")
            found.append(Mistake(where, shown(problem.value), problem.expected))
    return found


def _mistake(detail: ErrorDetails, place: Callable[[str], str]) -> tuple[Mistake, str]:
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path if path[0] in SECTIONS else path[:1])  # without the position in a list
    if name not in FIELDS:
        return unknown(name, place(name), shown(detail["input"])), name
    field, value = FIELDS[name], detail["input"]
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    nearest = close(str(value).strip("'\""), choices)
    return Mistake(place(name), shown(value), str(field.description), nearest), name


def unknown(name: str, place: str, value: str) -> Mistake:
    """The mistake of setting a dotted name that is no field."""
    section, _, leaf = name.partition(".")
    if name in SECTIONS:
        return Mistake(place, value, "is a section: name one of its fields")
    if section in SECTIONS:
        nearest = close(leaf, SECTIONS[section].model_fields)
        return Mistake(place, value, f"is not a field of {section}", nearest and f"{section}.{nearest}")
    homes = {known.rpartition(".")[2]: known for known in FIELDS}
    if name in homes:
        return Mistake(place, value, f"belongs inside {homes[name].partition('.')[0]}", homes[name])
    nearest = close(name, FIELDS if "." in name else homes)
    return Mistake(place, value, "is not a section or a field", nearest and homes.get(nearest, nearest))


def close(name: str, names: Iterable[str]) -> str | None:
    """The name most like this one, if any is."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def shown(value: object) -> str:
    """A value as it stands in a message: short, with text in quotes."""
    if isinstance(value, Mapping):
        return "{ … }"
    plain = value is None or isinstance(value, bool | str)
    text = json.dumps(value, ensure_ascii=False) if plain else reprlib.repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
