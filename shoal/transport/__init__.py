"""The seam between members: whoever implements `Endpoint` can carry Shoal's messages.

Two lanes lead to each peer, so that a commit never waits behind megabytes of shares; nothing may rely on an
order between them.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from shoal.errors import PeerFailed, UsageError
from shoal.transport.memory import Memory
from shoal.wire import BULK, Body, Frame, Header, Kind, Message, decode, encode

Lane = Literal["control", "bulk"]
LANES: tuple[Lane, Lane] = ("control", "bulk")
TOGETHER = (
    1 << 20
)  # bytes at places that a peer is told of at once: to copy more takes longer than to wake up


class Token(Protocol):
    """Says when the frames of a sent message may be written to again."""

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; True once the frames belong to the sender again."""
        ...


class Released:
    """The token of a transport that has copied the frames."""

    def wait(self, timeout: float) -> bool:
        """Returns True at once."""
        return True


class Endpoint(Protocol):
    """One member's end of the wires; used by one thread at a time."""

    name: str

    @property
    def memory(self) -> Memory:
        """Where what is sent may lie, so that peers on this machine read it in place."""
        ...

    @property
    def traffic(self) -> Counter[str]:
        """Payload bytes sent so far, by receiver."""
        ...

    def send(self, peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
        """Send header, body and raw frames to a peer; never blocks, never drops.

        Args:
            turn: of what waits on the lane, messages with a smaller one leave first where the transport can
                choose.
        """
        ...

    def recv(self, timeout: float) -> list[Frame] | None:
        """The next message, control before bulk, or None after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Send what is still queued, then let go of every resource."""
        ...


class Post:
    """A member's letters: messages with this member's name on them, over any endpoint.

    Args:
        run: the run's secret, which every message carries.
        life: this member's incarnation.
    """

    def __init__(self, endpoint: Endpoint, run: str, life: int = 1) -> None:
        self.endpoint = endpoint
        self.life = life
        self.plan = ""
        self._run = run
        self._keeping = False
        self._kept: defaultdict[str, list[tuple[Lane, list[Frame], int]]] = defaultdict(list)
        self._due: Counter[str] = Counter()  # bytes, of what is kept
        self._failures: list[PeerFailed] = []
        self._sequence = itertools.count(1)
        self._closed = False

    def send(
        self, peer: str, kind: Kind, body: Body | None = None, frames: Sequence[Frame] = (), **fields: Any
    ) -> Token:
        """Send one message; `fields` are the header's.

        A single frame that lies in memory that the peer shares is not sent: the peer is told where it lies,
        which takes the control lane, and reads it there. So it must stay as it is until the protocol says
        that the peer is done with it.

        Raises:
            UsageError: after `close`.
        """
        if self._closed:
            raise UsageError("the run is closed", member=self.endpoint.name, remedy="call run.close() last")
        fields.setdefault("sequence", next(self._sequence))
        place = self.endpoint.memory.place(peer, frames[0]) if len(frames) == 1 else ""
        nbytes = memoryview(frames[0]).nbytes if place else 0
        if place:
            self.endpoint.traffic[peer] += nbytes
            frames = ()
        lane: Lane = "bulk" if kind in BULK and not place else "control"
        turn = fields.get("chunk", 0) if kind is Kind.VALUES else 0  # a forward needs the first chunks first
        header = Header(
            kind=kind,
            run=self._run,
            sender=self.endpoint.name,
            life=self.life,
            plan=self.plan,
            place=place,
            sent=time.time(),
            **fields,
        )
        message = encode(header, body, frames)
        if not self._keeping:
            return self.endpoint.send(peer, lane, message, turn)
        if not place:
            return self._send(peer, lane, message, turn)
        self._kept[peer].append((lane, message, turn))
        self._due[peer] += nbytes
        if self._due[peer] >= TOGETHER:
            self._send_kept(peer)
        return Released()

    def keep(self) -> None:
        """From now on tell of places at `flush`, or of many bytes at once: a peer is woken up less often.

        A peer that is gone is no error of `send` then, for there are others; `flush` tells of it.
        """
        self._keeping = True

    def flush(self) -> list[PeerFailed]:
        """Send what is kept; returns what kept it, or anything else so far, from peers that are gone."""
        for peer in list(self._kept):
            self._send_kept(peer)
        failures, self._failures = self._failures, []
        return failures

    def _send_kept(self, peer: str) -> None:
        del self._due[peer]
        for letter in self._kept.pop(peer):
            self._send(peer, *letter)

    def _send(self, peer: str, lane: Lane, message: Sequence[Frame], turn: int) -> Token:
        try:
            return self.endpoint.send(peer, lane, message, turn)
        except PeerFailed as error:
            self._failures.append(error)
            return Released()

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds; raises ProtocolError for an alien one."""
        frames = self.endpoint.recv(timeout)
        if frames is None:
            return None
        message = decode(frames, self._run)
        if not message.header.place:
            return message
        return Message(message.header, message.content, [self.endpoint.memory.at(message.header.place)])

    def close(self) -> None:
        """Send what is kept and what is still queued; nothing can be sent after it."""
        self.flush()
        self._closed = True
        self.endpoint.close()
        self.endpoint.memory.close()
