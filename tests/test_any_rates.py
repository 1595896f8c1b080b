"""Rates that change on the way, by hand and by a metric, in processes of every framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from toys import SIZE, Line, pull_of

import shoal
from shoal.config import load
from shoal.topology import Topology

STEPS = 8
METRICS = (5, 4, 4, 4, 3, 3, 2, 2)  # and the worker's rank, so that a group has to agree on one


def rate(group: int, step: int) -> float:
    """What a script may think of by hand; another one in each group."""
    return 2.0 ** -((step + group) % 3)


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)


def script(file: str) -> None:
    """The training: one parameter's rate is set by hand, the other's follows the group's metric."""
    run = shoal.init()
    model = Line()
    first, second = torch.optim.SGD([model.long], lr=1.0), torch.optim.SGD([model.short], lr=1.0)
    scheduler = plateau(second)
    run.prepare(model, first, second)
    for step in run.epochs(STEPS):
        first.param_groups[0]["lr"] = rate(run.group, step)
        model.zero_grad()
        (model() * pull_of(run.rank, step + 1)).sum().backward()
        first.step()
        second.step()
        scheduler.step(run.mean(METRICS[step] + run.rank))
    run.save(file)


def expected(topology: Topology) -> Tensor:
    """Powers of two times integers: exact in any order."""
    total = torch.zeros(SIZE + 3, dtype=torch.float64)
    for group in range(topology.worker_groups):
        ranks = range(group * topology.workers_per_group, (group + 1) * topology.workers_per_group)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = plateau(optimizer)
        for step in range(STEPS):
            average = torch.stack([pull_of(rank, step + 1) for rank in ranks]).mean(0)
            average[:SIZE] *= rate(group, step)
            average[SIZE:] *= optimizer.param_groups[0]["lr"]
            total -= average
            scheduler.step(METRICS[step] + sum(ranks) / len(ranks))
        assert optimizer.param_groups[0]["lr"] < 0.5
    return total


@pytest.mark.parametrize("preset", ["sandblaster", "allreduce", "downpour", "hogwild"])
def test_rates_change_by_hand_and_by_a_metric(preset: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from test_any_rates import script\n"
        'script("model.safetensors")\n'
    )
    command = [sys.executable, "-m", "shoal", "run", "--cluster", preset, "--run-dir", "run", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hyperparameters differed" not in done.stdout + done.stderr
    values = load_file(tmp_path / "model.safetensors")
    found = torch.cat([values["long"], values["short"]])
    assert torch.equal(found, expected(Topology.of(load(preset).cluster)))
