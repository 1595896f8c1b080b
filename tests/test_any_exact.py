"""What a script may do with a step, in every framework: SGD on integers, so that the end is known exactly.

Whatever the groups do to each other, the sum of their updates is the same in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cases import adds_up
from frameworks import ASYNCHRONOUS, SYNCHRONOUS
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from toys import SIZE, Line, pull_of

from shoal import Run
from shoal.config import Cluster
from shoal.testing import run_cluster
from shoal.topology import Topology

EVERY = {**SYNCHRONOUS, **ASYNCHRONOUS}
STEPS = 4

Step = Callable[[Run, Line, Optimizer, Tensor], None]
Average = Callable[[list[Tensor]], Tensor]
"""What a group's update should be of its workers' gradients (each SIZE + 3)."""


def backward(model: Line, pull: Tensor) -> Tensor:
    loss = (model() * pull).sum()
    loss.backward()
    return loss


def usual(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, pull)
    optimizer.step()


def in_place(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(model, pull)
    optimizer.step()


def in_parts(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    with run.accumulate():
        backward(model, pull / 3)
        backward(model, pull / 3)
    backward(model, pull / 3)
    optimizer.step()


def in_parts_unsaid(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, pull / 3)
    backward(model, pull * 2 / 3)
    optimizer.step()


def with_closure(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        return backward(model, pull).item()

    assert optimizer.step(closure) is not None


def after_a_batch_for_nothing(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, 5 * pull)
    usual(run, model, optimizer, pull)


def doubled_while_held(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    with run.hold():
        backward(model, pull)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        optimizer.step()


def doubled_by_a_hook(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    values = model()
    values.register_hook(lambda gradient: gradient * 2)
    (values * pull).sum().backward()
    optimizer.step()


def clipped_at_what_none_reaches(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, pull)
    assert 0 < run.clip_grad_norm_(1e9) < 1e9
    optimizer.step()


def clipped_by_value(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, pull)
    run.clip_grad_value_(7)
    optimizer.step()


def on_the_first_worker_only(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    if run.rank_in_group == 0:
        backward(model, pull)
    optimizer.step()


def the_long_one_on_the_first_worker_only(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, pull)
    if run.rank_in_group:
        model.long.grad = None
    optimizer.step()


def weighed(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    run.weight(0 if run.rank_in_group == 1 else 6)
    usual(run, model, optimizer, pull)


def looked_at_in_between(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, pull)
    with torch.no_grad():
        model.eval()()
        model.train()
    assert run.evaluate(lambda: 3) == 3
    optimizer.step()


def scaled(run: Run, model: Line, optimizer: Optimizer, pull: Tensor) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale((model() * pull).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def mean(pulls: list[Tensor]) -> Tensor:
    return torch.stack(pulls).mean(0)


def twice_the_mean(pulls: list[Tensor]) -> Tensor:
    return 2 * mean(pulls)


def within_seven(pulls: list[Tensor]) -> Tensor:
    return mean(pulls).clamp(-7, 7)


def of_the_first(pulls: list[Tensor]) -> Tensor:
    return pulls[0] / len(pulls)


def of_the_first_where_long(pulls: list[Tensor]) -> Tensor:
    return torch.cat([of_the_first(pulls)[:SIZE], mean(pulls)[SIZE:]])


def without_the_second(pulls: list[Tensor]) -> Tensor:
    return mean(pulls[:1] + pulls[2:])


LOOPS: dict[Step, Average] = {
    usual: mean,
    in_place: mean,
    in_parts: mean,
    in_parts_unsaid: mean,
    with_closure: mean,
    after_a_batch_for_nothing: mean,
    doubled_while_held: twice_the_mean,
    doubled_by_a_hook: twice_the_mean,
    clipped_at_what_none_reaches: mean,
    clipped_by_value: within_seven,
    on_the_first_worker_only: of_the_first,
    the_long_one_on_the_first_worker_only: of_the_first_where_long,
    weighed: without_the_second,
    looked_at_in_between: mean,
    scaled: mean,
}


@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
def test_a_step_moves_the_model_as_far_as_it_should(step: Step, cluster: Mapping[str, Any]) -> None:
    def work(run: Run) -> Tensor:
        model = Line()
        model, optimizer = run.prepare(model, SGD(model.parameters(), lr=1.0))
        for number in run.epochs(STEPS):
            step(run, model, optimizer, pull_of(run.rank, number + 1))
        run.evaluate(lambda: 0)
        return model().detach().clone()

    check(work, LOOPS[step], cluster)


@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
def test_two_optimizers_take_turns(cluster: Mapping[str, Any]) -> None:
    """As in a GAN: a backward for each reaches the other's parameter too, whose gradient is thrown away."""

    def work(run: Run) -> Tensor:
        model = Line()
        first, second = SGD([model.long], lr=1.0), SGD([model.short], lr=1.0)
        run.prepare(model, first, second)
        for number in run.epochs(STEPS):
            for optimizer in (first, second):
                model.zero_grad()
                backward(model, pull_of(run.rank, number + 1))
                optimizer.step()
        run.evaluate(lambda: 0)
        return model().detach().clone()

    check(work, mean, cluster)


def check(work: Callable[[Run], Tensor], average: Average, cluster: Mapping[str, Any]) -> None:
    """Every worker ends where all groups lead it (its own, if independent), and the ledgers balance."""
    report = run_cluster(work, cluster)
    adds_up(report)
    topology = Topology.of(Cluster(**cluster))
    moved = [torch.zeros(SIZE + 3, dtype=torch.float64) for _ in range(topology.worker_groups)]
    for step in range(1, STEPS + 1):
        for group, total in enumerate(moved):
            ranks = range(topology.workers_per_group * group, topology.workers_per_group * (group + 1))
            total -= average([pull_of(rank, step) for rank in ranks])
    for worker in topology.workers:
        alone = topology.framework == "independent"
        expected = moved[worker.group] if alone else torch.stack(moved).sum(0)
        assert torch.equal(report.results[worker.name], expected), worker
