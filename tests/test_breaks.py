"""Mistakes and mishaps that once ended in a wrong word, a wrong number or an internal traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.config import load
from shoal.errors import ConfigError, PeerFailed, ShoalError
from shoal.events import Event
from shoal.launcher import local
from shoal.run import Run
from shoal.testing import run_cluster

SCRIPT = """
import os, torch, shoal
run = shoal.init()
model = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


@dataclass
class Ran:
    """A run that has ended: its exit status, what it printed, its summary."""

    status: int
    out: str
    err: str
    summary: dict[str, Any] | None


def ran(folder: Path, script: str, *settings: str) -> Ran:
    path, run_dir = folder / "script.py", folder / "run"
    path.write_text(SCRIPT + script)
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "shoal", "run", "--cluster", "hogwild", *options]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir), str(path)], capture_output=True, text=True, timeout=120
    )
    summary = run_dir / "summary.json"
    return Ran(
        done.returncode,
        done.stdout,
        done.stderr,
        json.loads(summary.read_text()) if summary.exists() else None,
    )


# Configuration


def mistakes(source: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, settings)
    return str(caught.value)


@pytest.mark.parametrize("name", ["nworker_groups", "nworkers_per_group", "nservers_per_group"])
def test_a_million_members_are_refused_at_once(name: str) -> None:
    assert "one machine takes 4096 members" in mistakes("downpour", f"cluster.{name}=1000000")


def test_ports_must_end_within_the_range() -> None:
    tcp = "cluster.transport=tcp"
    assert "the last would be 65536" in mistakes("downpour", tcp, "cluster.start_port=65533")
    assert load("downpour", [tcp, "cluster.start_port=65532"]).cluster.start_port == 65532
    assert load("downpour", ["cluster.start_port=65535"]).cluster.transport == "auto"  # no ports are used


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    config = load("downpour", ["cluster.delay_compensation=1e-3"])
    assert config.cluster.delay_compensation == 0.001
    file = tmp_path / "my.yaml"
    file.write_text("timeouts: {values: 1e3, ask: 5E-1}\n")
    assert (load(str(file)).timeouts.values, load(str(file)).timeouts.ask) == (1000.0, 0.5)


def test_what_no_path_and_no_class_can_be_is_refused() -> None:
    assert "must be text" in mistakes("downpour", r'cluster.workspace="a\0b"')
    assert "each MODULE:CLASS" in mistakes("downpour", "allow_optimizers=[Lion]")


def test_a_schedule_that_cannot_be_written_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "shoal",
        "run",
        "--cluster",
        "hogwild",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    record = ["--record-schedule", str(tmp_path / "file" / "first"), str(tmp_path / "script.py")]
    done = subprocess.run([*command, *record], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "must be a folder that can be made" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["validate", "hogwild"], ["doctor"]])
