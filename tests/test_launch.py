"""The launcher with real processes: good order, bad luck, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil
import pytest

import shoal
from shoal.config import load
from shoal.errors import ProtocolError, UsageError
from shoal.events import Events, read
from shoal.launch import FAILED_HERE, Spawn, forkserver, local
from shoal.launch.progress import Board, Row, View
from shoal.rundir import RunDir
from shoal.summary import Outcome
from shoal.topology import Member, Topology

PACKAGE = Path(shoal.__file__).parent.parent
LIMIT = 5.0  # seconds within which everything is gone, whatever happens
PATIENCE = 60.0  # seconds that a test waits for what takes two on an idle machine

SCRIPT = """
import os, signal, sys, time
import torch, shoal

run = shoal.init()
model = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.randn(512, 2))
loader = run.loader(data, batch_size=8)
me = f"{run.group}.{run.rank_in_group}"
feed = iter(torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork"))

def train(steps):
    for inputs, targets in run.steps(loader, steps):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss.item())
        yield run.global_step
"""
FOREVER = SCRIPT + "next(feed)\nfor step in train(10**9):\n    time.sleep(0.01)\n"


@dataclass
class Started:
    """A launcher that runs, with everything that it starts marked by an environment variable."""

    process: subprocess.Popen[str]
    run_dir: Path
    mark: str
    temporary: Path
    out: str = ""
    err: str = ""

    def alive(self) -> list[str]:
        """What is left of it, fork server, members and data loaders included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SHOAL_TEST") == self.mark and process.status() != "zombie":
                    found.append(f"{process.pid} {process.name()}")
            except psutil.Error:
                continue
        return found

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits for a condition; a launcher that ends meanwhile is shown."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"not within {seconds} s; alive: {self.alive()}")
            time.sleep(0.02)

    def trains(self) -> Started:
        """Waits until every worker has taken a step."""
        self.until(lambda: self.process.poll() is not None or all(map(self.events, self.workers())))
        assert self.process.poll() is None, self.process.communicate()
        return self

    def workers(self) -> list[str]:
        return [f"w{group}.{index}" for group in (0, 1) for index in (0, 1)]

    def events(self, member: str, kind: str = "progress") -> list[dict[str, Any]]:
        return [e for e in read(self.run_dir / "events" / f"{member}.jsonl") if e["event"] == kind]

    def pid(self, member: str) -> int:
        return int(self.events(member, "started")[-1]["pid"])

    def ends(self, code: int, within: float = PATIENCE) -> Started:
        """Waits for the launcher's end; nothing may be left then."""
        try:
            self.out, self.err = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it runs on: {self.alive()}")
        assert self.process.returncode == code, self.err
        assert self.alive() == []
        assert list(self.temporary.glob("shoal-*")) == []
        return self

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``shoal run`` on a script; what is left at the end of a test is killed."""
    runs: list[Started] = []
    temporary = Path(tempfile.mkdtemp(prefix="test-", dir="/tmp"))  # short: sockets come to lie below it

    def go(script: str, *args: str, cluster: str = "downpour", options: tuple[str, ...] = ()) -> Started:
        (tmp_path / "train.py").write_text(script)
        mark, run_dir = uuid.uuid4().hex, tmp_path / "run"
        command = [sys.executable, "-m", "shoal", "run", "--cluster", cluster, "--run-dir", str(run_dir)]
        process = subprocess.Popen(
            [*command, *options, "train.py", *args],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(PACKAGE), "SHOAL_TEST": mark, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        runs.append(Started(process, run_dir, mark, temporary))
        return runs[-1]

    yield go
    for run in runs:
        run.process.kill()
        run.process.wait()
        for line in run.alive():
            os.kill(int(line.split()[0]), signal.SIGKILL)
    shutil.rmtree(temporary)


def shoal_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "TMPDIR": str(cwd)}
    command = [sys.executable, "-m", "shoal", *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE)


# The command line


def test_the_command_starts_without_torch() -> None:
    code = "import sys, shoal.cli, shoal.launch.local; print({'torch', 'rich', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "set()\n", done.stderr


def test_version_and_validate(tmp_path: Path) -> None:
    assert shoal_command("--version", cwd=tmp_path).stdout == f"shoal {shoal.__version__}\n"
    done = shoal_command("validate", "downpour", "--set", "cluster.nworker_groups=3", cwd=tmp_path)
    assert done.returncode == 0
    assert "downpour" in done.stdout and "worker 2.1" in done.stdout
    assert shoal_command("validate", "downpour", "--set", "cluster.x=1", cwd=tmp_path).returncode == 2


def test_all_mistakes_are_told_at_once_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    options = ("--set", "cluster.nworker_group=3", "--set", "cluster.sync_freq=0", "--run-dir", "taken")
    done = shoal_command(
        "run", "--cluster", "downpour", *options, "--allow-optimizer", "Mine", "none.py", cwd=tmp_path
    )
    assert done.returncode == 2
    for part in ("5 mistakes", "nworker_groups", "sync_freq", "none.py", "taken", "Mine"):
        assert part in done.stderr, done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_missing_cluster_is_a_mistake_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = shoal_command("run", "--cluster", "downpuor", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "downpour" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


# Good order


GOOD = (
    """
