"""The parts of the launcher one by one: a member forked here, the board, the supervisor's verdict."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil
import pytest

from shoal.config import load
from shoal.errors import ProtocolError, UsageError
from shoal.events import Events, read
from shoal.launcher import FAILED_HERE, local, process
from shoal.launcher.messages import Spawn
from shoal.launcher.progress import Board, Row, View
from shoal.rundir import RunDir
from shoal.summary import Outcome
from shoal.topology import Member, Topology

LIMIT = 5.0  # seconds within which everything is gone, whatever happens
PATIENCE = 60.0  # seconds that a test waits for what takes a moment on an idle machine


# One member, forked here


@dataclass
class Forked:
    """A member that runs: its process, its log, the launcher's end of its lifeline."""

    pid: int
    log: Path
    lifeline: BinaryIO

    def says(self, text: str, times: int = 1) -> Forked:
        """Waits until its log contains a text, so many times."""
        end = time.monotonic() + PATIENCE
        while not self.log.exists() or self.log.read_text().count(text) < times:
            assert time.monotonic() < end
            time.sleep(0.02)
        return self


@dataclass
class Ended:
    """What a member has left behind."""

    code: int
    failed: list[dict[str, Any]]
    log: str


Fork = Callable[..., Ended]


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fork:
    """Forks a member from this process, around a session that does nothing; waits for its end."""

    def go(
        script: str = "",
        member: str = "worker 0.0",
        cluster: str = "sandblaster",
        meanwhile: Callable[[Forked], object] = lambda running: None,
        **session: Callable[..., object],
    ) -> Ended:
        for name in ("attach", "finish", "serve", "current_step"):
            monkeypatch.setattr(f"shoal.session.{name}", session.get(name, lambda *_: None))
        run_dir = RunDir.create(tmp_path / uuid.uuid4().hex)
        path = tmp_path / "train.py"
        path.write_text(script)
        config = load(cluster).model_dump(mode="json")
        spawn = Spawn(member, 1, config, "id", str(run_dir.path), str(tmp_path), str(path), ["--x"], 1)
        reading, writing = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(writing)
            become(spawn, reading, parent)
        os.close(reading)
        log = run_dir.log(Member.parse(member))
        with os.fdopen(writing, "wb") as lifeline:
            meanwhile(Forked(pid, log, lifeline))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        events = [event for file in (run_dir.path / "events").iterdir() for event in read(file)]
        return Ended(code, [event for event in events if event["event"] == "failed"], log.read_text())

    return go


def become(spawn: Spawn, lifeline: int, parent: int) -> NoReturn:
    """Becomes a member without pytest's streams, and never comes back."""
    try:
        from shoal.launcher import member

        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        member.become(spawn, lifeline, parent)
    finally:
        os._exit(99)


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: object) -> None:
        raise error

    return function


def test_the_end_of_a_script_is_not_the_end_of_its_process(fork: Fork) -> None:
    script = "import atexit, sys\natexit.register(print, 'at exit')\nprint('end')\nsys.exit(0)"
    ended = fork(script, finish=lambda: print("finish"))
    assert (ended.code, ended.failed, ended.log) == (0, [], "end\nfinish\nat exit\n")


def test_threads_of_the_script_end_before_its_process(fork: Fork) -> None:
    """An executor's wait for work until they hear that there will be none."""
    ended = fork(
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\npool.submit(print, 'worked').result()\n"
        "threading.Timer(0.2, print, ['late']).start()"
    )
    assert (ended.code, ended.failed, ended.log) == (0, [], "worked\nlate\n")


@pytest.mark.parametrize(("status", "said"), [("4", "exit status 4"), ("'no data'", "no data")])
def test_a_script_that_exits_with_a_status_has_failed(fork: Fork, status: str, said: str) -> None:
    ended = fork(f"import sys\nsys.exit({status})", current_step=lambda: 7)
    (event,) = ended.failed
    assert (ended.code, event["member"], event["error"], event["step"]) == (1, "worker 0.0", "SystemExit", 7)
    assert said in event["message"]


def test_a_traceback_starts_in_the_script_and_keeps_its_cause(fork: Fork) -> None:
    ended = fork(
        "def f():\n    try:\n        1 / 0\n    except Exception as e:\n        raise OSError(1) from e\nf()"
    )
    (event,) = ended.failed
    assert event["traceback"].count("train.py") == 3
    assert "/launcher/" not in event["traceback"]
    assert "ZeroDivisionError" in event["traceback"] and event["traceback"].endswith("OSError: 1\n")
    assert ended.log == f"{FAILED_HERE} worker 0.0\n{event['traceback']}"


def test_a_script_that_cannot_be_compiled(fork: Fork) -> None:
    (event,) = fork("x = (").failed
    assert event["error"] == "SyntaxError" and "train.py" in event["traceback"]


def test_a_failure_to_finish_is_a_failure(fork: Fork) -> None:
    ended = fork(finish=raising(UsageError("no init")))
    assert (ended.code, ended.failed[0]["error"]) == (1, "UsageError")


def test_a_server_fails_under_its_own_name(fork: Fork) -> None:
    ended = fork(member="server 0.1", serve=raising(ProtocolError("bad", step=5)))
    assert (ended.code, ended.failed[0]["member"], ended.failed[0]["step"]) == (1, "server 0.1", 5)


