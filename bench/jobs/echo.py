"""A bare copy over a socket and back.

``echo.py serve PATH`` and ``echo.py work PATH BELL BYTES WARMUP STEPS``.
"""

from __future__ import annotations

import socket

from bench.jobs.meter import Meter
from bench.jobs.roles import play

PIECE = 1 << 18  # bytes per call


def receive(stream: socket.socket, memory: memoryview) -> bool:
    """Fill the memory; False at the other side's end."""
    at = 0
    while at < len(memory):
        count = stream.recv_into(memory[at : at + PIECE])
        if not count:
            return False
        at += count
    return True


def serve(path: str) -> None:
    """Give back all that comes, a message's bytes at a time."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        stream, _ = listener.accept()
    size = memoryview(bytearray(8))
    receive(stream, size)
    memory = memoryview(bytearray(int.from_bytes(size, "big")))
    while receive(stream, memory):
        send(stream, memory)


def send(stream: socket.socket, memory: memoryview) -> None:
    """Send all of the memory."""
    for at in range(0, len(memory), PIECE):
        stream.sendall(memory[at : at + PIECE])


def work(path: str, bell: str, count: int, warmup: int, steps: int) -> None:
    """Send and receive."""
    meter = Meter(bell, warmup)
    stream = socket.socket(socket.AF_UNIX)
    while stream.connect_ex(path):
        pass  # the other side has not come so far
    stream.sendall(count.to_bytes(8, "big"))
    memory = memoryview(bytearray(count))
    while meter.steps < steps:
        send(stream, memory)
        receive(stream, memory)
        meter.tick()
    meter.end(model_bytes=float(count))
    stream.close()


if __name__ == "__main__":
    play(serve, work)
