"""The order in which a server admitted messages: written down, or kept to in another run.

What a server does follows from what it admits, in which order; so an asynchronous run whose servers keep to
the order of an earlier one repeats it bit for bit. Only the first copy of a message counts, and only messages
that may change something. Each server has a file of its own, `s0.1.jsonl`: a head, then one entry a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shoal.config import Config
from shoal.config.schema import shown
from shoal.errors import Mistake, ScheduleMismatch, WaitTimeout
from shoal.topology import Member
from shoal.wire import Commit, Kind, Lease, Message

VERSION = 1
REMEDY = "replay it with the script, data, cluster block and seed that it was recorded with"

PLACEMENT = frozenset({"workspace", "start_port", "share_memory", "poll_time", "transport"})
"""Fields of the cluster block that may differ: they change how messages travel, not what they do."""

NUMBERED = frozenset({Kind.INIT, Kind.STOP, Kind.PULL})
"""Kinds that change something only where they have a number."""

IN_ORDER = frozenset({"commit", "norm", "pull", "leave"})
"""Kinds of which a worker sends one after the other."""


class Head(msgspec.Struct, frozen=True):
    """The first line of a file: which run this is the schedule of."""

    version: int
    server: str
    cluster: dict[str, Any]
    seed: int
    plan: str


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One message. `number` is what tells it from others of its kind, step and chunk."""

    sender: str
    kind: str
    step: int
    chunk: int
    number: int
    life: int = 1

    def __str__(self) -> str:
        told = {"step": self.step or None, "chunk": self.chunk, "number": self.number or None}
        where = ", ".join(f"{name} {value}" for name, value in told.items() if value not in (None, -1))
        return f"{self.sender}'s {self.kind} ({where})"


class Schedules(msgspec.Struct, frozen=True):
    """The folders that a run's schedules are written to, and read from."""

    record: str | None = None
    replay: str | None = None

    @property
    def kept(self) -> bool:
        """Whether an order is written down or kept to."""
        return self.record is not None or self.replay is not None


UNSCHEDULED = Schedules()


def head_of(config: Config, server: Member, plan: str = "") -> Head:
    """The head of a server's file; `plan`: its digest."""
    cluster = config.cluster.model_dump(mode="json", exclude=set(PLACEMENT))
    return Head(VERSION, server.name, cluster, config.seed, plan)


def path_of(folder: str, server: Member) -> Path:
    """A server's file."""
    return Path(folder, f"{server.short}.jsonl")


def entry_of(message: Message) -> Entry | None:
    """The message as a schedule knows it; None for one that changes nothing."""
    header = message.header
    step, number, chunk = header.step, header.number, header.chunk
    if header.kind in NUMBERED and not number:
        return None
    match header.kind:
        case Kind.COMMIT:
            number = message.body(Commit).optimizer
        case Kind.SYNC | Kind.SYNCED:
            number = header.sequence
        case Kind.PULL:
            chunk = -1  # who lacks an answer asks once more, for single chunks
        case Kind.LEASE:
            ask = message.body(Lease).ask
            step, chunk, number = ask.position + 1, ask.loader, ask.epoch + 1
        case Kind.SHARE | Kind.NORM | Kind.LEAVE | Kind.INIT | Kind.STOP:
            pass
        case _:
            return None
    return Entry(header.sender, header.kind.name.lower(), step, chunk, number, header.life)


