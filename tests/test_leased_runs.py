"""Clusters whose groups lease their data: a quick group takes more, and every sample is still seen once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from cases import Case, adds_up, loss_of, same, sgd, values_of
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset
from toys import ASKING, PATIENT, config

import shoal
from shoal import Run
from shoal.config import Cluster, Config, Timeouts
from shoal.data import Loader
from shoal.errors import ProtocolError, UsageError, WaitTimeout
from shoal.schedule import Schedules
from shoal.testing import Report, run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

SAMPLES = 130
WAIT = 20.0

DOWNPOUR: dict[str, Any] = {
    "nworker_groups": 2,
    "nworkers_per_group": 2,
    "nservers_per_group": 2,
    "data": "leased",
}
HYBRID: dict[str, Any] = {"nworker_groups": 4, "nserver_groups": 2, "nworkers_per_group": 1, "data": "leased"}

generator = torch.Generator().manual_seed(7)
DATA = TensorDataset(
    torch.arange(SAMPLES),
    torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64),
    torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
)
START = Case().model()

Seen = list[list[int]]


class Trainer:
    """A worker's model on the shared data, and the samples of each of its batches by epoch."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.run, self.seen = run, list[list[list[int]]]()
        self.model = deepcopy(START)
        self.model, self.optimizer = run.prepare(self.model, sgd(self.model))
        self.loader = run.loader(DATA, batch_size=2, **options)

    def batches(self, source: Iterator[Any] | Loader | None = None) -> Iterator[None]:
        """Trains on one batch after the other."""
        self.seen.append([])
        for numbers, inputs, targets in source or self.loader:
            self.step(numbers, inputs, targets)
            yield

    def step(self, numbers: Tensor, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, inputs, targets).backward()
        self.optimizer.step()
        self.seen[-1].append(numbers.tolist())


def by_worker(report: Report) -> dict[str, list[Seen]]:
    """What each worker saw: its batches by epoch."""
    return {name: result for name, result in sorted(report.results.items())}


def counted(report: Report, epoch: int) -> Counter[int]:
    seen = by_worker(report).values()
    return Counter(n for epochs in seen for batch in epochs[epoch] for n in batch)


def once(report: Report, epochs: int) -> None:
    """Every sample is seen once an epoch, by whichever worker; workers of a group take equally many steps."""
    for epoch in range(epochs):
        assert counted(report, epoch) == Counter(range(SAMPLES))
    for name, seen in by_worker(report).items():
        assert list(map(len, seen)) == list(map(len, report.results[f"{name[:-1]}0"]))
    adds_up(report)


