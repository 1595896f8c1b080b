"""Tables with sparse gradients: torch's own results, and only touched rows on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
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
    Values,
    adds_up,
    close,
    dropped,
    part,
    same,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from shoal import Run
from shoal.acts import Average
from shoal.errors import GradientEdited, OptimizerRefused, ParameterEdited, ProtocolError, UsageError
from shoal.parameters import frames_of, received
from shoal.partition import Parameter, make_plan
from shoal.rows import Rows, average_rows, no_rows
from shoal.shard import Shard
from shoal.testing import Report, Script, run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Frame, Header, Kind, OptimizerSpec

ROWS, WIDTH, IDS = 97, 5, 3
Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], list[Optimizer]]


class Words(nn.Module):
    """A table that every sample uses, a second one that only samples with a large first number use."""

    def __init__(self, lookup: Callable[..., nn.Module] = nn.Embedding, **keywords: Any) -> None:
        super().__init__()
        self.words = lookup(ROWS, WIDTH, sparse=True, **keywords)
        self.rare = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        seen = self.words(ids)
        seen = seen if seen.ndim == 2 else seen.sum(1)
        chosen = ids[:, 0] >= ROWS - 4
        if chosen.any():
            seen = seen.index_add(0, chosen.nonzero()[:, 0], self.rare(ids[chosen]).mean(1))
        return self.head(seen.tanh())


class Never(Words):
    """Its second table is never used."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


