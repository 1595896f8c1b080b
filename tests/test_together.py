"""Evaluation by all workers: each sample once, one result, and everything as it was afterwards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from math import isinf, isnan
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from cases import (
    ALLREDUCE,
    SANDBLASTER,
    Case,
    Values,
    fit,
    loss_of,
    part,
    plain,
    regression,
    same,
    sgd,
    values_of,
)
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, workers_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import shoal
from shoal import Run
from shoal.errors import LaunchError, PeerFailed, UsageError
from shoal.results import weighted_mean
from shoal.testing import Script, run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

EVERY = SYNCHRONOUS | ASYNCHRONOUS


def one(start: float = 0.0) -> nn.Module:
    """A single number."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, start)
    return model


def prepare(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = one()
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def down(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With SGD at rate 1, a step from w to w − 1."""
    optimizer.zero_grad()
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()


def squares(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Any]:
    """Means over the samples of a part: of (number + weight)², of an indicator, of the weight itself."""
    samples = torch.cat([batch.double() for batch in batches])
    weight = model.weight.item()
    return {
        "square": (samples + weight).square().mean(),
        "even": float((samples % 2 == 0).double().mean()),
        "both": [samples.mean(), weight],
    }


# Which samples, whose result.


@pytest.mark.parametrize("size", [1, 2, 5, 23])
@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
def test_every_sample_counts_once_and_all_get_what_one_would(cluster: Mapping[str, Any], size: int) -> None:
    """Inside the loop each group evaluates for itself, after it all of them together."""
    lock, seen = threading.Lock(), Counter[tuple[Any, int]]()

    def work(run: Run) -> list[Any]:
        model, optimizer = prepare(run)

        def test(batches: Iterable[Tensor], whose: object) -> dict[str, Any]:
            kept = list(batches)
            with lock:
                seen.update((whose, int(number)) for batch in kept for number in batch)
            assert all(len(batch) <= 3 for batch in kept)
            return squares(model, kept)

        results = []
        for _ in run.epochs(2 + run.group):
            down(model, optimizer)
            results.append(run.evaluate(test, run.group, data=range(size), batch_size=3))
        results.append(run.evaluate(test, whose="all", data=range(size), batch_size=3))
        alone = run.evaluate(lambda: squares(model, [torch.arange(size)]))
        return [*results, alone]

    results = run_cluster(work, cluster).results
    groups = cluster.get("nworker_groups", 1)
    calls = {group: 2 + group for group in range(groups)} | {"all": 1}
    assert seen == {(whose, number): calls[whose] for whose in calls for number in range(size)}
    for name, (*inside, after, alone) in results.items():
        for result in inside:
            check_squares(result, size)
            others = [results[other][inside.index(result)] for other in results if other[:9] == name[:9]]
            assert others == [result] * len(others)
        check_squares(after, size)
        assert after == results["worker 0.0"][-2]
        assert after["both"][1] == pytest.approx(float(alone["both"][1]))


def check_squares(result: Mapping[str, Any], size: int) -> None:
    """Equal to what one worker finds on all samples, at the weight that all have found."""
    mean, weight = result["both"]
    samples = torch.arange(size, dtype=torch.float64)
    assert weight == pytest.approx(round(weight), abs=1e-12)  # one value on all workers
    assert mean == pytest.approx(float(samples.mean()), rel=1e-12)
    assert result["square"] == pytest.approx(float((samples + round(weight)).square().mean()), rel=1e-12)
    assert result["even"] == pytest.approx(float((samples % 2 == 0).double().mean()), rel=1e-12)


@given(
    values=st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), min_size=1),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_the_mean_of_parts_is_the_mean_of_all(values: list[tuple[float, bool]], cuts: list[int]) -> None:
    def result(part: list[tuple[float, bool]]) -> Any:
        if not part:
            return None
        return {"x": sum(x for x, _ in part) / len(part), "y": [[sum(y for _, y in part) / len(part)], 3]}

    places = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [values[a:b] for a, b in pairwise(places)]
    found, expected = weighted_mean([(len(p), result(p)) for p in parts]), result(values)
    assert found["x"] == pytest.approx(expected["x"], rel=1e-9, abs=1e-6)
    assert found["y"] == [pytest.approx(expected["y"][0]), pytest.approx(3)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(23)


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


def add_one(samples: list[int]) -> Tensor:
    return torch.tensor(samples) + 1


DATA: dict[str, tuple[Callable[[], Any], set[int]]] = {
    "list": (lambda: list(range(23)), set(range(23))),
    "stream": (Stream, set(range(23))),
    "loader of a stream": (lambda: DataLoader(Stream(), batch_size=4), set(range(23))),
    "shuffled": (lambda: DataLoader(Plain(), batch_size=4, shuffle=True), set(range(23))),
    "drop_last": (lambda: DataLoader(Plain(), batch_size=4, drop_last=True), set(range(23))),
    "collate_fn": (lambda: DataLoader(Plain(), 4, collate_fn=add_one), set(range(1, 24))),
    "sampler": (lambda: DataLoader(Plain(), 4, sampler=SubsetRandomSampler(range(5, 12))), set(range(5, 12))),
    "batch_sampler": (
        lambda: DataLoader(Plain(), batch_sampler=[[1, 2, 3], [4], [5, 6]]),
        {1, 2, 3, 4, 5, 6},
    ),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("cluster", [{}, SANDBLASTER], ids=["single", "sandblaster"])
def test_data_of_every_kind(name: str, cluster: Mapping[str, Any]) -> None:
    make, expected = DATA[name]
    lock, seen = threading.Lock(), list[int]()

    def work(run: Run) -> float:
        prepare(run)
        assert not run._training.loaders and run.global_step == 0

        def test(batches: Any) -> float:
            samples = [int(number) for batch in batches for number in batch]
            assert batches.samples == len(samples)
            with lock:
                seen.extend(samples)
            return sum(samples) / len(samples)

        data = make()
        size = None if isinstance(data, DataLoader) else 4
        result = run.evaluate(test, data=data, batch_size=size)
        assert run.global_step == 0
        return result

    for result in run_cluster(work, cluster).results.values():
        assert result == pytest.approx(sum(expected) / len(expected), rel=1e-12)
    assert sorted(seen) == sorted(expected)


def test_processes_of_a_dataloader_and_its_samples() -> None:
    data = TensorDataset(torch.arange(10))

    def work(run: Run) -> float:
        prepare(run)
        loader = DataLoader(data, batch_size=2, num_workers=2)
        return run.evaluate(lambda batches: torch.cat([b for (b,) in batches]).double().mean(), data=loader)

    assert set(run_cluster(work, {}).results.values()) == {4.5}


def test_a_part_can_be_gone_through_twice_and_left_early() -> None:
    def work(run: Run) -> list[float]:
        prepare(run)

        def twice(batches: Any) -> float:
            mean = sum(float(batch.sum()) for batch in batches) / batches.samples
            squares = sum(float((batch - mean).square().sum()) for batch in batches)
            return squares / batches.samples

        def early(batches: Any) -> float:
            for batch in batches:
                return float(batch.double().mean())
            raise AssertionError

        return [run.evaluate(test, data=range(8), batch_size=2) for test in (twice, early)]

    assert run_cluster(work, {}).results["worker 0.0"] == [5.25, 0.5]
    early = run_cluster(work, {"nworkers_per_group": 2}).results["worker 0.1"][1]
    assert early == (0.5 + 2.5) / 2


# Whose values.


def test_workers_of_a_group_evaluate_one_model_while_other_groups_train() -> None:
    """Then, without a step of their own in between, the next one; no copy outlives their next step."""
    order = ["0 begins", "0.0 looks", "1 steps", "1 has stepped", "0.1 calls"]
    script = Script([*order, *order[1:]])
    cluster = {"nworker_groups": 2, "nworkers_per_group": 2, "server_worker_separate": True}

    def other(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        leads = run.rank_in_group == 0
        for _ in range(2):
            if leads:
                script.turn("1 steps")
            down(model, optimizer)
            if leads:
                script.turn("1 has stepped")

    def work(run: Run) -> list[float]:
        model, optimizer = prepare(run)
        if run.group == 1:
            other(run, model, optimizer)
            return []
        down(model, optimizer)
        if run.rank == 0:
            script.turn("0 begins")
        own, seen = model.weight.item(), []

        def test(batches: Any) -> float:
            if run.rank == 0:
                script.turn("0.0 looks")
            assert [len(batch) for batch in batches] == [2]
            seen.append(model.weight.item())
            return 1.0

        for _ in range(2):
            if run.rank == 1:
                script.turn("0.1 calls")
            assert run.evaluate(test, data=range(4), batch_size=2) == 1
            assert model.weight.item() == own
        down(model, optimizer)
        return seen

    report = run_cluster(work, cluster)
    assert report.results["worker 0.0"] == report.results["worker 0.1"] == [-1, -2]
    (server,) = report.servers.values()
    assert server.rounds is not None and not server.rounds._present._kept


class Noisy(nn.Module):
    """Parameters, running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.frozen(self.body(inputs))  # type: ignore[no-any-return]


@torch.no_grad()
def rude(model: nn.Module, batches: Iterable[Any] = ()) -> float:
    """A test that leaves the model in another mode, its statistics moved and its weights zero."""
    model.train()
    for inputs, _ in batches or regression(1):
        model(inputs)
    model.eval()
    for parameter in model.parameters():
        parameter.zero_()
    return 0.0


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
def test_models_are_afterwards_what_they_were(cluster: Mapping[str, Any], together: bool) -> None:
    models = [Case(Noisy).model() for _ in range(workers_of(cluster))]
    data = TensorDataset(*regression(1)[0])

    def work(run: Run) -> None:
        model = models[run.rank]
        model, optimizer = run.prepare(model, sgd(model))
        model.body[1].eval()  # type: ignore[index]

        def call() -> None:
            before, modes = values_of(model), [m.training for m in model.modules()]
            if together:
                run.evaluate(lambda batches: rude(model, batches), data=data, batch_size=4)
            else:
                run.evaluate(rude, model)
            same(values_of(model), before)
            assert [m.training for m in model.modules()] == modes

        for number in run.epochs(3):
            fit(model, optimizer, part(regression(3), run.rank, run.world_size)[number : number + 1])
            call()
        run.evaluate(lambda: 0)
        call()

    run_cluster(work, cluster)


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_training_and_statistics_go_on_as_if_nothing_was(cluster: Mapping[str, Any]) -> None:
    """Also from the middle of a step, when statistics have moved that its end is to push."""
    start, data = Case(Noisy).model(), TensorDataset(*regression(1)[0])

    def trained(evaluates: bool) -> Values:
        def work(run: Run) -> Values:
            model = deepcopy(start)
            model, optimizer = run.prepare(model, sgd(model))

            def test(batches: Any = ()) -> float:
                model.eval()
                return float(sum(loss_of(model, *batch).detach() for batch in batches))

            for inputs, targets in part(regression(4), run.rank, run.world_size):
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                if evaluates:
                    run.evaluate(test)
                    run.evaluate(test, data=data, batch_size=2)
                optimizer.step()
            return run.state_dict()

        return run_cluster(work, cluster).results["worker 0.0"]  # type: ignore[no-any-return]

    same(trained(True), trained(False))


def test_training_equals_plain_pytorch_with_evaluations_in_between() -> None:
    start = Case().model()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        for batch in part(regression(), run.rank, run.world_size):
            fit(model, optimizer, [batch])
            run.evaluate(lambda batches: float(len(list(batches))), data=range(7))
        return values_of(model)

    for values in run_cluster(work, ALLREDUCE).results.values():
        for name, value in plain(Case()).items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9)


def test_lost_messages_are_asked_for_again() -> None:
    """And the answers are still those that the group's first worker had."""
    sent: Counter[tuple[str, str, Kind, int]] = Counter()

    def judge(header: Header, peer: str) -> Fate:
        if header.kind not in (Kind.PULL, Kind.VALUES) or header.number <= 0:
            return "deliver"
        which = header.sender, peer, header.kind, header.number
        sent[which] += 1
        return "lose" if sent[which] == 1 else "deliver"

    def work(run: Run) -> list[float]:
        model, optimizer = prepare(run)

        def test(batches: Any) -> float:
            assert len(list(batches)) == 2
            return model.weight.item()

        found = []
        for _ in run.epochs(2):
            down(model, optimizer)
            found.append(run.evaluate(test, data=range(4)))
        return found

    cluster = {"nworker_groups": 2, "nworkers_per_group": 2, "server_worker_separate": True}
    report = run_cluster(work, cluster, judge=judge)
    for found in report.results.values():
        assert all(value == round(value) for value in found)
    assert sum(link.fates["lose"] for link in report.links.values()) == len(sent) == 2 * 4 * 2


# What goes wrong.


@pytest.mark.parametrize("after", [False, True], ids=["inside the loop", "after it"])
@pytest.mark.parametrize("cluster", [SANDBLASTER, ASYNCHRONOUS["hogwild"]], ids=["sandblaster", "hogwild"])
def test_one_failure_ends_the_call_for_all_at_once_by_name(cluster: Mapping[str, Any], after: bool) -> None:
    last = 2 if after or cluster is SANDBLASTER else 0
    errors: dict[int, BaseException] = {}
    begun = threading.Barrier(3 if last else 1, timeout=20)

    def work(run: Run) -> None:
        model, optimizer = prepare(run)

        def test(batches: Any) -> float:
            for number, _ in enumerate(batches):
                if number == 0:
                    begun.wait()
                    if run.rank == last:
                        return 1 / 0
                assert number < 1_000_000, "it goes on"
            raise AssertionError("it went on to the end")

        if after:
            for _ in run.epochs(1):
                down(model, optimizer)
        elif run.group and cluster is not SANDBLASTER:
            return
        try:
            run.evaluate(test, data=range(10_000_000))
        except Exception as error:
            errors[run.rank] = error

    run_cluster(work, cluster)
    assert isinstance(errors.pop(last), ZeroDivisionError)
    name = f"worker {last}.0" if cluster is not SANDBLASTER else "worker 0.2"
    for error in errors.values():
        assert isinstance(error, PeerFailed)
        assert f"the evaluation failed on {name}: ZeroDivisionError: division by zero" in str(error)
    assert len(errors) == (2 if last else 0)


def ok(batches: Iterable[Any]) -> float:
    return float(len(list(batches)))


MISTAKES: dict[str, tuple[Callable[[Run], Any], str]] = {
    "no samples": (lambda run: run.evaluate(ok, data=[]), "no samples"),
    "text": (lambda run: run.evaluate(lambda b: str(ok(b)), data=range(9)), "have no mean: str"),
    "nothing": (
        lambda run: run.evaluate(lambda b: print(ok(b) * 0), data=range(9)),
        "have no mean: NoneType",
    ),
    "other keys": (
        lambda run: run.evaluate(lambda b: {str(run.rank): ok(b)}, data=range(9)),
        "no mean: dict",
    ),
    "other lengths": (lambda run: run.evaluate(lambda b: [ok(b)] * run.rank, data=range(9)), "no mean: list"),
    "an object": (lambda run: run.evaluate(lambda b: [ok(b), run], data=range(9)), "cannot be sent"),
    "no look": (lambda run: run.evaluate(lambda b: 1.0, data=range(9)), "not looked at its batches"),
    "size alone": (lambda run: run.evaluate(lambda: 1.0, batch_size=3), "batch_size without data"),
    "size twice": (
        lambda run: run.evaluate(ok, data=DataLoader(Plain()), batch_size=3),
        "and keywords: batch_size",
    ),
    "a run's loader": (lambda run: run.evaluate(ok, data=run.loader(Plain())), "dealt to workers already"),
    "an iterator": (lambda run: run.evaluate(ok, data=iter([1])), "read once only"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str) -> None:
    call, words = MISTAKES[name]
    errors: list[BaseException] = []

    def work(run: Run) -> None:
        prepare(run)
        try:
            call(run)
        except (UsageError, PeerFailed) as error:
            errors.append(error)

    run_cluster(work, SANDBLASTER)
    assert len(errors) == 3
    assert any(isinstance(error, UsageError) for error in errors)
    assert all(words in str(error) for error in errors)


@pytest.mark.parametrize(
    "cluster", [{}, SANDBLASTER, ASYNCHRONOUS["hogwild"]], ids=["single", "sandblaster", "hogwild"]
)
def test_what_is_no_number_is_none_for_everyone(cluster: Mapping[str, Any]) -> None:
    def work(run: Run) -> list[float]:
        model, optimizer = prepare(run)
        for _ in run.epochs(1):
            down(model, optimizer)
        nan = torch.tensor(float("nan"))
        return [
            run.evaluate(lambda: nan),
            run.evaluate(lambda batches: nan * ok(batches), data=range(2)),
            run.evaluate(lambda: {"loss": -float("inf")})["loss"],
        ]

    for one, all_, infinite in run_cluster(work, cluster).results.values():
        assert isnan(one) and isnan(all_) and isinf(infinite)


# Between processes.


def test_processes_evaluate_together(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    first, *others = shoal.launch(jobs.judge, "downpour", (str(path),))
    for other in others:
        assert all(other[key] == first[key] for key in ("after", "whole", "ema", "average"))
    assert first["after"]["loss"] == pytest.approx(first["whole"], rel=1e-6)
    assert first["ema"]["loss"] == pytest.approx(first["average"], rel=1e-6)
    assert first["average"] != first["whole"]
    assert first["after"]["samples"] == pytest.approx((2 * 2 + 2 * 2 + 2 * 2 + 1) / 7)
    assert first["best"] == [True, False, False] and path.exists()


def test_a_process_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="this part fails"):
        shoal.launch(jobs.judge, "sandblaster", (str(tmp_path / "best.safetensors"), True))