class Gate:
    """Worker group 1 begins, then stands until group 0 has come to its end."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def work(self, run: Run, epochs: int = 2) -> list[Seen]:
        trainer = Trainer(run)
        if run.group == 0:
            assert self.begun.wait(WAIT)
        for _ in run.epochs(epochs):
            for _ in trainer.batches():
                if run.group == 1:
                    self.begun.set()
                    assert self.ended.wait(WAIT)
        if run.group == 0:
            self.ended.set()
        return trainer.seen


def test_a_group_that_stands_keeps_one_block_and_the_other_takes_the_rest() -> None:
    report = run_cluster(Gate().work, config(**DOWNPOUR))
    once(report, epochs=2)
    steps = {name: [len(epoch) for epoch in seen] for name, seen in by_worker(report).items()}
    # 33 batches of 4: a block of an eighth of half of them is two.
    assert steps["worker 1.0"] == [2, 0] and steps["worker 0.0"] == [31, 33]


def test_the_common_end_is_the_models_of_all_groups() -> None:
    gate = Gate()

    def work(run: Run) -> Any:
        gate.work(run)
        return run.evaluate(lambda: float(run.global_step))

    report = run_cluster(work, config(**DOWNPOUR))
    assert set(report.results.values()) == {64.0}
    assert report.total("rounds") > 0


def test_a_group_that_takes_everything_trains_as_a_single_group_does() -> None:
    ended = threading.Event()

    def work(run: Run) -> Any:
        trainer = Trainer(run)
        if run.group == 1:
            assert ended.wait(WAIT)
        for _ in run.epochs(2):
            for _ in trainer.batches():
                pass
        values = values_of(trainer.model)
        if run.group == 0:
            run.barrier()
            ended.set()
        return trainer.seen, values

    leased = run_cluster(work, config(**DOWNPOUR))
    for data in ("dealt", "leased"):
        alone = run_cluster(work, config(**{**DOWNPOUR, "nworker_groups": 1, "data": data}))
        for name, (seen, values) in alone.results.items():
            assert leased.results[name][0] == seen and seen[1]
            same(leased.results[name][1], values)
    assert leased.results["worker 1.0"][0] == [[], []]


def leisurely(run: Run) -> list[Seen]:
    """Three epochs at a pace that changes, with an evaluation now and then."""
    trainer, chance = Trainer(run), random.Random(time.perf_counter_ns() + run.rank)
    for _ in run.epochs(3):
        for _ in trainer.batches():
            end = time.perf_counter() + chance.random() * (0.004 if run.group else 0.001)
            while time.perf_counter() < end:
                pass
            if len(trainer.seen[-1]) % 7 == 0:
                run.evaluate(lambda: 1)
    return trainer.seen


@pytest.mark.parametrize("block", [DOWNPOUR, {**DOWNPOUR, "max_delay": 1}, {**DOWNPOUR, "warmup_steps": 5}])
def test_groups_that_run_beside_each_other_see_each_sample_once(block: dict[str, Any]) -> None:
    once(run_cluster(leisurely, config(**block)), epochs=3)


def test_each_server_group_leases_its_part_to_its_own_groups() -> None:
    report = run_cluster(leisurely, config(**HYBRID))
    once(report, epochs=3)
    seen = by_worker(report)
    for epoch in range(3):
        halves = [
            {n for group in groups for batch in seen[f"worker {group}.0"][epoch] for n in batch}
            for groups in ((0, 1), (2, 3))
        ]
        assert [len(half) for half in halves] == [SAMPLES // 2] * 2


def test_a_server_group_of_one_worker_group_deals() -> None:
    def work(run: Run) -> Any:
        trainer = Trainer(run)
        length = len(trainer.loader)
        for _ in run.epochs(1):
            for _ in trainer.batches():
                pass
        return length, trainer.seen

    hogwild: dict[str, Any] = {"nworker_groups": 2, "nserver_groups": 2}
    results = [run_cluster(work, config(**hogwild, data=data)).results for data in ("leased", "dealt")]
    assert results[0] == results[1] and results[0]["worker 1.0"][0] == 33


def test_each_group_takes_the_steps_that_it_is_told_to() -> None:
    def work(run: Run) -> Any:
        trainer = Trainer(run)
        for count in (3, 20):
            for _ in trainer.batches(run.steps(trainer.loader, count)):
                pass
        return trainer.seen

    report = run_cluster(work, config(**DOWNPOUR))
    assert {len(seen[0]) for seen in by_worker(report).values()} == {3}
    assert {len(seen[1]) for seen in by_worker(report).values()} == {20}
    whole = counted(report, 0) + counted(report, 1)  # 46 batches of 4, of 33 in an epoch
    assert whole.total() <= 46 * 4 and set(whole.values()) == {1, 2}
    adds_up(report)


def test_two_loaders_are_leased_apart() -> None:
    def work(run: Run) -> Any:
        trainer = Trainer(run)
        other = run.loader(range(24), shuffle=False)
        found: list[int] = []
        for _ in run.epochs(2):
            for _ in trainer.batches():
                pass
            found += [int(batch) for batch in other]
        return found

    report = run_cluster(work, config(**DOWNPOUR))
    assert Counter(n for found in report.results.values() for n in found) == Counter([*range(24)] * 2)


def test_a_stop_ends_all_groups() -> None:
    def work(run: Run) -> Any:
        trainer = Trainer(run)
        for _ in run.epochs(1000):
            for _ in trainer.batches():
                if run.rank == 3 and run.global_step == 10:
                    run.stop()
        return run.global_step

    steps = run_cluster(work, config(**DOWNPOUR)).results
    assert steps["worker 1.0"] == steps["worker 1.1"] == 11
    assert steps["worker 0.0"] == steps["worker 0.1"]


# Messages that are lost, and other trouble.


class Every:
    """Gives every n-th message about leases a fate."""

    def __init__(self, fate: Fate, every: int) -> None:
        self.fate, self.every, self.met = fate, every, 0
        self._lock = threading.Lock()

    def __call__(self, header: Header, peer: str) -> Fate:
        with self._lock:
            self.met += header.kind is Kind.LEASE
            return self.fate if header.kind is Kind.LEASE and self.met % self.every == 0 else "deliver"


@pytest.mark.parametrize(("fate", "every"), [("lose", 7), ("double", 1)])
def test_leases_survive_links_that_lose_and_double(fate: Fate, every: int) -> None:
    judge = Every(fate, every)
    asking = ASKING.model_copy(update={"ask": 0.05})
    report = run_cluster(leisurely, config(asking, **DOWNPOUR), judge=judge)
    once(report, epochs=3)
    assert judge.met > 50


def test_a_lease_that_never_comes_ends_in_the_named_timeout() -> None:
    timeouts = Timeouts(start=20, values=1, flush=1, ask=0.2, evaluate=1, finish=1)
    with pytest.raises(
        WaitTimeout, match=r"timeouts\.values\) for the next block of leased data from server"
    ):
        run_cluster(leisurely, config(timeouts, **DOWNPOUR), judge=Every("lose", 1))


def test_a_replayed_run_leases_what_the_recorded_one_did(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = run_cluster(leisurely, config(**DOWNPOUR), schedules=Schedules(record=folder))
    second = run_cluster(leisurely, config(**DOWNPOUR), schedules=Schedules(replay=folder))
    assert first.results == second.results
    assert '"lease"' in (tmp_path / "s0.0.jsonl").read_text()
    assert '"lease"' not in (tmp_path / "s0.1.jsonl").read_text()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def early(run: Run) -> None:
    next(iter(run.loader(DATA, batch_size=2)))


def streaming(run: Run) -> None:
    run.loader(Stream())


def unlike(run: Run) -> None:
    trainer = Trainer(run)
    for _ in run.loader(DATA, batch_size=2 + run.group):
        run.barrier()
    trainer.run.close()


@pytest.mark.parametrize(
    ("work", "error", "said"),
    [
        (early, UsageError, r"a batch of leased data \(cluster\.data\) was drawn before prepare\(\)"),
        (streaming, UsageError, r"a Stream, a stream, has no blocks that groups could lease"),
        (unlike, ProtocolError, r"worker \d\.\d has \d\d batches of \d samples in epoch 0 of loader 1"),
    ],
)
def test_what_cannot_be_leased_is_told(
    work: Callable[[Run], None], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run_cluster(work, config(PATIENT, **DOWNPOUR))


def test_processes_lease_too(tmp_path: Path) -> None:
    block = Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True, data="leased")
    seen = shoal.launch(jobs.lease, Config(cluster=block), (str(tmp_path / "store"),))
    for epoch in range(2):
        assert Counter(n for worker in seen for n in worker[epoch]) == Counter(range(96))
    steps = [[len(epoch) // 2 for epoch in worker] for worker in seen]
    # 24 batches of 4, one in a block: a group that stands keeps its own and the next.
    assert steps == [[22, 24], [22, 24], [2, 0], [2, 0]]