class Tied(nn.Module):
    """Two sparse lookups share a weight; a lookup shares one with a layer, and is no table then."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))
        self.two.weight = self.one.weight
        self.out = nn.Embedding(4, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 4)
        self.head.weight = self.out.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids[:, 0]) + self.two(ids[:, 1]).tanh() + self.out(ids[:, 2] % 4))


def everything(cls: type[Optimizer], **keywords: Any) -> Make:
    """One optimizer for the whole model."""
    return lambda model: [cls(model.parameters(), **keywords)]


def split(model: nn.Module) -> list[Optimizer]:
    """SparseAdam for the tables, Adam for the rest."""
    tables = [p for n, p in model.named_parameters() if "head" not in n]
    rest = [p for n, p in model.named_parameters() if "head" in n]
    return [optim.SparseAdam(tables, lr=0.05), optim.Adam(rest, lr=0.05)]


MOMENTUM = everything(optim.SGD, lr=0.2, momentum=0.9, dampening=0.1)
OPTIMIZERS: dict[str, Make] = {
    "SGD": everything(optim.SGD, lr=0.2),
    "SGD, momentum": MOMENTUM,
    "SGD, nesterov": everything(optim.SGD, lr=0.2, momentum=0.9, nesterov=True),
    "Adagrad": everything(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "SparseAdam": split,
}


def texts(steps: int = 6, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Joined batches (SAMPLES × IDS numbers, SAMPLES × 4); few rows, so that workers meet in some."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for step in range(steps):
        ids = torch.randint(ROWS - 30 * (step % 3), (SAMPLES, IDS), generator=generator)
        ids[0] = torch.tensor([7, 7, 9])
        if step % 2 == 0:  # the second table: by one sample, or by none
            ids[-1, 0] = ROWS - 1 - step % 4
        else:
            ids[:, 0] %= 50
        batches.append((ids, torch.randn(SAMPLES, 4, generator=generator, dtype=dtype)))
    return batches


def train(model: nn.Module, optimizers: Sequence[Optimizer], batches: Sequence[Batch]) -> None:
    """The usual loop.

    Rows that come more than once in a batch are summed before the step. Adagrad and SparseAdam do that
    themselves; SGD adds one after the other, and rounds otherwise.
    """
    for ids, targets in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(ids) - targets).square().mean().backward()
        if type(optimizers[0]) is optim.SGD:  # not a prepared one
            sum_rows(model)
        for optimizer in optimizers:
            optimizer.step()


def sum_rows(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def started(build: Callable[[], nn.Module] = Words, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return build().to(dtype)


def plain(make: Make, start: nn.Module, batches: Sequence[Batch]) -> Values:
    model = deepcopy(start)
    train(model, make(model), batches)
    return values_of(model)


def clustered(
    make: Make, start: nn.Module, batches: Sequence[Batch], cluster: Mapping[str, Any], **keywords: Any
) -> Report:
    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizers = make(model)
        run.prepare(model, *optimizers)
        train(model, optimizers, part(batches, run.rank, run.world_size))
        return values_of(model)

    report = run_cluster(work, cluster, **keywords)
    adds_up(report)
    return report


def check(make: Make, cluster: Mapping[str, Any], build: Callable[[], nn.Module] = Words) -> None:
    """Equality with plain PyTorch on the joined batch; bit for bit alone."""
    start, batches = started(build), texts()
    oracle, report = plain(make, start, batches), clustered(make, start, batches, cluster)
    for values in report.results.values():
        close(values, oracle)
        same(values, report.results["worker 0.0"])
    if cluster in ALONE.values():
        start, batches = started(build, torch.float32), texts(dtype=torch.float32)
        values = clustered(make, start, batches, cluster).results["worker 0.0"]
        same(values, plain(make, start, batches))


# Equality.


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_group_equals_one_process(make: Make, cluster: Mapping[str, Any]) -> None:
    check(make, cluster)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "padding": lambda: Words(padding_idx=7),
    "bag, sum": lambda: Words(nn.EmbeddingBag, mode="sum"),
    "bag, mean": lambda: Words(nn.EmbeddingBag, mode="mean", padding_idx=9),
    "never used": Never,
    "tied": Tied,
}


@pytest.mark.parametrize("cluster", [ALONE["single"], SANDBLASTER, GROUPS["singa's slices"]], ids=str)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_lookups_of_every_kind(build: Callable[[], nn.Module], cluster: Mapping[str, Any]) -> None:
    check(MOMENTUM, cluster, build)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_sandblaster_and_allreduce_agree_bit_for_bit(make: Make) -> None:
    start, batches = started(dtype=torch.float32), texts(dtype=torch.float32)
    one, two = (clustered(make, start, batches, c).results["worker 0.0"] for c in (SANDBLASTER, ALLREDUCE))
    same(one, two)


def test_a_gradient_without_rows_is_a_gradient() -> None:
    """Momentum goes on moving a table that saw nothing but padding, and stops for one that was not used."""
    start = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0).double()
    looks = [torch.tensor([3, 5, 60]), torch.tensor([0, 0, 0]), None, torch.tensor([3, 0, 96])]

    def moves(run: Run | None) -> list[Tensor]:
        model = deepcopy(start)
        optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        if run is not None:
            run.prepare(model, optimizer)
        seen = []
        for ids in looks:
            optimizer.zero_grad()
            if ids is not None:
                model(ids).sum().backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
        return seen

    oracle = moves(None)
    assert not torch.equal(oracle[0], oracle[1]) and torch.equal(oracle[1], oracle[2])
    for cluster in (*ALONE.values(), SANDBLASTER):
        for seen in run_cluster(moves, cluster).results.values():
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, oracle, strict=True))


def test_unequal_parts_count_by_their_weight() -> None:
    start, batches = started(), texts()
    sizes = [1, 3, SAMPLES - 4]

    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizers = MOMENTUM(model)
        run.prepare(model, *optimizers)
        for batch in batches:
            run.weight(sizes[run.rank])
            train(model, optimizers, [tuple(t.split(sizes)[run.rank] for t in batch)])  # type: ignore[list-item]
        return values_of(model)

    for values in run_cluster(work, SANDBLASTER).results.values():
        close(values, plain(MOMENTUM, start, batches))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("cluster", [ALONE["one worker, three servers"], SANDBLASTER], ids=["alone", "group"])
def test_state_from_before_prepare_is_taken_over(make: Make, cluster: Mapping[str, Any]) -> None:
    start, batches = started(), texts()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizers = make(model)
        if run.rank == 0:
            train(model, optimizers, batches[:3])
        run.prepare(model, *optimizers)
        train(model, optimizers, part(batches[3:], run.rank, run.world_size))
        return values_of(model)

    for values in run_cluster(work, cluster).results.values():
        close(values, plain(make, start, batches))


# Bytes.


LONG, BROAD = 20_000, 16
ROW_BYTES = 8 + 4 * BROAD  # its number and its values


def looking(run: Run, steps: int, momentum: float = 0.0) -> Tensor:
    """Each worker touches ten rows of its own per step, the same in each step, and all touch row 0."""
    model = nn.Embedding(LONG, BROAD, sparse=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    run.prepare(model, optimizer)
    slots = run._training._replica.slots  # type: ignore[union-attr]
    assert all(isinstance(slot, Rows) for slot in slots)
    for step in range(steps):
        optimizer.zero_grad()
        ids = torch.arange(10) * 1900 + 3 * step + run.rank + 1
        model(torch.cat([torch.zeros(2, dtype=torch.int64), ids])).sum().backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
def test_only_touched_rows_travel(cluster: Mapping[str, Any]) -> None:
    reports = [run_cluster(lambda run, n=n: looking(run, n), cluster) for n in (2, 6)]

    def sent(name: str, to: str) -> int:
        """Payload bytes of four steps."""
        traffic = [report.events[name].last("finished")["traffic"] for report in reports]
        return sum(t * b for m, t in ((1, 1), (0, -1)) for p, b in traffic[m].items() if p.startswith(to))

    workers = [name for name in reports[0].events if name.startswith("worker")]
    servers = reports[0].servers
    for worker in workers:
        assert sent(worker, "server") == 4 * 11 * ROW_BYTES
        assert sum(sent(server, worker) for server in servers) == 4 * 31 * ROW_BYTES
    assert 4 * 31 * ROW_BYTES < LONG * BROAD * 4 / 100
    for report in reports:
        for values in report.results.values():
            assert torch.equal(values, report.results["worker 0.0"])


def test_with_momentum_all_rows_that_still_move_are_pulled() -> None:
    reports = [run_cluster(lambda run, n=n: looking(run, n, 0.9), SANDBLASTER) for n in (2, 3)]
    pulled = [
        sum(report.events[server].last("finished")["traffic"]["worker 0.0"] for server in report.servers)
        for report in reports
    ]
    assert pulled[1] - pulled[0] == (3 * 30 + 1) * ROW_BYTES


def test_a_server_counts_its_sparse_state() -> None:
    report = run_cluster(lambda run: looking(run, 2, 0.9), SANDBLASTER)
    state = sum(report.events[server].last("finished")["state_bytes"] for server in report.servers)
    assert state == (2 * 30 + 1) * ROW_BYTES


# Edits, clipping, what is not finite.


def test_clipping_sees_the_average_of_all_rows() -> None:
    start, batches = started(), texts()

    def loop(model: nn.Module, optimizer: Optimizer, mine: Sequence[Batch], clip: Any) -> list[float]:
        norms = []
        for ids, targets in mine:
            optimizer.zero_grad()
            (model(ids) - targets).square().mean().backward()
            norms.append(float(clip(model, 0.3)))
            optimizer.step()
        return norms

    def work(run: Run) -> tuple[list[float], Values]:
        model = deepcopy(start)
        (optimizer,) = MOMENTUM(model)
        run.prepare(model, optimizer)
        mine = part(batches, run.rank, run.world_size)
        return loop(model, optimizer, mine, lambda m, n: run.clip_grad_norm_(n)), values_of(model)

    def torchs(model: nn.Module, limit: float) -> Tensor:
        sum_rows(model)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([(g._values() if g.is_sparse else g).norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
        return norm

    model = deepcopy(start)
    norms = loop(model, *MOMENTUM(model), batches, torchs)
    assert min(norms) > 0.3
    for cluster in (ALONE["single"], SANDBLASTER):
        for found, values in run_cluster(work, cluster).results.values():
            assert found == pytest.approx(norms, rel=1e-9)
            close(values, values_of(model))


def test_a_row_that_is_not_finite_skips_the_step() -> None:
    start, batches = started(), texts()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizers = MOMENTUM(model)
        run.prepare(model, *optimizers)
        for step, (ids, targets) in enumerate(part(batches, run.rank, run.world_size)):
            optimizers[0].zero_grad()
            loss = (model(ids) - targets).square().mean()
            if step == 2 and run.rank == 1:
                loss = loss + model.words(ids[:1]).sum() * float("inf")
            loss.backward()
            optimizers[0].step()
        return values_of(model)

    oracle = plain(MOMENTUM, start, batches[:2] + batches[3:])
    report = run_cluster(work, SANDBLASTER)
    assert dropped(report, "non-finite")
    for values in report.results.values():
        close(values, oracle)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda gradient: gradient.mul_(2),
    "its values": lambda gradient: gradient._values().mul_(2),
    "past the counters": lambda gradient: gradient.data._values().mul_(2),
}


@pytest.mark.parametrize(
    ("edit", "at"),
    [*((edit, 0) for edit in EDITS.values()), *((edit, 4) for edit in list(EDITS.values())[:2])],
)
def test_an_edited_gradient_is_noticed(edit: Callable[[Tensor], Any], at: int) -> None:
    """In the first steps by its bytes, in others by its version counters."""

    def work(run: Run) -> Tensor:
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.zero_()
        run.prepare(model, optimizer)
        for step in range(at + 1):
            optimizer.zero_grad()
            model(torch.tensor([4, 8])).sum().backward()
            assert model.weight.grad is not None
            if step == at:
                edit(model.weight.grad)
            optimizer.step()
        return model.weight.detach()[4]

    with pytest.raises(GradientEdited, match=r"gradient of weight was changed"):
        run_cluster(work, SANDBLASTER)
    assert (run_cluster(work, {}).results["worker 0.0"] == -2 - at).all()


@pytest.mark.parametrize("cluster", [ALONE["single"], SANDBLASTER], ids=["single", "sandblaster"])
@pytest.mark.parametrize("way", ["twice", "hold", "accumulate"])
def test_several_backwards_of_one_step(way: str, cluster: Mapping[str, Any]) -> None:
    start, batches = started(), texts()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        (optimizer,) = MOMENTUM(model)
        run.prepare(model, optimizer)
        if way == "hold":
            run.hold()
        for ids, targets in part(batches, run.rank, run.world_size):
            optimizer.zero_grad()
            loss = (model(ids) - targets).square().mean() / 2
            if way == "accumulate":
                with run.accumulate():
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        return values_of(model)

    report = run_cluster(work, cluster)
    adds_up(report)
    assert (dropped(report, "superseded") > 0) == (way == "twice")
    for values in report.results.values():
        close(values, plain(MOMENTUM, start, batches))


@pytest.mark.parametrize("cluster", [*ALONE.values(), SANDBLASTER], ids=str)
def test_a_table_may_be_edited(cluster: Mapping[str, Any]) -> None:
    start, batches = started(), texts()

    def clamped(model: nn.Module) -> None:
        with torch.no_grad():
            model.words.weight.clamp_(-0.5, 0.5)

    def work(run: Run | None) -> Values:
        model = deepcopy(start)
        optimizers = MOMENTUM(model)
        mine = batches
        if run is not None:
            run.prepare(model, *optimizers)
            mine = part(batches, run.rank, run.world_size)
        for batch in mine:
            if run is None:
                clamped(model)
            else:
                with run.edit():
                    clamped(model)
            train(model, optimizers, [batch])
        return values_of(model)

    oracle = work(None)
    for values in run_cluster(work, cluster).results.values():
        (same if cluster in ALONE.values() else close)(values, oracle)


# Groups beside each other: integers, whose sums are exact in any order.


def walk(run: Run, steps: int = 5) -> list[Tensor]:
    """Each worker moves its own rows and row 1; the table after each step, and at the common end."""
    model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
    with torch.no_grad():
        model.weight.zero_()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    run.prepare(model, optimizer)
    seen = []
    for step in run.epochs(steps):
        optimizer.zero_grad()
        (model(rows_at(run.rank, step)).sum() * 12).backward()
        optimizer.step()
        seen.append(model.weight.detach().clone())
    run.evaluate(lambda: 0)
    return [*seen, model.weight.detach().clone()]


def rows_at(rank: int, step: int) -> Tensor:
    return torch.tensor([1, 1, 10 * rank + step, 40 + 3 * step, 96 - rank])


def movement(workers: int, ranks: int, steps: int = 5) -> Tensor:
    """Where all groups together end, with `workers` per group."""
    total = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank in range(ranks):
        for step in range(steps):
            share = torch.full((5, WIDTH), -12.0 / workers, dtype=torch.float64)
            total.index_add_(0, rows_at(rank, step), share)
    return total


DOWNPOUR = {"nworker_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2}
BESIDE: dict[str, tuple[dict[str, Any], int, int]] = {
    "downpour": ({**DOWNPOUR, "server_worker_separate": True}, 2, 4),
    "downpour, lockstep": ({**DOWNPOUR, "server_worker_separate": True, "max_delay": 0}, 2, 4),
    "hogwild": ({"nworker_groups": 3, "nserver_groups": 3}, 1, 3),
    "hybrid": ({**DOWNPOUR, "nserver_groups": 2, "sync_freq": 2}, 2, 4),
}


@pytest.mark.parametrize("lossy", [False, True], ids=["", "lossy"])
@pytest.mark.parametrize(("block", "workers", "ranks"), BESIDE.values(), ids=BESIDE)
def test_groups_beside_each_other_lose_no_row(
    block: dict[str, Any], workers: int, ranks: int, lossy: bool
) -> None:
    sent: Counter[tuple[Any, ...]] = Counter()

    def judge(header: Header, peer: str) -> Fate:
        """The first copy of each share and of each step's values is lost."""
        if lossy and header.kind in (Kind.SHARE, Kind.VALUES) and header.step:
            key = header.kind, header.sender, peer, header.step, header.chunk
            sent[key] += 1
            return "lose" if sent[key] == 1 else "deliver"
        return "deliver"

    report = run_cluster(walk, block, judge=judge)
    adds_up(report)
    for name, seen in report.results.items():
        assert torch.equal(seen[-1], movement(workers, ranks))
        leader = report.results[f"worker {name[7]}.0"]
        assert all(torch.equal(a, b) for a, b in zip(seen, leader, strict=True)), "one snapshot for a group"


