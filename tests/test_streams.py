"""Streams: each sample counts once, a group's workers have equally many batches, all is resumable."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shoal.data import Loader, Place, make_loader
from shoal.errors import UsageError
from shoal.sampling import deal, turns

small = st.integers(1, 4)


class Numbers(IterableDataset[int]):
    """0, 1, …; counts what is read of it."""

    def __init__(self, samples: int) -> None:
        self.samples, self.read = samples, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.samples):
            self.read += 1
            yield number


class Stateful(Numbers):
    """One that goes on where its state stands, and at its end stands at its start again."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.where = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.where["next"] < self.samples:
            self.where["next"] += 1
            self.read += 1
            yield self.where["next"] - 1
        self.where["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.where  # not a copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.where = state


class Mixed(IterableDataset[int]):
    """Shuffled by a global generator, in an order that follows set_epoch or not."""

    def __init__(self, source: Any) -> None:
        self.source, self.told = source, -1

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(30))
        self.source.shuffle(numbers)
        for number in numbers:
            random.random(), np.random.rand(), torch.rand(1)
            yield number + 100 * self.told


class Torch:
    @staticmethod
    def shuffle(numbers: list[int]) -> None:
        numbers[:] = [numbers[i] for i in torch.randperm(len(numbers))]


class Split(IterableDataset[int]):
    """Splits itself over the processes of its DataLoader, as torch's documentation shows it."""

    def __init__(self, stop: int) -> None:
        self.start, self.stop = 0, stop

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        process, processes = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(self.start + process, self.stop, processes))


class Ranged(Split):
    """Split by its worker_init_fn."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


def ranges(process: int) -> None:
    info: Any = get_worker_info()
    share = -(-info.dataset.stop // info.num_workers)
    assert info.id == process
    info.dataset.start = info.id * share
    info.dataset.stop = min(info.dataset.start + share, info.dataset.stop)


def loader_of(data: Any, place: Place = Place(), weights: list[int] | None = None, **more: Any) -> Loader:  # noqa: B008
    record = [] if weights is None else weights
    return make_loader(data, place, on_batch=record.append, **more)


def epoch_of(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def places(groups: int, workers: int) -> list[Place]:
    return [Place(0, groups, workers, group, rank) for group in range(groups) for rank in range(workers)]


def run_of(data: Any, place: Place, **more: Any) -> list[tuple[list[int], int]]:
    """One epoch's batches and weights."""
    weights: list[int] = []
    batches = epoch_of(loader_of(data, place, weights, **more))
    return list(zip(batches, weights, strict=True))


# Who gets what.


@given(st.integers(0, 60), small, st.lists(small, min_size=1, max_size=3), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_stream_is_dealt_in_turns_and_as_evenly_as_a_dataset(
    samples: int, groups: int, sizes: list[int], drop_last: bool
) -> None:
    for place in places(groups, len(sizes)):
        keywords = {"batch_size": dict(enumerate(sizes)), "drop_last": drop_last}
        batches = run_of(Numbers(samples), place, **keywords)
        mine = [
            [sample for sample, rank in zip(block, turns(sizes), strict=False) if rank == place.rank]
            for block in blocks(range(samples)[place.group :: groups], sum(sizes))
            if len(block) == sum(sizes) or not drop_last
        ]
        assert [batch[:weight] for batch, weight in batches] == mine
        other = deal(range(samples), place, sizes, drop_last)
        assert [weight for _, weight in batches] == [batch.weight for batch in other]


def blocks(items: range, size: int) -> Iterator[range]:
    return (items[start : start + size] for start in range(0, len(items), size))


@given(st.integers(0, 60), small, small, small)
@settings(max_examples=50, deadline=None)
def test_equal_workers_take_every_nth_sample(samples: int, groups: int, workers: int, size: int) -> None:
    for place in places(groups, workers):
        batches = run_of(Numbers(samples), place, batch_size=size)
        taken = [sample for batch, weight in batches for sample in batch[:weight]]
        assert taken == list(range(samples))[place.group + groups * place.rank :: groups * workers]


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_change_nothing(processes: int) -> None:
    for place in places(2, 2):
        alone = run_of(Numbers(29), place, batch_size={0: 2, 1: 1})
        assert run_of(Numbers(29), place, batch_size={0: 2, 1: 1}, num_workers=processes) == alone
        assert active_children() == []


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"multiprocessing_context": "spawn"}])
def test_processes_hear_of_each_epoch(options: dict[str, Any]) -> None:
    alone, other = (
        loader_of(Mixed(Torch), batch_size=7, **more) for more in ({}, {"num_workers": 1, **options})
    )
    for _ in range(2):
        assert epoch_of(other) == epoch_of(alone)


