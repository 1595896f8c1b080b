"""Samplers of the user's: drawn alike on every worker, once per epoch, and dealt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.data import Loader, Place, make_loader
from shoal.errors import UsageError

DATA = list(range(24))


class Shuffled(Sampler[int]):
    """Draws from whatever it is given, and knows its epoch."""

    def __init__(self, source: Any) -> None:
        self.source, self.epochs, self.drawn = source, list[int](), 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        numbers = list(DATA)
        self.source.shuffle(numbers)
        return iter(numbers[:21])


class Buckets(Sampler[list[int]]):
    """Batches of unlike sizes, in a random order; no length."""

    def __init__(self) -> None:
        self.inner = SubsetRandomSampler([0, 6, 12, 18])

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.inner:
            yield list(range(start, start + 6 if start else 4))


class Epoch(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def loader_of(sampler: Any, place: Place = Place(), weights: list[int] | None = None, **more: Any) -> Loader:  # noqa: B008
    record = [] if weights is None else weights
    return make_loader(DATA, place, on_batch=record.append, sampler=sampler, **more)


def states() -> str:
    return str((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))


def flat(loader: Loader) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 12 + [3.0] * 12, 50),
    "weighted with a generator": lambda: WeightedRandomSampler([1.0] * 24, 50, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(range(3, 14)),
    "with replacement": lambda: RandomSampler(DATA, replacement=True),
    "fewer": lambda: RandomSampler(DATA, num_samples=7),
    "numpy's": lambda: Shuffled(np.random),
    "random's": lambda: Shuffled(random),
    "one's own of random": lambda: Shuffled(random.Random()),
    "one's own of numpy": lambda: Shuffled(np.random.default_rng()),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_all_workers_draw_the_same_list_and_share_it(name: str) -> None:
    """Each worker is another process with other states of the generators: an oracle of the whole list is one worker's."""  # noqa: E501
    torch.manual_seed(0)
    alone = loader_of(SAMPLERS[name](), batch_size=5)
    whole = [flat(alone) for _ in range(3)]
    assert len({str(epoch) for epoch in whole}) == 3
    parts: list[Counter[int]] = [Counter() for _ in range(3)]
    for group in range(2):
        lengths = set()
        for rank in range(2):
            torch.manual_seed(10 * group + rank + 1)
            np.random.seed(10 * group + rank)
            random.seed(10 * group + rank)
            before, weights = states(), list[int]()
            loader = loader_of(SAMPLERS[name](), Place(0, 2, 2, group, rank), weights, batch_size=2)
            lengths.add(len(loader))
            for epoch in range(3):
                for batch in loader:
                    parts[epoch].update(batch[: weights[-1]].tolist())
            assert states() == before
        assert len(lengths) == 1
    assert parts == [Counter(epoch) for epoch in whole]


def test_a_samplers_order_is_kept_and_follows_the_seed() -> None:
    assert flat(loader_of([5, 3, 5, 1], batch_size=3)) == [5, 3, 5, 1]
    sampler = SAMPLERS["weighted"]
    assert flat(loader_of(sampler(), Place(1))) != flat(loader_of(sampler(), Place(0)))


def test_a_samplers_own_generator_stands_where_it_stood() -> None:
    generator = torch.Generator()
    before = generator.get_state()
    sampler = SubsetRandomSampler(range(8), generator=generator)
    assert flat(loader_of(sampler)) == flat(loader_of(SubsetRandomSampler(range(8))))
    assert sampler.generator is generator and torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_a_sampler_is_drawn_once_per_epoch_told_it_and_resumed(stop: int) -> None:
    expected = [
        flat(loader) for loader in [loader_of(Shuffled(random.Random()), batch_size=4)] for _ in range(2)
    ]
    sampler = Shuffled(random.Random())
    loader, handed = loader_of(sampler, batch_size=4), list[int]()
    for number, batch in enumerate(loader.endless(), 1):
        handed += batch.tolist()
        assert len(loader) == 6
        if number == stop:
            break
    assert (
        sampler.drawn == len(sampler.epochs) == loader.epoch + 1 and sampler.epochs == [0, 1][: sampler.drawn]
    )
    resumed = loader_of(Shuffled(random.Random()), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    rest = flat(resumed)
    assert handed + rest == (expected[0] + expected[1])[: 21 * (loader.epoch + 1)]


def test_batches_of_the_users_are_dealt_whole() -> None:
    torch.manual_seed(0)
    seen, orders = [], set()
    for group in range(2):
        for rank in range(2):
            torch.manual_seed(group * 2 + rank)
            weights: list[int] = []
            place = Place(0, 2, 2, group, rank)
            loader = make_loader(DATA, place, on_batch=weights.append, batch_sampler=Buckets())
            assert loader.batch_size is None and len(loader) == 1
            orders.add(str([batch.tolist() for batch in make_loader(
                DATA, Place(), on_batch=weights.append, batch_sampler=Buckets())]))  # fmt: skip
            seen += [batch.tolist() for batch in loader]
    assert sorted(seen) == [[0, 1, 2, 3], *([*range(s, s + 6)] for s in (6, 12, 18))] and len(orders) == 1


def test_a_worker_without_a_batch_of_the_last_round_repeats_one() -> None:
    weights: list[int] = []
    source = DataLoader(DATA, batch_sampler=[[0, 1], [2], [3, 4, 5]])  # type: ignore[arg-type]
    loader = make_loader(source, Place(workers=2, rank=1), on_batch=weights.append)
    assert [batch.tolist() for batch in loader] == [[2], [3, 4, 5]]
    assert weights == [1, 0]


def test_the_sampler_of_a_dataloader_is_taken_over() -> None:
    sampler = WeightedRandomSampler([1.0] * 24, 9)
    loader = make_loader(DataLoader(DATA, batch_size=4, sampler=sampler), Place(), on_batch=lambda w: None)
    assert loader.batch_size == 4 and flat(loader) == flat(loader_of(sampler))
    other = DataLoader(DATA, sampler=SequentialSampler(range(5)))  # the dataset's first five
    assert flat(make_loader(other, Place(), on_batch=lambda w: None)) == [0, 1, 2, 3, 4]
    batched = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 10, False))
    assert len(make_loader(batched, Place(), on_batch=lambda w: None)) == 3


