"""Moving averages on the servers: torch's AveragedModel is the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    SANDBLASTER,
    Batch,
    Case,
    Values,
    adamw,
    close,
    fit,
    large,
    loss_of,
    mlp,
    part,
    regression,
    same,
    sgd,
    values_of,
)
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, workers_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal import Run
from shoal.ema import Ema
from shoal.errors import ModelMismatch, UsageError
from shoal.partition import Chunk, Piece
from shoal.testing import Report, run_cluster

DECAY = 0.9


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def parameters_of(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def both(case: Case, cluster: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> list[Values]:
    """Worker 0.0's averages: the servers', and those that a user keeps beside the training."""
    models = [case.model(dtype) for _ in range(cluster.get("nworkers_per_group", 1))]
    batches = regression(case.steps, dtype)

    def work(run: Run) -> list[Values]:
        model = models[run.rank]
        model, optimizer = run.prepare(model, case.optimizer(model), ema=DECAY)
        own = averaged(model)
        for batch in part(batches, run.rank, run.world_size):
            case.loop(model, optimizer, [batch])
            own.update_parameters(model)
        return [run.state_dict(ema=True), parameters_of(own.module)]

    return run_cluster(work, cluster).results["worker 0.0"]  # type: ignore[no-any-return]


# As torch's.


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_group_in_step_has_the_average_of_torch(cluster: Mapping[str, Any], dtype: torch.dtype) -> None:
    same(*both(Case(large, adamw, steps=6), cluster, dtype))


def test_one_worker_has_the_average_of_plain_pytorch() -> None:
    model = Case(large).model(torch.float32)
    optimizer, average = adamw(model), averaged(model)
    for batch in regression(5, torch.float32):
        fit(model, optimizer, [batch])
        average.update_parameters(model)
    servers, _ = both(Case(large, adamw), {"nservers_per_group": 3}, torch.float32)
    same(servers, parameters_of(average.module))


class Turns(nn.Module):
    """Two experts of which each step uses one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return (self.first if self.calls % 3 else self.second)(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cluster", [{}, SANDBLASTER, ALLREDUCE], ids=["single", "sandblaster", "allreduce"])
def test_steps_that_leave_a_parameter_alone_count_as_in_torch(cluster: Mapping[str, Any]) -> None:
    """Each is in a chunk of its own or in one with others: that must not show."""
    close(*both(Case(Turns, adamw, steps=8), {**cluster, "slicer": "singa"}), 1e-14)
    close(*both(Case(Turns, lambda m: torch.optim.Muon([m.first.weight, m.second.weight])), cluster), 1e-14)


def skipping(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        (loss_of(model, inputs, targets) * (float("inf") if inputs[0, 0] > 0 else 1.0)).backward()
        optimizer.step()


def test_skipped_steps_count_as_in_torch() -> None:
    assert {bool(inputs[0, 0] > 0) for inputs, _ in regression(8)} == {True, False}
    close(*both(Case(loop=skipping, steps=8), {"nservers_per_group": 2}), 1e-14)


class Bag(nn.Module):
    """A table with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = (inputs[:, :3].abs() * 7).long() % 30
        return self.head(self.table(rows))  # type: ignore[no-any-return]


SPARSE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("cluster", [{}, SANDBLASTER], ids=["single", "sandblaster"])
def test_rows_that_a_step_does_not_touch_count_as_in_torch(
    make: Callable[[nn.Module], Optimizer], cluster: Mapping[str, Any]
) -> None:
    close(*both(Case(Bag, make, steps=9), cluster), 1e-14)


ROWS = 5
Change = tuple[list[int], bool, bool]


@given(
    changes=st.lists(st.tuples(st.sets(st.integers(0, ROWS - 1)).map(sorted), st.booleans(), st.booleans())),
    decay=st.floats(0, 0.999),
)
def test_rows_that_are_followed_late_end_where_all_rows_do(changes: list[Change], decay: float) -> None:
    """Rounds touch some rows; now and then the average is read, or something else changes the table."""
    pieces = (Piece(0, 0, ROWS * 2, 0),)
    ema = Ema(decay, [Chunk(0, 0, "float64", 0, ROWS * 2, 0, 0, pieces, row=2)])
    values, plain = torch.zeros(ROWS, 2, dtype=torch.float64), torch.zeros(ROWS, 2, dtype=torch.float64)
    for number, (rows, read, foreign) in enumerate(changes, 1):
        index = torch.tensor(rows, dtype=torch.int64)
        ema.follow(0, values.view(-1), number - 1, index)
        values[index] = float(number)
        ema.follow(0, values.view(-1), number, index)
        plain = values.clone() if number == 1 else plain.lerp(values, 1 - decay)
        if read:
            ema.follow(0, values.view(-1), number)
            torch.testing.assert_close(ema.values(0).view(ROWS, 2), plain, rtol=1e-12, atol=1e-12)
        if foreign:
            ema.follow(0, values.view(-1), number)
            values += 10
    if changes and not changes[-1][2]:
        ema.follow(0, values.view(-1), len(changes))
        torch.testing.assert_close(ema.values(0).view(ROWS, 2), plain, rtol=1e-12, atol=1e-12)


# What torch's has not.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("fine", ["same", "float32"])
def test_coarse_parameters_have_a_fine_average(dtype: torch.dtype, fine: str) -> None:
    """At this decay an average in half precision would stay where it began."""
    steps, decay = 40, 0.999
    model = nn.Linear(64, 4).to(dtype)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()

    def work(run: Run) -> Values:
        mine = deepcopy(model)
        mine, optimizer = run.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.05), ema=decay)
        for _ in range(steps):
            step(mine, optimizer)
        return run.state_dict(ema=True)

    cluster = {"server_dtype": fine, "nservers_per_group": 2}
    found = run_cluster(work, cluster).results["worker 0.0"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    average: Values = {}
    for _ in range(steps):
        step(model, optimizer)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            value = parameter.detach().float()
            if fine == "float32":
                value = masters[name] = masters[name] - 0.05 * parameter.grad.float()
                parameter.data.copy_(value)
            average[name] = average.get(name, value).lerp(value, 1 - decay)
    for name, value in average.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], value.to(dtype), rtol=2**-7, atol=1e-6)
        exact = found[name].float() - value
        assert exact.abs().max() <= value.abs().max() * 2**-8


def one() -> nn.Module:
    """A single number, 0."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    return model


def down(model: nn.Module, optimizer: Optimizer) -> None:
    """With SGD at rate 1, a step from w to w − 1."""
    optimizer.zero_grad()
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()


def falling(rounds: int) -> float:
    """The average over −1, −2, … −rounds."""
    average = -1.0
    for number in range(2, rounds + 1):
        average = DECAY * average - (1 - DECAY) * number
    return average


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_groups_beside_each_other_average_the_rounds_of_their_server_group(
    cluster: Mapping[str, Any], tmp_path: Path
) -> None:
    """Server groups do not exchange anything before the end, and what they exchange then is no round."""
    groups = cluster["nworker_groups"]
    server_groups = cluster.get("nserver_groups", 1) or groups
    level = threading.Barrier(workers_of(cluster), timeout=20)

    def work(run: Run) -> tuple[list[float], ...]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=DECAY)

        def weight(batches: Any = ()) -> float:
            assert all(len(batch) for batch in batches)
            return model.weight.item()

        before = []
        for number in run.epochs(5 + run.group):
            down(model, optimizer)
            own = model.weight.item()
            if number == 2:
                before = [run.evaluate(weight, ema=True), run.evaluate(weight, data=range(9), ema=True)]
            assert model.weight.item() == own
            if number == 4 + run.group:
                level.wait()  # nobody is at the end while another has rounds to come
        after = [run.evaluate(weight, ema=True), run.evaluate(weight, data=range(9), ema=True)]
        run.save(tmp_path / "average.safetensors", ema=True)
        if run.is_main:
            after.append(load_file(tmp_path / "average.safetensors")["weight"].item())
        return before, after, [run.evaluate(weight), model.weight.item()]

    results = run_cluster(work, {**cluster, "sync_freq": 1000}).results.values()
    steps = [5 + group for group in range(groups)]
    rounds = sum(steps[: groups // server_groups])  # of server group 0
    end = -5 if cluster.get("nserver_groups") == 0 else -sum(steps)
    possible = [falling(count) for count in range(3, sum(steps) + 1)]
    for before, after, values in results:
        assert all(min(abs(seen - value) for value in possible) < 1e-12 for seen in before)
        assert after == pytest.approx([falling(rounds)] * len(after), abs=1e-12)
        assert values[0] == end and values[1] in (end, -6)  # independent groups keep their own


def test_an_exchange_between_server_groups_counts_with_the_next_round() -> None:
    """What a group sees after each of its rounds is what its average is made of."""

    def work(run: Run) -> list[float]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=DECAY)
        average = float("nan")
        found = []
        for number in run.epochs(6):
            down(model, optimizer)
            value = model.weight.item()
            average = value if number == 0 else DECAY * average + (1 - DECAY) * value
            found.append(abs(run.evaluate(model.weight.item, ema=True) - average))
        return found

    for found in run_cluster(work, "hogwild").results.values():
        assert max(found) < 1e-12


def test_training_goes_on_after_the_loop_and_so_does_the_average() -> None:
    def work(run: Run) -> list[float]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=DECAY)
        seen = []
        for _ in range(2):
            for _ in run.epochs(2):
                down(model, optimizer)
            seen.append(run.evaluate(model.weight.item, ema=True))
        return seen

    cluster = {"nworker_groups": 2, "nworkers_per_group": 2, "server_worker_separate": True}
    for seen in run_cluster(work, cluster).results.values():
        assert seen == pytest.approx([falling(4), falling(8)], abs=1e-12)


def test_before_the_first_round_the_average_is_the_start_and_buffers_are_the_present_ones() -> None:
    def work(run: Run) -> list[Values]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
        model, optimizer = run.prepare(model, sgd(model), ema=DECAY)
        found = [run.state_dict(ema=True), values_of(model)]
        for batch in regression(3):
            fit(model, optimizer, [batch])
        return [*found, run.state_dict(ema=True), values_of(model)]

    at_start, start, average, values = run_cluster(work, {}).results["worker 0.0"]
    same(at_start, start)
    for name, value in values.items():
        assert torch.equal(average[name], value) is name.startswith(("1.running", "1.num")), name


def test_edits_count_with_the_next_round() -> None:
    def work(run: Run) -> list[float]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=DECAY)
        down(model, optimizer)
        with run.edit(), torch.no_grad():
            model.weight.fill_(10.0)
        seen = [run.state_dict(ema=True)["weight"].item()]
        down(model, optimizer)
        return [*seen, run.state_dict(ema=True)["weight"].item()]

    assert run_cluster(work, {}).results["worker 0.0"] == pytest.approx([-1, -DECAY + (1 - DECAY) * 9])


