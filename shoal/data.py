"""The loader: a torch DataLoader that is told which samples are this worker's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from shoal.errors import UsageError
from shoal.sampling import Batch, deal, order, seed_of

_OWN = ("sampler", "batch_sampler")  # Shoal's own business
_KEYWORDS = tuple(name for name in signature(DataLoader).parameters if name not in ("dataset", *_OWN))


@dataclass(frozen=True, slots=True)
class Place:
    """Whose loader it is: the run's seed, how many groups and workers in each, this one's group and rank."""

    seed: int
    groups: int
    workers: int
    group: int
    rank: int


def make_loader(
    data: Any,
    *,
    seed: int,
    groups: int,
    workers: int,
    group: int,
    rank: int,
    on_batch: Callable[[int], None],
    **keywords: Any,
) -> Loader:
    """One worker's loader.

    Args:
        data: a dataset with a length and indices, or a DataLoader, whose dataset and settings are taken over
            (its sampler only as the wish to shuffle or not).
        seed: the run's seed; it decides the order and the randomness of the DataLoader's processes.
        groups: worker groups.
        workers: workers in a group.
        group: this worker's group.
        rank: this worker's place in it.
        on_batch: called before each batch is handed out, with the number of its samples that count (0 when a
            sample is only repeated).
        keywords: DataLoader's, for a dataset. ``batch_size`` (default 1) is per worker; ``shuffle`` is True
            by default.

    Raises:
        UsageError: a dataset that cannot be dealt, a sampler of the user's, or a keyword that does not exist.
    """
    if isinstance(data, DataLoader):
        _check_dataset(data.dataset)
        dataset, options = data.dataset, _settings_of(data, keywords)
    else:
        _check_dataset(data)
        dataset, options = data, _checked(keywords)
    _check_options(options)
    return Loader(dataset, options, Place(seed, groups, workers, group, rank), on_batch)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not all(
        hasattr(dataset, name) for name in ("__len__", "__getitem__")
    ):
        raise UsageError(
            f"samples of a {type(dataset).__name__} cannot be dealt: it has no length or no indices",
            remedy="Use a map-style dataset (__len__ and __getitem__), for example a list of the samples.",
        )


def _checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    for name in keywords:
        if name in _OWN:
            raise UsageError(
                f"the loader takes no {name}: Shoal deals the samples to the workers",
                remedy="Use shuffle=True or False, or order the dataset (torch.utils.data.Subset).",
            )
        if name not in _KEYWORDS:
            near = get_close_matches(name, _KEYWORDS, 1)
            raise UsageError(
                f"the loader has no keyword {name!r}",
                remedy=f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(_KEYWORDS)}.",
            )
    return {"batch_size": 1, "shuffle": True, "drop_last": False, **keywords}


def _settings_of(source: DataLoader[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """A DataLoader's settings as keywords."""
    if keywords:
        raise UsageError(
            f"the loader was given a DataLoader and keywords: {', '.join(keywords)}",
            remedy="Set them on the DataLoader, or hand over its dataset with keywords.",
        )
    sampler = source.sampler
    random = sampler if type(sampler) is RandomSampler else None
    plain = random is None or (not random.replacement and random.num_samples == len(random.data_source))
    if source.batch_size is None and source.batch_sampler is not None:
        foreign = type(source.batch_sampler).__name__
    elif not plain:
        foreign = "RandomSampler with replacement or num_samples"
    elif random is None and type(sampler) is not SequentialSampler:
        foreign = type(sampler).__name__
    else:
        settings = {name: getattr(source, name) for name in _KEYWORDS if name != "shuffle"}
        return {**settings, "shuffle": random is not None}
    raise UsageError(
        f"the DataLoader draws its samples by a {foreign}, which would not deal them to the workers",
        remedy="Hand over the dataset itself, with batch_size and shuffle as keywords.",
    )


def _check_options(options: Mapping[str, Any]) -> None:
    batch_size = options["batch_size"]
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(
            f"a loader with batch_size={batch_size!r}",
            remedy="Give batch_size, the samples per worker and step, a whole number of 1 or more.",
        )
    if not options.get("in_order", True):
        raise UsageError(
            "a loader with in_order=False: it could not tell which batch has come",
            remedy="Leave in_order out.",
        )


