"""Evaluation and files: whose values, who computes, what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    SANDBLASTER,
    TOPOLOGIES,
    WIDTH,
    Case,
    Values,
    adamw,
    close,
    fit,
    large,
    loss_of,
    mlp,
    part,
    plain,
    regression,
    same,
    sgd,
    values_of,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal import Run
from shoal.errors import PeerFailed, UsageError
from shoal.testing import Script, run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

DOWNPOUR = {
    "nworker_groups": 2,
    "nworkers_per_group": 2,
    "nservers_per_group": 2,
    "server_worker_separate": True,
}
HYBRID = {"nworker_groups": 4, "nserver_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2}
EVERY = {
    **TOPOLOGIES,
    "downpour": DOWNPOUR,
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3},
    "hybrid": HYBRID,
}


def one() -> nn.Module:
    """A single number."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    return model


def down(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With SGD at rate 1, a step from w to w − 1."""
    optimizer.zero_grad()
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_inside_the_loop_worker_0_evaluates_and_training_goes_on_as_if_nothing_was(
    cluster: Mapping[str, Any],
) -> None:
    start, batches = Case(large).model(), regression()
    who: Counter[int] = Counter()

    def work(run: Run) -> tuple[list[Any], Values]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, adamw(model))
        results = []

        def test(factor: float, *, name: str) -> dict[str, Any]:
            who[run.rank] += 1
            model.eval()
            with torch.no_grad():
                loss = loss_of(model, *batches[0])
            model.train()
            return {name: loss * factor, "list": [1, (2, "x")], "none": None}

        for number in run.epochs(5):
            if number == 3:  # gradients are on their way, the step is not over
                inputs, targets = part(batches, run.rank, run.world_size)[number]
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                results.append(run.evaluate(test, 2.0, name="loss"))
                optimizer.step()
                continue
            fit(model, optimizer, part(batches, run.rank, run.world_size)[number : number + 1])
            results.append(run.evaluate(test, 2.0, name="loss"))
        return results, values_of(model)

    report = run_cluster(work, cluster)
    assert set(who) == {0}
    expected, model = [], deepcopy(start)
    optimizer = adamw(model)
    for number, batch in enumerate(batches):
        if number == 3:
            expected.append(2 * loss_of(model, *batches[0]).item())
        fit(model, optimizer, [batch])
        if number != 3:
            expected.append(2 * loss_of(model, *batches[0]).item())
    for results, values in report.results.values():
        close(values, plain(Case(large, adamw)))
        assert [float(result["loss"]) for result in results] == pytest.approx(expected, abs=1e-9)
        assert all(list(result["list"][1]) == [2, "x"] and result["none"] is None for result in results)


def test_inside_the_loop_a_group_sees_the_servers_values_and_then_its_own_again() -> None:
    script = Script(["0 has stepped", "1 begins", "1 has stepped", "0 looks"])

    def work(run: Run) -> list[float]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        if run.group == 1:
            script.turn("1 begins")
            down(model, optimizer)
            down(model, optimizer)
            script.turn("1 has stepped")
            return []
        down(model, optimizer)
        script.turn("0 has stepped")
        seen = [model.weight.item()]
        script.turn("0 looks")
        seen += [run.evaluate(lambda: model.weight.item()), model.weight.item()]
        seen.append(run.state_dict()["weight"].item())
        down(model, optimizer)
        return [*seen, model.weight.item()]

    report = run_cluster(work, {"nworker_groups": 2, "server_worker_separate": True})
    assert report.results["worker 0.0"] == [-1, -3, -1, -3, -4]


@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
def test_after_the_loop_worker_00_evaluates_once_for_everyone(cluster: Mapping[str, Any]) -> None:
    who: Counter[int] = Counter()

    def work(run: Run) -> tuple[float, float, float]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for number in run.epochs(3):
            down(model, optimizer)
            if run.group == 0 or number == 0:  # groups need not evaluate equally often
                run.evaluate(lambda: model.weight.item())

        def test() -> float:
            who[run.rank] += 1
            return model.weight.item()

        return run.evaluate(test), run.evaluate(test), model.weight.item()

    report = run_cluster(work, cluster)
    steps = 3 * cluster.get("nworker_groups", 1)
    assert who == {0: 2}
    assert set(report.results.values()) == {(-steps, -steps, -steps)}


def test_training_again_after_an_evaluation() -> None:
    def work(run: Run) -> list[float]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        seen = []
        for _ in range(2):
            for _ in run.epochs(2):
                down(model, optimizer)
            seen.append(run.evaluate(lambda: model.weight.item()))
        return seen

    for cluster in (DOWNPOUR, SANDBLASTER, EVERY["hogwild"]):
        groups = cluster.get("nworker_groups", 1)
        for seen in run_cluster(work, cluster).results.values():
            assert seen == [-2 * groups, -4 * groups]


def test_errors_of_an_evaluation_reach_everyone() -> None:
    errors: dict[int, BaseException] = {}

    def failing(result: Any) -> Any:
        def work(run: Run) -> None:
            model = mlp()
            run.prepare(model, sgd(model))
            try:
                run.evaluate(lambda: result())
            except Exception as error:
                errors[run.rank] = error

        errors.clear()
        run_cluster(work, SANDBLASTER)
        return errors

    found = failing(lambda: 1 / 0)
    assert isinstance(found[0], ZeroDivisionError)
    assert all(isinstance(found[r], PeerFailed) and "division by zero" in str(found[r]) for r in (1, 2))
    found = failing(lambda: object())
    assert isinstance(found[0], UsageError) and "return numbers" in str(found[0])
    assert isinstance(found[1], PeerFailed)


class Whole(nn.Module):
    """Trained, frozen, tied and unowned parameters, and buffers that are saved or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.body[0].weight if WIDTH == 8 else self.tied.weight
        self.head = nn.Linear(8, 4)
        self.empty = nn.Parameter(torch.empty(0))
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.tied(self.frozen(self.body(inputs)))) + self.conv.weight.sum() * 0.01


