"""A group of any shape equals one process; arrival order never shows; worker 0.0's start is everyone's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    ALONE,
    GROUPS,
    SAMPLES,
    SANDBLASTER,
    TOPOLOGIES,
    WIDTH,
    Case,
    Drop,
    Values,
    adamw,
    adds_up,
    averaged,
    check,
    close,
    clustered,
    fit,
    large,
    loss_of,
    mlp,
    notes,
    part,
    plain,
    regression,
    same,
    seeded,
    values_of,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.errors import ModelMismatch, UsageError
from shoal.testing import run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.inner.weight
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.again(self.inner(inputs).tanh()))


class Frozen(nn.Module):
    """Parameters that are never trained, before, between and after others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16).requires_grad_(False)
        self.middle = nn.Linear(16, 16)
        self.middle.bias.requires_grad_(False)
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.first(inputs)).tanh())


class Odd(nn.Module):
    """A scalar, an empty parameter, a transposed one, and convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(4, 4 * WIDTH).t())
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(-1, 2, 2, WIDTH // 4).to(memory_format=torch.channels_last)
        seen = self.conv(images).flatten(1).tile(1, 2)[:, : 4 * WIDTH]
        return (seen @ self.strided[: seen.shape[1]]) * self.scale + self.empty.sum()


class Mixed(nn.Module):
    """float32 inside float64 (inside float32, where that is the default)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 16, dtype=torch.float64)
        self.own = nn.Linear(16, 16)
        self.wide_again = nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        own = self.own(self.wide(inputs.double()).to(self.own.weight.dtype))
        return self.wide_again(own.tanh().double())


class Checkpointed(nn.Module):
    """A layer whose forward runs again during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, inputs, use_reentrant=False))


def twice(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
    """Fit all batches two times over."""
    fit(model, optimizer, batches)
    fit(model, optimizer, batches)


def two_groups(model: nn.Module) -> Optimizer:
    """Decay for weights, another rate for biases."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.03, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def backwards(model: nn.Module) -> Optimizer:
    """The optimizer lists parameters in another order than the model."""
    return torch.optim.Adam(list(model.parameters())[::-1], lr=0.01)


def slowly(model: nn.Module) -> Optimizer:
    """SGD at a rate that suits a product of parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9, weight_decay=0.1)


CASES = {
    "mlp": Case(),
    "several chunks": Case(large, adamw),
    "two epochs": Case(loop=twice, steps=3),
    "param groups": Case(optimizer=two_groups),
    "other order": Case(optimizer=backwards),
    "tied": Case(Tied, adamw),
    "frozen": Case(Frozen, adamw),
    "odd shapes": Case(Odd, adamw),
    "odd shapes, slowly": Case(Odd, slowly),
    "checkpointed": Case(Checkpointed),
}


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_group_equals_one_process(case: Case, cluster: Mapping[str, Any]) -> None:
    check(case, cluster)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_mixed_dtypes(cluster: Mapping[str, Any]) -> None:
    case = Case(Mixed)
    trained = clustered(case, cluster, torch.float32)
    oracle = averaged(case, len(trained.values), torch.float32)
    for values in trained.values:
        same(values, oracle)
    assert {value.dtype for value in oracle.values()} == {torch.float32, torch.float64}


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_shares_are_summed_in_float32_or_wider_in_the_order_of_ranks(
    cluster: Mapping[str, Any], dtype: torch.dtype
) -> None:
    case = Case(large, adamw)
    trained = clustered(case, cluster, dtype)
    oracle = averaged(case, len(trained.values), dtype)
    for values in trained.values:
        same(values, oracle)


class Noisy(nn.Module):
    """Batch statistics and dropout: what a worker's part is matters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), Drop(), nn.Linear(16, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_batch_statistics_and_dropout_are_each_workers_own(cluster: Mapping[str, Any]) -> None:
    case = Case(Noisy, adamw)
    start, batches = case.model(), regression(case.steps)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        seeded(model, run.rank)
        model, optimizer = run.prepare(model, adamw(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))
        return values_of(model)

    report = run_cluster(work, cluster)
    oracle = averaged(case, len(report.results))
    for values in report.results.values():
        close(values, oracle)