class Loader:
    """This worker's batches, epoch after epoch.

    Each iteration is one epoch; one left by ``break`` is over, and the next iteration is the next epoch. All
    workers of a group have the same number of batches.

    Attributes:
        dataset: what the samples come from.
        batch_size: samples per worker and batch.
        epoch: the epoch that is being dealt, or is next; counted from 0.
        position: batches of that epoch that were handed out.
    """

    def __init__(
        self, dataset: Any, options: Mapping[str, Any], place: Place, on_batch: Callable[[int], None]
    ) -> None:
        rest = dict(options)
        self.dataset, self.batch_size = dataset, rest.pop("batch_size")
        self.epoch = self.position = 0
        self._place, self._on_batch = place, on_batch
        self._shuffle, self._drop_last = bool(rest.pop("shuffle")), bool(rest.pop("drop_last"))
        self._iteration: object | None = None  # the one that is open
        self._length = len(self._dealt())
        self._ours = torch.Generator()  # torch's global one must not move: one worker equals plain PyTorch
        rest["generator"] = rest.get("generator") or self._ours
        rest["worker_init_fn"] = _Start(rest.get("worker_init_fn"))
        self._sampler = _Dealt()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._sampler, **rest)

    def __len__(self) -> int:
        """Batches of this worker per epoch."""
        return self._length

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
        if not len(self):
            raise UsageError(
                f"no batches for worker {self._place.group}.{self._place.rank}: {len(self.dataset)} samples"
                f" for {self._place.groups} groups",
                remedy="Use more samples, fewer groups or drop_last=False.",
            )
        return self._epochs()

    def _epochs(self) -> Iterator[Any]:
        mine = self._open()
        try:
            while True:
                yield from self._rest(mine)
                self._next_epoch()
        finally:
            if self._iteration is mine:
                self._iteration = None

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: ``epoch``, and ``position``, the batches of it handed out."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration hands out the rest of the state's epoch. An iteration that is open is over.

        The samples are those of a run that never stopped. What a dataset draws at random in processes of the
        DataLoader is drawn afresh.

        Raises:
            UsageError: not such a state, or one of other data or another cluster.
        """
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= len(self):
            raise UsageError(
                f"a loader with {len(self)} batches cannot stand at epoch {epoch}, position {position}",
                remedy="Load what state_dict() gave, with the same dataset, batch_size and cluster.",
            )
        self.epoch, self.position, self._iteration = epoch, position, None

    def _open(self) -> object:
        if self._iteration is not None:
            self._next_epoch()
        self._iteration = object()
        return self._iteration

    def _next_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def _dealt(self) -> Sequence[Batch]:
        place = self._place
        samples = order(len(self.dataset), place.seed, self.epoch, self._shuffle)
        return deal(
            samples, place.groups, place.workers, self.batch_size, place.group, place.rank, self._drop_last
        )

    def _rest(self, mine: object) -> Iterator[Any]:
        """What is left of the present epoch, as long as no other iteration begins."""
        batches, place = self._dealt(), self._place
        left = range(self.position, len(batches))
        self._ours.manual_seed(seed_of(place.seed, self.epoch, place.group, place.rank))
        self._sampler.batches = (list(batches[number].indices) for number in left)
        loaded = iter(self._loader) if left else iter(())
        try:
            for number in left:
                content: Any = next(loaded)
                self.position = number + 1
                self._on_batch(batches[number].weight)
                yield content
                if self._iteration is not mine:
                    raise UsageError(
                        "this iteration of the loader is over: another one began, or a state was loaded",
                        remedy="Iterate over a loader in one place at a time.",
                    )
        finally:
            del loaded  # torch ends its processes with it


class _Dealt(Sampler[list[int]]):
    """A batch sampler that is told its batches before each epoch."""

    batches: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class _Start:
    """How a DataLoader's process starts: it will end when its parent is gone; then the user's function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        Thread(target=_end_with_parent, daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