def whole_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_the_state_dict_is_complete_current_and_plainly_named(
    cluster: Mapping[str, Any], tmp_path: Path
) -> None:
    start, batches = Case(Whole).model(), regression(2)

    def work(run: Run) -> tuple[Any, ...]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, whole_sgd(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))
        inside = run.state_dict()
        run.save(tmp_path / "model.safetensors")
        for tensor in inside.values():
            tensor.zero_()  # copies: nothing happens to the model
        return values_of(model), run.state_dict()

    results = run_cluster(work, cluster).results
    values, found = results["worker 0.0"]
    assert list(found) == list(start.state_dict())
    same(found, values)
    assert all(found[name].shape == tensor.shape for name, tensor in start.state_dict().items())
    same(load_file(tmp_path / "model.safetensors"), found)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert all(not other[1] for name, other in results.items() if name != "worker 0.0")
    fresh = Whole().double()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(fresh.eval()(batches[0][0]), _with(start, values).eval()(batches[0][0]))


def _with(model: nn.Module, values: Values) -> nn.Module:
    model = deepcopy(model)
    model.load_state_dict(values)
    return model


@pytest.mark.parametrize(
    "cluster", [DOWNPOUR, HYBRID, EVERY["hogwild"]], ids=["downpour", "hybrid", "hogwild"]
)
def test_after_the_loop_files_hold_what_all_groups_made_together(
    cluster: Mapping[str, Any], tmp_path: Path
) -> None:
    def work(run: Run) -> dict[str, Tensor]:
        model = one()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in run.epochs(4):
            down(model, optimizer)
        run.save(tmp_path / "model.safetensors")
        return run.state_dict()

    results = run_cluster(work, cluster).results
    expected = -4.0 * cluster["nworker_groups"]
    assert load_file(tmp_path / "model.safetensors")["weight"].item() == expected
    assert results["worker 0.0"]["weight"].item() == expected
    assert results["worker 1.0"] == {}


def test_several_models_and_compiled_ones_have_plain_names() -> None:
    def work(run: Run) -> list[str]:
        first, second = nn.Linear(2, 2), torch.compile(nn.Linear(2, 1), backend="eager")
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        run.prepare(first, second, optimizer)
        return list(run.state_dict())

    assert run_cluster(work, {}).results["worker 0.0"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_nothing_prepared_is_an_error() -> None:
    def work(run: Run) -> None:
        for call in (lambda: run.evaluate(lambda: 1), run.state_dict):
            with pytest.raises(UsageError, match="nothing is prepared yet"):
                call()
        run.prepare(mlp())  # is wrong too, and so ends the cluster

    with pytest.raises(UsageError, match="no optimizer"):
        run_cluster(work, {})


def test_present_values_say_of_which_version_they_are() -> None:
    told: list[tuple[int, int]] = []

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.VALUES and header.number > 0:
            told.append((header.version, header.lsn))
        return "deliver"

    def work(run: Run) -> None:
        model = mlp()
        model, optimizer = run.prepare(model, sgd(model))
        for _ in run.epochs(1):
            fit(model, optimizer, regression(2, torch.float32))
            run.evaluate(lambda: 0.0)

    run_cluster(work, SANDBLASTER, judge=judge)
    assert told and {version for version, _ in told} == {2} and all(lsn > 0 for _, lsn in told)