def test_nothing_outlives_a_look_at_a_script(tmp_path: Path, command: list[str]) -> None:
    script, running = tmp_path / "script.py", tmp_path / "running"
    script.write_text(
        f"import os, time\nopen({str(running)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    look = subprocess.Popen([sys.executable, "-m", "shoal", *command, str(script)], stdout=subprocess.DEVNULL)
    try:
        while look.poll() is None and not (running.exists() and running.read_text()):
            time.sleep(0.05)
        assert int(running.read_text()) == look.pid
    finally:
        look.kill()
        look.wait()


# Calls


def prepared(run: Run) -> None:
    model = nn.Linear(2, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_no_norm_below_zero_is_clipped_to(norm: float) -> None:
    def train(run: Run) -> None:
        prepared(run)
        run.clip_grad_norm_(norm)

    with pytest.raises(ShoalError, match="no gradient can have a norm of"):
        run_cluster(train, "sandblaster")


def test_a_folder_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        prepared(run)
        run.save(tmp_path / "missing" / "model.safetensors")

    with pytest.raises(ShoalError, match=r"there is no folder .*missing"):
        run_cluster(train, {})


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_a_step_weighs_a_finite_number(count: float) -> None:
    def train(run: Run) -> None:
        prepared(run)
        run.weight(count)

    with pytest.raises(ShoalError, match="a step cannot weigh"):
        run_cluster(train, {})


def test_a_run_may_be_closed_more_than_once_and_then_takes_no_step(tmp_path: Path) -> None:
    step = "model(torch.ones(3, 4)).sum().backward()\n"
    done = ran(
        tmp_path, f"for _ in run.epochs(2):\n    {step}    optimizer.step()\nrun.close()\nrun.close()\n"
    )
    assert done.status == 0, done.err
    (tmp_path / "more").mkdir()
    done = ran(tmp_path / "more", f"run.close()\n{step}optimizer.step()\n")
    assert done.status == 1
    assert done.err.rstrip().endswith("the run is closed\n  call run.close() last")


FORK = """
for step in run.epochs(4):
    if step == 2 and os.fork() == 0:
        raise SystemExit
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if step == 2:
        os.wait()
print("on and on")
"""


def test_a_process_that_the_script_forks_does_not_close_the_run(tmp_path: Path) -> None:
    done = ran(tmp_path, FORK)
    assert (done.status, "on and on" in done.out) == (0, True), done.err
    assert done.summary is not None
    assert set(done.summary["steps"].values()) == {4}
    script = tmp_path / "alone.py"
    script.write_text(SCRIPT + FORK)
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (alone.returncode, alone.stdout) == (0, "on and on\n"), alone.stderr


@pytest.mark.parametrize("value", [object(), 1j, [1.0], {"a": 1}, torch.ones(3), torch.ones(1) * 1j])
def test_what_cannot_be_written_down_is_refused_when_it_is_logged(value: object) -> None:
    def train(run: Run) -> None:
        prepared(run)
        run.log(score=value)

    with pytest.raises(ShoalError, match="score cannot be logged"):
        run_cluster(train, {})


def test_every_kind_of_number_can_be_logged(tmp_path: Path) -> None:
    done = ran(
        tmp_path,
        """
import numpy as np
for _ in run.epochs(1):
    model(torch.ones(3, 4)).sum().backward()
    run.log(loss=torch.ones(1, 1) / 2, a=np.float32(0.5), b=np.int64(3), c=10**30, d=None, e=True, f="[/x]")
    optimizer.step()
run.log(loss="none")
""",
    )
    assert done.status == 0, done.err
    assert done.summary is not None
    logged = {"loss": "none", "a": 0.5, "b": 3, "c": 10**30, "d": None, "e": True, "f": "[/x]"}
    assert done.summary["final"] == logged
    assert "[/x]" in done.out


# The end of a run


def test_a_run_without_a_step_finishes(tmp_path: Path) -> None:
    done = ran(tmp_path, "for _ in run.epochs(0): pass\nprint('all', run.evaluate(lambda: 3))\n")
    assert (done.status, done.err.count("Traceback")) == (0, 0)
    assert done.summary is not None
    assert set(done.summary["steps"].values()) == {0}
    assert "all 3" in done.out


def test_a_script_that_ends_itself_was_not_told_to_stop(tmp_path: Path) -> None:
    done = ran(tmp_path, "if run.group == 1: os._exit(3)\nfor _ in run.epochs(1): pass\n")
    assert done.status == 1
    assert done.summary is not None
    assert done.summary["reason"] == "worker 1.0 ended with exit status 3"


def test_who_waits_for_the_start_names_the_worker_that_makes_it(tmp_path: Path) -> None:
    script = "import time\nrun = shoal.init()\nif run.is_main: time.sleep(60)\n" + SCRIPT
    path = tmp_path / "script.py"
    path.write_text("import shoal\n" + script)
    command = [sys.executable, "-m", "shoal", "run", "--cluster", "hogwild", "--set", "timeouts.start=1"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "for worker 0.0 to call prepare() and then for the servers' welcome" in done.stderr


def test_a_failure_that_only_follows_another_is_not_the_reason() -> None:
    def told(time: float, member: str, error: str) -> Event:
        words = {"error": error, "message": "it failed", "traceback": error}
        return {"time": time, "member": member, "event": "failed", "step": None, **words}

    first = local._told(told(1.0, "worker 1.0", PeerFailed.__name__))
    second = local._told(told(2.0, "worker 0.0", "ValueError"))
    assert min([first, second], key=lambda failure: failure.order) == second


def test_a_summary_that_cannot_be_written_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not local._written(tmp_path / "gone" / "summary.json", {})
    assert "summary.json cannot be written: No such file or directory" in capsys.readouterr().err
