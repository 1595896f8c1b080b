"""Many messages over any two ends of a wire, whatever carries them."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.transport import Endpoint, Lane
from shoal.wire import Frame

MANY = 2000


def take(endpoint: Endpoint, count: int, seconds: float = 30.0) -> list[list[bytes]]:
    """So many messages as bytes; None is no message yet."""
    found: list[list[bytes]] = []
    until = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        frames = endpoint.recv(0.1)
        if frames is not None:
            found.append([bytes(frame) for frame in frames])
    assert len(found) == count
    return found


def burst(endpoint: Endpoint, peer: str) -> Callable[[], None]:
    """Sends MANY messages, by turns on either lane; their numbers come first, and in bulk once more."""

    def send() -> None:
        for number in range(MANY):
            lane: Lane = "bulk" if number % 2 else "control"
            payload: list[Frame] = [number.to_bytes(4, "big") * 256] if number % 2 else []
            endpoint.send(peer, lane, [number.to_bytes(4, "big"), b"", *payload])

    return send


def check_a_burst(sender: Endpoint, receiver: Endpoint) -> None:
    """Every message arrives whole, each lane's in their order."""
    thread = threading.Thread(target=burst(sender, receiver.name))
    thread.start()
    found = take(receiver, MANY)
    thread.join()
    numbers = [int.from_bytes(frames[0], "big") for frames in found]
    assert [n for n in numbers if n % 2 == 0] == list(range(0, MANY, 2))
    assert [n for n in numbers if n % 2 == 1] == list(range(1, MANY, 2))
    assert all(frames[2] == frames[0] * 256 for frames in found if len(frames) > 2)


@contextmanager
def no_files_left() -> Iterator[None]:
    """No file can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
