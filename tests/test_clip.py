"""Clipping, loss scaling and skipped rounds, across several servers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    GROUPS,
    SANDBLASTER,
    TOPOLOGIES,
    Case,
    Values,
    adamw,
    adds_up,
    close,
    counted,
    dropped,
    fit,
    large,
    loss_of,
    mlp,
    notes,
    part,
    regression,
    same,
    sgd,
    values_of,
)
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import shoal.stepping
from shoal import Run
from shoal.errors import GradientEdited, NonFiniteGradients, UsageError
from shoal.testing import Report, run_cluster
from shoal.transport.faulty import Fate, Judge
from shoal.wire import Header, Kind

Work = Callable[[Run, nn.Module, Optimizer, Sequence[Any]], Any]


def work_on(
    cluster: Mapping[str, Any],
    work: Work,
    *,
    build: Callable[[], nn.Module] = large,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 5,
    judge: Judge | None = None,
) -> Report:
    """Run `work` with a prepared model, its optimizer and the worker's part of the batches."""
    start, batches = Case(build).model(), regression(steps)

    def prepared(run: Run) -> Any:
        model = deepcopy(start)
        model, own = run.prepare(model, optimizer(model))
        return work(run, model, own, part(batches, run.rank, run.world_size))

    report = run_cluster(prepared, cluster, judge=judge)
    adds_up(report)
    return report


def torch_clipped(
    max_norm: float, build: Callable[[], nn.Module], make: Callable[[nn.Module], Optimizer], steps: int = 5
) -> tuple[list[float], Values]:
    """Plain PyTorch on the joined batches with its own clip."""
    model = Case(build).model()
    optimizer, norms = make(model), []
    for inputs, targets in regression(steps):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return norms, values_of(model)


def clipping(max_norm: float) -> Work:
    """The loop with Shoal's clip; returns norms and values."""

    def work(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> Any:
        norms = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            norms.append(run.clip_grad_norm_(max_norm))
            optimizer.step()
        return norms, values_of(model)

    return work


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("max_norm", [0.05, 1.7, 1e6], ids=["always", "sometimes", "never"])
def test_clip_equals_torchs_on_the_joined_batch(cluster: Mapping[str, Any], max_norm: float) -> None:
    norms, oracle = torch_clipped(max_norm, large, sgd)
    if max_norm == 1.7:
        assert min(norms) < max_norm < max(norms)
    results = work_on(cluster, clipping(max_norm), optimizer=sgd).results
    for ours, values in results.values():
        assert ours == pytest.approx(norms, rel=1e-12)
        assert ours == results["worker 0.0"][0]  # exactly the same number on every worker
        close(values, oracle)


def test_the_norm_is_of_the_average_not_of_any_workers_own() -> None:
    report = work_on(SANDBLASTER, clipping(1.0), steps=1)
    own = []
    for rank in range(3):
        model = Case(large).model()
        loss_of(model, *part(regression(1), rank, 3)[0]).backward()
        own.append(math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())))
    assert report.results["worker 0.1"][0][0] < min(own) * 0.999


def test_with_more_servers_than_the_model_needs() -> None:
    cluster = {"nworkers_per_group": 2, "nservers_per_group": 4, "server_worker_separate": True}
    norms, oracle = torch_clipped(0.05, lambda: nn.Linear(8, 4), sgd)
    for ours, values in work_on(
        cluster, clipping(0.05), build=lambda: nn.Linear(8, 4), optimizer=sgd
    ).results.values():
        assert ours == pytest.approx(norms, rel=1e-12)
        close(values, oracle)


def test_lost_and_doubled_norms_change_nothing() -> None:
    lock, seen = threading.Lock(), set()

    def judge(header: Header, peer: str) -> Fate:
        key = (header.kind, header.sender, peer, header.step)
        with lock:
            if header.kind is not Kind.NORM or key in seen:
                return "double" if header.kind is Kind.NORM else "deliver"
            seen.add(key)
            return "lose" if header.step % 2 else "double"

    norms, oracle = torch_clipped(0.05, mlp, sgd, steps=3)
    report = work_on(SANDBLASTER, clipping(0.05), build=mlp, optimizer=sgd, steps=3, judge=judge)
    for ours, values in report.results.values():
        assert ours == pytest.approx(norms, rel=1e-12)
        close(values, oracle)