def test_training_goes_on_after_a_common_end() -> None:
    def work(run: Run) -> Tensor:
        model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
        with torch.no_grad():
            model.weight.zero_()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        run.prepare(model, optimizer)
        for _ in range(2):
            for step in run.epochs(5):
                optimizer.zero_grad()
                (model(rows_at(run.rank, step)).sum() * 12).backward()
                optimizer.step()
            run.evaluate(lambda: 0)
        return model.weight.detach()

    for values in run_cluster(work, BESIDE["downpour"][0]).results.values():
        assert torch.equal(values, 2 * movement(2, 4))


def whole(run: Run) -> Tensor:
    """The table as the group's servers hand it to a worker that has nothing yet."""
    _, exchange = run._training.joined()
    values = exchange.pull().values
    assert all(isinstance(flat, Tensor) for flat in values.values())
    return torch.cat([values[number] for number in sorted(values)])  # type: ignore[misc]


def one_step(model: nn.Module, optimizer: Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    model(ids).sum().backward()
    optimizer.step()


def test_a_worker_that_asks_for_all_gets_the_whole_table() -> None:
    def work(run: Run) -> None:
        model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        run.prepare(model, optimizer)
        for step in range(3):
            one_step(model, optimizer, rows_at(run.rank, step))
        values = whole(run)
        one_step(model, optimizer, rows_at(run.rank, 3))
        assert values.numel() == ROWS * WIDTH

    run_cluster(work, {"nworker_groups": 2, "server_worker_separate": True})


def test_the_end_of_a_loop_stays_while_others_begin_the_next() -> None:
    script = Script(["both have left", "both have left", "moved on", "read"])

    def work(run: Run) -> Tensor:
        model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        run.prepare(model, optimizer)
        one_step(model, optimizer, rows_at(run.rank, 0))
        run._training.end_loop()
        run._training.joined()[1].settle()
        run._training.settled = True
        script.turn("both have left")
        if run.group:
            script.turn("read")
            return whole(run)
        end = whole(run)
        one_step(model, optimizer, rows_at(run.rank, 1))
        run._training.settled = True
        script.turn("moved on")
        return end

    one, two = run_cluster(work, {"nworker_groups": 2, "server_worker_separate": True}).results.values()
    assert torch.equal(one, two)


def test_a_shard_knows_which_rows_have_changed() -> None:
    plan = make_plan([Parameter("t", (6, 2), "float32", row=2)], (), 1)
    shard = Shard(plan, 0, [OptimizerSpec("torch.optim:SGD", {"lr": 1.0}, ({"lr": 1.0},))], ())
    shard.assign(0, torch.arange(12.0))
    changes = [
        Rows(torch.tensor([4]), torch.ones(1, 2)),
        torch.tensor([[0.0, 1], [2, 3.5], [4, 5], [6, 7], [1, 2], [10, 11]]).view(-1),
    ]
    for values in changes:
        shard.assign(0, values)
    shard.step(0, Rows(torch.tensor([5]), torch.ones(1, 2)), None, ({"lr": 1.0},))
    found = [shard.news(0, lsn).index.tolist() for lsn in range(5)]
    assert found == [[0, 1, 2, 3, 4, 5], [1, 4, 5], [1, 4, 5], [5], []]
    assert shard.news(0, 2).values.tolist() == [[2, 3.5], [1, 2], [9, 10]]


# Evaluation and files.


@pytest.mark.parametrize("cluster", [ALONE["single"], SANDBLASTER, BESIDE["downpour"][0]], ids=str)
def test_evaluation_and_files_show_the_whole_table(cluster: Mapping[str, Any], tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        run.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(rows_at(run.rank, step)).sum().backward()
            optimizer.step()
            own = model.weight.detach().clone()
            total = run.evaluate(lambda: float(model.weight.detach().sum()))
            assert torch.equal(model.weight, own)
            if run.num_groups == 1:
                assert total == float(own.sum())
                if run.is_main:
                    assert torch.equal(run.state_dict()["weight"], own)
        run.save(tmp_path / "table.safetensors")
        run._training.end_loop()
        run._training.settle()
        return run.state_dict(), model.weight.detach()

    report = run_cluster(work, cluster)
    state, _ = report.results["worker 0.0"]
    assert all(torch.equal(values, state["weight"]) for _, values in report.results.values())
    if len(report.results) < 4:
        assert torch.equal(load_file(tmp_path / "table.safetensors")["weight"], state["weight"])


# What prepare() and step() refuse.

REFUSED: dict[str, tuple[Make, str]] = {
    "Adam": (everything(optim.Adam), "Adam does not support sparse gradients"),
    "RMSprop": (everything(optim.RMSprop), "RMSprop does not support sparse gradients"),
    "Adafactor": (everything(optim.Adafactor), "Adafactor does not support sparse gradients"),
    "decay": (everything(optim.SGD, lr=0.1, weight_decay=0.1), r"add\(sparse, dense\) is not supported"),
    "Adagrad, decay": (everything(optim.Adagrad, weight_decay=0.1), "weight_decay option is not compatible"),
    "dense": (lambda m: [optim.SparseAdam(list(m.parameters()))], "SparseAdam does not support dense"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_torchs_own_refusals_come_at_prepare(make: Make, reason: str) -> None:
    def work(run: Run) -> None:
        model = Words()
        run.prepare(model, *make(model))

    with pytest.raises(OptimizerRefused, match=rf"weight(.|\n)*{reason}(.|\n)*another optimizer"):
        run_cluster(work, SANDBLASTER)


def refused(model: nn.Module, cluster: Mapping[str, Any] | None = None) -> None:
    run_cluster(lambda run: run.prepare(model, optim.SGD(model.parameters(), lr=0.1)), cluster or {})


def test_max_norm_is_refused_with_the_remedy() -> None:
    for sparse in (True, False):
        with pytest.raises(ParameterEdited, match=r"words has max_norm(.|\n)*leave max_norm out"):
            refused(nn.ModuleDict({"words": nn.Embedding(9, 3, max_norm=1.0, sparse=sparse)}))
    frozen = nn.Embedding(9, 3, max_norm=1.0).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(3, 3))
    run_cluster(lambda run: run.prepare(model, optim.SGD(model[1].parameters(), lr=0.1)), {})


def test_delay_compensation_is_refused_for_tables() -> None:
    block = {"nworker_groups": 2, "delay_compensation": 0.1, "server_worker_separate": True}
    with pytest.raises(UsageError, match=r"delay_compensation .*weight(.|\n)*sparse=False"):
        refused(nn.Embedding(9, 3, sparse=True), block)


def test_a_table_whose_gradient_is_dense_is_refused_by_name() -> None:
    def work(run: Run) -> None:
        model = nn.Embedding(5, 3, sparse=True)
        run.prepare(model, optim.SGD(model.parameters(), lr=0.1))
        nn.functional.linear(torch.ones(3), model.weight).sum().backward()

    with pytest.raises(UsageError, match=r"weight .* is not sparse(.|\n)*sparse=False"):
        run_cluster(work, {})


# The rules by themselves.

SIZES = st.tuples(st.integers(0, 300), st.integers(1, 40), st.sampled_from([0, 1]))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(SIZES, min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["balanced", "singa"]),
)
def test_tables_are_cut_between_rows(
    sizes: list[tuple[int, int, int]], servers: int, groups: int, slicer: str
) -> None:
    parameters = [
        Parameter(f"p{i}", (rows, width), "float32", row=width * table)
        for i, (rows, width, table) in enumerate(sizes)
    ]
    plan = make_plan(parameters, (), servers, groups, slicer, chunk_bytes=1024)
    for index, parameter in enumerate(parameters):
        pieces = [
            (piece, chunk) for chunk in plan.chunks for piece in chunk.pieces if piece.parameter == index
        ]
        places = sorted((piece.start, piece.stop) for piece, _ in pieces)
        assert [start for start, _ in places] == [0, *(stop for _, stop in places)][: len(places)]
        assert sum(stop - start for start, stop in places) == parameter.numel
        if parameter.row:
            for piece, chunk in pieces:
                assert chunk.pieces == (piece,) and chunk.row == parameter.row
                assert piece.start % parameter.row == piece.stop % parameter.row == 0
    if slicer == "balanced":
        loads = [sum(chunk.nbytes for chunk in plan.chunks_of(server)) for server in range(servers)]
        atom = max((4 * min(p.atom, p.numel) for p in parameters), default=0)
        assert max(loads) - min(loads) <= atom


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_average_as_dense_gradients_do(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    shares, dense = [], []
    for _ in range(count):
        numbers = data.draw(st.lists(st.integers(0, 8), unique=True).map(sorted))
        index = torch.tensor(numbers, dtype=torch.int64)
        shares.append(Rows(index, torch.randn(len(index), 2, generator=generator, dtype=torch.float64)))
        dense.append(shares[-1].sparse(9).to_dense())
    weights = data.draw(st.sampled_from([None, tuple((i + 1) / 10 for i in range(count))]))
    over = 1 if count == 1 and weights is None else count + 1
    rule = Average(0, 0, tuple(range(count)), weights, over, None)
    total = sum(d * (1.0 if weights is None else weights[i]) for i, d in enumerate(dense))
    found = average_rows(shares, rule)
    assert found.index.tolist() == sorted({i for share in shares for i in share.index.tolist()})
    assert torch.equal(found.sparse(9).to_dense(), total / over if weights is None else total)


TABLE = make_plan([Parameter("t", (6, 2), "float32", row=2)], (), 1).chunks[0]
GOOD = frames_of(Rows(torch.tensor([0, 5]), torch.ones(2, 2)))
BAD: dict[str, Sequence[Frame]] = {
    "nothing": [],
    "one frame": GOOD[:1],
    "three frames": [*GOOD, b""],
    "half a number": [b"1234", b""],
    "too few values": [GOOD[0], bytes(8)],
    "above": frames_of(Rows(torch.tensor([0, 6]), torch.ones(2, 2))),
    "below": frames_of(Rows(torch.tensor([-1, 5]), torch.ones(2, 2))),
    "twice": frames_of(Rows(torch.tensor([5, 5]), torch.ones(2, 2))),
    "not in order": frames_of(Rows(torch.tensor([5, 0]), torch.ones(2, 2))),
}


def test_rows_come_back_from_the_wire() -> None:
    for rows in (
        Rows(torch.tensor([0, 5]), torch.randn(2, 2)),
        no_rows(2, torch.float32),
    ):
        back = received([bytes(frame) for frame in frames_of(rows)], "rows", TABLE, "worker 0.0")
        assert isinstance(back, Rows)
        assert torch.equal(back.index, rows.index) and torch.equal(back.values, rows.values)


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD)
def test_rows_of_another_form_are_refused(frames: Sequence[Frame]) -> None:
    with pytest.raises(ProtocolError, match=r"worker 0.0 sent .*rows"):
        received(frames, "rows", TABLE, "worker 0.0")


def test_rows_of_what_is_no_table_are_refused() -> None:
    chunk = make_plan([Parameter("t", (6, 2), "float32")], (), 1).chunks[0]
    with pytest.raises(ProtocolError, match="rows of chunk"):
        received(GOOD, "rows", chunk, "worker 0.0")
