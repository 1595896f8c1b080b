"""Buffers travel as chunks of their own: averaged, or the maximum for integers; assigned, not stepped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    ALONE,
    GROUPS,
    SANDBLASTER,
    TOPOLOGIES,
    WIDTH,
    Case,
    Values,
    adds_up,
    averaged,
    close,
    clustered,
    fit,
    loss_of,
    mean,
    part,
    plain,
    regression,
    same,
    sgd,
    values_of,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.testing import run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind


def normed() -> nn.Module:
    """Two batch norms, one of them with a cumulative average."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4, momentum=0.3)
    )


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
def test_batch_norm_equals_the_average_of_parts(cluster: Mapping[str, Any]) -> None:
    trained = clustered(Case(normed), cluster)
    oracle = averaged(Case(normed), len(trained.values))
    assert oracle["1.num_batches_tracked"] == 5
    for values in trained.values:
        close(values, oracle)
        same(values, trained.values[0])
    adds_up(trained.report)


@pytest.mark.parametrize("cluster", ALONE.values(), ids=ALONE)
def test_alone_batch_norm_equals_plain_pytorch_bit_for_bit(cluster: Mapping[str, Any]) -> None:
    same(clustered(Case(normed), cluster, torch.float32).values[0], plain(Case(normed), torch.float32))


