"""One member's process, from the fork to its exit.

Exit status: 0 the member has finished, 3 it was stopped in good order, 1 it failed.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import io
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from shoal import session
from shoal.beside import Beside
from shoal.config import Config
from shoal.errors import ShoalError, Stopped
from shoal.events import Events
from shoal.launcher import FAILED, FAILED_HERE, FINISHED, STOPPED
from shoal.launcher.messages import Spawn
from shoal.rundir import RunDir
from shoal.session import Membership
from shoal.site import OneMachine
from shoal.topology import Member, Topology

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def become(spawn: Spawn, lifeline: int, parent: int) -> NoReturn:
    """Turns a fresh fork of the fork server into a member, runs it and ends the process.

    Args:
        spawn: the launcher's order.
        lifeline: descriptor of a pipe that reads its end when the launcher is gone.
        parent: the fork server's process id.
    """
    member = Member.parse(spawn.member)
    _settle(member, RunDir(Path(spawn.run_dir)).log(member))
    _end_with(parent, lifeline)
    if spawn.threads is not None:
        torch.set_num_threads(spawn.threads)
    code = Process(spawn, member).run()
    _leave(code)


def _settle(member: Member, log: Path) -> None:
    """A process group of its own, a name in ``ps``, nothing to read, the log to write."""
    os.setsid()
    _prctl(PR_SET_NAME, f"shoal {member.short}".encode())
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    os.close(written)
    os.close(empty)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a script prints is seen when it is printed


def _end_with(parent: int, lifeline: int) -> None:
    """Dies with the fork server, and with the launcher takes all its children along."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _leave(code: int) -> NoReturn:
    """Ends as Python would, without taking the modules down: that costs half a second of every member."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.flush()  # what comes now may take longer than the launcher waits
    threading._shutdown()  # type: ignore[attr-defined]  # executors hear of the end, and threads are waited for
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Process:
    """What runs in one process: a worker with the servers beside it, or a server alone."""

    def __init__(self, spawn: Spawn, member: Member) -> None:
        self._spawn, self._member = spawn, member
        self._config = Config.model_validate(spawn.config)
        self._topology = Topology.of(self._config.cluster)
        self._run_dir = RunDir(Path(spawn.run_dir))
        self._beside = Beside()
        self._stopping = False
        self._pid = os.getpid()

    def run(self) -> int:
        """Runs it to its end; returns the exit status."""
        signal.signal(signal.SIGTERM, self._stop)
        # A process that the script forks is ended by SIGTERM as everywhere.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        body = self._work if self._member.role == "worker" else lambda: self._serve(self._member)
        return self._guarded(self._member, body)

    def _serve(self, member: Member) -> None:
        membership = self._membership(member)
        session.serve(membership, OneMachine(membership), self._events(member))

    def _work(self) -> None:
        threads = [
            threading.Thread(target=self._serve_beside, args=(server,), name=server.name, daemon=True)
            for server in self._topology.servers
            if self._topology.host_of(server) == self._member
        ]
        for thread in threads:
            thread.start()
        membership = self._membership(self._member)
        session.attach(membership, OneMachine(membership), self._events(self._member))
        session.seed_everything(self._config.seed)
        run_script(self._spawn.script, self._spawn.args)
        session.finish()
        for thread in threads:
            thread.join()

    def _serve_beside(self, server: Member) -> None:
        code = self._guarded(server, lambda: self._serve(server))
        if code != 0:
            sys.stderr.flush()
            os._exit(code)  # at once: the worker may be deep in a computation that nothing else ends

    def _membership(self, member: Member) -> Membership:
        return Membership(
            config=self._config,
            topology=self._topology,
            member=member,
            run_id=self._spawn.run_id,
            run_dir=self._run_dir.path,
            private=Path(self._spawn.private),
            incarnation=self._spawn.incarnation,
            schedules=self._spawn.schedules,
            beside=self._beside if self._topology.paired(member) else None,
        )

    def _events(self, member: Member) -> Events:
        return Events(self._run_dir.events(member), member.name)

    def _guarded(self, member: Member, body: Callable[[], None]) -> int:
        events = self._events(member)
        events.write("started", pid=os.getpid(), incarnation=self._spawn.incarnation)
        try:
            body()
        except BaseException as error:
            if os.getpid() != self._pid:  # a process that the script has forked, not the member
                traceback.print_exc()
                return FAILED
            if self._stopping or isinstance(error, Stopped):
                events.write("stopped")
                return STOPPED
            self._report(member, events, error)
            return FAILED
        return FINISHED

    def _report(self, member: Member, events: Events, error: BaseException) -> None:
        if member == self._member:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is ending, and says why first
        step = error.step if isinstance(error, ShoalError) else None
        if step is None and member == self._member:
            step = session.current_step()
        text = user_traceback(error)
        print(f"{FAILED_HERE} {member.name}\n{text}", end="", file=sys.stderr, flush=True)
        events.write("failed", step=step, error=type(error).__name__, message=_message(error), traceback=text)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            raise Stopped


def run_script(script: str, args: Sequence[str]) -> None:
    """Runs a script as ``python script args`` would: its names are the module ``__main__``, and stay it.

    (``runpy`` takes the module away at the script's end, when its data loaders and exit functions may
    still need it.)

    Raises:
        SystemExit: the script ended with a status other than 0.
    """
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(script)
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    with io.open_code(main.__file__) as file:
        code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def user_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, from the script's own frame on."""
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(
        __file__
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"the script ended with exit status {error.code}"
    return error.what if isinstance(error, ShoalError) else str(error)
