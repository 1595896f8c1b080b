"""`wire_dtype`: gradients and values travel in fewer bytes, and training reaches what it would reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    SANDBLASTER,
    WIDTH,
    Case,
    Values,
    adamw,
    adds_up,
    close,
    clustered,
    dropped,
    large,
    loss_of,
    mlp,
    part,
    regression,
    same,
    values_of,
)
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, check_asynchronous, workers_of
from torch import Tensor, nn
from toys import config

from shoal import Run
from shoal.codecs import CODECS, Coding, decoded, move
from shoal.config import Cluster
from shoal.partition import Chunk, Piece
from shoal.testing import Report, run_cluster
from shoal.wire import Header, Kind

LOSSY = tuple(CODECS)
SIMPLE = {"nworkers_per_group": 3, "server_worker_separate": True}
FACTOR = {"bfloat16": 1.9, "float16": 1.9, "int8": 3.5, "topk": 20}

Step = Callable[[Run, nn.Module, torch.optim.Optimizer, int], None]


def case(steps: int = 6, **fields: Any) -> Case:
    return Case(optimizer=adamw, steps=steps, **fields)


# By hand.


def by_hand(name: str, steps: int, workers: int) -> Values:
    """The same in plain PyTorch, on one flat vector: everybody's residual, and what the group has."""
    model = case().model(torch.float32)
    sizes = [parameter.numel() for parameter in model.parameters()]
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    optimizer = adamw(nn.ParameterList([flat]))  # type: ignore[arg-type]
    chunk = Chunk(0, 0, "float32", 0, len(flat), 0, 0, (Piece(0, 0, len(flat), 0),))
    coding = Coding.of(Cluster(wire_dtype=name))  # type: ignore[arg-type]
    known, residuals = flat.detach().clone(), [torch.zeros(len(flat)) for _ in range(workers)]

    def show() -> None:
        for parameter, values in zip(model.parameters(), known.split(sizes), strict=True):
            parameter.data = values.clone().view(parameter.shape)

    for batch in regression(steps, torch.float32):
        total = torch.zeros(len(flat))
        for rank in range(workers):
            model.zero_grad()
            show()
            loss_of(model, *part([batch], rank, workers)[0]).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
            x = gradient + residuals[rank]
            share = decoded(coding.encode(x, chunk), chunk)
            if coding.feedback:
                residuals[rank] = x - share
            total += share
        flat.grad = total / workers
        optimizer.step()
        move(known, decoded(coding.encode(flat.detach() - known, chunk), chunk))
    show()
    return values_of(model)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_group_does_what_the_rule_says(name: str, workers: int) -> None:
    cluster = {"nworkers_per_group": workers, "server_worker_separate": True, "wire_dtype": name}
    trained = clustered(case(), cluster, torch.float32)
    for values in trained.values:
        same(values, by_hand(name, 6, workers))
    adds_up(trained.report)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("framework", SYNCHRONOUS)
def test_float32_is_exact(framework: str, dtype: torch.dtype) -> None:
    """It is the default, and encodes nothing, whatever the model's dtype."""
    cluster = SYNCHRONOUS[framework]
    ours = clustered(case(), config(**cluster, wire_dtype="float32"), dtype)
    for values, plain in zip(ours.values, clustered(case(), cluster, dtype).values, strict=True):
        same(values, plain)
    size = sum(value.nbytes for value in ours.values[0].values())
    assert traffic(ours.report) == size * (1 + workers_of(cluster) * (1 + 2 * 6))  # start; pulls, steps


# In every framework.


def descend(steps: int = 40, momentum: float = 0.8) -> Case:
    """SGD for a few groups at a time, whose updates add up."""
    rate = 0.25 * (1 - momentum)
    return Case(mlp, lambda m: torch.optim.SGD(m.parameters(), lr=rate, momentum=momentum), steps=steps)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("framework", SYNCHRONOUS)
