"""The loader: a torch DataLoader that is told which samples are this worker's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from torch.utils.data import DataLoader

from shoal.errors import UsageError
from shoal.leases import Tenant
from shoal.options import check_sampler, checked, is_stream, settings_of, sizes_of
from shoal.sampling import Place
from shoal.sources import Indexed, Source
from shoal.streams import Streamed

__all__ = ["Loader", "Place", "make_loader", "make_part"]


def _never() -> bool:
    return False


def make_loader(
    data: Any,
    place: Place,
    *,
    on_batch: Callable[[int], None],
    stopped: Callable[[], bool] = _never,
    agree: Callable[[bool], bool] | None = None,
    tenant: Tenant | None = None,
    **keywords: Any,
) -> Loader:
    """One worker's loader.

    Args:
        data: a dataset with a length and indices; a stream (an IterableDataset, or what else can be iterated
            over again and again); or a DataLoader, torchdata's StatefulDataLoader too, to take over its
            dataset, settings and sampler from.
        place: whose loader it is.
        on_batch: called before each batch is handed out, with the number of its samples that count (0 when it
            is only repeated).
        stopped: asked before each batch is handed out; True ends the iteration, as if its epoch were over.
            It must answer all workers of a group alike.
        agree: needed for a sharded stream where a group has several workers; told whether this worker has one
            more batch, says whether any worker of its group has. Every worker of the group calls it.
        tenant: how the loader comes by its batches, where groups lease them; None: they are dealt.
        keywords: DataLoader's, for a dataset. ``batch_size`` (default 1) is per worker: a number, or numbers
            by rank in the group, as in ``{0: 16, 1: 128}``. ``shuffle`` is True by default; a stream comes in
            its own order. What a ``sampler`` gives for an epoch is drawn alike on all workers and then dealt;
            the batches of a ``batch_sampler`` are dealt whole: each is one worker's batch. Both must end. And
            ``sharded=True``: each worker's stream is its own part already. ``leased=False``: this loader's
            samples are dealt also where groups lease others.

    Raises:
        UsageError: what cannot be dealt, keywords that do not exist or exclude each other.
    """
    sharded = bool(keywords.pop("sharded", False))
    if not keywords.pop("leased", True):
        tenant = None
    if isinstance(data, DataLoader):
        dataset, options = data.dataset, settings_of(data, keywords)
    else:
        dataset, options = data, checked(keywords)
    source, size = _source(dataset, place, options, agree, sharded, tenant)
    return Loader(dataset, source, place, size, on_batch, stopped)


def make_part(data: Any, place: Place, batch_size: int | None = None) -> Source:
    """One worker's batches of data that are gone through once: those of weight 0 do not count.

    Every sample is in one worker's batch, in the order of the data; of a DataLoader, what its sampler gives.

    Args:
        data: as for make_loader.
        batch_size: samples in a batch of this worker, 1 by default; not with a DataLoader, which has its own.

    Raises:
        UsageError: as make_loader.
    """
    if isinstance(data, Loader):
        raise UsageError(
            "the batches of a loader of run.loader are dealt to workers already",
            remedy="Give its dataset, or the DataLoader that it was made from.",
        )
    keywords = {} if batch_size is None else {"batch_size": batch_size}
    if isinstance(data, DataLoader):
        dataset, options = data.dataset, settings_of(data, keywords)
    else:
        dataset, options = data, checked(keywords)
    return _source(dataset, place, {**options, "shuffle": False, "drop_last": False}, None, False, None)[0]


def _source(
    dataset: Any,
    place: Place,
    options: dict[str, Any],
    agree: Callable[[bool], bool] | None,
    sharded: bool,
    tenant: Tenant | None,
) -> tuple[Source, int | None]:
    """Where the batches come from, and the samples in one."""
    sampler = options.get("batch_sampler", options.get("sampler"))
    if is_stream(dataset, sampler):
        if tenant is not None:
            raise UsageError(
                f"a {type(dataset).__name__}, a stream, has no blocks that groups could lease (cluster.data)",
                remedy="Use data: dealt, or leased=False for this loader, or a dataset with indices.",
            )
        return _stream(dataset, place, options, agree, sharded)
    if sharded:
        raise UsageError(
            f"sharded=True for a {type(dataset).__name__}, which has indices",
            remedy="Leave it out and give every worker the whole dataset: its samples are dealt.",
        )
    return _indexed(dataset, place, options, sampler, tenant)


def _indexed(
    dataset: Any, place: Place, options: dict[str, Any], sampler: Any, tenant: Tenant | None
) -> tuple[Source, int | None]:
    if sampler is not None:
        check_sampler(sampler)
    whole = "batch_sampler" in options
    sizes = sizes_of(options.pop("batch_size", 1), place.workers)
    options.setdefault("shuffle", sampler is None)
    options.setdefault("drop_last", False)
    return Indexed(dataset, place, sizes, options, tenant), None if whole else sizes[place.rank]


def _stream(
    dataset: Any, place: Place, options: dict[str, Any], agree: Callable[[bool], bool] | None, sharded: bool
) -> tuple[Source, int]:
    name = type(dataset).__name__
    for unfit in ("sampler", "batch_sampler", "shuffle"):
        if options.pop(unfit, None):
            raise UsageError(
                f"{unfit} for a {name}, a stream, which comes in its own order",
                remedy="Leave it out and shuffle in the dataset, or use one with __len__ and __getitem__.",
            )
    sizes = sizes_of(options.pop("batch_size"), place.workers)
    if sharded and agree is None:
        if place.workers > 1:
            raise UsageError(
                "a sharded stream for a group of several workers, which have no way to agree on its end here",
                remedy="Leave out sharded=True, or use groups of one worker.",
            )
        agree = bool
    return Streamed(dataset, place, sizes, options, agree if sharded else None), sizes[place.rank]


class Loader:
    """This worker's batches, epoch after epoch.

    Each iteration is one epoch; one left by ``break`` is over, and the next iteration is the next epoch. All
    workers of a group have the same number of batches. With fewer samples than workers some repeat a sample
    that does not count; with fewer than groups, or none, some groups have no batches. Where groups lease
    their batches, each has as many as it comes to take.

    Attributes:
        dataset: what the samples come from.
        batch_size: samples per batch of this worker; None where a batch sampler makes them.
        epoch: the epoch that is being dealt, or is next; counted from 0.
        position: batches of that epoch that were handed out.
    """

    def __init__(
        self,
        dataset: Any,
        source: Source,
        place: Place,
        batch_size: int | None,
        on_batch: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.epoch = self.position = 0
        self._source, self._place, self._on_batch, self._stopped = source, place, on_batch, stopped
        self._state: Any = None  # a stream's own, after the last batch handed out
        self._iteration: object | None = None  # the one that is open

    def __len__(self) -> int:
        """Batches of this worker in the present epoch.

        Raises:
            TypeError: a stream of unknown length, or leased data.
        """
        length = self._source.length(self.epoch)
        if length is None:
            kind = type(self.dataset).__name__
            why = "batches are leased" if self._source.leased else "a stream"
            raise TypeError(f"nobody knows the length of a {kind}, {why}")
        return length

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of the one that a loaded state stands in."""
        mine = self._open()
        try:
            yield from self._rest(mine)
        finally:
            if self._iteration is mine:
                self._iteration = None
                self._next_epoch()

    def endless(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch; the next iteration goes on where this one was left.

        Raises:
            UsageError: this worker has no batches.
        """
        if self._source.length(self.epoch) == 0:
            raise self._empty()
        return self._epochs()

    def _leasable(self) -> bool:
        """Whether other groups may have taken all of this epoch, and this one may get some of the next."""
        return self._source.leased and self._source.length(self.epoch) != 0

    def _empty(self) -> UsageError:
        place = self._place
        return UsageError(
            f"no batches for worker {place.group}.{place.rank}: too few samples for {place.groups} groups",
            remedy="Use more samples, fewer groups or drop_last=False.",
        )

    def _epochs(self) -> Iterator[Any]:
        mine = self._open()
        try:
            while not (yield from self._rest(mine)):
                if not (self.position or self._leasable()):
                    raise self._empty()
                self._next_epoch()
        finally:
            if self._iteration is mine:
                self._iteration = None
                if self.position == self._source.length(self.epoch):
                    self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: ``epoch``, and ``position``, the batches of it handed out.

        And ``dataset``, the state of a stream that has one.
        """
        own = {} if self._state is None else {"dataset": self._state}
        return {"epoch": self.epoch, "position": self.position, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration hands out the rest of the state's epoch. An iteration that is open is over.

        The samples are those of a run that never stopped; a stream without a state of its own is read again
        up to there. What a dataset draws at random in processes of the DataLoader is drawn afresh.

        Raises:
            UsageError: not such a state, or one of other data or another cluster.
        """
        epoch: Any = state.get("epoch")
        position: Any = state.get("position")
        numbers = all(type(number) is int and number >= 0 for number in (epoch, position))
        if not numbers or not self._source.holds(epoch, position):
            raise UsageError(
                f"a loader with {self._source.length(self.epoch)} batches cannot stand at epoch {epoch}, "
                f"position {position}",
                remedy="Load what state_dict() gave, with the same dataset, batch_size and cluster.",
            )
        self.epoch, self.position, self._iteration = epoch, position, None
        self._state = state.get("dataset")

    def _open(self) -> object:
        if self._iteration is not None:
            self._next_epoch()
        self._iteration = object()
        return self._iteration

    def _next_epoch(self) -> None:
        self.epoch, self.position, self._state = self.epoch + 1, 0, None

    def _rest(self, mine: object) -> Generator[Any, None, bool]:
        """What is left of the present epoch, as long as no other iteration begins; whether it was stopped."""
        with closing(self._source.batches(self.epoch, self.position, self._state)) as batches:
            for content, weight, state in batches:
                if self._stopped():
                    return True
                self.position, self._state = self.position + 1, state
                self._on_batch(weight)
                yield content
                if self._iteration is not mine:
                    raise UsageError(
                        "this iteration of the loader is over: another one began, or a state was loaded",
                        remedy="Iterate over a loader in one place at a time.",
                    )
        return False
