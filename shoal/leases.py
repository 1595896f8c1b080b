"""Leased data: blocks of an epoch go to the worker group that asks next, each batch to one of them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shoal.errors import ProtocolError

if TYPE_CHECKING:  # sampling needs numpy, which whoever only reads messages need not load
    from shoal.sampling import Batch

MOST = 16
"""Batches in a block at the most: a group that is held up keeps no more than these from the others."""

SPLIT = 8
"""A block is at most this part of a group's even share of the rest: a group that is that much slower than the
others is then through with its block when they are through with theirs."""


class Ask(NamedTuple):
    """A worker's question: in which block is a batch of its group?

    All workers of a group get the same answer, however often and in whatever order they ask.

    Attributes:
        loader: which of the worker's loaders, counted from 0.
        epoch: counted from 0.
        position: the batch, counted from 0 among those that its group has in the epoch.
        batches: how many the epoch has, for all groups together.
        samples: in a whole batch of the group.
    """

    loader: int
    epoch: int
    position: int
    batches: int
    samples: int


class Block(NamedTuple):
    """Batches ``start`` … ``stop`` − 1 of an epoch, which are a group's from its number ``first`` on.

    None where nothing was left for the group.
    """

    first: int
    start: int
    stop: int

    @property
    def after(self) -> int:
        """The group's batch that follows the block."""
        return self.first + self.stop - self.start


class Lessor(Protocol):
    """Who answers; on a worker its exchange with the servers."""

    def request(self, ask: Ask) -> None:
        """Ask for a block that will be wanted soon; does not wait."""
        ...

    def block(self, ask: Ask) -> Block:
        """The answer; waits for it."""
        ...


@dataclass(frozen=True)
class Tenant:
    """How one loader of a worker comes by its batches.

    Attributes:
        lessor: whom it asks; raises UsageError where there is nobody yet.
        loader: its number among the worker's loaders.
        parts: server groups; each leases a fixed part of an epoch, ``order[part::parts]``, to its own groups.
        part: the number of this worker's server group.
    """

    lessor: Callable[[], Lessor]
    loader: int = 0
    parts: int = 1
    part: int = 0

    def batches(self, epoch: int, position: int, dealt: Sequence[Batch], samples: int) -> Iterator[Batch]:
        """A worker's batches of an epoch after its group's first ``position``, block by block.

        With the last batch of a block the next one is asked for, so that no step waits for it.

        Args:
            dealt: what this worker's batches would be if its group had all of the epoch.
            samples: in a whole batch of the group.
        """
        ask = Ask(self.loader, epoch, position, len(dealt), samples)
        while True:
            block = self.lessor().block(ask)
            following = ask._replace(position=block.after)
            for number in range(ask.position, block.after):
                if number == block.after - 1 and block.stop < len(dealt):
                    self.lessor().request(following)
                yield dealt[block.start + number - block.first]
            if block.stop >= len(dealt):
                return
            ask = following


@dataclass
class _Epoch:
    """Who has which batches of an epoch: the first ``taken`` ones, in blocks by group."""

    batches: int
    samples: int
    taken: int = 0
    blocks: dict[int, list[Block]] = field(default_factory=dict)


@dataclass
class _Loader:
    """The epochs of a loader, and in which each worker (group, rank) was when it last asked."""

    epochs: dict[int, _Epoch] = field(default_factory=dict)
    asked: dict[tuple[int, int], int] = field(default_factory=dict)
    over: int = 0  # epochs below this are forgotten


class Leases:
    """A server's table of who has leased what.

    An epoch is forgotten when every worker has asked for a batch of a later one.

    Args:
        groups: worker groups that lease from it.
        workers: workers in all of them.
    """

    def __init__(self, groups: int, workers: int) -> None:
        self._groups, self._workers = groups, workers
        self._loaders: dict[int, _Loader] = {}

    def block(self, group: int, rank: int, ask: Ask) -> Block:
        """The block that the batch is in: one that the group has, or else the next that nobody has.

        Raises:
            ProtocolError: the batch lies behind the next one, or in an epoch that is forgotten; or the
                epoch has other batches elsewhere.
        """
        epoch = self._epoch(group, rank, ask)
        blocks = epoch.blocks.setdefault(group, [])
        following = blocks[-1].after if blocks else 0
        if ask.position < following:
            return blocks[bisect_right(blocks, ask.position, key=attrgetter("first")) - 1]
        if ask.position > following:
            raise _wrong(
                ask,
                f"worker {group}.{rank} asks for batch {ask.position} of",
                f"its group has leased {following} here; a loader's state is for the run that it is from",
            )
        block = Block(following, epoch.taken, epoch.taken + self._size(epoch.batches - epoch.taken))
        if block.stop > block.start:
            epoch.taken = block.stop
            blocks.append(block)
        return block

    def _size(self, left: int) -> int:
        return min(left, max(1, min(MOST, left // (SPLIT * self._groups))))

    def _epoch(self, group: int, rank: int, ask: Ask) -> _Epoch:
        who = f"worker {group}.{rank}"
        if min(ask) < 0:
            raise ProtocolError(f"{who} asks for data by a negative number: {ask}")
        loader = self._loaders.setdefault(ask.loader, _Loader())
        if ask.epoch < loader.over:
            raise _wrong(ask, f"{who} goes back to", "all workers have left it")
        epoch = loader.epochs.setdefault(ask.epoch, _Epoch(ask.batches, ask.samples))
        if (ask.batches, ask.samples) != (epoch.batches, epoch.samples):
            raise _wrong(
                ask,
                f"{who} has {ask.batches} batches of {ask.samples} samples in",
                f"others have {epoch.batches} of {epoch.samples}; "
                "leased data are the same for all groups, in batches of the same size",
            )
        loader.asked[group, rank] = ask.epoch
        if len(loader.asked) == self._workers:
            loader.over = min(loader.asked.values())
            for number in [number for number in loader.epochs if number < loader.over]:
                del loader.epochs[number]
        return epoch


def _wrong(ask: Ask, what: str, why: str) -> ProtocolError:
    return ProtocolError(f"{what} epoch {ask.epoch} of loader {ask.loader}: {why}")