import random
import numpy, torch
print("drawn", random.random(), numpy.random.rand(), torch.rand(1).item())
"""
    + SCRIPT
    + """
import dataclasses, pickle
import beside

@dataclasses.dataclass
class Item:
    names: "list[str]"

assert pickle.loads(pickle.dumps(Item(["a"]))) == Item(["a"])
assert sys.modules["__main__"].Item is Item and __name__ == "__main__" and __spec__ is None
print(me, sys.argv, os.path.basename(__file__), beside.VALUE)
print("an error of no weight", file=sys.stderr)
steps = list(train(3))
next(feed)
sys.exit(0)
"""
)


def test_a_run_from_start_to_end(start: Start, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 'imported'")
    run = start(GOOD, "--epochs", "5", "--", "-v", options=("--seed", "7"))
    run.ends(0)
    assert "0.0 ['train.py', '--epochs', '5', '--', '-v'] train.py imported" in run.out
    assert "0.1 ['train.py'" not in run.out + run.err
    assert "run finished" in run.out and str(run.run_dir) in run.out
    logs = {path.stem: path.read_text() for path in (run.run_dir / "logs").iterdir()}
    assert set(logs) == {*run.workers(), "s0.0", "s0.1"}
    assert all(f"{name[1:]} ['train.py', '--epochs'" in logs[name] for name in run.workers())
    assert len({logs[name].splitlines()[0] for name in run.workers()}) == 1
    assert "an error of no weight" in logs["w1.1"]
    summary = run.summary
    assert (summary["status"], summary["seed"], summary["os_processes"]) == ("finished", 7, 6)
    assert summary["steps"] == {f"worker {name[1:]}": 3 for name in run.workers()}
    assert len({run.pid(name) for name in (*run.workers(), "s0.0", "s0.1")}) == 6


def test_server_groups_say_how_far_they_move_and_share_their_workers_processes(
    start: Start, tmp_path: Path
) -> None:
    run = start(SCRIPT + "list(train(3))", cluster="hogwild")
    run.ends(0)
    assert "3 times as far" in run.err
    assert run.summary["os_processes"] == 3
    assert all(run.pid(f"s{group}.0") == run.pid(f"w{group}.0") for group in range(3))
    assert {path.name for path in (run.run_dir / "logs").iterdir()} == {f"w{g}.0.log" for g in range(3)}


# Bad luck


def test_a_workers_traceback_is_the_last_thing_printed(start: Start) -> None:
    script = """
next(feed)
for step in train(10**9):
    time.sleep(0.01)
    if me == "1.0" and step == 2:
        print("so far so good")
        raise ValueError("no such luck")
