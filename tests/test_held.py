"""`p.grad` is the script's own tensor, also where gradients are held: it may be kept, scaled and clipped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from cases import SANDBLASTER, Batch, mlp, regression
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import Run
from shoal.errors import GradientEdited
from shoal.testing import run_cluster

Accumulate = Callable[[], AbstractContextManager[None]]
Loop = Callable[[nn.Module, Optimizer, Accumulate], list[float]]

APART: dict[str, Any] = {"nservers_per_group": 2, "server_worker_separate": True}


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def twice(model: nn.Module, batch: Batch, accumulate: Accumulate, scale: float = 1.0) -> None:
    """Two backwards, the first of them held."""
    inputs, targets = batch
    with accumulate():
        ((model(inputs[::2]) - targets[::2]).square().mean() * scale).backward()
    ((model(inputs[1::2]) - targets[1::2]).square().mean() * scale).backward()


def clipping(model: nn.Module, optimizer: Optimizer, accumulate: Accumulate) -> list[float]:
    norms = []
    for batch in regression():
        optimizer.zero_grad()
        twice(model, batch, accumulate)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return norms


def unscaling(model: nn.Module, optimizer: Optimizer, accumulate: Accumulate) -> list[float]:
    """A scaler counts no versions when it changes a gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in regression():
        optimizer.zero_grad()
        twice(model, batch, accumulate, scaler.get_scale())
        scaler.scale(torch.zeros(()))  # or it does not know its scale
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return []


def comparing(model: nn.Module, optimizer: Optimizer, accumulate: Accumulate) -> list[float]:
    """Each step's gradients with those of the step before, which are kept."""
    before: list[Tensor] = []
    found = []
    for batch in regression():
        optimizer.zero_grad()
        twice(model, batch, accumulate)
        optimizer.step()
        now = gradients_of(model)
        found += [sum((a * b).sum().item() for a, b in zip(before, now, strict=True))] if before else []
        before = now
    return found


def adding(model: nn.Module, optimizer: Optimizer, accumulate: Accumulate) -> list[float]:
    """Two losses' gradients, each by itself, then put together by hand."""
    for inputs, targets in regression():
        apart = []
        with accumulate():
            for weight in (1.0, 3.0):
                optimizer.zero_grad()
                (model(inputs) * weight - targets).square().mean().backward()
                apart.append(gradients_of(model))
        for parameter, one, other in zip(model.parameters(), *apart, strict=True):
            parameter.grad = one + other
        optimizer.step()
    return []


def recalling(model: nn.Module, optimizer: Optimizer, accumulate: Accumulate) -> list[float]:
    """Every other step goes by gradients made of those of the step before; each step is taken twice."""
    kept: list[Tensor] = []
    for number, batch in enumerate(regression()):
        optimizer.zero_grad()
        if number % 2:
            for parameter, gradient in zip(model.parameters(), kept, strict=True):
                parameter.grad = gradient * 0.5
        else:
            twice(model, batch, accumulate)
            kept = gradients_of(model)
        optimizer.step()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [gradient.sum().item() for gradient in kept]


def trained(loop: Loop, prepare: Callable[[nn.Module, Optimizer], Any], accumulate: Accumulate) -> list[Any]:
    torch.manual_seed(3)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepare(model, optimizer)
    return [loop(model, optimizer, accumulate), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("loop", [clipping, unscaling, comparing, adding, recalling])
def test_a_held_gradient_is_the_scripts_own(loop: Loop, lasting: bool, share_memory: bool) -> None:
    def work(run: Run) -> list[Any]:
        if lasting:
            run.hold()
        return trained(loop, run.prepare, run.accumulate)

    report = run_cluster(work, {**APART, "share_memory": share_memory})
    wanted, *values = trained(loop, lambda *objects: None, nullcontext)
    found, *ours = report.results["worker 0.0"]
    assert found == wanted
    for value, mine in zip(values, ours, strict=True):
        assert torch.equal(value, mine)


@pytest.mark.parametrize("share_memory", [True, False])
def test_in_a_group_it_may_not_be_changed_after_its_push(share_memory: bool) -> None:
    with pytest.raises(GradientEdited, match="changed after it was pushed"):
        run_cluster(
            lambda run: trained(clipping, run.prepare, run.accumulate),
            {**SANDBLASTER, "share_memory": share_memory},
        )


EACH = pytest.mark.parametrize("which", range(4))


@EACH
def test_where_gradients_live_in_their_slots_none_may_be_changed_after_clipping(which: int) -> None:
    def work(run: Run) -> None:
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        run.hold()
        inputs, targets = regression()[0]
        for changed in (False, True):
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            run.clip_grad_norm_(0.5)
            if changed:
                gradients_of(model)[which].data.mul_(2)
            optimizer.step()

    with pytest.raises(GradientEdited, match="after clipping"):
        run_cluster(work, APART)


@EACH
def test_what_leaves_early_after_a_lasting_hold_is_watched_as_ever(which: int) -> None:
    def work(run: Run) -> None:
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        inputs, targets = regression()[0]
        hold = run.hold()
        (model(inputs) - targets).square().mean().backward()
        with hold:
            pass  # what seemed to be for good has come to an end
        (model(inputs) - targets).square().mean().backward()
        gradients_of(model)[which].data.mul_(2)
        optimizer.step()

    with pytest.raises(GradientEdited, match="changed after it was pushed"):
        run_cluster(work, {**APART, "nworkers_per_group": 2})
