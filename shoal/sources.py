"""Where a loader's batches come from: a dataset with indices, dealt by an order of ours or of the user's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset, default_collate

from shoal.leases import Tenant
from shoal.randomness import Randomness, fresh
from shoal.sampling import Batch, Place, deal, deal_whole, order, seed_of


class Ready(NamedTuple):
    """A batch as the script gets it, how many of its samples count, and the dataset's state after it."""

    content: Any
    weight: int
    state: Any = None


class Source(Protocol):
    """Batches of one worker, epoch by epoch.

    Attributes:
        leased: whether groups take of an epoch what they can, so that it may be over without one for this.
    """

    leased: bool

    def length(self, epoch: int) -> int | None:
        """Batches in an epoch, counted from 0; None where nobody knows."""
        ...

    def holds(self, epoch: int, position: int) -> bool:
        """Whether a loader can stand there."""
        ...

    def batches(self, epoch: int, position: int, state: Any) -> Generator[Ready, None, None]:
        """The epoch's batches after the first ``position`` ones; ``state`` came with the last of those."""
        ...


class Loading:
    """A DataLoader whose random numbers are a worker's own in each epoch.

    Args:
        place: whose batches.
        options: DataLoader's keywords.
    """

    def __init__(self, dataset: Any, place: Place, options: Mapping[str, Any]) -> None:
        self._place = place
        self._ours = torch.Generator()  # torch's global one must not move: one worker equals plain PyTorch
        generator = options.get("generator") or self._ours
        self._loader: DataLoader[Any] = DataLoader(dataset, **{**options, "generator": generator})

    def epoch(self, number: int) -> Generator[Any, None, None]:
        """What the DataLoader gives for the epoch; to be closed, for torch's processes to end."""
        place = self._place
        self._ours.manual_seed(seed_of(place.seed, number, place.group, place.rank))
        yield from self._loader


