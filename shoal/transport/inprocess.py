"""Members as threads of one process: queues instead of sockets.

Payloads are copied when they are sent, as a wire would, or lie in shared memory, as they do between processes
of one machine; so what holds here holds there.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

from shoal.transport import Lane, Released, Token
from shoal.transport.memory import Memory
from shoal.wire import Frame


class Hub:
    """Where in-process endpoints find each other.

    Args:
        shared: whether they read each other's memory in place.
    """

    def __init__(self, shared: bool = True) -> None:
        self.shared = shared
        self._mailboxes: dict[str, _Mailbox] = {}
        self._lock = threading.Lock()

    def mailbox(self, name: str) -> _Mailbox:
        """The mailbox of a member, made at its first mention: a sender need not wait for a receiver."""
        with self._lock:
            return self._mailboxes.setdefault(name, _Mailbox())


class _Mailbox:
    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[list[Frame]]] = {"control": deque(), "bulk": deque()}
        self._arrived = threading.Condition()

    def put(self, lane: Lane, frames: list[Frame]) -> None:
        with self._arrived:
            self._lanes[lane].append(frames)
            self._arrived.notify()

    def take(self, timeout: float) -> list[Frame] | None:
        with self._arrived:
            if not self._arrived.wait_for(lambda: any(self._lanes.values()), timeout):
                return None
            lane = self._lanes["control"] or self._lanes["bulk"]
            return lane.popleft()


class InProcess:
    """An endpoint on a hub."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self.traffic: Counter[str] = Counter()
        self.memory = Memory(lambda peer: hub.shared)
        self._hub = hub
        self._mailbox = hub.mailbox(name)

    def send(self, peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
        """See Endpoint.send."""
        raw = [bytes(frame) for frame in frames[2:]]
        self.traffic[peer] += sum(map(len, raw))
        self._hub.mailbox(peer).put(lane, [*frames[:2], *raw])
        return Released()

    def recv(self, timeout: float) -> list[Frame] | None:
        """See Endpoint.recv."""
        return self._mailbox.take(timeout)

    def close(self) -> None:
        """See Endpoint.close."""
