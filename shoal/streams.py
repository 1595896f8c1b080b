"""Where a loader's batches come from: a stream, which has no indices and perhaps no known end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from shoal.errors import UsageError
from shoal.randomness import Randomness
from shoal.sampling import Place, deal, seed_of, turns
from shoal.sources import Loading, Ready, Start


class Streamed:
    """Batches of a stream.

    Every worker reads the whole stream, in blocks of one batch for each group, and keeps its own samples; so
    each knows by itself where the stream ends. Sample i belongs to group ``i % groups``, whose block is dealt
    to its workers in `turns`. A last, smaller block is too (unless drop_last), and a worker with none repeats
    a sample at weight 0. What the stream draws from the global generators of torch, numpy and random is the
    same for all workers.

    A sharded stream is taken as it comes; there the group agrees on the end, batch by batch, and workers that
    have none left repeat their last one at weight 0.

    Args:
        dataset: what has ``__iter__``; ``state_dict`` and ``load_state_dict`` spare a resumed run the reading
            of what it has had.
        place: whose batches.
        sizes: samples per batch of each worker of the group, shape [workers].
        options: DataLoader's keywords. The processes are started anew for each epoch.
        agree: for a sharded stream: told whether this worker has a batch, says whether any of the group has.
    """

    leased = False

    def __init__(
        self,
        dataset: Any,
        place: Place,
        sizes: Sequence[int],
        options: Mapping[str, Any],
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        rest = dict(options)
        drop_last = bool(rest.pop("drop_last"))
        self._place, self._sizes, self._drop_last, self._agree = place, sizes, drop_last, agree
        part = (
            Whole(dataset, place, sizes, drop_last)
            if agree is None
            else Own(dataset, place, sizes, drop_last)
        )
        self._part = part
        self._last: Any = None  # of a sharded stream, kept for company
        self._processes = rest.get("num_workers", 0)
        rest |= {
            "batch_size": None,
            "worker_init_fn": _Start(rest.get("worker_init_fn")),
            "collate_fn": _Collate(rest.get("collate_fn") or default_collate),
            "persistent_workers": False,  # one that persists would not hear of the next epoch
        }
        self._loading = Loading(part, place, rest)

    def length(self, epoch: int) -> int | None:
        """See Source.length; as right as the stream's own ``__len__``."""
        if self._agree is not None or not hasattr(self._part.source, "__len__"):
            return None
        return len(deal(range(len(self._part.source)), self._place, self._sizes, self._drop_last))

    def holds(self, epoch: int, position: int) -> bool:
        """See Source.holds."""
        return True

    def batches(self, epoch: int, position: int, state: Any) -> Generator[Ready, None, None]:
        """See Source.batches."""
        if self._agree is not None and self._processes > 1:
            state = None  # one process's
        self._part.begin(epoch, position, state)
        with closing(self._loading.epoch(epoch)) as loaded:
            if self._agree is None:
                yield from loaded
            else:
                yield from self._agreed(loaded, self._agree, 0 if state is not None else position)

    def _agreed(
        self, loaded: Iterator[Ready], agree: Callable[[bool], bool], skipped: int
    ) -> Iterator[Ready]:
        """The batches of a sharded stream, until nobody in the group has one."""
        for ready in islice(loaded, skipped):
            self._last = ready.content
        while True:
            found = next(loaded, None)
            if not agree(found is not None):
                return
            if found is not None:
                self._last = found.content
            elif self._last is None:
                raise UsageError(
                    f"worker {self._place.group}.{self._place.rank} has no samples in its part of the stream",
                    remedy="Split the stream into more parts, or leave out sharded=True.",
                )
            yield found or Ready(self._last, 0)