def test_a_step_skipped_after_its_clip() -> None:
    """The second batch is thrown away after its norm is known, as a careful script does with a large one."""

    def skipping(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> Any:
        norms = []
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            norms.append(run.clip_grad_norm_(0.05))
            if number != 1:
                optimizer.step()
        return norms, values_of(model)

    model = Case(large).model()
    optimizer, norms = sgd(model), []
    for number, (inputs, targets) in enumerate(regression()):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        if number != 1:
            optimizer.step()

    def judge(header: Header, peer: str) -> Fate:
        """An answer that comes twice is not the answer to the next question."""
        return "double" if header.kind is Kind.NORM else "deliver"

    for ours, values in work_on(SANDBLASTER, skipping, optimizer=sgd, judge=judge).results.values():
        assert ours == pytest.approx(norms, rel=1e-12)
        close(values, values_of(model))


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_gradient_changed_after_clipping_is_an_error(cluster: Mapping[str, Any]) -> None:
    def edit(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> None:
        loss_of(model, *batches[0]).backward()
        run.clip_grad_norm_(1.0)
        model[2].weight.grad.mul_(2)
        optimizer.step()

    def again(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> None:
        loss_of(model, *batches[0]).backward()
        run.clip_grad_norm_(1.0)
        loss_of(model, *batches[1]).backward()
        optimizer.step()

    with pytest.raises(GradientEdited, match=r"2\.weight was changed after"):
        work_on(cluster, edit, build=mlp)
    with pytest.raises(GradientEdited, match=r"weight was changed after clipping"):
        work_on(cluster, again, build=mlp)


def test_clip_needs_to_know_which_of_several_optimizers() -> None:
    def work(run: Run) -> list[float]:
        models = [nn.Linear(2, 2).double() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        with pytest.raises(UsageError, match="nothing is prepared"):
            run.clip_grad_norm_(1.0)
        run.prepare(*models, *optimizers)
        with pytest.raises(UsageError, match="found 2 optimizers"):
            run.clip_grad_norm_(1.0)
        for model in models:
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        return [run.clip_grad_norm_(1.0, optimizer=optimizer) for optimizer in optimizers]

    assert run_cluster(work, SANDBLASTER).results["worker 0.1"] == pytest.approx([6**0.5] * 2)


# Loss scaling.


def scaled(bad: Mapping[int, int], clip: float | None = None, enabled: bool = True) -> Work:
    """The usual loop with a GradScaler. `bad`: number of a batch → the one worker whose loss is then nan."""

    def work(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> Any:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)
        scales = []
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            if bad.get(number) == run.rank:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            if clip is not None:
                run.clip_grad_norm_(clip, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values_of(model)

    return work


def torch_scaled(
    bad: Sequence[int], steps: int, clip: float | None = None, enabled: bool = True
) -> tuple[list[float], Values]:
    """The same in plain PyTorch, on the joined batches."""
    model = Case(large).model()
    optimizer, scales = adamw(model), []
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)
    for number, (inputs, targets) in enumerate(regression(steps)):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        scaler.scale(loss * float("nan") if number in bad else loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, values_of(model)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("clip", [None, 0.05], ids=["free", "clipped"])
def test_a_nan_on_one_worker_skips_the_step_everywhere(
    cluster: Mapping[str, Any], clip: float | None
) -> None:
    workers = cluster.get("nworkers_per_group", 1)
    bad = {1: 0, 4: workers - 1, 5: workers // 2}
    report = work_on(cluster, scaled(bad, clip), steps=9)
    scales, oracle = torch_scaled([*bad], 9, clip)
    assert len(set(scales)) > 2  # it backed off and grew
    for ours, values in report.results.values():
        assert ours == scales
        close(values, oracle)
    rounds = counted(report, "rounds") // 9
    assert dropped(report, "non-finite") == rounds * workers * len(bad)
    assert counted(report, "applied") == rounds * workers * (9 - len(bad))


def test_a_scaler_that_is_off_changes_nothing() -> None:
    report = work_on(SANDBLASTER, scaled({}, 0.05, enabled=False))
    _, oracle = torch_scaled([], 5, 0.05, enabled=False)
    for _, values in report.results.values():
        close(values, oracle)


def test_alone_unscaling_by_hand_works() -> None:
    def work(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> Values:
        scaler = GradScaler("cpu", init_scale=1024.0)
        for inputs, targets in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, inputs, targets)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        return values_of(model)

    _, oracle = torch_scaled([], 5, 0.05)
    same(
        work_on({"nservers_per_group": 2, "server_worker_separate": True}, work).results["worker 0.0"], oracle
    )


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
def test_unscaling_by_hand_in_a_group_is_an_error(cluster: Mapping[str, Any]) -> None:
    def work(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> None:
        scaler = GradScaler("cpu", init_scale=1024.0)
        for inputs, targets in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, inputs, targets)).backward()
            if inputs is batches[-1][0]:  # the fifth step: no longer one of the thorough three
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(GradientEdited, match=r"worker 0\.\d, step 5: the gradient of .*weight was changed"):
        work_on(cluster, work, build=mlp)


# Without a scaler.


def breaking(bad: set[int], rank: int) -> Work:
    """The tutorial's loop, with one worker's loss infinite in some batches."""

    def work(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> Any:
        norms = []
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            (loss * float("inf") if number in bad and run.rank == rank else loss).backward()
            if number == 3:
                norms.append(run.clip_grad_norm_(1e9))
            optimizer.step()
        return norms, values_of(model)

    return work


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_rounds_that_are_not_finite_are_skipped_and_counted(cluster: Mapping[str, Any]) -> None:
    workers = cluster.get("nworkers_per_group", 1)
    report = work_on(cluster, breaking({1, 3}, workers - 1), steps=6)
    model = Case(large).model()
    fit(model, adamw(model), [b for number, b in enumerate(regression(6)) if number not in (1, 3)])
    for norms, values in report.results.values():
        assert len(norms) == 1 and math.isnan(norms[0])
        close(values, values_of(model))
    rounds = counted(report, "rounds") // 6
    assert dropped(report, "non-finite") == rounds * workers * 2
    for rank in range(workers):
        told = [note for note in notes(report, f"worker 0.{rank}") if "not finite" in note]
        assert len(told) == 1


def test_too_many_skipped_rounds_in_a_row_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shoal.stepping.SKIPS == 100
    monkeypatch.setattr(shoal.stepping, "SKIPS", 4)
    work_on(SANDBLASTER, breaking({0, 1, 2, 4, 5, 6}, 1), build=mlp, steps=8)  # never four in a row
    with pytest.raises(NonFiniteGradients, match=r"step 5: the last 4 steps(.|\n)*lower the learning rate"):
        work_on(SANDBLASTER, breaking({1, 2, 3, 4}, 1), build=mlp, steps=8)


def test_large_sums_of_finite_gradients_are_finite() -> None:
    def work(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> Values:
        model(torch.full((1, 4), 1e308, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return values_of(model)

    report = work_on(
        SANDBLASTER,
        work,
        build=lambda: nn.Linear(4, 4),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-308),
    )
    assert dropped(report, "non-finite") == 0
