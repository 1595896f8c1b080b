"""Messages and their encoding.

Every message is a list of frames: a header of fixed fields (msgpack), a body that depends on the kind
(msgpack, often empty), then raw tensor bytes. Nothing on the wire is code; nothing is unpickled.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from shoal.errors import ProtocolError
from shoal.leases import Ask, Block
from shoal.partition import Buffer, Parameter

PROTOCOL = 1
VERSION = "0.1.0"

Frame = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    INIT = 3
    SHARE = 4
    COMMIT = 5
    NORM = 6
    VALUES = 7
    PULL = 8
    LEAVE = 9
    SYNC = 10
    SYNCED = 11
    REPLICATE = 12
    STORED = 13
    HEARTBEAT = 14
    REFUSE = 15
    STOP = 16
    LEASE = 17


BULK = frozenset({Kind.INIT, Kind.SHARE, Kind.VALUES, Kind.SYNC, Kind.SYNCED})


class Header(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The fixed fields of every message; a field that a kind does not use keeps its default.

    Attributes:
        life: incarnation of the sender (a group's or a server's).
        sequence: counts a sender's messages, or the exchanges of a chunk in SYNC and SYNCED.
        plan: digest of the plan, "" before there is one.
        number: which push of the chunk in this step (SHARE), or a kind's own small number.
        chunk: chunk number; -1 = all of the receiver's.
        base: version of the values that a share's gradient was computed on; in PULL −1 = all values, for a
            worker that has nothing to add a difference to.
        codec: "raw" = one frame, all of the chunk; "rows" = two: numbers (int64) and rows of a table; else
            one of `codecs.CODECS`: a gradient (SHARE), or a difference of values (VALUES).
        place: "" = bytes follow inline; else where in shared memory they lie.
        sent: seconds since the epoch.
    """

    protocol: int = PROTOCOL
    kind: Kind
    run: str
    sender: str
    life: int = 1
    sequence: int = 0
    plan: str = ""
    epoch: int = 0
    group: int = 0
    step: int = 0
    number: int = 0
    chunk: int = -1
    base: int = 0
    version: int = 0
    lsn: int = 0
    codec: str = "raw"
    dtype: str = ""
    place: str = ""
    sent: float = 0.0


class Body(msgspec.Struct, array_like=True, frozen=True):
    """The kind-specific part of a message."""


class OptimizerSpec(Body, frozen=True):
    """An optimizer by name: its class, constructor defaults and the settings of its param groups."""

    name: str
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]


class Hello(Body, frozen=True):
    """Who is there and what it wants to train; a server that greets a server leaves the model out.

    Attributes:
        ema: the decay of the moving averages that servers shall keep of parameters; None = none.
    """

    shoal: str
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    optimizers: tuple[OptimizerSpec, ...] = ()
    checksum: int = 0
    ema: float | None = None


class Welcome(Body, frozen=True):
    """The answer to a hello.

    Attributes:
        steps: for each optimizer the last step of the group that is closed everywhere here.
        differs: the worker's start was not worker 0.0's.
        model: to a server only: worker 0.0's hello.
    """

    steps: tuple[int, ...] = ()
    differs: bool = False
    model: Hello | None = None


class State(Body, frozen=True):
    """One entry of a piece's optimizer state in INIT: a number, or the next raw frame.

    Attributes:
        rows: two frames follow, of a sparse tensor: its row numbers (int64), and those rows.
    """

    piece: int
    key: str
    value: float | int | bool | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    rows: bool = False


class Init(Body, frozen=True):
    """What follows a chunk's values in INIT: its optimizer state."""

    state: tuple[State, ...] = ()


class Commit(Body, frozen=True):
    """A worker's word to a server: what this step of this optimizer is, and that it happens.

    Attributes:
        pushed: chunk → shares pushed for it in this step.
        counts: chunks whose last share counts; in the others every `p.grad` is None.
        touched: chunk → indices of its pieces that have a gradient, where not all have.
        weight: samples behind the worker's gradient.
        scale: the loss scale that the gradients still carry.
        clip: coefficient for the averaged gradient, 1 where nothing is clipped.
        total: shares pushed to this server so far, over all optimizers and steps.
        settings: the param groups' hyperparameters, where they changed.
        cursor: the worker's loader position, to server 0 only.
        stop: the worker asks all groups to end their loops.
        limit: largest absolute value of an element of the averaged gradient, after `clip`; None = any.
    """

    optimizer: int
    pushed: dict[int, int]
    counts: tuple[int, ...]
    touched: dict[int, tuple[int, ...]]
    weight: float
    finite: bool
    scale: float
    clip: float
    total: int
    settings: tuple[dict[str, Any], ...] | None = None
    cursor: tuple[int, ...] = ()
    stop: bool = False
    limit: float | None = None


