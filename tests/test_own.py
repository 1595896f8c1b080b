"""One worker beside its server: no message, no copy, and all that links would do, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import OPTIMIZERS, STEPS, Step, model_of, plain_step
from torch import nn

from shoal.errors import GradientEdited, NonFiniteGradients, ParameterEdited
from shoal.run import Run
from shoal.testing import Report, run_cluster

BEGIN_AND_END = 3
"""Messages that a worker sends its server all the same: a greeting, that its loop has ended, a farewell."""


def trained(
    step: Step, make: Callable[[Any], torch.optim.Optimizer], messages: bool, steps: int = 6
) -> Report:
    def work(run: Run) -> dict[str, Any]:
        model = model_of()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        run.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in run.epochs(steps):
            step(run, model, optimizer, torch.randn(12, 8, generator=generator))
            scheduler.step()
        saved = {name: tensor.clone() for name, tensor in run.state_dict().items()}
        assert run.evaluate(lambda: model[3].weight.sum().item()) == model[3].weight.sum().item()
        return saved | {f"model.{name}": tensor for name, tensor in model.state_dict().items()}

    return run_cluster(work, {}, messages=messages)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_ends_where_links_end(name: str, optimizer: str) -> None:
    linked, own = (trained(STEPS[name], OPTIMIZERS[optimizer], messages) for messages in (True, False))
    wanted, found = linked.results["worker 0.0"], own.results["worker 0.0"]
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        assert torch.equal(value, found[key]), key
    assert (
        linked.events["worker 0.0"].last("finished")["final"]
        == own.events["worker 0.0"].last("finished")["final"]
    )


@pytest.mark.parametrize("name", ["plain_step", "unused", "infinite", "weightless"])
def test_the_accounts_are_those_of_links(name: str) -> None:
    def without_norm(run: Run) -> None:
        model = nn.Sequential(nn.Linear(8, 300), nn.Identity(), nn.Identity(), nn.Linear(300, 4))
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        run.prepare(model, optimizer)
        for _ in run.epochs(6):
            STEPS[name](run, model, optimizer, torch.ones(12, 8))

    linked, own = (run_cluster(without_norm, {}, messages=messages) for messages in (True, False))
    for field in ("pushed", "applied", "dropped", "rounds", "staleness", "parameters", "duplicate"):
        assert (
            linked.events["server 0.0"].last("finished")[field]
            == own.events["server 0.0"].last("finished")[field]
        )
    state = own.events["server 0.0"].last("finished")["state_bytes"]
    assert state == linked.events["server 0.0"].last("finished")["state_bytes"]
    assert own.links["worker 0.0"].fates["deliver"] == BEGIN_AND_END
    assert linked.links["worker 0.0"].fates["deliver"] > BEGIN_AND_END
    assert not sum(own.events["worker 0.0"].last("finished")["traffic"].values())


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam])
def test_a_table_is_stepped_by_its_touched_rows(make: Any, limit: float | None) -> None:
    """Rows that come more than once are summed first, and clipped then."""

    def work(run: Run) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Embedding(50, 4, sparse=True)
        optimizer = make(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        for step in run.epochs(4):
            optimizer.zero_grad()
            model(torch.tensor([1, step, 1, step, 1])).square().sum().backward()
            if limit is not None:
                run.clip_grad_value_(limit)
            optimizer.step()
        return run.state_dict()["weight"]

    linked, own = (
        run_cluster(work, {}, messages=messages).results["worker 0.0"] for messages in (True, False)
    )
    assert torch.equal(linked, own)


def test_the_state_stays_the_optimizers_own() -> None:
    def work(run: Run) -> int:
        model = model_of()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        run.prepare(model, optimizer)
        for _ in run.epochs(2):
            plain_step(run, model, optimizer, torch.ones(12, 8))
        return len(optimizer.state_dict()["state"])

    assert run_cluster(work, {}, messages=False).results["worker 0.0"] == 6


def prepared(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of()
    return run.prepare(model, OPTIMIZERS["SGD"](model.parameters()))


def two_steps(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in run.epochs(2):
        plain_step(run, model, optimizer, torch.ones(12, 8))


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def edit_unseen(model: nn.Module) -> None:
    model[0].weight.data.add_(1)


@pytest.mark.parametrize("change", [edit, edit_unseen])
def test_a_changed_parameter_is_the_error_that_it_is_elsewhere(change: Callable[[nn.Module], None]) -> None:
    def work(run: Run) -> None:
        model, optimizer = prepared(run)
        plain_step(run, model, optimizer, torch.ones(12, 8))
        change(model)
        plain_step(run, model, optimizer, torch.ones(12, 8))

    with pytest.raises(ParameterEdited, match=r"parameter 0\.weight was changed by the script"):
        run_cluster(work, {}, messages=False)


def test_a_gradient_changed_after_clipping_is_an_error() -> None:
    def work(run: Run) -> None:
        model, optimizer = prepared(run)
        model(torch.ones(12, 8)).sum().backward()
        run.clip_grad_norm_(1.0)
        model[0].weight.grad.mul_(2)
        optimizer.step()

    with pytest.raises(GradientEdited, match="changed after clipping"):
        run_cluster(work, {}, messages=False)


def test_too_many_steps_without_a_finite_gradient_are_an_error() -> None:
    def work(run: Run) -> None:
        model, optimizer = prepared(run)
        for _ in run.epochs(200):
            optimizer.zero_grad()
            (model(torch.ones(12, 8)).sum() * float("nan")).backward()
            optimizer.step()

    with pytest.raises(NonFiniteGradients):
        run_cluster(work, {}, messages=False)


@pytest.mark.parametrize(
    "cluster",
    [
        {"nworkers_per_group": 2, "nservers_per_group": 2},
        {"server_worker_separate": True},
        {"nworker_groups": 2, "nserver_groups": 1},
        {"server_dtype": "float32"},
        {"data": "leased"},
        {"wire_dtype": "bfloat16"},
    ],
)
def test_whoever_is_not_alone_has_links(cluster: dict[str, Any]) -> None:
    report = run_cluster(two_steps, cluster, messages=False)
    assert all(report.links[name].fates["deliver"] > 4 for name in report.results)


def test_groups_that_exchange_nothing_keep_their_own() -> None:
    report = run_cluster(two_steps, {"nworker_groups": 2, "nserver_groups": 0}, messages=False)
    assert [report.links[name].fates["deliver"] for name in sorted(report.results)] == [BEGIN_AND_END] * 2