def test_sandblaster_and_allreduce_agree_bit_for_bit() -> None:
    case = Case(large, adamw)
    first, second = (clustered(case, c, torch.float32).values[0] for c in (SANDBLASTER, ALLREDUCE))
    same(first, second)
    again = clustered(case, SANDBLASTER, torch.float32).values[0]
    same(first, again)


@pytest.mark.parametrize("further", [1, 2, 3])
def test_mixed_servers_equal_one_process_and_any_other_servers(further: int) -> None:
    """With 3 further servers those beside workers hold no parameters, only buffers, or nothing."""
    mixed = {"nworkers_per_group": 3, "nservers_per_group": 3 + further, "server_placement": "mixed"}
    report = check(Case(large, adamw), mixed)
    held = [report.events[f"server 0.{n}"].last("finished")["parameters"] for n in range(3 + further)]
    beside, apart = {1: (1 / 5, 2 / 5), 2: (1 / 11, 4 / 11), 3: (0, 1 / 3)}[further]
    for fraction, count in zip([beside] * 3 + [apart] * further, held, strict=True):
        assert abs(count - fraction * sum(held)) <= 65
    one, other = (clustered(Case(large, adamw), c, torch.float32).values[0] for c in (mixed, ALLREDUCE))
    same(one, other)
    for values in clustered(Case(normed), mixed).values:
        close(values, averaged(Case(normed), 3))