def test_rounds_before_an_edit_had_the_values_of_before() -> None:
    """Also where they had left a row, or a parameter, as it was."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 1, sparse=True)
            self.late = nn.Parameter(torch.zeros(1))
            nn.init.zeros_(self.table.weight)

    def work(run: Run) -> Values:
        model = Two().double()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=DECAY)
        for step in range(4):
            optimizer.zero_grad()
            loss = model.table(torch.tensor([0 if step < 2 else 1])).sum()
            (loss + model.late.sum() if step < 2 else loss).backward()
            optimizer.step()
        with run.edit(), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(10.0)
        return run.state_dict(ema=True)

    found = run_cluster(work, {"slicer": "singa"}).results["worker 0.0"]
    falls = DECAY**2 * falling(2) - (1 - DECAY**2) * 2
    assert found["table.weight"][0].item() == found["late"].item() == pytest.approx(falls)
    assert found["table.weight"][1].item() == pytest.approx(-(1 - DECAY) * DECAY - 2 * (1 - DECAY))


# What it costs, and what is refused.


@pytest.mark.parametrize("cluster", [SANDBLASTER, ASYNCHRONOUS["hogwild"]], ids=["sandblaster", "hogwild"])
def test_it_costs_memory_of_servers_when_asked_for_and_no_traffic(cluster: Mapping[str, Any]) -> None:
    start = Case(mlp).model()

    def trained(ema: float | None) -> Report:
        def work(run: Run) -> None:
            model = deepcopy(start)
            model, optimizer = run.prepare(model, sgd(model), ema=ema)
            for _ in run.epochs(1):
                fit(model, optimizer, part(regression(3), run.rank, run.world_size))

        return run_cluster(work, {**cluster, "sync_freq": 1000})

    plain, report = trained(None), trained(DECAY)
    assert report.total("state_bytes") == plain.total("state_bytes") > 0
    for name in plain.links:
        assert report.links[name].traffic == plain.links[name].traffic
    size = sum(parameter.nbytes for parameter in start.parameters())
    groups = cluster.get("nserver_groups", 1)
    assert sum(server._shard.ema_bytes for server in report.servers.values()) == size * groups
    assert all(server._shard.ema_bytes == 0 for server in plain.servers.values())


def test_what_was_not_asked_for_cannot_be_had() -> None:
    def work(run: Run) -> None:
        model = one()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for call in (
            lambda: run.state_dict(ema=True),
            lambda: run.evaluate(lambda: 1, ema=True),
            lambda: run.evaluate(lambda batches: 1, data=range(3), ema=True),
            lambda: run.save("nowhere.safetensors", ema=True),
        ):
            with pytest.raises(UsageError, match=r"ema=0\.999"):
                call()

    run_cluster(work, {})


@pytest.mark.parametrize("decay", [1, 1.5, -0.1, True, float("nan")])
def test_a_decay_that_makes_no_average_is_refused(decay: float) -> None:
    def work(run: Run) -> None:
        model = one()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=decay)

    with pytest.raises(UsageError, match="is no decay"):
        run_cluster(work, {})


def test_workers_agree_on_the_decay() -> None:
    def work(run: Run) -> None:
        model = one()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=0.9 if run.rank else 0.99)

    with pytest.raises(ModelMismatch, match=r"ema=0\.9, there 0\.99"):
        run_cluster(work, SANDBLASTER)
