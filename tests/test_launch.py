"""The launcher with real processes: good order, bad luck, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from shoal import cli, commands
from shoal.events import read
from shoal.launcher import local

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


def alive(variable: str, value: str) -> list[str]:
    """Processes with this in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != "zombie":
                found.append(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return found


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
        return alive("SHOAL_TEST", self.mark)

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
        """Waits for the launcher's end; nothing may be left soon after."""
        try:
            self.out, self.err = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it runs on: {self.alive()}")
        assert self.process.returncode == code, self.err
        self.until(lambda: not self.alive(), LIMIT)  # who is killed takes a moment to be gone
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

    def go(
        script: str,
        *args: str,
        cluster: str = "downpour",
        options: tuple[str, ...] = (),
        before: tuple[str, ...] = (),
    ) -> Started:
        (tmp_path / "train.py").write_text(script)
        mark, run_dir = uuid.uuid4().hex, tmp_path / "run"
        command = [sys.executable, "-m", "shoal", *before, "run", "--cluster", cluster]
        command += ["--run-dir", str(run_dir)]
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


def test_a_run_that_the_command_did_not_foresee_starts_all_the_same(start: Start) -> None:
    start(SCRIPT + "for step in train(2):\n    pass\n", cluster="hogwild", before=("--",)).ends(0)


def shoal_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "TMPDIR": str(cwd)}
    command = [sys.executable, "-m", "shoal", *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE)


# The command line


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """A clone's, for instance, in the folder of the command; installed as scripts/environment does it."""
    (tmp_path / "shoal").mkdir()
    command = [sys.executable, "-c", "import shoal; print(shoal.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == shoal.__file__


def printed(code: str) -> str:
    """What a new process prints that runs this."""
    env = os.environ | {"PYTHONPATH": str(PACKAGE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_command_starts_without_torch() -> None:
    code = "import sys, shoal.commands, shoal.launcher.local; "
    assert printed(code + "print({'torch', 'rich', 'numpy'} & set(sys.modules))") == "set()\n"


def test_the_fork_server_starts_before_the_commands_own_imports() -> None:
    code = (
        "import sys, shoal.cli as cli; slow = {'typer', 'pydantic', 'msgspec', 'yaml'}; "
        "cli.ForkProcess = lambda: sys.exit(str(slow & set(sys.modules))); "
        "sys.argv[1:] = ['run']; cli.main()"
    )
    assert printed(code) == "set()\n"


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "started"),
    [
        (["run", "train.py"], {}, True),
        (["run", "train.py"], {**TORCHRUN, "TORCHELASTIC_RUN_ID": "job"}, False),
        (["validate", "run"], {}, False),
        ([], {}, False),
    ],
)
def test_only_a_run_that_starts_members_starts_a_fork_server(
    arguments: list[str], environment: dict[str, str], started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "ForkProcess", lambda: nullcontext("the fork server"))
    monkeypatch.setattr(commands, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["shoal", *arguments])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cli.main()
    assert seen == ["the fork server" if started else None]


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
    assert alive("TMPDIR", str(tmp_path)) == []


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
    assert "train.py" in trace.splitlines()[1] and "/launcher/" not in trace and "Traceback" not in head
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


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_a_signal_before_anything_is_forked(start: Start) -> None:
    run = start(FOREVER)
    run.until(lambda: catches(run.process.pid, signal.SIGTERM))
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_ends_before_it_has_read_its_arguments_leaves_nothing(
    start: Start, number: signal.Signals
) -> None:
    run = start(SCRIPT)
    run.until(lambda: list(run.temporary.glob("shoal-*/forkserver.log")))
    run.process.send_signal(number)
    run.process.wait(LIMIT)
    run.until(lambda: not run.alive() and not list(run.temporary.glob("shoal-*")), LIMIT)


def test_a_worker_that_just_leaves_is_missed(start: Start) -> None:
    run = start(SCRIPT + "if me == '0.1': os._exit(0)\n" + FOREVER.removeprefix(SCRIPT))
    run.ends(1)
    assert run.summary["reason"] == "worker 0.1 ended before the run did, with exit status 0"