@pytest.mark.parametrize(("data", "start"), [(Split(23), None), (Ranged(23), ranges)])
def test_streams_that_split_themselves_over_processes_are_read_whole(data: Any, start: Any) -> None:
    seen: Counter[int] = Counter()
    for place in places(1, 2):
        for batch, weight in run_of(data, place, batch_size=3, num_workers=2, worker_init_fn=start):
            seen.update(batch[:weight])
    assert seen == Counter(range(23))


def test_what_can_be_iterated_over_again_is_a_stream() -> None:
    class Letters:
        def __iter__(self) -> Iterator[str]:
            return iter("abcde")

    loader = loader_of(Letters(), Place(workers=2, rank=1), batch_size=2, collate_fn="".join)
    assert [list(loader), list(loader)] == [["bd", "e"]] * 2


def test_the_dataloader_of_a_stream_is_taken_over() -> None:
    source = DataLoader(Numbers(7), batch_size=3, drop_last=True, collate_fn=sum)
    loader = loader_of(source)
    assert list(loader) == [3, 12] and loader.batch_size == 3 and loader.dataset is source.dataset


def test_a_stream_without_end() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

    loader = loader_of(Endless(), Place(workers=3, rank=2), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in islice(loader, 2)] == [[2, 5], [8, 11]]
    assert active_children() == []


# Lengths and ends.


def test_a_length_is_known_where_the_stream_has_one() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.samples

    for place in places(2, 3):
        loader = loader_of(Sized(20), place, batch_size=2)
        assert len(loader) == len(epoch_of(loader)) == 2
    with pytest.raises(TypeError, match="nobody knows the length of a Numbers"):
        len(loader_of(Numbers(3)))
    assert epoch_of(loader_of(Numbers(2))) == [[0], [1]]
    assert len(list(loader_of(Numbers(2)))) == 2


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_streams_shorter_than_the_cluster(samples: int) -> None:
    found = [run_of(Numbers(samples), place, batch_size=2) for place in places(2, 2)]
    assert (
        found
        == [
            [[], [], [], []],
            [[([0], 1)], [([0], 0)], [], []],
            [[([0], 1)], [([0], 0)], [([1], 1)], [([1], 0)]],
        ][samples]
    )


def test_a_stream_without_batches_is_an_error_without_end() -> None:
    loader = loader_of(Numbers(3), batch_size=4, drop_last=True)
    assert epoch_of(loader) == []
    with pytest.raises(UsageError, match=r"no batches for worker 0\.0"):
        next(loader.endless())


def test_a_stop_is_asked_for_before_each_batch() -> None:
    asked = iter([False, False, True])
    loader = loader_of(Numbers(9), batch_size=2, stopped=lambda: next(asked))
    assert epoch_of(loader) == [[0, 1], [2, 3]] and loader.state_dict() == {"epoch": 1, "position": 0}