def test_synchronous_frameworks(framework: str, name: str) -> None:
    """One seed is one run, the workers of a group are equal, and it is close to the exact run."""
    cluster = SYNCHRONOUS[framework]
    coded = {**cluster, "wire_dtype": name, "topk_fraction": 0.2}
    first, second = (clustered(descend(10), coded, torch.float32) for _ in range(2))
    for values in (*first.values, *second.values):
        same(values, first.values[0])
    close(first.values[0], clustered(descend(10), cluster, torch.float32).values[0], 0.1)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("framework", [*ASYNCHRONOUS, "sandblaster"])
def test_every_framework_learns(framework: str, name: str) -> None:
    cluster = (ASYNCHRONOUS | SYNCHRONOUS)[framework]
    momentum = 0.0 if name == "topk" else 0.8  # what arrives late and what is delayed add up
    coded = {**cluster, "wire_dtype": name, "topk_fraction": 0.2}
    check_asynchronous(descend(60, momentum), coded, 0.5)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_beside_what_else_asynchronous_groups_may_do(name: str) -> None:
    cluster = {**ASYNCHRONOUS["downpour"], "wire_dtype": name, "max_delay": 1, "warmup_steps": 3}
    check_asynchronous(descend(), {**cluster, "delay_compensation": 0.1, "staleness_rate": True}, 0.6)


@pytest.mark.parametrize("name", LOSSY)
def test_least_squares_are_solved(name: str) -> None:
    """What is cut off does not stay away: the solution is reached as finely as without."""
    inputs = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(1))
    solution = torch.linspace(-1, 1, WIDTH * 4).view(WIDTH, 4)

    def work(run: Run) -> float:
        model = nn.Linear(WIDTH, 4, bias=False)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        mine = inputs.tensor_split(run.world_size)[run.rank]
        for _ in run.epochs(400):
            optimizer.zero_grad()
            (model(mine) - mine @ solution).square().sum(1).mean().backward()
            optimizer.step()
        return run.evaluate(lambda: float((model.weight.T.detach() - solution).abs().max()))  # type: ignore[no-any-return]

    cluster = {**SIMPLE, "wire_dtype": name, "topk_fraction": 0.1}
    assert max(run_cluster(work, cluster).results.values()) < 1e-4


# On the wire.


def traffic(report: Report) -> int:
    return sum(sum(link.traffic.values()) for link in report.links.values())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("framework", ["sandblaster", "allreduce"])
def test_bytes(framework: str, name: str) -> None:
    """Of shares and values together; the start travels in full in either case."""
    shape, cluster = Case(large, steps=2), SYNCHRONOUS[framework]

    def per_step(**fields: str) -> float:
        runs = (clustered(Case(large, steps=s), config(**cluster, **fields), torch.float32) for s in (2, 6))
        few, many = (traffic(run.report) for run in runs)
        return (many - few) / 4

    size = sum(4 * value.numel() for value in values_of(shape.model(torch.float32)).values())
    exact = per_step()
    assert exact == 2 * workers_of(cluster) * size
    assert exact / per_step(wire_dtype=name) >= FACTOR[name]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("fate", ["lose", "double"])
def test_a_bad_link_changes_nothing(name: str, fate: str) -> None:
    """Whatever is lost or doubled: every third share, commit and answer."""
    seen: dict[tuple[str, Kind], int] = {}

    def judge(header: Header, peer: str) -> Any:
        if header.kind not in (Kind.SHARE, Kind.VALUES, Kind.COMMIT):
            return "deliver"
        key = header.sender, header.kind
        seen[key] = seen.get(key, 0) + 1
        return fate if seen[key] % 3 == 0 else "deliver"

    for cluster in (SANDBLASTER, ALLREDUCE):
        coded = {**cluster, "wire_dtype": name}
        clean = clustered(case(), coded, torch.float32).values[0]
        bad = clustered(case(), coded, torch.float32, judge)
        for values in bad.values:
            same(values, clean)
        adds_up(bad.report)


# What a script may do.


def train(
    cluster: dict[str, Any],
    step: Step | None = None,
    steps: int = 6,
    build: Callable[[], nn.Module] = mlp,
    after: Callable[[Run, nn.Module], Any] = lambda run, model: values_of(model),
    dtype: torch.dtype = torch.float32,
) -> Report:
    start, batches = Case(build).model(dtype), regression(steps, dtype)

    def work(run: Run) -> Any:
        model = deepcopy(start)
        optimizer = adamw(model)
        run.prepare(model, optimizer)
        for number, batch in enumerate(part(batches, run.rank, run.world_size)):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            if step is not None:
                step(run, model, optimizer, number)
            optimizer.step()
        return after(run, model)

    report = run_cluster(work, cluster)
    adds_up(report)
    return report