class Keys(Dataset[str]):
    """No length, and names for indices."""

    def __getitem__(self, name: str) -> str:
        return name.upper()


def test_a_sampler_may_name_samples_as_it_likes_of_a_dataset_without_a_length() -> None:
    loader = make_loader(
        Keys(), Place(workers=2, rank=1), on_batch=lambda w: None, sampler=["b", "a", "c"], collate_fn=list
    )
    assert list(loader) == [["A"], ["C"]]


def test_no_sampler_is_no_sampler() -> None:
    assert flat(loader_of(None, shuffle=False, batch_sampler=None)) == DATA


def test_an_empty_epoch_of_a_sampler_is_an_error_only_without_end() -> None:
    loader = loader_of(Epoch(0))
    assert len(loader) == 0 and list(loader) == []
    sampler = Epoch(3)
    endless = loader_of(sampler).endless()
    with pytest.raises(UsageError, match=r"no batches for worker 0\.0"):
        for _batch in endless:
            sampler.length = 0


# What is refused.


class Repeated(Epoch):
    num_replicas = 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampler": DistributedSampler(DATA, 2, 0)}, "a DistributedSampler would deal .* once more"),  # type: ignore[arg-type]
    ({"sampler": DistributedSampler(DATA, 1, 0)}, "a DistributedSampler would deal"),  # type: ignore[arg-type]
    ({"batch_sampler": BatchSampler(DistributedSampler(DATA, 2, 0), 2, False)}, "a DistributedSampler would"),  # type: ignore[arg-type]
    ({"sampler": Repeated(3)}, "a Repeated would deal"),
    ({"sampler": iter(DATA)}, "a list_iterator as sampler gives no order"),
    ({"sampler": 3}, "an? int as sampler gives no order"),
    ({"sampler": DATA, "shuffle": True}, "given sampler and shuffle"),
    ({"batch_sampler": [[1]], "batch_size": 2, "drop_last": True}, "batch_sampler and batch_size, drop_last"),
    ({"batch_sampler": [[1]], "sampler": [1]}, "batch_sampler and sampler"),
]


@pytest.mark.parametrize(("keywords", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_dealt_is_refused_with_a_remedy(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make_loader(DATA, Place(), on_batch=lambda w: None, **keywords)
    assert caught.value.remedy


def test_a_dataloaders_distributed_sampler_is_refused() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(DATA, 2, 0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="DistributedSampler"):
        make_loader(DataLoader(DATA, sampler=sampler), Place(), on_batch=lambda w: None)  # type: ignore[arg-type]


# torchdata's StatefulDataLoader: a DataLoader with a state and a RandomSampler of its own.


class StatefulDataLoader(DataLoader[Any]):
    def __init__(
        self, dataset: Any, shuffle: bool = False, snapshot_every_n_steps: int = 1, **more: Any
    ) -> None:
        sampler = _RandomSampler(dataset) if shuffle else None
        super().__init__(dataset, sampler=sampler, **more)
        self.snapshot_every_n_steps = snapshot_every_n_steps

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class _RandomSampler(Sampler[int]):
    def __init__(self, data_source: Sequence[Any]) -> None:
        self.data_source, self.replacement, self.num_samples = data_source, False, len(data_source)

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError


_RandomSampler.__name__, _RandomSampler.__module__ = "RandomSampler", "torchdata.stateful_dataloader.sampler"


@pytest.mark.parametrize("real", [False, True])
def test_a_stateful_dataloader_is_taken_over(real: bool) -> None:
    kind: Any = StatefulDataLoader
    if real:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    ours = flat(make_loader(DATA, Place(), on_batch=lambda w: None, batch_size=5))
    loader = make_loader(kind(DATA, batch_size=5, shuffle=True), Place(), on_batch=lambda w: None)
    assert loader.batch_size == 5 and flat(loader) == ours != DATA
    assert loader.state_dict() == {"epoch": 1, "position": 0}
    assert flat(make_loader(kind(DATA, batch_size=5), Place(), on_batch=lambda w: None)) == DATA
