"""What a script may ask of its run: hold, accumulate, weight, edit, stop; and values between workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    GROUPS,
    SANDBLASTER,
    TOPOLOGIES,
    Batch,
    Case,
    Values,
    adds_up,
    close,
    dropped,
    large,
    loss_of,
    part,
    plain,
    regression,
    same,
    values_of,
)
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.errors import ParameterEdited, UsageError
from shoal.testing import Report, run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

DOWNPOUR = {"nworker_groups": 2, "nworkers_per_group": 2, "server_worker_separate": True}
HOGWILD = {"nworker_groups": 3, "nserver_groups": 3}

Body = Callable[[Run, nn.Module, Optimizer, Sequence[Batch]], None]


def clustered(
    case: Case, cluster: Mapping[str, Any], body: Body, judge: Callable[[Header, str], Fate] | None = None
) -> tuple[list[Values], Report]:
    """Each worker runs `body` on its part of the joined batches."""
    start, batches = case.model(), regression(case.steps)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, case.optimizer(model))
        body(run, model, optimizer, part(batches, run.rank, run.world_size))
        return values_of(model)

    report = run_cluster(work, cluster, judge=judge)
    return [report.results[name] for name in sorted(report.results)], report


class Shares:
    """A judge that lets everything pass and counts each worker's shares by step."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, int]] = Counter()

    def __call__(self, header: Header, peer: str) -> Fate:
        if header.kind is Kind.SHARE:
            self.sent[header.sender, header.step] += 1
        return "deliver"


def halves(batches: Sequence[Batch]) -> list[list[Batch]]:
    return [[tuple(t[k::2] for t in batch) for k in range(2)] for batch in batches]  # type: ignore[misc]


