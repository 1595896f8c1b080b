"""The launcher: starts a run's members on this machine, watches over them, and says how it ended.

It waits on two things only, the fork server's messages and signals to itself; what members write is
looked at now and then, for the eye.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import shoal
from shoal.config import Config
from shoal.errors import PeerFailed
from shoal.events import Event, Tail
from shoal.launcher import FAILED, FINISHED, STOPPED
from shoal.launcher.forkserver import Team
from shoal.launcher.messages import Exited, Kill, Ready, Spawn, Stop
from shoal.launcher.process import ForkProcess
from shoal.launcher.progress import Board, View
from shoal.rundir import RunDir
from shoal.schedule import UNSCHEDULED, Schedules
from shoal.summary import Outcome, Summary, Times, summarise, write
from shoal.topology import Member, Topology

GRACE = 2.0  # seconds that members have to end in good order before they are killed
REFRESH = 0.25  # seconds between looks at what members write
LOG_LINES = 20  # of the log, shown of a member that died without a word

STATUS = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}


@dataclass(frozen=True)
class Job:
    """What to run, and where its files go."""

    config: Config
    script: str
    args: tuple[str, ...]
    run_dir: RunDir
    schedules: Schedules = UNSCHEDULED

    @property
    def topology(self) -> Topology:
        """The members to start."""
        return Topology.of(self.config.cluster)


@dataclass(frozen=True)
class Failure:
    """What went wrong: ``what`` in a sentence, ``detail`` for the end of the screen.

    ``follows``: it only says that another member has failed, which may come to be known later.
    """

    time: float
    what: str
    detail: str
    follows: bool = False

    @property
    def order(self) -> tuple[bool, float]:
        """What the reason of the whole run's failure is the least in."""
        return self.follows, self.time


def launch(job: Job, process: ForkProcess | None = None) -> int:
    """Runs a job to its end: summary written, table shown, nothing left running.

    Args:
        process: the fork server's, where it has been started already; its members end here.

    Returns:
        The exit status: 0 finished, 3 stopped in good order, 1 failed.
    """
    started = time.time()
    starting = nullcontext(process) if process is not None else ForkProcess()
    with starting as forks, _signals() as signals, Team(forks) as team:
        view = View()
        board = Board(job.topology, job.run_dir, view)
        supervisor = Supervisor(job, team, board)
        try:
            _greet(job, view)
            supervisor.run(signals)
            board.poll(ended=True)
        finally:
            view.close()
    outcome, failure = supervisor.outcome()
    times = Times(started, time.time() - started)
    summary = summarise(job.config, job.topology, board.events, outcome, times, shoal.__version__)
    written = _written(job.run_dir.summary, summary)
    view.report(summary, job.run_dir.path)
    if failure:
        print(failure.detail, file=sys.stderr, flush=True)
    return STATUS[outcome.status] if written else FAILED


