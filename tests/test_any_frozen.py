"""Parameters that are frozen or unfrozen while training goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from cases import ALONE, SANDBLASTER, WIDTH, Batch, Case, adamw, adds_up, loss_of, part, regression, sgd
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, check_asynchronous, check_joined, clustered
from torch import Tensor, nn
from torch.optim import Optimizer
from toys import SIZE, Line, pull_of

from shoal import Run
from shoal.config import Cluster
from shoal.testing import run_cluster
from shoal.topology import Topology
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

EVERY = {**SYNCHRONOUS, **ASYNCHRONOUS}
STEPS = 6

# Which steps train the long parameter; a number of a group shifts the change, so that groups are not alike.
Trained = Callable[[int, int], bool]
WINDOWS: dict[str, Trained] = {
    "unfrozen": lambda group, step: step > 2 + group,
    "frozen": lambda group, step: step <= 2 + group,
    "in turns": lambda group, step: (step + group) % 2 == 0,
    "never": lambda group, step: False,
}


@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("trained", WINDOWS.values(), ids=WINDOWS)
def test_a_parameter_moves_by_the_steps_that_train_it(trained: Trained, cluster: Mapping[str, Any]) -> None:
    """SGD on integers, whose sum over all groups is exact in any order."""

    def work(run: Run) -> Tensor:
        model = Line()
        model.long.requires_grad_(trained(run.group, 1))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for number in run.epochs(STEPS):
            model.long.requires_grad_(trained(run.group, number + 1))
            optimizer.zero_grad()
            (model() * pull_of(run.rank, number + 1)).sum().backward()
            before = model.long.detach().clone()
            optimizer.step()
            if run.num_groups == 1 and not model.long.requires_grad:
                assert torch.equal(model.long, before)
        run.evaluate(lambda: 0)
        return model().detach().clone()

    report = run_cluster(work, cluster)
    adds_up(report)
    topology = Topology.of(Cluster(**cluster))
    for name, values in report.results.items():
        alone = [int(name.split()[1].split(".")[0])] if topology.framework == "independent" else None
        groups = alone or list(range(topology.worker_groups))
        expected = torch.stack([moved(group, topology.workers_per_group, trained) for group in groups]).sum(0)
        assert torch.equal(values, expected), name


def moved(group: int, workers: int, trained: Trained) -> Tensor:
    """How far a group's averages take the long parameter and the short one."""
    total = torch.zeros(SIZE + 3, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        ranks = range(group * workers, (group + 1) * workers)
        average = torch.stack([pull_of(rank, step) for rank in ranks]).mean(0)
        if not trained(group, step):
            average[:SIZE] = 0
        total -= average
    return total


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.SyncBatchNorm(16), nn.Tanh(), nn.Linear(16, 4))


def half_way(to_none: bool) -> Callable[[nn.Module, Optimizer, Sequence[Batch]], None]:
    """The head alone at first; then all of it, with the batch norm as it is."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for number, (inputs, targets) in enumerate(batches):
            model[:2].requires_grad_(number in (2, 3))
            model[1].train(number < 2)
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, inputs, targets).backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_fine_tuning_in_stages_equals_plain_pytorch(
    make: Callable[[nn.Module], Optimizer], to_none: bool, cluster: Mapping[str, Any]
) -> None:
    """Frozen with gradients of zero, momentum and decay go on, as in plain PyTorch; without, nothing does."""
    check_joined(Case(normed, make, half_way(to_none), steps=6), cluster)


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_fine_tuning_in_stages_learns_with_groups(cluster: Mapping[str, Any]) -> None:
    def gentle(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    check_asynchronous(Case(normed, gentle, half_way(True), steps=20), cluster, 0.95)


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_statistics_of_a_frozen_layer_stay_while_those_of_others_move(cluster: Mapping[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(normed(), nn.BatchNorm1d(4))

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        model[0].requires_grad_(False).eval()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()

    start = Case(build).model().state_dict()
    for values in clustered(Case(build, adamw), cluster, body=body).results.values():
        for name, value in start.items():
            assert torch.equal(values[name], value) is name.startswith("0."), name


@pytest.mark.parametrize("cluster", [ALONE["single"], SANDBLASTER], ids=["alone", "sandblaster"])
def test_what_was_frozen_at_prepare_leaves_during_backward_once_it_is_not(cluster: Mapping[str, Any]) -> None:
    """One step later, that is: by then it is seen."""
    seen: dict[str, list[str]] = defaultdict(list)

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.SHARE:
            seen[header.sender].append(f"share of {header.step}")
        return "deliver"

    def work(run: Run) -> None:
        model = nn.Linear(WIDTH, 4).requires_grad_(False)
        model.bias.requires_grad_(True)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        model.requires_grad_(True)
        for inputs, targets in part(regression(3, torch.float32), run.rank, run.world_size):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            seen[f"worker 0.{run.rank}"].append("backward is over")
            optimizer.step()

    run_cluster(work, cluster, judge=judge)
    for events in seen.values():
        last = max(at for at, event in enumerate(events) if event == "backward is over")
        assert "share of 3" in events[:last] and "share of 3" not in events[last:]