def test_a_server_beside_a_worker_ends_it_under_its_own_name(fork: Fork) -> None:
    script = "import time\ntime.sleep(99)"
    ended = fork(script, "worker 0.1", "allreduce", serve=raising(ValueError("bad")))
    assert (ended.code, [event["member"] for event in ended.failed]) == (1, ["server 0.1"])


def test_a_worker_waits_for_the_servers_beside_it(fork: Fork) -> None:
    served = threading.Event()

    def serve(*_: object) -> None:
        served.wait()
        print("served")

    ended = fork(cluster="allreduce", serve=serve, finish=served.set)
    assert (ended.code, ended.log) == (0, "served\n")


def test_a_member_that_is_told_to_stop_cleans_up(fork: Fork) -> None:
    script = (
        "import time\ntry:\n    print('on', flush=True); time.sleep(99)\nfinally:\n    print('tidy'); 1 / 0"
    )
    ended = fork(script, meanwhile=lambda forked: os.kill(forked.says("on").pid, signal.SIGTERM))
    assert (ended.code, ended.failed, ended.log) == (3, [], "on\ntidy\n")


def test_a_cut_lifeline_ends_a_member_and_its_children(fork: Fork) -> None:
    script = "import os, time\nprint('child', os.fork(), flush=True)\ntime.sleep(99)"
    ended = fork(script, meanwhile=lambda forked: forked.says("\n", 2).lifeline.close())
    assert ended.code == -signal.SIGKILL
    (child,) = {int(line.split()[1]) for line in ended.log.splitlines()} - {0}
    end = time.monotonic() + LIMIT
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() != "zombie":
            assert time.monotonic() < end
            time.sleep(0.02)


# What the launcher makes of it


class Recorded(View):
    """A view that remembers."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.said: list[str] = []
        self.rows: list[Row] = []

    def print(self, line: str) -> None:
        self.printed.append(line)

    def say(self, line: str) -> None:
        self.said.append(line)

    def groups(self, rows: Sequence[Row], *, now: bool) -> None:
        self.rows = list(rows)


@dataclass
class Bench:
    """A board over files that a test writes."""

    run_dir: RunDir
    view: Recorded
    board: Board

    def events(self, name: str) -> Events:
        return Events(self.run_dir.events(Member.parse(name)), name)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    run_dir, view = RunDir.create(tmp_path / "run"), Recorded()
    return Bench(run_dir, view, Board(Topology.of(load("downpour").cluster), run_dir, view))


def test_each_worker_group_has_a_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 10.0, 12.0, 10.0])
    monkeypatch.setattr("shoal.events.time.time", lambda: next(clock))
    for name, loss in (("worker 0.0", 1.0), ("worker 0.1", 3.0)):
        events = bench.events(name)
        events.write("progress", step=1, samples=10, loss=None, staleness=None)
        events.write("progress", step=5, samples=50, loss=loss, staleness=0.5)
    bench.events("worker 1.0").write("progress", step=2, samples=16, loss=None, staleness=None)
    bench.board.poll()
    assert bench.view.rows == [
        ("group 0", "step 5", "40 samples/s", "loss 2", "staleness 0.50"),
        ("group 1", "step 2", "0 samples/s", "loss -", "staleness -"),
    ]


def test_a_note_is_shown_once_with_its_member(bench: Bench) -> None:
    bench.events("server 0.1").write("note", message="look here")
    bench.board.poll()
    bench.board.poll()
    assert bench.view.said == ["server 0.1: look here"]


def test_only_worker_00_is_heard_and_its_traceback_is_kept_for_the_end(bench: Bench) -> None:
    for member in Topology.of(load("downpour").cluster).workers:
        text = f"{member}\n 1%\r 2%\nlast\n{FAILED_HERE} {member}\nTraceback"
        bench.run_dir.log(member).write_text(text)
    bench.board.poll(ended=True)
    assert bench.view.printed == ["worker 0.0", " 2%", "last"]


def test_the_first_failure_by_time_is_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    job = local.Job(load("downpour"), "train.py", (), bench.run_dir)
    supervisor = local.Supervisor(job, None, bench.board)  # type: ignore[arg-type]
    assert supervisor.outcome() == (Outcome("finished"), None)
    for name, when in (("server 0.0", 3.0), ("worker 1.1", 2.0), ("worker 0.0", 4.0)):
        monkeypatch.setattr("shoal.events.time.time", lambda when=when: when)
        bench.events(name).write("failed", step=None, error="OSError", message=name, traceback="T\n")
    bench.board.poll()
    outcome, failure = supervisor.outcome()
    assert outcome == Outcome("failed", "worker 1.1 failed: OSError: worker 1.1")
    assert failure is not None and failure.detail == "worker 1.1 failed:\nT"


def test_a_long_temporary_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    private = process.private_directory()
    assert private.parent == Path("/tmp") and private.stat().st_mode & 0o777 == 0o700
    private.rmdir()


def test_threads_are_shared_out_unless_the_user_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (local.threads(3), local.threads(9)) == (2, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert local.threads(3) is None