class Kept(nn.Module):
    """Buffers of every kind, set by the script."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("table", torch.zeros(3, 5))
        self.register_buffer("rough", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(70, dtype=torch.bool))
        self.register_buffer("bytes", torch.zeros(4, dtype=torch.uint8))
        self.register_buffer("still", torch.arange(6.0))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def kept(model: nn.Module) -> Values:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train_kept(cluster: Mapping[str, Any], touch: Any, steps: int = 3) -> Any:
    """Each worker changes buffers in its own way before each step; values before and after each step."""
    start, batches = Kept(), regression(steps, torch.float32)

    def work(run: Run) -> list[tuple[Values, Values]]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        history = []
        for number, (inputs, targets) in enumerate(part(batches, run.rank, run.world_size)):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            touch(model, run.rank, number)
            before = kept(model)
            optimizer.step()
            history.append((before, kept(model)))
        return history

    report = run_cluster(work, cluster)
    adds_up(report)
    return [report.results[name] for name in sorted(report.results)], report


def write(model: Kept, rank: int, number: int) -> None:
    """Something else in every buffer of every worker."""
    model.table.add_(rank + 0.1)
    model.rough += rank * 0.37
    model.count.fill_(10 * number + rank)
    model.seen[rank::7] = True
    model.bytes.data.fill_(200 + rank)
    model.bytes.add_(0)
    model.hidden.mul_(2).add_(rank)


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
def test_floats_are_averaged_and_integers_and_bools_take_the_maximum(cluster: Mapping[str, Any]) -> None:
    histories, _ = train_kept(cluster, write)
    for step in range(3):
        befores = [history[step][0] for history in histories]
        for name in befores[0]:
            shares = [before[name] for before in befores]
            if shares[0].is_floating_point():
                expected = mean(shares, len(shares)).to(shares[0].dtype)
            else:
                expected = torch.stack(shares).amax(0)
            for history in histories:
                assert torch.equal(history[step][1][name], expected), (name, step)


def test_a_buffer_that_one_worker_changed_becomes_everyones() -> None:
    def touch(model: Kept, rank: int, number: int) -> None:
        if rank == 1 and number == 1:
            model.table.fill_(7)
            model.count.fill_(-3)  # below the others', who say nothing
            model.rough = torch.full_like(model.rough, 2.5)  # another tensor in its place

    histories, _ = train_kept(SANDBLASTER, touch)
    for history in histories:
        for after in (history[1][1], history[2][1]):
            assert (after["table"] == 7).all() and after["count"] == -3 and (after["rough"] == 2.5).all()


def test_buffers_that_do_not_change_do_not_travel() -> None:
    pushed: list[int] = []

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.SHARE:
            pushed.append(header.chunk)
        return "deliver"

    start, batches = Kept(), regression(3, torch.float32)

    def work(run: Run) -> None:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))

    report = run_cluster(work, {"nworkers_per_group": 2, "server_worker_separate": True}, judge=judge)
    plan = report.servers["server 0.0"].rounds._plan
    assert {chunk for chunk in pushed if plan.chunks[chunk].buffer is not None} == set()
    assert len(pushed) == 3 * 2


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_buffers_are_not_stepped(cluster: Mapping[str, Any]) -> None:
    """Strong decay would show."""
    start = Kept()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        decaying = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        run.prepare(model, decaying)
        for _ in range(3):
            model.still.add_(1)
            model(torch.ones(2, WIDTH)).sum().backward()
            decaying.step()
        return kept(model)

    for values in run_cluster(work, cluster).results.values():
        assert torch.equal(values["still"], torch.arange(6.0) + 3)


def test_weights_count_for_buffers_and_weight_0_is_left_out() -> None:
    """13 samples for 3 × 4: the last batch has one sample, so two workers only repeat one."""
    start, (inputs, targets) = Kept(), (torch.randn(17, WIDTH), torch.randn(17, 4))

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        weights: Sequence[Sequence[int]] = ((4, 4, 4), (2, 2, 1))
        for number, batch in enumerate(
            run.loader(TensorDataset(inputs, targets), batch_size=4, shuffle=False)
        ):
            assert len(batch[0]) == weights[number][run.rank]
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            model.table.fill_(10 ** (run.rank + 1))
            optimizer.step()
        return kept(model)

    for values in run_cluster(work, SANDBLASTER).results.values():
        expected = torch.full((3, 5), (10 * 2 + 100 * 2 + 1000 * 1) / 5)
        torch.testing.assert_close(values["table"], expected)

    def poisoned(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        data = TensorDataset(inputs[:13], targets[:13])
        for number, batch in enumerate(run.loader(data, batch_size=4, shuffle=False)):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            model.table.fill_(float("nan") if number and run.rank else 5)
            optimizer.step()
        return kept(model)

    for values in run_cluster(poisoned, SANDBLASTER).results.values():
        assert (values["table"] == 5).all()


def test_sandblaster_and_allreduce_agree_on_buffers_bit_for_bit() -> None:
    first, second = (clustered(Case(normed), c, torch.float32).values[0] for c in (SANDBLASTER, ALLREDUCE))
    same(first, second)


def test_files_show_the_servers_buffers() -> None:
    start, batches = Case(normed).model(), regression()

    def work(run: Run) -> tuple[dict[str, Tensor], Values]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))
        model(batches[0][0])  # a forward in training mode after the last step changes this copy only
        return run.state_dict(), values_of(model)

    found, own = run_cluster(work, SANDBLASTER).results["worker 0.0"]
    close(found, averaged(Case(normed), 3))
    assert not torch.equal(found["1.running_mean"], own["1.running_mean"])


def test_frozen_parameters_without_an_optimizer_travel_like_buffers() -> None:
    """A teacher that follows its pupil, by hand."""

    def work(run: Run) -> Values:
        model = nn.ModuleDict({"pupil": nn.Linear(2, 2), "teacher": nn.Linear(2, 2).requires_grad_(False)})
        with torch.no_grad():
            model["teacher"].weight.fill_(run.rank)
        model, optimizer = run.prepare(model, torch.optim.SGD(model["pupil"].parameters(), lr=0.1))
        assert (model["teacher"].weight == 0).all()
        for _ in range(2):
            optimizer.zero_grad()
            model["pupil"](torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                model["teacher"].weight.add_(run.rank)
            optimizer.step()
        return values_of(model)

    for values in run_cluster(work, SANDBLASTER).results.values():
        assert (values["teacher.weight"] == 2).all()