class Indexed:
    """Batches of a dataset with indices.

    Args:
        dataset: what has ``__getitem__``, and ``__len__`` unless there is a sampler.
        place: whose batches.
        sizes: samples per batch of each worker of the group, shape [workers].
        options: DataLoader's keywords.
        tenant: how it comes by its batches, where groups lease them.
    """

    def __init__(
        self,
        dataset: Any,
        place: Place,
        sizes: Sequence[int],
        options: Mapping[str, Any],
        tenant: Tenant | None = None,
    ) -> None:
        rest = dict(options)
        self._dataset, self._place, self._sizes, self._tenant = dataset, place, sizes, tenant
        self.leased = tenant is not None
        # Whose part of the epoch it is: this group's, or what all groups of its server group lease from.
        self._owner = replace(place, groups=tenant.parts, group=tenant.part) if tenant else place
        self._user_sampler, self._user_batches = rest.pop("sampler", None), rest.pop("batch_sampler", None)
        self._shuffle, self._drop_last = bool(rest.pop("shuffle")), bool(rest.pop("drop_last"))
        self._known: tuple[int, Sequence[Batch]] | None = None  # an epoch and its batches
        rest["worker_init_fn"] = Start(rest.get("worker_init_fn"))
        self._sampler = _Dealt()
        self._loading = Loading(dataset, place, {**rest, "batch_sampler": self._sampler})
        self._generator = rest.get("generator")
        self._make = None if rest.get("num_workers") or rest.get("pin_memory") else self._maker(rest)

    def length(self, epoch: int) -> int | None:
        """See Source.length; 0 of leased data if there are none for any group."""
        length = len(self._dealt(epoch))
        return None if self.leased and length else length

    def holds(self, epoch: int, position: int) -> bool:
        """See Source.holds."""
        return position <= len(self._dealt(epoch))

    def batches(self, epoch: int, position: int, state: Any) -> Generator[Ready, None, None]:
        """See Source.batches; the state is always None."""
        coming = self._from(epoch, position)
        if self._make is None:
            yield from self._loaded(epoch, coming)
            return
        if self._generator is not None:  # as a DataLoader does, for its processes' seed
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        for batch in coming:
            yield Ready(self._make(list(batch.indices)), batch.weight)

    def _maker(self, options: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
        """How samples become a batch, as in a DataLoader without processes.

        That one spends longer on telling a profiler of each small batch than the loader on all else.
        """
        dataset, collate = self._dataset, options.get("collate_fn") or default_collate
        numbered = self._user_sampler is None and self._user_batches is None
        if numbered and collate is default_collate and _has_rows(dataset):
            return partial(_rows, dataset)
        fetch = getattr(dataset, "__getitems__", None) or (lambda indices: [dataset[i] for i in indices])
        return lambda indices: collate(fetch(indices))

    def _loaded(self, epoch: int, coming: Iterator[Batch]) -> Generator[Ready, None, None]:
        weights = deque[int]()
        if (first := next(coming, None)) is None:
            return  # and no processes are started for nothing

        def indices() -> Iterator[list[Any]]:
            for batch in chain([first], coming):
                weights.append(batch.weight)
                yield list(batch.indices)

        self._sampler.batches = indices()
        with closing(self._loading.epoch(epoch)) as loaded:
            for content in loaded:
                yield Ready(content, weights.popleft())

    def _from(self, epoch: int, position: int) -> Iterator[Batch]:
        dealt = self._dealt(epoch)
        if self._tenant is not None:
            return self._tenant.batches(epoch, position, dealt, sum(self._sizes))
        return (dealt[number] for number in range(position, len(dealt)))

    def _dealt(self, epoch: int) -> Sequence[Batch]:
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self._deal(epoch)
        return self._known[1]

    def _deal(self, epoch: int) -> Sequence[Batch]:
        seed = self._place.seed
        if self._user_batches is not None:
            return deal_whole(draw(self._user_batches, seed, epoch), self._owner)
        if self._user_sampler is not None:
            samples: Any = draw(self._user_sampler, seed, epoch)
        else:
            samples = order(len(self._dataset), seed, epoch, self._shuffle)
        return deal(samples, self._owner, self._sizes, self._drop_last)


class _Dealt(Sampler[list[int]]):
    """A batch sampler that is told its batches before each epoch."""

    batches: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def _has_rows(dataset: Any) -> bool:
    """Whether its batches are rows of ordinary tensors."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
        for tensor in dataset.tensors
    )


def _rows(dataset: TensorDataset, indices: list[int]) -> list[Tensor]:
    """The batch that torch stacks from samples one by one, bit for bit, gathered at once."""
    index = torch.tensor(indices)
    return [tensor.index_select(0, index) for tensor in dataset.tensors]


def draw(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """All that a sampler of the user's gives for an epoch: the same list on every worker and after a resume.

    Its generators, and the global ones of torch, numpy and random, are seeded ones meanwhile; afterwards they
    stand where they stood. ``set_epoch`` is called where it exists.
    """
    own = seed_of(seed, epoch)
    with Randomness(own).used():
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        for number, part in enumerate(parts_of(sampler)):
            if callable(told := getattr(part, "set_epoch", None)):
                told(epoch)
            fields = getattr(part, "__dict__", {})
            for name, value in list(fields.items()):
                kind = torch.Generator() if value is None and name == "generator" else value
                if (generator := fresh(kind, seed_of(seed, epoch, number))) is not None:
                    replaced.append((fields, name, value))
                    fields[name] = generator
        try:
            return list(sampler)
        finally:
            for fields, name, value in replaced:
                fields[name] = value


def parts_of(sampler: Any) -> list[Any]:
    """A sampler and the samplers that it draws from."""
    found = [sampler]
    for one in found:  # grows on the way
        for name, value in getattr(one, "__dict__", {}).items():
            inner = isinstance(value, Sampler) or (name.endswith("sampler") and value is not None)
            if inner and all(value is not other for other in found):
                found.append(value)
    return found


class Start:
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
