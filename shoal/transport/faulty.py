"""An endpoint that loses, doubles or holds back messages, for tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from shoal.transport import Endpoint, Lane, Released, Token
from shoal.transport.memory import Memory
from shoal.wire import Frame, Header

Fate = Literal["deliver", "lose", "double", "hold"]
Judge = Callable[[Header, str], Fate]

_decoder = msgspec.msgpack.Decoder(Header)


class Faulty:
    """Wraps an endpoint; a judge decides the fate of each message from its header and receiver.

    Held messages go out in their order at `open()`, and everything passes from then on.
    """

    def __init__(self, inner: Endpoint, judge: Judge) -> None:
        self.name = inner.name
        self.fates: Counter[str] = Counter()
        self._inner = inner
        self._judge = judge
        self._held: list[tuple[str, Lane, Sequence[Frame], int]] = []
        self._open = False
        self._lock = threading.Lock()

    @property
    def traffic(self) -> Counter[str]:
        """Payload bytes handed to the wrapped endpoint, by receiver."""
        return self._inner.traffic

    @property
    def memory(self) -> Memory:
        """The wrapped endpoint's."""
        return self._inner.memory

    def send(self, peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
        """See Endpoint.send; the judge may decide otherwise."""
        with self._lock:
            fate: Fate = "deliver" if self._open else self._judge(_decoder.decode(frames[0]), peer)
            self.fates[fate] += 1
            if fate == "lose":
                return Released()
            if fate == "hold":
                self._held.append((peer, lane, [bytes(frame) for frame in frames], turn))
                return Released()
            if fate == "double":
                self._inner.send(peer, lane, frames, turn)
            return self._inner.send(peer, lane, frames, turn)

    def open(self) -> None:
        """Deliver what is held, and from now on everything."""
        with self._lock:
            self._open = True
            for held in self._held:
                self._inner.send(*held)
            self._held.clear()

    def recv(self, timeout: float) -> list[Frame] | None:
        """See Endpoint.recv."""
        return self._inner.recv(timeout)

    def close(self) -> None:
        """See Endpoint.close."""
        self._inner.close()