def read(path: Path) -> tuple[Head, list[Entry]]:
    """A server's schedule; a torn last line is left out.

    Raises:
        ScheduleMismatch: there is none, or not one of this version.
    """
    try:
        first, *lines = path.read_bytes().rpartition(b"\n")[0].split(b"\n")
        head = msgspec.json.decode(first, type=Head)
        if head.version != VERSION:
            raise ScheduleMismatch(f"{path} is of version {head.version}, this Shoal's are of {VERSION}")
        return head, [msgspec.json.decode(line, type=Entry) for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise ScheduleMismatch(
            f"{path} is no schedule ({what})", remedy="name the folder of a run with --record-schedule"
        ) from None


def difference(recorded: Head, present: Head) -> str | None:
    """What a schedule was recorded with that is another now, in words; None if nothing is."""
    for name in sorted(recorded.cluster.keys() | present.cluster.keys()):
        then, now = recorded.cluster.get(name), present.cluster.get(name)
        if then != now:
            return f"it was recorded with cluster.{name} {shown(then)}, which is {shown(now)} now"
    if recorded.seed != present.seed:
        return f"it was recorded with seed {recorded.seed}, which is {present.seed} now"
    if recorded.plan and present.plan and recorded.plan != present.plan:
        return "it was recorded with another model"
    return None


def misfits(schedules: Schedules, config: Config, servers: Sequence[Member]) -> Iterator[Mistake]:
    """What can be wrong with the folders, as far as it can be told before a run starts."""
    record, replay = schedules.record, schedules.replay
    if record is not None and Path(record).exists() and not (Path(record).is_dir() and empty(Path(record))):
        yield Mistake("--record-schedule", record, "must be a new or an empty folder")
    for server in servers if replay is not None else ():
        try:
            found = difference(read(path_of(replay or "", server))[0], head_of(config, server))
        except ScheduleMismatch as error:
            found = error.what
        if found:
            yield Mistake("--replay-schedule", str(replay), f"does not fit: {found}")
            return


def empty(folder: Path) -> bool:
    """Whether a folder holds nothing."""
    return next(folder.iterdir(), None) is None


class Schedule:
    """What one server does about the order of its messages.

    Args:
        schedules: where an order is written to or read from; without either, messages are taken as they come.

    Attributes:
        kept: see Schedules.kept.
    """

    def __init__(self, schedules: Schedules, config: Config, server: Member) -> None:
        self.kept = schedules.kept
        self._schedules, self._config, self._server = schedules, config, server
        self._file: BinaryIO | None = None
        self._seen: set[Entry] = set()
        self._order: list[Entry] = []
        self._known: set[Entry] = set()
        self._coming: dict[str, list[Entry]] = {}
        self._held: dict[Entry, Message] = {}
        self._at, self._since = 0, 0.0

    def begin(self, plan: str, now: float) -> None:
        """The model is known, by its plan's digest; raises ScheduleMismatch for a schedule of another run."""
        head = head_of(self._config, self._server, plan)
        if (folder := self._schedules.replay) is not None:
            path = path_of(folder, self._server)
            recorded, self._order = read(path)
            if found := difference(recorded, head):
                raise self._mismatch(f"the schedule {path} does not fit: {found}")
            self._known, self._since = set(self._order), now
            for entry in reversed(self._order):
                if entry.kind in IN_ORDER:
                    self._coming.setdefault(entry.sender, []).append(entry)
        if (folder := self._schedules.record) is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = path_of(folder, self._server).open("wb", buffering=0)
            self._file.write(msgspec.json.encode(head) + b"\n")

    def arrived(self, message: Message, now: float) -> list[Message]:
        """A message has arrived; returns those whose turn it is now, in their order.

        Raises:
            ScheduleMismatch: it is the first that the schedule does not know of.
        """
        entry = entry_of(message) if self.kept else None
        if entry is None:
            return [message]
        if entry in self._seen:  # a copy: of one that waits for its turn here, or of one that has been taken
            return [] if entry in self._held else [message]
        if self._schedules.replay and not self._expects(entry):
            return []
        self._seen.add(entry)
        self._held[entry] = message
        return list(self._ready(now)) if self._schedules.replay else [self._take(entry)]

    def _expects(self, entry: Entry) -> bool:
        """Whether the schedule has this message; raises ScheduleMismatch unless it is a share.

        A share that does not count may arrive at any time, also after its server's end.
        """
        if entry.kind == "share":
            return entry in self._known
        coming = self._coming.get(entry.sender, [])
        expected = coming.pop() if entry.kind in IN_ORDER and coming else None
        if expected == entry or (entry.kind not in IN_ORDER and entry in self._known):
            return True
        there = f"has {expected}" if expected else f"has no such message; {self._next()}"
        raise self._mismatch(f"{entry} arrived where the schedule {there}")

    def _next(self) -> str:
        return f"{self._order[self._at]} is next" if self._at < len(self._order) else "it ends here"

    def _ready(self, now: float) -> Iterator[Message]:
        while self._at < len(self._order) and self._order[self._at] in self._held:
            self._at, self._since = self._at + 1, now
            yield self._take(self._order[self._at - 1])

    def _take(self, entry: Entry) -> Message:
        if self._file is not None:
            self._file.write(msgspec.json.encode(entry) + b"\n")
        return self._held.pop(entry)

    def check(self, now: float) -> None:
        """Raises WaitTimeout where the message that is next has been waited for too long."""
        seconds = self._config.timeouts.replay
        if self._at < len(self._order) and now - self._since > seconds:
            awaited = self._order[self._at]
            raise WaitTimeout(
                f"waited {seconds:g} s (timeouts.replay) for {awaited}, which is next in the schedule",
                member=self._server.name,
                remedy="see that member's log; raise timeouts.replay if it is only slow",
            )

    def end(self) -> None:
        """The run is over; raises ScheduleMismatch where the schedule goes on."""
        for entry in self._order[self._at :]:
            if entry.kind != "share":
                raise self._mismatch(f"the run ended where the schedule has {entry}")

    def _mismatch(self, what: str) -> ScheduleMismatch:
        return ScheduleMismatch(what, member=self._server.name, remedy=REMEDY)