def normed() -> nn.Module:
    """Batch statistics, which are buffers."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_order_of_arrival_never_shows(cluster: Mapping[str, Any], late: int) -> None:
    case = Case(mlp, adamw, steps=3)
    lost: Counter[tuple[int, int]] = Counter()

    def judge(header: Header, peer: str) -> Fate:
        """The first copy of each share of one worker is lost, so its shares come last."""
        if header.kind is Kind.SHARE and header.sender == f"worker 0.{late}":
            lost[header.step, header.chunk] += 1
            if lost[header.step, header.chunk] == 1:
                return "lose"
        return "deliver"

    trained = clustered(case, cluster, torch.float32, judge)
    assert lost and max(lost.values()) > 1
    same(trained.values[0], averaged(case, 3, torch.float32))


# Unequal parts: the weights come from the loader.


def dealt(samples: int, bad: bool = False) -> tuple[dict[str, Values], Values]:
    """Train on a dataset that does not divide; with the same in plain PyTorch."""
    case = Case(mlp, adamw)
    start = case.model()
    inputs, targets = (torch.cat(tensors)[:samples] for tensors in zip(*regression(10), strict=True))
    batches = -(-samples // SAMPLES)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, adamw(model))
        loader = run.loader(TensorDataset(inputs, targets), batch_size=SAMPLES // 3, shuffle=False)
        for number, (mine, wanted) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model, mine, wanted)
            if bad and number == batches - 1 and run.rank > 0:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
        return values_of(model)

    report = run_cluster(work, SANDBLASTER)
    adds_up(report)
    model = deepcopy(start)
    fit(model, adamw(model), list(zip(inputs.split(SAMPLES), targets.split(SAMPLES), strict=True)))
    return report.results, values_of(model)


@pytest.mark.parametrize("rest", [1, 2, 5, 7, 11])
def test_unequal_parts_count_by_their_samples(rest: int) -> None:
    results, oracle = dealt(3 * SAMPLES + rest)
    for values in results.values():
        close(values, oracle)


def test_a_worker_of_weight_0_does_not_spoil_the_average() -> None:
    results, oracle = dealt(3 * SAMPLES + 1, bad=True)
    for values in results.values():
        close(values, oracle)


def test_the_result_differs_when_one_workers_data_is_taken_away() -> None:
    case, batches = Case(), regression()
    start = case.model()

    def trained(missing: int | None) -> Values:
        def work(run: Run) -> Values:
            model = deepcopy(start)
            model, optimizer = run.prepare(model, sgd_of(model))
            mine = part(batches, run.rank, run.world_size)
            if run.rank == missing:
                mine = [(inputs * 0, targets * 0) for inputs, targets in mine]
            fit(model, optimizer, mine)
            return values_of(model)

        return run_cluster(work, SANDBLASTER).results["worker 0.0"]

    full = trained(None)
    close(full, plain(case))
    for rank in range(3):
        less = trained(rank)
        assert all((less[name] - value).abs().max() > 1e-6 for name, value in full.items())


def sgd_of(model: nn.Module) -> Optimizer:
    return Case().optimizer(model)


# One start (rule 3.10).


@pytest.mark.parametrize(
    "cluster",
    [SANDBLASTER, {"nworker_groups": 2, "nserver_groups": 2, "nworkers_per_group": 2}],
    ids=["sandblaster", "two server groups"],
)
def test_worker_00s_start_is_everyones(cluster: Mapping[str, Any]) -> None:
    start = Noisy()
    first = values_of(start)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        if run.rank:
            with torch.no_grad():
                for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                    tensor.add_(run.rank)
        run.prepare(model, torch.optim.Adam(model.parameters()))
        return values_of(model)

    report = run_cluster(work, cluster)
    for name, values in report.results.items():
        same(values, first)
        warned = any("start differed from worker 0.0's" in note for note in notes(report, name))
        assert warned == (name != "worker 0.0")


def test_equal_starts_are_no_news() -> None:
    report = clustered(Case(steps=1), SANDBLASTER).report
    assert not any(notes(report, name) for name in report.events)


def test_what_no_optimizer_holds_starts_equal_too() -> None:
    def work(run: Run) -> Values:
        model = mlp()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(run.rank + 1)
        model[0].requires_grad_(False)
        run.prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
        return values_of(model)

    for values in run_cluster(work, SANDBLASTER).results.values():
        assert all((value == 1).all() for value in values.values())


MISMATCHES = {
    "name": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), "[12].weight"),
    "shape": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), "1.weight"),
    "dtype": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "1.weight"),
    "buffer": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)),
        "2.",
    ),
}


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize(("build", "named"), MISMATCHES.values(), ids=MISMATCHES)
def test_models_that_differ_are_refused_by_name(build: Any, named: str, other: int) -> None:
    errors: dict[int, BaseException] = {}

    def work(run: Run) -> None:
        model = build() if run.rank == other else nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        try:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ModelMismatch as error:
            errors[run.rank] = error
            raise

    with pytest.raises(ModelMismatch, match=named):
        run_cluster(work, SANDBLASTER)
    assert errors
    if other:  # the one that differs hears of it; who differs from a wrong worker 0.0 are the others
        assert set(errors) == {other} and f"worker 0.{other}" in str(errors[other])
    else:
        assert set(errors) <= {1, 2}


def test_optimizers_that_differ_are_refused_by_name() -> None:
    def work(run: Run) -> None:
        model = nn.Linear(2, 2)
        cls = torch.optim.Adam if run.rank else torch.optim.SGD
        run.prepare(model, cls(model.parameters(), lr=0.1))

    with pytest.raises(ModelMismatch, match="Adam"):
        run_cluster(work, SANDBLASTER)


# What prepare() refuses.


def test_prepare_says_what_it_cannot_take() -> None:
    model = mlp()

    def refused(*objects: Any) -> str:
        with pytest.raises(UsageError) as error:
            run_cluster(lambda run: run.prepare(*objects), {})
        assert error.value.remedy
        return str(error.value)

    assert "no optimizer" in refused(model)
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    assert "two optimizers" in refused(model, *both)
    lazy = nn.LazyLinear(3)
    assert "weight has no shape yet" in refused(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    frozen = mlp().requires_grad_(False)
    assert "no parameter to train" in refused(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def work(run: Run) -> None:
        model = nn.Linear(3, 5)  # no table: what it is used for cannot be seen
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        nn.functional.embedding(torch.tensor([1, 2]), model.weight, sparse=True).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"weight has a sparse gradient(.|\n)*sparse=False"):
        run_cluster(work, {})


def test_alone_is_bit_for_bit_even_with_batch_statistics() -> None:
    case = Case(Noisy, adamw)
    for cluster in ALONE.values():
        same(clustered(case, cluster, torch.float32).values[0], plain(case, torch.float32))
