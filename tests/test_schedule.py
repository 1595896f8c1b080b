"""A recorded order of messages is kept to bit for bit, and one that does not fit is told of."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from toys import Net, config

from shoal import Run
from shoal.config import Cluster, Config, Timeouts
from shoal.errors import PeerFailed, ScheduleMismatch, ShoalError, WaitTimeout
from shoal.schedule import Schedules, head_of, misfits, path_of, read
from shoal.testing import Report, run_cluster
from shoal.topology import Member, Topology
from shoal.transport.faulty import Fate
from shoal.wire import Header

SHAPES: dict[str, dict[str, Any]] = {
    "downpour 2": {"nworker_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2},
    "downpour 3": {"nworker_groups": 3, "max_delay": 2, "staleness_rate": True},
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3, "delay_compensation": 0.1},
    "hybrid": {"nworker_groups": 4, "nserver_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2},
    "warm": {"nworker_groups": 3, "nserver_groups": 3, "warmup_steps": 3},
}
DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
STEPS = {0: 8, 1: 7, 2: 5, 3: 6}


def learn(run: Run, steps: dict[int, int] = STEPS) -> bytes:
    """Two loops, an evaluation in each, clipping; the bytes of the end and of what was evaluated."""
    model = Net()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(run.rank)
    chance = random.Random(time.perf_counter_ns() + run.rank)
    seen = []
    for _ in range(2):
        for step in run.epochs(steps[run.group]):
            inputs = torch.randn(8, 16, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            run.clip_grad_norm_(0.5)
            pause(chance.random() * 0.004)
            optimizer.step()
            if step == 2:
                seen.append(run.evaluate(lambda: [p.sum().item() for p in model.parameters()]))
        seen.append(run.evaluate(lambda: [p.sum().item() for p in model.parameters()]))
    values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return values + msgspec.json.encode(seen)


def pause(seconds: float) -> None:
    """Compute for a while, so that groups come in another order each time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def staleness(report: Report) -> dict[str, Any]:
    return {name: report.events[name].last("finished")["staleness"] for name in report.servers}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replayed_run_is_the_recorded_one_bit_for_bit(shape: str, tmp_path: Path) -> None:
    folder, again = str(tmp_path / "first"), str(tmp_path / "again")
    block = config(**SHAPES[shape])
    first = run_cluster(learn, block, schedules=Schedules(record=folder))
    second = run_cluster(learn, block, schedules=Schedules(record=again, replay=folder))
    assert first.results == second.results
    assert staleness(first) == staleness(second)
    for server in first.servers:
        paths = [path_of(each, Member.parse(server)) for each in (folder, again)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_without_a_schedule_another_order_is_another_result(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    results = set()
    for _ in range(5):
        results.add(run_cluster(learn, config(**SHAPES["downpour 2"])).results["worker 0.0"])
    assert len(results) > 1


def test_copies_of_messages_are_outside_the_schedule(tmp_path: Path) -> None:
    def doubled(header: Header, peer: str) -> Fate:
        return "double" if header.kind.name in ("SHARE", "COMMIT", "SYNC", "PULL", "LEAVE") else "deliver"

    folder = str(tmp_path)
    block = config(**SHAPES["hogwild"])
    first = run_cluster(learn, block, judge=doubled, schedules=Schedules(record=folder))
    second = run_cluster(learn, block, schedules=Schedules(replay=folder))
    third = run_cluster(learn, block, judge=doubled, schedules=Schedules(replay=folder))
    assert first.results == second.results == third.results


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedule")
    run_cluster(learn, config(**SHAPES["downpour 3"]), schedules=Schedules(record=str(folder)))
    return folder


def small(run: Run) -> None:
    model = nn.Linear(3, 3)
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in run.epochs(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("function", "block", "seed", "said"),
    [
        pytest.param(small, {}, 0, "recorded with another model", id="model"),
        pytest.param(learn, {"max_delay": 1}, 0, "with cluster.max_delay 2, which is 1 now", id="cluster"),
        pytest.param(learn, {}, 5, "with seed 0, which is 5 now", id="seed"),
        pytest.param(
            lambda run: learn(run, STEPS | {2: 4}),
            {},
            0,
            r"2\.0's leave \(number 1\) arrived where the schedule has .* 2\.0's norm \(step 5, number 5\)",
            id="fewer steps",
        ),
        pytest.param(
            lambda run: learn(run, STEPS | {2: 6}),
            {},
            0,
            r"2\.0's norm \(step 6, number 6\) arrived where the schedule has .* 2\.0's leave \(number 1\)",
            id="more steps",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_says_where(
    function: Callable[[Run], Any], block: dict[str, Any], seed: int, said: str, recorded: Path
) -> None:
    plan = config(**SHAPES["downpour 3"] | block).model_copy(update={"seed": seed})
    with pytest.raises((ScheduleMismatch, PeerFailed), match=said):
        run_cluster(function, plan, schedules=Schedules(replay=str(recorded)))


def test_a_message_that_never_comes_is_named_by_a_timeout(recorded: Path) -> None:
    block = SHAPES["downpour 3"]
    timeouts = Timeouts(start=20, values=20, flush=1, ask=0.1, evaluate=20, finish=20, replay=0.5)

    def judge(header: Header, peer: str) -> Fate:
        return (
            "lose"
            if (header.kind.name, header.sender, header.step) == ("COMMIT", "worker 1.0", 3)
            else "deliver"
        )

    with pytest.raises(
        (WaitTimeout, PeerFailed), match=r"0\.5 s \(timeouts\.replay\) for worker 1\.0's commit \(step 3\)"
    ):
        run_cluster(learn, config(timeouts, **block), judge=judge, schedules=Schedules(replay=str(recorded)))


def test_what_can_be_told_before_the_start_is(recorded: Path, tmp_path: Path) -> None:
    def told(config: Config, **folders: Path) -> list[str]:
        schedules = Schedules(**{name: str(path) for name, path in folders.items()})
        return [str(m) for m in misfits(schedules, config, Topology.of(config.cluster).servers)]

    same = config(**SHAPES["downpour 3"])
    assert told(same, replay=recorded, record=tmp_path / "new") == []
    assert (
        told(
            same.model_copy(update={"cluster": Cluster(**SHAPES["downpour 3"], transport="tcp")}),
            replay=recorded,
        )
        == []
    )
    (found,) = told(config(**SHAPES["downpour 2"]), replay=recorded)
    assert (
        found.startswith("--replay-schedule")
        and "recorded with cluster.max_delay 2, which is null now" in found
    )
    (found,) = told(same, replay=tmp_path)
    assert "s0.0.jsonl is no schedule (No such file or directory)" in found
    (found,) = told(same, record=recorded)
    assert found.endswith("must be a new or an empty folder")


def test_a_schedule_is_a_head_and_entries_and_a_torn_line_is_left_out(recorded: Path, tmp_path: Path) -> None:
    server = Member("server", 0, 0)
    head, entries = read(path_of(str(recorded), server))
    assert head == head_of(config(**SHAPES["downpour 3"]), server, head.plan)
    assert len(set(entries)) == len(entries) > 50
    torn = tmp_path / "s0.0.jsonl"
    torn.write_bytes(path_of(str(recorded), server).read_bytes()[:-7])
    assert read(torn) == (head, entries[:-1])
    torn.write_bytes(torn.read_bytes().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(ShoalError, match="version 2"):
        read(torn)


def test_on_processes_a_replay_saves_the_same_model(tmp_path: Path) -> None:
    def saved(name: str, *options: str) -> str:
        path = tmp_path / f"{name}.safetensors"
        script = [
            str(DIGITS),
            "--epochs",
            "3",
            "--save",
            str(path),
        ]
        command = [sys.executable, "-m", "shoal", "run", "--cluster", "downpour", *options]
        subprocess.run(
            [*command, "--run-dir", str(tmp_path / name), *script],
            check=True,
            timeout=100,
            capture_output=True,
        )
        return hashlib.sha256(path.read_bytes()).hexdigest()

    folder = str(tmp_path / "schedule")
    first = saved("first", "--record-schedule", folder)
    assert first == saved("second", "--replay-schedule", folder, "--set", "cluster.transport=tcp")
    command = [sys.executable, "-m", "shoal", "run", "--cluster", "hogwild", "--replay-schedule", folder]
    result = subprocess.run([*command, str(DIGITS)], capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert "recorded with cluster.nserver_groups 1, which is 3 now" in result.stderr
