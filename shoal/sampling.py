"""Which sample, whose, when: the order of an epoch and how it is dealt to groups and workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one worker's batch; ``weight`` of them count (0: one sample repeated for company)."""

    indices: tuple[int, ...]
    weight: int


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


def deal(
    order: Indices,
    groups: int,
    workers: int,
    batch_size: int,
    group: int,
    rank: int,
    drop_last: bool = False,
) -> Batches:
    """One worker's batches of an epoch.

    Group g sees ``order[g::groups]``. Its batch k is the next ``workers * batch_size`` samples of that, and
    worker r gets the r-th part of those. A last, smaller batch (left out with ``drop_last``) is dealt evenly,
    one more to the first workers; a worker with none repeats one of its samples at weight 0. So
    every sample counts once per epoch, and all workers of a group have the same number of batches.

    Args:
        order: the epoch's order over all samples, shape [samples].
        groups: worker groups.
        workers: workers in a group.
        batch_size: samples per worker and batch.
        group: this worker's group, below ``groups``.
        rank: this worker's place in it, below ``workers``.
        drop_last: leave out a group's last batch if it is smaller.
    """
    mine = order[group::groups]
    joint = workers * batch_size
    full = len(mine) // joint
    rows = mine[: full * joint].reshape(full, workers, batch_size)[:, rank]
    rest = mine[full * joint :]
    if drop_last or not len(rest):
        return Batches(rows)
    share, more = divmod(len(rest), workers)
    start = rank * share + min(rank, more)
    part = rest[start : start + share + (rank < more)]
    return Batches(rows, Batch(tuple(part.tolist()) or (int(rest[rank % len(rest)]),), len(part)))


class Batches(Sequence[Batch]):
    """Full batches, shape [batches, batch_size], and perhaps a smaller last one; made when asked for."""

    def __init__(self, rows: Indices, last: Batch | None = None) -> None:
        self._rows, self._last = rows, last

    def __len__(self) -> int:
        return len(self._rows) + (self._last is not None)

    @overload
    def __getitem__(self, number: int) -> Batch: ...

    @overload
    def __getitem__(self, number: slice) -> list[Batch]: ...

    def __getitem__(self, number: int | slice) -> Batch | list[Batch]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        index = range(len(self))[number]
        if index == len(self._rows) and self._last is not None:
            return self._last
        row = tuple(self._rows[index].tolist())
        return Batch(row, len(row))
