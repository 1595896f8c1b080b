"""Schedulers and hands change hyperparameters; worker 0 of a group decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALONE,
    SANDBLASTER,
    TOPOLOGIES,
    Batch,
    Case,
    Values,
    adds_up,
    close,
    fit,
    large,
    loss_of,
    mlp,
    notes,
    part,
    regression,
    same,
    values_of,
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal import Run
from shoal.testing import Report, run_cluster

Scheduler = Callable[[Optimizer], Any]
DIFFERED = "hyperparameters differed"

SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 6),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=True),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), StepLR(o, 1, 0.9)], [2]),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(
        [{"params": list(m.parameters())[:2], "lr": 0.02}, {"params": list(m.parameters())[2:]}], lr=0.05
    ),
}


def scheduled(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, batches: Sequence[Batch]
) -> list[list[float]]:
    """Train, a scheduler step after each; returns the rates in use."""
    rates = []
    for number, batch in enumerate(batches):
        rates.append([group["lr"] for group in optimizer.param_groups])
        fit(model, optimizer, [batch])
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(float(number % 3))
        else:
            scheduler.step()
    return rates


@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
def test_schedulers_equal_plain_pytorch(
    scheduler: Scheduler, optimizer: Callable[[nn.Module], Optimizer], before: bool
) -> None:
    start, batches = Case(large).model(), regression(6)

    def work(run: Run) -> tuple[list[list[float]], Values]:
        model = deepcopy(start)
        own = optimizer(model)
        schedule = scheduler(own) if before else None
        assert run.prepare(model, own, schedule) == (
            model,
            own,
            schedule,
        )  # what it does not know passes through
        schedule = schedule or scheduler(own)
        rates = scheduled(model, own, schedule, part(batches, run.rank, run.world_size))
        return rates, values_of(model)

    model = deepcopy(start)
    plain = optimizer(model)
    rates = scheduled(model, plain, scheduler(plain), batches)
    assert rates[0] != rates[-1]
    for cluster in (SANDBLASTER, ALONE["one worker, three servers"]):
        report = run_cluster(work, cluster)
        adds_up(report)
        for ours, values in report.results.values():
            assert ours == rates
            close(values, values_of(model))
        assert not any(DIFFERED in note for name in report.results for note in notes(report, name))


def by_hand(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Other settings for each step."""
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
            group["weight_decay"] = 0.01 * number
            if "betas" in group:
                group["betas"] = (0.9 - 0.1 * number, 0.99)
        fit(model, optimizer, [batch])


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_settings_changed_by_hand(
    optimizer: Callable[[nn.Module], Optimizer], cluster: Mapping[str, Any]
) -> None:
    start, batches = Case(large).model(), regression()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, own = run.prepare(model, optimizer(model))
        by_hand(model, own, part(batches, run.rank, run.world_size))
        return values_of(model)

    model = deepcopy(start)
    by_hand(model, optimizer(model), batches)
    for values in run_cluster(work, cluster).results.values():
        close(values, values_of(model))


def test_the_optimizer_object_stays_and_its_hooks_run() -> None:
    calls: list[str] = []

    def work(run: Run) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: LRScheduler = StepLR(optimizer, 1)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        prepared = run.prepare(model, optimizer)
        assert prepared[0] is model and prepared[1] is optimizer
        assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        fit(model, optimizer, regression(2, torch.float32))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    run_cluster(work, {})
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("messages", [True, False])
def test_a_profile_names_every_step_and_a_hook_on_all_optimizers_runs_once(messages: bool) -> None:
    seen: list[str] = []

    def work(run: Run) -> None:
        model = mlp()
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = regression(5, torch.float32)
        fit(model, optimizer, batches[:1])
        with torch.autograd.profiler.profile() as profile:
            fit(model, optimizer, batches[1:3])
        hook = register_optimizer_step_pre_hook(lambda *_: seen.append("hook"))
        fit(model, optimizer, batches[3:4])
        hook.remove()
        fit(model, optimizer, batches[4:])
        seen.extend(event.name for event in profile.function_events if "Optimizer.step" in event.name)

    run_cluster(work, {}, messages=messages)
    assert seen.count("Optimizer.step#SGD.step") == 2
    assert seen.count("hook") == 1


# A peer that differs.


def differing(change: Callable[[int, int, Optimizer], None]) -> tuple[Report, Values]:
    """`change(rank, number, optimizer)` before each step, on every worker; the oracle changes as worker 0."""
    start, batches = Case(mlp).model(), regression()

    def trained(rank: int, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> list[float]:
        rates = []
        for number, batch in enumerate(batches):
            change(rank, number, optimizer)
            fit(model, optimizer, [batch])
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def work(run: Run) -> tuple[list[float], Values]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return trained(run.rank, model, optimizer, part(batches, run.rank, run.world_size)), values_of(model)

    model = deepcopy(start)
    rates = trained(0, model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    report = run_cluster(work, SANDBLASTER)
    for name, (ours, values) in report.results.items():
        close(values, values_of(model))
        assert ours == rates, name
    return report, values_of(model)


def told(report: Report) -> list[int]:
    """How often each worker was told that its settings differed."""
    return [sum(DIFFERED in note for note in notes(report, f"worker 0.{rank}")) for rank in range(3)]


def test_a_peer_that_differs_is_overwritten_and_told_once() -> None:
    def change(rank: int, number: int, optimizer: Optimizer) -> None:
        if rank == 1 and number in (1, 3):
            optimizer.param_groups[0]["lr"] = 5.0

    report, _ = differing(change)
    assert told(report) == [0, 1, 0]


def test_a_peer_that_differs_from_the_first_step_on() -> None:
    def change(rank: int, number: int, optimizer: Optimizer) -> None:
        if rank == 2 and number == 0:
            optimizer.param_groups[0]["weight_decay"] = 5.0

    report, _ = differing(change)
    assert told(report) == [0, 0, 1]


def test_a_schedule_on_worker_0_only_is_everyones() -> None:
    def change(rank: int, number: int, optimizer: Optimizer) -> None:
        if rank == 0:
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)

    report, _ = differing(change)
    assert told(report) == [0, 1, 1]


def test_groups_keep_their_own_schedules() -> None:
    """Two groups with servers of their own: each moves by its own rate."""
    start, (inputs, targets) = Case(mlp).model(), regression(1)[0]
    rates = (0.1, 0.0001)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.param_groups[0]["lr"] = rates[run.group]
        fit(model, optimizer, [(inputs, targets)])
        return values_of(model)

    report = run_cluster(work, {"nworker_groups": 2, "nserver_groups": 0})
    for group, rate in enumerate(rates):
        model = deepcopy(start)
        loss_of(model, inputs, targets).backward()
        torch.optim.SGD(model.parameters(), lr=rate).step()
        same(report.results[f"worker {group}.0"], values_of(model))


def test_groups_on_one_server_keep_their_own_schedules() -> None:
    """Downpour: each group's rounds are stepped with its own rate."""
    start = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        start.weight.zero_()

    def work(run: Run) -> None:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.param_groups[0]["lr"] = (1.0, 0.001)[run.group]
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.step()

    report = run_cluster(work, {"nworker_groups": 2, "server_worker_separate": True})
    values = report.servers["server 0.0"].rounds.shard.values(0)
    assert values.item() == pytest.approx(-(10 * 1.0 + 10 * 0.001))
