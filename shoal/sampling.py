"""Which sample, whose, when: the order of an epoch and how it is dealt to groups and workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Indices = NDArray[np.int64]
Order = Indices | Sequence[Any]  # a sampler of the user's may name samples by anything


class Batch(NamedTuple):
    """The samples of one worker's batch; ``weight`` of them count (0: repeated for company)."""

    indices: tuple[Any, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class Place:
    """Whose samples they are: the run's seed, groups, workers in each, this one's group and rank in it."""

    seed: int = 0
    groups: int = 1
    workers: int = 1
    group: int = 0
    rank: int = 0


def seed_of(seed: int, *path: int) -> int:
    """A 63-bit seed for one purpose, such as (epoch, group, rank), independent of those of other paths."""
    sequence = np.random.SeedSequence(abs(seed), spawn_key=(int(seed < 0), *path))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def order(samples: int, seed: int, epoch: int, shuffle: bool) -> Indices:
    """The order, shape [samples], in which an epoch (counted from 0) sees ``samples`` samples."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    # NumPy promises that this generator's stream never changes: a run resumed under another version goes on.
    stream = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed_of(seed, epoch))))
    return stream.permutation(samples).astype(np.int64, copy=False)


def shard(items: Iterable[T], rank: int, world_size: int) -> Iterator[T]:
    """Every ``world_size``-th of the items, from number ``rank`` (below ``world_size``) on."""
    yield from islice(items, rank, None, world_size)


def turns(sizes: Sequence[int]) -> Indices:
    """The rank that gets each sample of a group's batch, shape [sum(sizes)], where worker r gets sizes[r].

    However many samples a smaller batch has, dealt in these turns it is split in proportion to the sizes as
    evenly as it goes, at most sizes[r] to worker r. Equal sizes give 0, 1, …, 0, 1, …
    """
    due = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(due, kind="stable")]


def deal(order: Order, place: Place, sizes: Sequence[int], drop_last: bool = False) -> Batches:
    """One worker's batches of an epoch.

    Group g sees ``order[g::groups]``. Its batch k is the next ``sum(sizes)`` samples of that, in parts of
    sizes[0], sizes[1], … for its workers. A last, smaller batch (left out with ``drop_last``) is dealt in
    proportion to the sizes; a worker with none repeats one of its samples at weight 0. So every sample counts
    once per epoch, and all workers of a group have the same number of batches.

    Args:
        order: the epoch's order over all samples, shape [samples].
        place: whose batches.
        sizes: samples per batch of each worker of a group, shape [workers], 1 or more.
        drop_last: leave out a group's last batch if it is smaller.
    """
    mine, rank, joint = order[place.group :: place.groups], place.rank, sum(sizes)
    full = len(mine) // joint
    rest = mine[full * joint :]
    last = None
    if len(rest) and not drop_last:
        shares = np.bincount(turns(sizes)[: len(rest)], minlength=len(sizes)).tolist()
        start = sum(shares[:rank])
        part = plain(rest[start : start + shares[rank]])
        last = Batch(part or plain(rest[rank % len(rest) :])[:1], len(part))
    return Batches(mine, range(sum(sizes[:rank]), full * joint, joint), sizes[rank], last)


def deal_whole(batches: Sequence[Sequence[Any]], place: Place) -> list[Batch]:
    """One worker's batches where the user has made them: they are dealt whole, in turn.

    Group g sees ``batches[g::groups]``, and its worker r every ``workers``-th of those. In the last round a
    worker with none repeats one of the others' at weight 0.
    """
    mine = batches[place.group :: place.groups]
    dealt = []
    for start in range(0, len(mine), place.workers):
        one_round = mine[start : start + place.workers]
        own = plain(one_round[place.rank % len(one_round)])
        dealt.append(Batch(own, len(own) if place.rank < len(one_round) else 0))
    return dealt


def plain(items: Order) -> tuple[Any, ...]:
    """The items as a tuple; an array's as Python's numbers."""
    return tuple(items.tolist() if isinstance(items, np.ndarray) else items)


class Batches(Sequence[Batch]):
    """Full batches and perhaps a smaller last one; made when asked for.

    Args:
        samples: what the batches are parts of.
        starts: where in it each full batch starts.
        size: samples in a full batch.
        last: the smaller one.
    """

    def __init__(self, samples: Order, starts: range, size: int, last: Batch | None = None) -> None:
        self._samples, self._starts, self._size, self._last = samples, starts, size, last

    def __len__(self) -> int:
        return len(self._starts) + (self._last is not None)

    @overload
    def __getitem__(self, number: int) -> Batch: ...

    @overload
    def __getitem__(self, number: slice) -> list[Batch]: ...

    def __getitem__(self, number: int | slice) -> Batch | list[Batch]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        index = range(len(self))[number]
        if index == len(self._starts) and self._last is not None:
            return self._last
        start = self._starts[index]
        return Batch(plain(self._samples[start : start + self._size]), self._size)
