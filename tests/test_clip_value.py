"""Clipping each element of the group's averaged gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    SANDBLASTER,
    TOPOLOGIES,
    Batch,
    Case,
    close,
    loss_of,
    mlp,
    part,
    plain,
    regression,
    sgd,
    values_of,
)
from frameworks import clustered
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from shoal import Run
from shoal.errors import ShoalError, UsageError
from shoal.testing import run_cluster

LIMIT = 0.02


def torch_clipped(max_norm: float | None = None) -> Case:
    """Plain PyTorch, with its own clips."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        clipped = 0
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            clipped += sum(
                int((p.grad.abs() > LIMIT).sum()) for p in model.parameters() if p.grad is not None
            )
            torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT)
            optimizer.step()
        assert 20 < clipped < 0.9 * len(batches) * sum(p.numel() for p in model.parameters())

    return Case(mlp, sgd, loop)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("max_norm", [None, 0.3], ids=["alone", "after the norm"])
@pytest.mark.parametrize("scale", [False, True], ids=["plain", "scaled"])
def test_it_equals_torchs_on_the_joined_batch(
    scale: bool, max_norm: float | None, cluster: Mapping[str, Any]
) -> None:
    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=scale)
        for inputs, targets in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, inputs, targets)).backward()
            if max_norm is not None:
                run.clip_grad_norm_(max_norm, scaler=scaler)
            run.clip_grad_value_(LIMIT)
            scaler.step(optimizer)
            scaler.update()

    oracle = plain(torch_clipped(max_norm))
    for values in clustered(Case(mlp, sgd), cluster, body=body).results.values():
        close(values, oracle)


def test_it_holds_for_one_step() -> None:
    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        run.clip_grad_value_(0.0)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()

    model = Case().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in regression()[1:]:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
    case = Case(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for cluster in ({}, SANDBLASTER):
        for values in clustered(case, cluster, body=body).results.values():
            close(values, values_of(model))


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_rows_of_a_table_are_clipped_too(cluster: Mapping[str, Any]) -> None:
    torch.manual_seed(3)
    words, start = torch.randint(20, (12, 3)), nn.Embedding(20, 4, sparse=True, dtype=torch.float64)

    def loss(model: nn.Module, mine: Tensor) -> Tensor:
        return model(mine).square().sum((1, 2)).mean()

    def work(run: Run) -> Tensor:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, words.tensor_split(run.world_size)[run.rank]).backward()
            run.clip_grad_value_(0.1)
            optimizer.step()
        return model.weight.detach().clone()

    dense = nn.Embedding(20, 4, dtype=torch.float64)
    dense.load_state_dict(start.state_dict())
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss(dense, words).backward()
        torch.nn.utils.clip_grad_value_(dense.parameters(), 0.1)
        optimizer.step()
    for values in run_cluster(work, cluster).results.values():
        torch.testing.assert_close(values, dense.weight.detach(), rtol=1e-9, atol=1e-9)


def test_workers_that_clip_differently_are_told() -> None:
    def work(run: Run) -> None:
        model = mlp()
        model, optimizer = run.prepare(model, sgd(model))
        inputs, targets = part(regression(1, torch.float32), run.rank, run.world_size)[0]
        loss_of(model, inputs, targets).backward()
        run.clip_grad_value_(0.1 * (1 + run.rank))
        optimizer.step()

    with pytest.raises(ShoalError, match=r"worker 0\.0 and worker 0\.1 scale or clip one step differently"):
        run_cluster(work, SANDBLASTER)


def test_mistakes_are_told() -> None:
    def work(run: Run) -> None:
        models = [nn.Linear(2, 2) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        with pytest.raises(UsageError, match="nothing is prepared"):
            run.clip_grad_value_(1.0)
        run.prepare(*models, *optimizers)
        with pytest.raises(UsageError, match=r"found 2 optimizers.*\n.*clip_grad_value_\(…, optimizer="):
            run.clip_grad_value_(1.0)
        run.clip_grad_value_(1.0, optimizer=optimizers[1])
        for limit in (-1.0, float("nan")):
            with pytest.raises(UsageError, match="no value can be within"):
                run.clip_grad_value_(limit, optimizer=optimizers[1])

    run_cluster(work, {})