# Randomness.


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("source", [random, np.random, Torch], ids=["random", "numpy", "torch"])
def test_what_a_stream_draws_is_alike_for_all_workers(source: Any, processes: int) -> None:
    epochs: list[Counter[int]] = [Counter(), Counter()]
    orders = []
    for number, place in enumerate(places(2, 2)):
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        before = str((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))
        weights: list[int] = []
        loader = loader_of(Mixed(source), place, weights, batch_size=3, num_workers=processes)
        for seen in epochs:
            for batch in loader:
                seen.update(batch[: weights[-1]].tolist())
                orders.append(batch.tolist())
        assert str((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())) == before
    assert epochs == [Counter(range(30)), Counter(range(100, 130))]
    assert [n % 100 for n in orders[0]] != [n % 100 for n in orders[len(orders) // 8]]  # epoch 0, epoch 1


def test_the_scripts_own_draws_between_batches_change_nothing() -> None:
    quiet = epoch_of(loader_of(Mixed(random)))
    loud = []
    for batch in loader_of(Mixed(random)):
        random.seed(len(loud))
        loud.append(batch.tolist())
    assert loud == quiet


# States.


def handed_and_state(loader: Loader, batches: int) -> tuple[list[list[int]], dict[str, Any]]:
    handed = [batch.tolist() for batch in islice(loader.endless(), batches)]
    return handed, loader.state_dict()


@pytest.mark.parametrize("processes", [(0, 0), (0, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("kind", [Numbers, Stateful])
def test_a_resumed_stream_hands_out_exactly_the_rest(
    kind: Callable[[int], Any], processes: tuple[int, int]
) -> None:
    for place in places(2, 2)[1:3]:
        whole = epoch_of(loader_of(kind(31), place, batch_size=2))
        for stop in range(1, 2 * len(whole)):
            first, second = (loader_of(kind(31), place, batch_size=2, num_workers=m) for m in processes)
            handed, state = handed_and_state(first, stop)
            second.load_state_dict(state)
            rest = epoch_of(second)
            assert handed + rest == (whole * 2)[: len(whole) * (state["epoch"] + 1)]
            if not processes[1]:
                assert epoch_of(second) == whole  # and the next epoch is complete


def test_a_stream_with_a_state_is_not_read_again() -> None:
    first = loader_of(Stateful(100), batch_size=4)
    handed, state = handed_and_state(first, 10)
    assert state == {"epoch": 0, "position": 10, "dataset": {"next": 40}}
    data = Stateful(100)
    second = loader_of(data, batch_size=4)
    second.load_state_dict(state)
    assert flat(handed + epoch_of(second)) == list(range(100)) and data.read == 60
    assert second.state_dict() == {"epoch": 1, "position": 0}
    numbers = Numbers(100)
    third = loader_of(numbers, batch_size=4)
    third.load_state_dict({"epoch": 0, "position": 10})
    assert epoch_of(third)[0] == [40, 41, 42, 43] and numbers.read == 100


def test_an_epoch_left_by_break_does_not_go_on_in_the_next() -> None:
    loader = loader_of(Stateful(10), batch_size=4)
    for _batch in loader:
        break
    assert epoch_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_state_handed_out_is_not_changed_by_going_on() -> None:
    loader = loader_of(Stateful(100), batch_size=4)
    iterator = loader.endless()
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    assert state["dataset"] == {"next": 4} and loader.state_dict()["dataset"] == {"next": 8}


# Sharded streams.


class Group:
    """The workers of a group as threads, which agree as a collective does."""

    def __init__(self, workers: int) -> None:
        self.votes, self.asked = [False] * workers, 0
        self.barrier = threading.Barrier(workers, timeout=10)

    def agree(self, rank: int) -> Callable[[bool], bool]:
        def agreed(have: bool) -> bool:
            self.votes[rank] = have
            self.barrier.wait()
            result = any(self.votes)
            self.barrier.wait()
            return result

        return agreed

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.votes)

        def guarded(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except UsageError as error:
                results[rank] = error
                self.barrier.abort()
            except threading.BrokenBarrierError:
                results[rank] = "left alone"

        threads = [
            threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(len(results))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
            assert not thread.is_alive(), "a worker hangs"
        return results


def sharded(lengths: list[int], skip: int = 0, **keywords: Any) -> list[Any]:
    """What each worker of a group gets whose parts are this long, in an epoch resumed after some batches."""
    group = Group(len(lengths))

    def work(rank: int) -> list[tuple[list[int], int]]:
        weights: list[int] = []
        place = Place(workers=len(lengths), rank=rank)
        data = keywords.get("kind", Numbers)(lengths[rank])
        more = {name: value for name, value in keywords.items() if name != "kind"}

        def made(weights: list[int]) -> Loader:
            return loader_of(
                data, place, weights, sharded=True, agree=group.agree(rank), batch_size=2, **more
            )

        loader = made(weights)
        if skip:
            first = made([])
            for _ in islice(first.endless(), skip):
                pass
            loader.load_state_dict(first.state_dict())
        return list(zip(epoch_of(loader), weights, strict=True))

    return group.run(work)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_workers_with_parts_of_unlike_length_end_together(lengths: list[int]) -> None:
    found = sharded(lengths)
    rounds = max(-(-length // 2) for length in lengths)
    for length, batches in zip(lengths, found, strict=True):
        own = [batch for batch, weight in batches if weight]
        assert flat(own) == list(range(length)) and len(batches) == rounds
        assert batches[len(own) :] == [(own[-1], 0)] * (rounds - len(own))


def test_a_worker_without_any_sample_is_told() -> None:
    error, *_ = sharded([0, 3])
    assert isinstance(error, UsageError) and "worker 0.0 has no samples" in str(error)
    assert sharded([0, 0]) == [[], []]


def test_a_smaller_batch_is_left_out_of_a_sharded_stream_too() -> None:
    assert sharded([5, 2], drop_last=True) == [[([0, 1], 2), ([2, 3], 2)], [([0, 1], 2), ([0, 1], 0)]]


@pytest.mark.parametrize("kind", [Numbers, Stateful])
@pytest.mark.parametrize("skip", [1, 2, 3, 4, 5])
def test_a_sharded_stream_is_resumed(kind: Any, skip: int) -> None:
    assert sharded([10, 3, 4], skip, kind=kind) == [part[skip:] for part in sharded([10, 3, 4])]


def test_a_sharded_stream_with_a_state_is_not_read_again() -> None:
    data = Stateful(100)
    loader = loader_of(data, sharded=True, batch_size=4)
    loader.load_state_dict({"epoch": 0, "position": 10, "dataset": {"next": 40}})
    assert flat(epoch_of(loader)) == list(range(40, 100)) and data.read == 60


@pytest.mark.parametrize(("data", "start"), [(Split(23), None), (Ranged(23), ranges)])
def test_a_sharded_stream_sees_the_processes_of_its_dataloader(data: Any, start: Any) -> None:
    keywords: dict[str, Any] = {"sharded": True, "batch_size": 4, "num_workers": 2, "worker_init_fn": start}
    plain = DataLoader(data, batch_size=4, num_workers=2, worker_init_fn=start)
    loader = loader_of(data, **keywords)
    whole = epoch_of(loader)
    assert whole == [batch.tolist() for batch in plain]
    loader.load_state_dict({"epoch": 0, "position": 3})
    assert epoch_of(loader) == whole[3:]


def test_a_dataloader_may_be_sharded() -> None:
    assert epoch_of(loader_of(DataLoader(Numbers(3), batch_size=2), sharded=True)) == [[0, 1], [2]]


# What is refused.

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Numbers(3), {"shuffle": True}, "shuffle for a Numbers, a stream"),
    (Numbers(3), {"sampler": [0]}, "sampler for a Numbers"),
    (Numbers(3), {"batch_sampler": [[0]]}, "batch_sampler for a Numbers"),
    (Numbers(3), {"batch_size": {0: 1}}, "batch_size by rank, for a group of 2, lacks 1"),
    (DataLoader(Numbers(3), batch_size=None), {}, "batch_size=None"),
    (Numbers(3), {"sharded": True}, "a sharded stream for a group of several workers"),
    (iter(Numbers(3)), {}, "a generator can be read once only"),
]


@pytest.mark.parametrize(("data", "keywords", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_dealt_is_refused_with_a_remedy(
    data: Any, keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        loader_of(data, Place(workers=2), **keywords)
    assert caught.value.remedy
