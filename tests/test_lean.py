"""What a step does not do twice, and does while it waits, changes nothing of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import SANDBLASTER, Batch, Case, fit, large, loss_of, part, regression, same, sgd, values_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shoal import Run
from shoal.acts import Average
from shoal.shard import average
from shoal.testing import run_cluster
from shoal.updater import Updater
from shoal.wire import OptimizerSpec

APART: dict[str, Any] = {"nservers_per_group": 2, "server_worker_separate": True}
Numbers = arrays("float32", 7, elements=st.floats(width=32))


@given(st.lists(Numbers, min_size=1, max_size=9))
def test_an_average_is_the_sum_divided_bit_for_bit(shares: list[Any]) -> None:
    tensors = [torch.from_numpy(share) for share in shares]
    rule = Average(0, 0, tuple(range(len(shares))), None, len(shares), None)
    total = tensors[0].clone()
    for share in tensors[1:]:
        total += share
    found, wanted = average(tensors, rule), total / len(shares)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))


# Sums that are taken while gradients are copied.


def spoiled(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch], plain: bool) -> None:
    """A number of each second gradient is not finite; a plain loop leaves that step out."""
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        weight = next(parameter for parameter in model.parameters() if parameter.numel() > 8)
        assert weight.grad is not None
        if step % 2:
            weight.grad.view(-1)[step * 7 % weight.numel()] = float("inf") if step % 3 else float("nan")
        if not (plain and step % 2):
            optimizer.step()


@pytest.mark.parametrize("hold", [True, False], ids=["held", "pushed late"])
@pytest.mark.parametrize("block", [8, 1 << 18])
def test_one_number_that_is_not_finite_is_found(
    monkeypatch: pytest.MonkeyPatch, block: int, hold: bool
) -> None:
    monkeypatch.setattr("shoal.parameters.BLOCK", block)
    start, batches = Case(large).model(), regression(6)
    plain = deepcopy(start)
    optimizer = sgd(plain)
    fit(plain, optimizer, batches[:1])
    spoiled(plain, optimizer, batches[1:], plain=True)

    def work(run: Run) -> dict[str, Tensor]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        fit(model, optimizer, batches[:1])
        if hold:
            run.hold()
        spoiled(model, optimizer, batches[1:], plain=False)
        return values_of(model)

    (found,) = run_cluster(work, APART).results.values()
    same(found, values_of(plain))


def test_sums_by_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    start, batches = Case(large).model(), regression(3)

    def work(run: Run) -> dict[str, Tensor]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))
        return values_of(model)

    wanted = run_cluster(work, SANDBLASTER).results
    monkeypatch.setattr("shoal.parameters.BLOCK", 5)
    for name, found in run_cluster(work, SANDBLASTER).results.items():
        same(found, wanted[name])


# Servers call an optimizer's step without torch's wrapper.


class Hooked(SGD):
    """Has a hook of its own."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.seen = 0
        self.register_step_post_hook(self._see)

    def _see(self, *_: Any) -> None:
        self.seen += 1


@pytest.mark.parametrize("cls", [SGD, Hooked])
def test_a_step_on_a_server_has_the_hooks_that_its_class_has(cls: type[SGD]) -> None:
    settings = ({"lr": 0.5},)
    updater = Updater(cls, OptimizerSpec("any", {"lr": 0.5}, settings), [value := torch.ones(4)], [0])
    updater.step(torch.ones(4), None, settings)
    updater.step(torch.ones(4), None, ({"lr": 0.25},))
    assert value.tolist() == [0.25] * 4
    assert getattr(updater._optimizer, "seen", 2) == 2