def results(report: Report) -> Sequence[Any]:
    return [report.results[name] for name in sorted(report.results)]


@pytest.mark.parametrize("name", LOSSY)
def test_evaluation_and_files_show_the_servers_values(name: str) -> None:
    def after(run: Run, model: nn.Module) -> tuple[Values, Values, Values]:
        before = values_of(model)
        shown = run.evaluate(lambda: {n: v.tolist() for n, v in model.state_dict().items()})
        saved = run.state_dict()
        same(values_of(model), before)  # afterwards each has its own again
        return before, {n: torch.tensor(v) for n, v in shown.items()}, saved

    report = train({**SIMPLE, "wire_dtype": name}, after=after)
    own, shown, saved = report.results["worker 0.0"]
    for values in (shown, saved):
        assert torch.equal(torch.cat([v.reshape(-1) for v in values.values()]), held(report))
    assert any(not torch.equal(own[key], shown[key]) for key in own)


def held(report: Report) -> Tensor:
    """The values of a cluster's only server."""
    (server,) = report.servers.values()
    return torch.cat([server._shard.values(c.number) for c in server._shard.chunks])


@pytest.mark.parametrize("name", LOSSY)
def test_the_common_end_is_exact(name: str) -> None:
    def work(run: Run) -> tuple[Values, Values]:
        torch.manual_seed(1)
        model = mlp()
        model, optimizer = run.prepare(model, adamw(model))
        for _ in run.epochs(3):
            optimizer.zero_grad()
            loss_of(model, *regression(1, torch.float32)[0]).backward()
            optimizer.step()
        before = values_of(model)
        run.evaluate(lambda: 0)
        return before, values_of(model)

    report = run_cluster(work, {**SIMPLE, "wire_dtype": name})
    for before, end in report.results.values():
        assert torch.equal(torch.cat([v.reshape(-1) for v in end.values()]), held(report))
        assert any(not torch.equal(before[key], end[key]) for key in end)


@pytest.mark.parametrize("name", LOSSY)
def test_a_second_loop_starts_at_the_common_end(name: str) -> None:
    start = mlp()

    def work(run: Run) -> list[Values]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, adamw(model))
        seen = []
        for loop in range(2):
            for number in run.epochs(3):
                optimizer.zero_grad()
                inputs, targets = regression(6, torch.float32)[3 * loop + number]
                loss_of(model, inputs, targets).backward()
                optimizer.step()
            run.evaluate(lambda: 0)
            seen.append(values_of(model))
        if run.is_main:
            run.state_dict()
        optimizer.zero_grad()  # without a loop around it
        loss_of(model, *regression(1, torch.float32)[0]).backward()
        optimizer.step()
        return [*seen, values_of(model)]

    report = run_cluster(work, {**SIMPLE, "wire_dtype": name})
    for seen in results(report):
        for values, first in zip(seen, report.results["worker 0.0"], strict=True):
            same(values, first)