class Part(IterableDataset[tuple[list[Any], int, Any]]):
    """A worker's batches as (samples, how many count, the stream's state after them).

    Args:
        source: the user's stream.
        place: whose batches.
        sizes: samples per batch of each worker of the group, shape [workers].
        drop_last: leave out a smaller batch.

    Attributes:
        process: which of the DataLoader's processes this is, of ``processes``.
        seed: what the stream's randomness follows; the same for all workers.
    """

    def __init__(self, source: Any, place: Place, sizes: Sequence[int], drop_last: bool) -> None:
        self.source, self.place, self.sizes, self.drop_last = source, place, sizes, drop_last
        self.process, self.processes, self.seed, self.position = 0, 1, 0, 0
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._fresh = self._state()
        self._loaded: Any = None

    def begin(self, epoch: int, position: int, state: Any) -> None:
        """What the next iteration gives: the epoch's batches after the first ``position``."""
        self.position, self._loaded = position, state
        self.seed = seed_of(self.place.seed, epoch, *(() if state is None else (position,)))
        if callable(told := getattr(self.source, "set_epoch", None)):
            told(epoch)

    def seen_from(self, process: int, processes: int) -> tuple[int, int]:
        """The process of how many that the user's code shall take itself for; this one is the given one."""
        self.process, self.processes = process, processes
        return process, processes

    def _state(self) -> Any:
        return deepcopy(self.source.state_dict()) if self._stateful else None

    def _open(self) -> Iterator[Any]:
        if self._stateful:
            self.source.load_state_dict(deepcopy(self._fresh if self._loaded is None else self._loaded))
        return iter(self.source)


class Whole(Part):
    """A worker's part of a stream that all workers see alike."""

    def __init__(self, source: Any, place: Place, sizes: Sequence[int], drop_last: bool) -> None:
        super().__init__(source, place, sizes, drop_last)
        self._turn: list[int] = turns(sizes).tolist()

    def __iter__(self) -> Iterator[tuple[list[Any], int, Any]]:
        randomness = Randomness(self.seed)
        joint = sum(self.sizes)
        block = self.place.groups * joint  # one batch for each group
        with randomness.used():
            stream = self._open()
            if self._loaded is None:
                deque(islice(stream, self.position * block), maxlen=0)
        number = 0
        while True:
            with randomness.used():
                mine, spare, count, ended = self._read(stream, block)
                # One that has ended may stand at its start again; a run resumed there reads up to its end.
                state = None if ended else self._state()
            if not spare or (self.drop_last and count < joint):
                return
            if number % self.processes == self.process:  # torch asks its processes in turn
                yield mine or spare, len(mine), state
            number += 1

    def _read(self, stream: Iterator[Any], block: int) -> tuple[list[Any], list[Any], int, bool]:
        """The next block: this worker's samples, one of its group's, how many its group's are, the end."""
        place, turn = self.place, self._turn
        mine: list[Any] = []
        spare: list[Any] = []
        count = number = 0
        for number, sample in enumerate(islice(stream, block), 1):
            if (number - 1) % place.groups == place.group:
                spare = spare or [sample]
                if turn[count] == place.rank:
                    mine.append(sample)
                count += 1
        return mine, spare, count, number < block

    def seen_from(self, process: int, processes: int) -> tuple[int, int]:
        """Every process shall read the whole stream."""
        super().seen_from(process, processes)
        return 0, 1


class Own(Part):
    """A stream that is this worker's, and this process's, as it comes."""

    def __iter__(self) -> Iterator[tuple[list[Any], int, Any]]:
        stream = self._open()
        samples = self._read(stream)
        while samples:
            # Of several processes none knows the others' states; one that has ended may stand at its start.
            state = self._state() if self.processes == 1 else None
            following = self._read(stream)
            yield samples, len(samples), state if following else None
            samples = following

    def _read(self, stream: Iterator[Any]) -> list[Any]:
        size = self.sizes[self.place.rank]
        samples = list(islice(stream, size))
        return [] if self.drop_last and len(samples) < size else samples


class _Collate:
    """Makes a batch of a part's samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, item: tuple[list[Any], int, Any]) -> Ready:
        samples, weight, state = item
        return Ready(self.collate(samples), weight, state)


class _Start(Start):
    """Starts a DataLoader's process; the user's code in it sees its own dataset, not the part around it."""

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(part := info.dataset, Part):
            number, processes = part.seen_from(info.id, info.num_workers)
            seen = {"dataset": part.source, "id": number, "num_workers": processes}
            if isinstance(part, Whole):
                seen["seed"] = part.seed
            for name, value in seen.items():
                object.__setattr__(info, name, value)
            worker = number
        super().__call__(worker)
