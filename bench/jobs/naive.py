"""The naive parameter server: pyzmq and numpy, the whole model in one message, each push applied at once.

``naive.py serve PATH WORKERS FLOATS`` and ``naive.py work PATH BELL FLOATS WARMUP STEPS``.
"""

from __future__ import annotations

import numpy as np
import zmq

from bench.jobs.meter import Meter
from bench.jobs.roles import play


def serve(path: str, workers: int, floats: int) -> None:
    """Answer each gradient with the new values, until every worker has said goodbye."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    values = np.zeros(floats, np.float32)
    while workers:
        peer, frame = socket.recv_multipart(copy=False)
        if len(frame.buffer) == 0:
            workers -= 1
            continue
        values -= 0.01 * np.frombuffer(frame.buffer, np.float32)
        socket.send_multipart([peer.bytes, values.tobytes()])
    socket.close()


def work(path: str, bell: str, floats: int, warmup: int, steps: int) -> None:
    """Push and pull."""
    meter = Meter(bell, warmup)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(f"ipc://{path}")
    gradient = np.ones(floats, np.float32)
    while meter.steps < steps:
        socket.send(gradient.tobytes())
        np.frombuffer(socket.recv(), np.float32)
        meter.tick()
    meter.end(model_bytes=4.0 * floats)
    socket.send(b"")
    socket.close()


if __name__ == "__main__":
    play(serve, work)