class Norm(Body, frozen=True):
    """A worker's question for the squared norm of the group's averaged gradient; fields as in Commit.

    Attributes:
        again: no answer came, so something may have been lost.
    """

    optimizer: int
    numbers: dict[int, int]
    touched: dict[int, tuple[int, ...]]
    weight: float
    finite: bool
    scale: float
    again: bool = False


class NormAnswer(Body, frozen=True):
    """The squared norm (float64) of one server's part of the averaged gradient."""

    optimizer: int
    squared: float


class Values(Body, frozen=True):
    """What comes with a chunk's values.

    Attributes:
        skipped: the round was skipped because a gradient was not finite.
        staleness: of the round that these values answer; -1 where none was applied.
        settings: the group's hyperparameters, to a worker whose own differ from its worker 0's.
        stop: the group is to end its loop after this step.
        edition: counts what the group was sent of a chunk that travels as differences.
        base: the edition to which this is a difference, or whose values have not changed; 0 = none.
    """

    skipped: bool = False
    staleness: int = -1
    settings: tuple[dict[str, Any], ...] | None = None
    stop: bool = False
    edition: int = 0
    base: int = 0


class Pull(Body, frozen=True):
    """What a worker asks for between steps, in PULL with a number above 0.

    Attributes:
        together: the workers of a group that ask with the same number get the same bytes; 0: this one only.
        ema: the moving averages of parameters, not their values.
    """

    together: int = 0
    ema: bool = False


class Leave(Body, frozen=True):
    """A worker ends its loop; total as in Commit. The answer comes when all groups have left and synced."""

    total: int = 0


class Lease(Body, frozen=True):
    """A worker's question to server 0 for a block of leased data; in the answer also the block."""

    ask: Ask
    block: Block | None = None


class Missing(Body, frozen=True):
    """In HEARTBEAT: for whose commit or share the server waits."""

    members: tuple[str, ...]


class Refuse(Body, frozen=True):
    """Why a member is turned away: the name of an error class and its text."""

    error: str
    what: str


_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(Header)
_B = TypeVar("_B", bound=Body)


class Message(msgspec.Struct, frozen=True):
    """A received message: header, undecoded body, raw frames."""

    header: Header
    content: memoryview | bytes
    frames: Sequence[Frame]

    def body(self, kind: type[_B]) -> _B:
        """Decode the body; raises ProtocolError for one of another form."""
        try:
            return msgspec.msgpack.decode(self.content, type=kind)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"{self.header.sender} sent a {self.header.kind.name.lower()} of an unknown form ({error})",
                remedy="run the same version of Shoal on every member",
            ) from None


def encode(header: Header, body: Body | None, frames: Sequence[Frame] = ()) -> list[Frame]:
    """Frames of a message, ready for a transport."""
    return [_encoder.encode(header), _encoder.encode(body) if body is not None else b"", *frames]


def decode(frames: Sequence[Frame], run: str) -> Message:
    """A message from its frames; raises ProtocolError for another protocol, run or form."""
    if len(frames) < 2:
        raise ProtocolError(f"a message of {len(frames)} frames arrived; every message has two or more")
    try:
        header = _header.decode(frames[0])
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"a message arrived whose header has an unknown form ({error})",
            remedy="run the same version of Shoal on every member",
        ) from None
    if header.protocol != PROTOCOL:
        raise ProtocolError(
            f"{header.sender} speaks protocol {header.protocol}, this member {PROTOCOL}",
            remedy="run the same version of Shoal on every member",
        )
    if header.run != run:
        raise ProtocolError(
            f"{header.sender} belongs to another run", remedy="check the address of the servers"
        )
    content = frames[1]
    return Message(header, content if isinstance(content, bytes) else memoryview(content), list(frames[2:]))
