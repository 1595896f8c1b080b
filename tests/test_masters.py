"""`server_dtype: float32`: servers keep fine values of a coarse model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import SAMPLES, SANDBLASTER, WIDTH, Values, mlp, same, values_of
from torch import nn
from torch.optim import Optimizer

from shoal import Run
from shoal.errors import ShoalError
from shoal.testing import run_cluster

STEPS = 12
Make = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def start(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return mlp().to(dtype)


def loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(inputs).float().square().mean()


def plain(make: Make, dtype: torch.dtype) -> Values:
    """The usual recipe by hand: a float32 optimizer over float32 copies, rounded after each step."""
    model = start(dtype)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = make(masters)
    for step in range(STEPS):
        model.zero_grad()
        loss(model, step, dtype).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return values_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("fine", ["same", "float32"])
def test_masters_are_the_recipe_by_hand(make: Make, dtype: torch.dtype, fine: str) -> None:
    prepared = start(dtype)

    def work(run: Run) -> Values:
        model = deepcopy(prepared)
        model, optimizer = run.prepare(model, make(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step, dtype).backward()
            optimizer.step()
        return values_of(model)

    for cluster in ({}, {"nservers_per_group": 3, "server_worker_separate": True}):
        values = run_cluster(work, {**cluster, "server_dtype": fine}).results["worker 0.0"]
        oracle = plain(make, dtype)
        if fine == "float32":
            same(values, oracle)
        else:  # small steps are lost in the rounding: that is what masters are for
            assert any(not torch.equal(values[name], oracle[name]) for name in oracle)


def test_an_edit_keeps_the_fine_values_of_what_it_leaves_alone() -> None:
    def work(run: Run, edit: bool) -> Values:
        model = start(torch.bfloat16)
        model, optimizer = run.prepare(model, sgd(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step, torch.bfloat16).backward()
            optimizer.step()
            if edit:
                with run.edit(), torch.no_grad():
                    model[2].bias.zero_()  # type: ignore[index]
        return values_of(model)

    cluster = {"server_dtype": "float32"}
    edited = run_cluster(lambda run: work(run, True), cluster).results["worker 0.0"]
    assert not edited["2.bias"].any()

    def frozen() -> Values:
        model = start(torch.bfloat16)
        masters = [parameter.detach().float() for parameter in model.parameters()]
        optimizer = sgd(masters)
        for step in range(STEPS):
            model.zero_grad()
            loss(model, step, torch.bfloat16).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()  # type: ignore[union-attr]
            optimizer.step()
            masters[3].zero_()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
        return values_of(model)

    same(edited, frozen())


def test_workers_that_clip_differently_are_told() -> None:
    def work(run: Run) -> None:
        model = nn.Linear(4, 4)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            run.clip_grad_norm_(0.1 * (1 + run.rank))
            optimizer.step()

    with pytest.raises(ShoalError, match=r"worker 0\.0 and worker 0\.1 scale or clip one step differently"):
        run_cluster(work, SANDBLASTER)
