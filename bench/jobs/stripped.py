"""A parameter server in shared memory stripped of everything else: gradients are copied, the values updated,
copied, and each waits for the other.

No names, no steps, no checks, nothing that may be late, and a model of one piece: how much faster it is than
another server tells what all these may cost.

``stripped.py serve PATH WORKERS FLOATS`` and ``stripped.py work PATH BELL FLOATS WARMUP STEPS``.
"""

from __future__ import annotations

import mmap
import os
import socket

import torch
from torch import Tensor

from bench.jobs.meter import Meter
from bench.jobs.roles import play


def shared(file: int, floats: int, parts: int) -> Tensor:
    """The memory of all: (parts, floats), float32; the values, then each worker's gradient."""
    return torch.frombuffer(mmap.mmap(file, 4 * floats * parts), dtype=torch.float32).view(parts, floats)


def serve(path: str, workers: int, floats: int) -> None:
    """Update once all have said that their gradient is there, until the first one goes."""
    file = os.memfd_create("bare")
    os.ftruncate(file, 4 * floats * (1 + workers))
    values, *gradients = shared(file, floats, 1 + workers)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        streams = [listener.accept()[0] for _ in range(workers)]
    for number, stream in enumerate(streams, 1):
        socket.send_fds(stream, [bytes([number, 1 + workers])], [file])
    while all([stream.recv(1) for stream in streams]):
        for gradient in gradients:
            values.add_(gradient, alpha=-0.01 / workers)
        for stream in streams:
            stream.send(b"x")


def work(path: str, bell: str, floats: int, warmup: int, steps: int) -> None:
    """Push and pull."""
    meter = Meter(bell, warmup)
    stream = socket.socket(socket.AF_UNIX)
    while stream.connect_ex(path):
        pass  # the server has not come so far
    told, files, _, _ = socket.recv_fds(stream, 2, 1)
    number, parts = told
    memory = shared(files[0], floats, parts)
    gradient, parameters = torch.ones(floats), torch.zeros(floats)
    while meter.steps < steps:
        memory[number].copy_(gradient)
        stream.send(b"x")
        stream.recv(1)
        parameters.copy_(memory[0])
        meter.tick()
    meter.end(model_bytes=4.0 * floats)
    stream.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    play(serve, work)
