"""Where one side of a scenario is run: its processes, the bell they ring, and what they used in between."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from bench.errors import BenchError
from bench.lan import Lan, Traffic
from bench.usage import Usage, usage

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "bench" / "jobs"
PATIENCE = 240.0  # seconds for all to be warm, and then for all to have ended
FAREWELL = 60.0  # seconds that processes have to end by themselves
LESSON = 1800.0  # seconds that a whole training may take


@dataclass(frozen=True)
class Look:
    """What everything had used at one moment.

    Attributes:
        time: seconds of the machine's monotonic clock.
        busy: CPU seconds of the whole machine.
    """

    time: float
    busy: float
    processes: Mapping[int, Usage]
    traffic: Mapping[int, Traffic]


@dataclass(frozen=True)
class Told:
    """What one process said at its end.

    Attributes:
        first: when its first step ended; `ends`: when what counts began, then when each step ended (both in
            seconds of the machine's monotonic clock).
    """

    pid: int
    first: float
    ends: Sequence[float]
    figures: Mapping[str, float]


@dataclass
class Course:
    """What is known of one run of one side."""

    started: float
    before: Look
    after: Look
    told: list[Told] = field(default_factory=list)


class Stage:
    """A folder, a bell and processes; leaving the context ends them all.

    Args:
        lan: where processes are started on hosts.
        threads: that each process may compute with; None = as its program likes.
    """

    def __init__(self, lan: Lan | None = None, threads: int | None = 1) -> None:
        self.lan = lan
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self.bell = str(self.folder / "bell")
        self.port = _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = threads
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.bell)
        self._listener.listen(128)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [process for process in self._processes if process.poll() is None]
        family = [child for process in left for child in _family(process.pid)]
        for process in left:
            process.terminate()
        _, stubborn = psutil.wait_procs(family, 5)
        for each in stubborn:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for process in left:
            process.wait()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def spawn(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, host: int | None = None
    ) -> None:
        """Start a process, on a host of the network where one is named; what it prints goes to a log."""
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        full = {**os.environ, "PYTHONPATH": paths, **(env or {})}
        if self._threads is not None:
            full["OMP_NUM_THREADS"] = str(self._threads)
        words = [str(word) for word in argv]
        with self._log(len(self._processes)).open("wb") as log:
            if host is None:
                process = subprocess.Popen(
                    words, env=full, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            else:
                assert self.lan is not None
                process = self.lan.run(host, words, full, log)
        self._processes.append(process)

    def python(
        self, script: str, *args: object, env: Mapping[str, str] | None = None, host: int | None = None
    ) -> None:
        """Start one of the jobs."""
        self.spawn([sys.executable, JOBS / script, *map(str, args)], env, host)

    def watch(self, parties: int) -> Course:
        """Let so many processes train, and see what it takes them; returns when all have ended.

        Raises:
            BenchError: a process has failed, or they take too long.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            callers: list[socket.socket] = []
            self._hear("begin", parties, selector, callers)
            before = self.look()
            _go_on(callers)
            said = self._hear("end", parties, selector, callers)
            after = self.look()
            _go_on(callers)
            for caller in callers:
                caller.close()
        self.wait(FAREWELL)
        course = Course(self._started, before, after)
        course.told = [Told(s["pid"], s["first"], s["ends"], s["figures"]) for s in said]
        return course

    def look(self) -> Look:
        """What everything has used so far."""
        traffic = self.lan.traffic() if self.lan else {}
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return Look(time.monotonic(), busy, usage(process.pid for process in self._processes), traffic)

    def _hear(
        self, at: str, parties: int, selector: selectors.BaseSelector, callers: list[socket.socket]
    ) -> list[dict[str, Any]]:
        """Wait until so many have said where they are."""
        deadline = time.monotonic() + PATIENCE
        said: list[dict[str, Any]] = []
        while len(said) < parties:
            self._check(
                time.monotonic() > deadline, f"{len(said)} of {parties} got to the {at} in {PATIENCE:g} s"
            )
            for key, _ in selector.select(0.5):
                if key.fileobj is self._listener:
                    caller, _ = self._listener.accept()
                    callers.append(caller)
                    selector.register(caller, selectors.EVENT_READ, caller.makefile("rb"))
                elif line := key.data.readline():
                    said.append(json.loads(line))
                    assert said[-1]["at"] == at
                else:
                    selector.unregister(key.fileobj)
        return said

    def _check(self, late: bool, what: str) -> None:
        for number, process in enumerate(self._processes):
            if process.poll():
                raise BenchError(
                    f"{self._words(process)} ended with {process.returncode}\n{self._end(number)}"
                )
        if late:
            ends = "\n".join(self._end(number) for number in range(len(self._processes)))
            raise BenchError(f"{what}\n{ends}")

    def wait(self, seconds: float) -> None:
        """Wait until every process has ended; raises BenchError if one fails or is late."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            self._check(process.poll() is None, f"{self._words(process)} did not end in {seconds:g} s")

    def _words(self, process: subprocess.Popen[bytes]) -> str:
        return " ".join(map(str, process.args)) if isinstance(process.args, list) else str(process.args)

    def _log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def _end(self, number: int) -> str:
        return "\n".join(self._log(number).read_text(errors="replace").splitlines()[-20:])


def _family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; some start sessions of their own."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _go_on(callers: Sequence[socket.socket]) -> None:
    for caller in callers:
        with suppress(OSError):
            caller.send(b"\n")