"""
    run = start(SCRIPT + script).trains()
    run.ends(1)
    head, _, trace = run.err.rpartition("worker 1.0 failed at step 3:\n")
    assert trace.startswith("Traceback (most recent call last):\n  File ")
    assert trace.endswith("ValueError: no such luck\n")
    assert "train.py" in trace.splitlines()[1] and "/launch/" not in trace and "Traceback" not in head
    assert run.summary["status"] == "failed"
    assert run.summary["reason"] == "worker 1.0 failed at step 3: ValueError: no such luck"
    assert run.summary["steps"]["worker 1.0"] in (1, 2)
    log = (run.run_dir / "logs" / "w1.0.log").read_text()
    assert log.index("so far so good") < log.index("no such luck")
    failed = run.events("w1.0", "failed")[0]["time"]
    assert time.time() - failed < LIMIT


def test_a_worker_that_is_killed_is_named_with_its_log(start: Start) -> None:
    run = start(FOREVER.replace("next(feed)", "print('the last words')")).trains()
    began = time.monotonic()
    os.kill(run.pid("w1.0"), signal.SIGKILL)
    run.ends(1, LIMIT)
    assert time.monotonic() - began < LIMIT
    assert run.summary["reason"] == "worker 1.0 was killed by SIGKILL"
    log = run.run_dir / "logs" / "w1.0.log"
    assert run.err.endswith(f"worker 1.0 was killed by SIGKILL; the end of its log, {log}:\nthe last words\n")


def test_nothing_outlives_a_killed_launcher(start: Start) -> None:
    run = start(FOREVER).trains()
    run.until(lambda: len(run.alive()) == 1 + 1 + 6 + 4)  # launcher, fork server, members, data loaders
    run.process.kill()
    run.until(lambda: run.alive() == [] and not list(run.temporary.glob("shoal-*")), LIMIT)


def test_nothing_outlives_a_killed_fork_server(start: Start) -> None:
    run = start(FOREVER).trains()
    os.kill(psutil.Process(run.pid("w0.0")).ppid(), signal.SIGKILL)
    run.ends(1, LIMIT)
    assert "fork server" in run.err.splitlines()[-1]
    assert run.summary["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_in_good_order(start: Start, number: signal.Signals) -> None:
    script = "try:\n    for step in train(10**9):\n        time.sleep(0.01)\nfinally:\n    print('tidy')\n"
    run = start(SCRIPT + "next(feed)\n" + script).trains()
    run.process.send_signal(number)
    run.ends(3, LIMIT)
    assert run.summary["status"] == "stopped"
    assert number.name in run.summary["reason"]
    assert "tidy" in run.out and "Traceback" not in run.err
    assert all("tidy" in (run.run_dir / "logs" / f"{name}.log").read_text() for name in run.workers())


def test_a_signal_before_anything_is_forked(start: Start) -> None:
    run = start(FOREVER)
    run.until(lambda: list(run.temporary.glob("shoal-*")))
    run.process.send_signal(signal.SIGINT)
    run.ends(3, LIMIT)
    assert run.summary["status"] == "stopped"


STUBBORN = (
    SCRIPT + "try:\n    for _ in train(10**9):\n        pass\nfinally:\n    print('no'); time.sleep(99)\n"
)


def test_a_stubborn_member_is_killed_after_the_grace(start: Start) -> None:
    run = start(STUBBORN).trains()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.ends(3, LIMIT)
    assert local.GRACE <= time.monotonic() - began < LIMIT


def test_a_second_interrupt_kills_at_once(start: Start) -> None:
    run = start(STUBBORN).trains()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "no" in (run.run_dir / "logs" / "w0.0.log").read_text())
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.ends(3, local.GRACE)
    assert time.monotonic() - began < local.GRACE


def test_a_worker_that_just_leaves_is_missed(start: Start) -> None:
    run = start(SCRIPT + "if me == '0.1': os._exit(0)\n" + FOREVER.removeprefix(SCRIPT))
    run.ends(1)
    assert run.summary["reason"] == "worker 0.1 ended before the run did, with exit status 0"


# One member, forked here


@dataclass
class Forked:
    """A member that runs: its process, its log, the launcher's end of its lifeline."""

    pid: int
    log: Path
    lifeline: BinaryIO

    def says(self, text: str) -> Forked:
        """Waits until its log contains a text."""
        end = time.monotonic() + PATIENCE
        while not (self.log.exists() and text in self.log.read_text()):
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
        from shoal.launch import member

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
    assert "/launch/" not in event["traceback"]
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

    def serve(_: object) -> None:
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
    ended = fork(script, meanwhile=lambda forked: forked.says("child 0").says("\n").lifeline.close())
    assert ended.code == -signal.SIGKILL
    children = [int(line.split()[1]) for line in ended.log.splitlines()]
    assert len(children) == 2
    assert not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children if pid
    )


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
    private = forkserver.private_directory()
    assert private.parent == Path("/tmp") and private.stat().st_mode & 0o777 == 0o700
    private.rmdir()


def test_threads_are_shared_out_unless_the_user_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (local.threads(3), local.threads(9)) == (2, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert local.threads(3) is None