class Supervisor:
    """Watches over the members of one run until all of them are gone."""

    def __init__(self, job: Job, team: Team, board: Board) -> None:
        self._job, self._team, self._board = job, team, board
        self._left = {member.name: member for member in processes(job.topology)}
        self._ready = False
        self._deaths: list[Failure] = []
        self._ending: Outcome | None = None
        self._ended_at = 0.0
        self._deadline: float | None = None
        self._killed = False

    def run(self, signals: socket.socket) -> None:
        """Returns when every member is gone.

        Args:
            signals: gives the number of each signal that the launcher is sent, one byte each.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._team, selectors.EVENT_READ, self._hear)
            selector.register(signals, selectors.EVENT_READ, lambda: self._interrupted(signals.recv(64)))
            while self._left:
                for key, _ in selector.select(self._patience()):
                    key.data()
                self._board.poll()
                if self._board.failures:
                    self._end("failed")
                self._insist()

    def outcome(self) -> tuple[Outcome, Failure | None]:
        """How the run ended; the first failure by time is the reason."""
        failures = self._deaths + [_told(event) for event in self._board.failures]
        if self._ending and self._ending.status == "stopped":
            failures = [failure for failure in failures if failure.time < self._ended_at]
        if failures:
            first = min(failures, key=lambda failure: failure.order)
            return Outcome("failed", first.what), first
        return self._ending or Outcome("finished"), None

    def _patience(self) -> float:
        if self._deadline is None:
            return REFRESH
        return min(REFRESH, max(0.0, self._deadline - time.monotonic()))

    def _hear(self) -> None:
        messages = self._team.receive()
        if messages is None:
            text = f"the fork server ended before its time{_end_of(self._team.log)}"
            self._deaths.append(Failure(time.time(), "the fork server ended before its time", text))
            self._end("failed")
            self._left.clear()
        for message in messages or ():
            match message:
                case Ready():
                    self._ready = True
                    self._spawn()
                case Exited():
                    self._gone(message)

    def _spawn(self) -> None:
        job = self._job
        run_id, config = os.urandom(16).hex(), job.config.model_dump(mode="json")
        for name in self._left:
            self._team.send(
                Spawn(
                    member=name,
                    incarnation=1,
                    config=config,
                    run_id=run_id,
                    run_dir=str(job.run_dir.path),
                    private=str(self._team.private),
                    script=job.script,
                    args=list(job.args),
                    threads=threads(len(self._left)),
                    schedules=job.schedules,
                )
            )

    def _gone(self, exited: Exited) -> None:
        member = self._left.pop(exited.member)
        self._board.poll()
        if exited.code == STOPPED and self._board.has_said(member, "stopped"):
            self._end("stopped", f"{member} was told to stop")
        elif exited.code != FINISHED or not self._board.has_said(member, "finished"):
            what = f"{member} {_how(exited.code)}"
            detail = what + _end_of(self._job.run_dir.log(member))
            self._deaths.append(Failure(exited.time, what, detail))
            self._end("failed")

    def _interrupted(self, numbers: bytes) -> None:
        for number in numbers:
            if self._ending:
                self._kill()
            self._end("stopped", f"the launcher received {signal.Signals(number).name}")

    def _end(self, status: Literal["failed", "stopped"], reason: str | None = None) -> None:
        """Asks all members to end, the first time."""
        if self._ending:
            return
        self._ending, self._ended_at = Outcome(status, reason), time.time()
        self._deadline = time.monotonic() + GRACE
        if self._ready:
            # To the members alone: a data loader whose worker is ended before it calls that a failure.
            self._team.send(Stop())
        else:
            self._left.clear()

    def _insist(self) -> None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        if self._killed:
            self._left.clear()  # not even SIGKILL ends a process inside a dead file system
        else:
            self._kill()

    def _kill(self) -> None:
        self._killed, self._deadline = True, time.monotonic() + GRACE
        self._team.send(Kill())


def processes(topology: Topology) -> list[Member]:
    """The members that are processes, all but servers that are a worker's threads."""
    return [*topology.workers, *(s for s in topology.servers if topology.host_of(s) is None)]


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Turns the signals that end a run into bytes, except those that our starter has switched off."""
    bell, ringer = socket.socketpair()
    ringer.setblocking(False)
    numbers = [
        n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN
    ]
    with bell, ringer:
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
        try:
            yield bell
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _greet(job: Job, view: View) -> None:
    topology = job.topology
    view.say(f"{topology.framework}, {topology.processes} processes, run directory {job.run_dir.path}")
    cluster = job.config.cluster
    if topology.synchronised:
        added = f"differences of {topology.server_groups} server groups are added, "
        if cluster.group_scale == "mean":
            view.say(f"{added}and every rate is divided by {topology.worker_groups} (group_scale)")
        else:
            view.say(f"{added}so they move {topology.server_groups} times as far as one")
    if cluster.warmup_steps and topology.worker_groups > 1:
        view.say(f"worker group 0 trains alone in its first {cluster.warmup_steps} steps (warmup_steps)")


def threads(count: int) -> int | None:
    """How many threads each of ``count`` processes may use; ``None`` if the user says it."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // count)


def _written(path: Path, summary: Summary) -> bool:
    """Whether the summary could be written; says why not."""
    try:
        write(path, summary)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return False
    return True


def _told(event: Event) -> Failure:
    place = event["member"] + " failed" + ("" if event["step"] is None else f" at step {event['step']}")
    what = f"{place}: {event['error']}: {event['message']}"
    follows = event["error"] == PeerFailed.__name__
    return Failure(event["time"], what, f"{place}:\n{event['traceback'].rstrip()}", follows)


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == FINISHED:
        return "ended before the run did, with exit status 0"
    return f"ended with exit status {code}"


def _end_of(log: Path) -> str:
    lines = [line.decode(errors="replace") for line in Tail(log).lines(ended=True)[-LOG_LINES:]]
    return "\n".join([f"; the end of its log, {log}:", *lines]) if lines else f"; its log, {log}, is empty"