def accumulating(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The oracle of the next test: two backwards for each step."""
    for parts in halves(batches):
        optimizer.zero_grad()
        for inputs, targets in parts:
            (loss_of(model, inputs, targets) / 2).backward()
        optimizer.step()


@pytest.mark.parametrize("cluster", [TOPOLOGIES["single"], {"nworkers_per_group": 2}], ids=["1", "2"])
def test_accumulate_sends_each_gradient_once_and_early(cluster: dict[str, Any]) -> None:
    case, shares, early = Case(build=large, loop=accumulating), Shares(), []

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for step, (first, second) in enumerate(halves(batches), start=1):
            optimizer.zero_grad()
            with run.accumulate():
                (loss_of(model, *first) / 2).backward()
            me = f"worker {run.group}.{run.rank_in_group}"
            assert not shares.sent[me, step]
            (loss_of(model, *second) / 2).backward()
            early.append(shares.sent[me, step])
            optimizer.step()

    values, report = clustered(case, cluster, body, shares)
    for mine in values:
        close(mine, plain(case))
    assert all(early)  # the shares left during the last backward
    assert len(set(shares.sent.values())) == 1
    assert dropped(report, "superseded") == 0
    adds_up(report)


def test_without_accumulate_the_first_part_is_superseded_and_later_steps_wait() -> None:
    case, shares = Case(build=large, loop=accumulating), Shares()

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        accumulating(model, optimizer, batches)

    values, report = clustered(case, {}, body, shares)
    close(values[0], plain(case))
    assert shares.sent["worker 0.0", 1] == 2 * shares.sent["worker 0.0", 2]
    assert dropped(report, "superseded") == shares.sent["worker 0.0", 2]


def test_accumulate_gives_the_early_start_back() -> None:
    shares, early = Shares(), []

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            for _ in range(2 if step == 1 else 1):
                if step == 3:
                    with run.accumulate():
                        pass
                loss_of(model, *batch).backward()
            early.append(shares.sent["worker 0.0", step])
            optimizer.step()

    clustered(Case(build=large), {}, body, shares)
    assert [bool(count) for count in early] == [True, False, True, True, True]


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
def test_gradients_may_be_changed_while_they_are_held(cluster: dict[str, Any]) -> None:
    """Scaling by a constant commutes with averaging, so plain PyTorch is the oracle."""

    def scaled(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        run.hold()
        scaled(model, optimizer, batches)

    case, shares = Case(build=large, loop=scaled), Shares()
    values, report = clustered(case, cluster, body, shares)
    for mine in values:
        close(mine, plain(case))
    assert dropped(report, "superseded") == 0


def test_a_held_share_leaves_at_step() -> None:
    shares, early = Shares(), []

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            if step % 2:
                with run.hold():
                    loss_of(model, *batch).backward()
            else:
                loss_of(model, *batch).backward()
            early.append(shares.sent["worker 0.0", step])
            optimizer.step()

    values, _ = clustered(Case(build=large), {}, body, shares)
    close(values[0], plain(Case(build=large)))
    assert [bool(count) for count in early] == [False, True, False, True, False]


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
def test_weights_make_unequal_parts_equal_to_the_joined_batch(cluster: dict[str, Any]) -> None:
    cuts = [0, 1, 5, 12]

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for inputs, targets in regression():
            mine = slice(cuts[run.rank], cuts[run.rank + 1])
            run.weight(len(inputs[mine]))
            optimizer.zero_grad()
            loss_of(model, inputs[mine], targets[mine]).backward()
            optimizer.step()

    values, _ = clustered(Case(), cluster, body)
    for mine in values:
        close(mine, plain(Case()))


def test_a_weight_holds_for_one_step_and_goes_before_the_loader() -> None:
    data = TensorDataset(torch.ones(8, 8, dtype=torch.float64), torch.ones(8, 4, dtype=torch.float64))

    def work(run: Run) -> None:
        model = nn.Linear(8, 4).double()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = run._training.batch
        loader = run.loader(data, batch_size=2)
        for number, (inputs, targets) in enumerate(loader):
            if number == 1:
                run.weight(7)
            assert batch.weight == (7 if number == 1 else 2)
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()

    run_cluster(work, {})


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="-1"):
        run_cluster(lambda run: run.weight(-1), {})


# Parameters changed by the script.


def clamped(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_clamp_inside_edit_equals_plain_pytorch(cluster: dict[str, Any]) -> None:
    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
            with run.edit(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.1, 0.1)

    case = Case(build=large, loop=clamped)
    values, _ = clustered(case, cluster, body)
    for mine in values:
        close(mine, plain(case))
        same(mine, values[0])


def test_edits_of_several_groups_are_added() -> None:
    def work(run: Run) -> Values:
        model = nn.Linear(2, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in run.epochs(1):
            with run.edit(), torch.no_grad():
                model.weight += run.group + 1
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            optimizer.step()
        run.evaluate(lambda: None)
        return values_of(model)

    for cluster in (DOWNPOUR, HOGWILD):
        report = run_cluster(work, cluster)
        groups = cluster["nworker_groups"]
        expected = groups * (groups + 1) / 2 - groups
        for values in report.results.values():
            assert torch.equal(values["weight"], torch.full((2, 2), expected, dtype=torch.float64))


def test_an_edit_waits_until_the_whole_group_has_its_values() -> None:
    """Else a peer could be sent values that are edited already, and would edit them once more."""
    held, entered, early = [], threading.Event(), []

    def judge(header: Header, peer: str) -> Fate:
        late = header.kind is Kind.VALUES and peer == "worker 0.1" and header.step == 1
        return "hold" if late else "deliver"

    def work(run: Run) -> None:
        model = nn.Linear(2, 2)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        if run.rank == 0:
            threading.Thread(target=release, daemon=True).start()
        optimizer.step()
        with run.edit():
            entered.set()

    def release() -> None:
        early.append(entered.wait(1))
        for link in held:
            link.open()

    cluster = {"nworkers_per_group": 2, "server_worker_separate": True}
    run_cluster(work, cluster, judge=judge, links=lambda links: held.append(links["server 0.0"]))
    assert early == [False]


def test_without_edit_a_clamp_is_an_error_that_names_the_way() -> None:
    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        clamped(model, optimizer, batches)

    with pytest.raises(ParameterEdited, match=r"run\.edit"):
        clustered(Case(), SANDBLASTER, body)


# An early stop.


@pytest.mark.parametrize(
    "cluster", [SANDBLASTER, DOWNPOUR, HOGWILD], ids=["sandblaster", "downpour", "hogwild"]
)
@pytest.mark.parametrize("endless", ["epochs", "steps"])
def test_one_worker_stops_all_groups(cluster: dict[str, Any], endless: str) -> None:
    data = TensorDataset(torch.ones(60, 8), torch.ones(60, 4))

    def work(run: Run) -> int:
        model = nn.Linear(8, 4)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = run.loader(data, batch_size=2)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            if run.rank == run.world_size - 1 and run.global_step == 5:
                run.stop()

        if endless == "epochs":
            for _ in run.epochs(10**6):
                for batch in loader:
                    step(*batch)
        else:
            for batch in run.steps(loader, 10**9):
                step(*batch)
        assert run.evaluate(lambda: 7) == 7
        taken = run._training.step_of()
        for _ in run.epochs(1):  # a stop is for one loop
            step(*next(iter(loader)))
        assert run._training.step_of() == taken + 1
        return taken

    report = run_cluster(work, cluster)
    assert min(report.results.values()) >= 1
    last = f"worker {cluster.get('nworker_groups', 1) - 1}."
    group = {steps for name, steps in report.results.items() if name.startswith(last)}
    assert group == {6}  # asked after the fifth step, said with the sixth
    adds_up(report)


# Between workers.


def test_mean_gather_barrier_shard_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    def work(run: Run) -> None:
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        r = run.rank_in_group
        assert run.mean(float(r)) == 1.0
        assert run.gather({"rank": r, "group": run.group}) == [
            {"rank": k, "group": run.group} for k in range(3)
        ]
        assert torch.equal(run.mean(torch.full((2,), float(r))), torch.ones(2))
        assert torch.equal(
            torch.stack(run.gather(torch.arange(2) + r)), torch.tensor([[0, 1], [1, 2], [2, 3]])
        )
        run.barrier()
        assert list(run.shard(range(12))) == list(range(run.rank, 12, 6))
        assert run.local_rank == run.rank
        run.print("once")
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), 1)
        assert run.track("scheduler", scheduler) is scheduler
        with pytest.raises(UsageError, match="state_dict"):
            run.track("number", 3)
        with pytest.raises(UsageError, match="threads"):
            _ = run.process_group
        with pytest.raises(UsageError, match="sent to other workers"):
            run.gather(object())

    run_cluster(work, {"nworker_groups": 2, "nworkers_per_group": 3})
    assert capsys.readouterr().out == "once\n"
