"""How a script that is measured speaks with the bench: over a UNIX socket, one JSON object a line.

The script says that it is warm and waits; when all are, the bench looks at what has been used so far and lets
them go. At the end the same again. So what is between the two is this work and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import time


class Meter:
    """One process's connection to the bench.

    Args:
        bell: the path of the bench's socket.
        warmup: steps before what counts.
    """

    def __init__(self, bell: str, warmup: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(bell)
        self._warmup = warmup
        self._first: float | None = None
        self._ends: list[float] = []

    @property
    def steps(self) -> int:
        """Steps that count so far; below 0 during the warm-up."""
        return len(self._ends) - 1 if self._ends else -self._warmup

    def tick(self) -> None:
        """A step has ended. Waits for the others where it was the last one of the warm-up."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if self._ends:
            self._ends.append(now)
            return
        self._warmup -= 1
        if self._warmup <= 0:
            self._say("begin")
            self._ends = [time.monotonic()]

    def end(self, **figures: float) -> None:
        """All steps are taken; `figures` are of this process alone. Waits until the bench has looked."""
        self._say("end", first=self._first, ends=self._ends, figures=figures)
        self._socket.close()

    def _say(self, at: str, **what: object) -> None:
        line = json.dumps({"at": at, "pid": os.getpid(), **what})
        self._socket.sendall(line.encode() + b"\n")
        if not self._socket.recv(1):
            raise SystemExit("the bench is gone")