@pytest.mark.parametrize("name", LOSSY)
def test_who_alone_has_taken_the_common_end_does_not_drift(name: str) -> None:
    """Only the main worker asks for the end: the next step's difference does not fit what others have."""
    start, batches = mlp(), regression(6, torch.float32)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, adamw(model))

        def step(number: int) -> None:
            optimizer.zero_grad()
            loss_of(model, *part(batches, run.rank, run.world_size)[number]).backward()
            optimizer.step()

        for number in run.epochs(3):
            step(number)
        if run.is_main:
            run.state_dict()
        run.barrier()
        for number in range(3, 6):
            step(number)
        return values_of(model)

    trained = results(run_cluster(work, {**SIMPLE, "wire_dtype": name}))
    for values in trained:
        same(values, trained[0])


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("framework", ["sandblaster", "downpour"])
def test_edits(framework: str, name: str) -> None:
    """What worker 0 sets by hand is what the servers have, and what all get, whatever others set."""
    batches = regression(60, torch.float32)

    def work(run: Run) -> tuple[Values, Values]:
        torch.manual_seed(1)
        model = mlp()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(part(batches, run.rank, run.world_size)):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
            if number == 3:
                optimizer.param_groups[0]["lr"] = 0.0  # what is still to come arrives
                before = run.state_dict()
                with run.edit(), torch.no_grad():
                    model[2].bias.zero_()
                    model[2].weight.clamp_(-0.01, 0.01 + run.rank_in_group)
                after = run.state_dict()
                if run.is_main and framework == "sandblaster":  # else others have moved them meanwhile
                    assert before["2.bias"].any() and not after["2.bias"].any()
                    assert after["2.weight"].abs().max() <= 0.01 + 0.005 * (name == "topk")  # is on its way
        return values_of(model), run.state_dict()

    cluster = {**(SYNCHRONOUS | ASYNCHRONOUS)[framework], "wire_dtype": name, "topk_fraction": 0.2}
    found = run_cluster(work, cluster).results
    for values, _ in found.values():
        close(values, found["worker 0.0"][1], 1e-6)


@pytest.mark.parametrize("name", LOSSY)
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(name: str) -> None:
    def spoilt(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 2:
            if run.rank == 1:
                with run.hold():
                    (model(torch.ones(1, WIDTH)) * math.nan).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(model, *part(regression(6, torch.float32), run.rank, run.world_size)[2]).backward()

    cluster = {**SIMPLE, "wire_dtype": name}
    good, bad = train(cluster), train(cluster, spoilt)
    assert dropped(bad, "non-finite") > 0
    for values, others in zip(results(bad), results(good), strict=True):
        same(values, others)


@pytest.mark.parametrize("name", LOSSY)
def test_the_norm_is_of_what_is_applied(name: str) -> None:
    """SGD at rate 1: without clipping the step is as long as the norm says."""
    norms: dict[int, float] = {}

    def work(run: Run) -> float:
        torch.manual_seed(1)
        model = mlp()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = run.state_dict()
        loss_of(model, *part(regression(1, torch.float32), run.rank, run.world_size)[0]).backward()
        norms[run.rank] = run.clip_grad_norm_(1e9)
        optimizer.step()
        after = run.state_dict()
        return sum(float((after[key] - before[key]).square().sum()) for key in after) ** 0.5

    length = run_cluster(work, {**SIMPLE, "wire_dtype": name}).results["worker 0.0"]
    assert len(set(norms.values())) == 1
    assert length == pytest.approx(norms[0], rel=1e-5)


# What a model may be made of.


class Mixed(nn.Module):
    """Tables, buffers, half precision, and a layer that not every step reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.coarse = nn.Linear(WIDTH, 40, dtype=torch.bfloat16)
        self.last = nn.Linear(40, 4)
        self.rare = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, rarely: bool) -> Tensor:
        """Inputs (n × WIDTH) → n × 4."""
        places = (inputs * 7).long().abs() % 50
        x = self.norm(inputs + self.table(places[:, 0]))
        x = self.last(self.coarse(x.bfloat16()).float())
        return self.rare(x) if rarely else x  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("fine", ["same", "float32"])
def test_a_model_of_many_kinds(name: str, fine: str) -> None:
    torch.manual_seed(2)
    start, batches = Mixed(), regression(8, torch.float32)

    def work(run: Run) -> tuple[Values, float]:
        model = deepcopy(start)
        optimizers = (
            torch.optim.SparseAdam([model.table.weight], lr=0.01),
            torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("table")], lr=0.02),
        )
        run.prepare(model, *optimizers)
        for number, (inputs, _) in enumerate(part(batches, run.rank, run.world_size)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (model(inputs, number % 3 == run.rank) - inputs[:, :4]).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return values_of(model), loss.item()

    report = run_cluster(work, {**SIMPLE, "wire_dtype": name, "server_dtype": fine})
    adds_up(report)
    for values, loss in results(report):
        assert math.isfinite(loss)
        same(values, report.results["worker 0.0"][0])
        assert all(v.isfinite().all() for v in values.values())
