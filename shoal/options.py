"""What a loader may be given, checked: datasets, DataLoaders, keywords, samplers, batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shoal.errors import UsageError
from shoal.sources import parts_of

_KEYWORDS = tuple(name for name in signature(DataLoader).parameters if name != "dataset")
_OURS = ("sharded", "leased")
_DEFAULTS = {"batch_size": 1, "drop_last": False}


def is_stream(dataset: Any, sampler: Any) -> bool:
    """Whether the samples can only be read in their own order; an error where they cannot be dealt."""
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset):
        if hasattr(dataset, "__getitem__") and (hasattr(dataset, "__len__") or sampler is not None):
            return False
        if isinstance(dataset, Iterator):
            raise UsageError(
                f"a {name} can be read once only, and not by every worker: its samples cannot be dealt",
                remedy="Give something that can be iterated over again: a list, or a class with __iter__.",
            )
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            f"samples of a {name} cannot be dealt: it has no length and indices, and cannot be iterated over",
            remedy="Use a map-style dataset (__len__ and __getitem__), an IterableDataset or a list.",
        )
    return True


def checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a user, with defaults."""
    for name in keywords:
        if name not in _KEYWORDS:
            near = get_close_matches(name, (*_KEYWORDS, *_OURS), 1)
            raise UsageError(
                f"the loader has no keyword {name!r}",
                remedy=f"Did you mean {near[0]}?"
                if near
                else f"Choose from {', '.join((*_KEYWORDS, *_OURS))}.",
            )
    samplers = ("sampler", "batch_sampler")
    options = {name: value for name, value in keywords.items() if value is not None or name not in samplers}
    excluded = {"sampler": ["shuffle"], "batch_sampler": ["batch_size", "shuffle", "sampler", "drop_last"]}
    for name, others in excluded.items():
        both = [other for other in others if options.get(other)] if name in options else []
        if both:
            raise UsageError(
                f"the loader was given {name} and {', '.join(both)}",
                remedy=f"Leave out one or the other: {name} says which samples come and in which order.",
            )
    return _in_order(options if "batch_sampler" in options else {**_DEFAULTS, **options})


def settings_of(source: DataLoader[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """A DataLoader's settings as keywords."""
    if keywords:
        raise UsageError(
            f"the loader was given a DataLoader and keywords: {', '.join(keywords)}",
            remedy="Set them on the DataLoader, or hand over its dataset with keywords.",
        )
    ways = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
    settings = {name: getattr(source, name) for name in _KEYWORDS if name not in ways}
    if source.batch_size is None and source.batch_sampler is not None:
        return _in_order({**settings, "batch_sampler": source.batch_sampler})
    settings |= {"batch_size": source.batch_size, "drop_last": source.drop_last}
    if not isinstance(source.dataset, IterableDataset):
        shuffled = _shuffles(source)
        settings |= {"sampler": source.sampler} if shuffled is None else {"shuffle": shuffled}
    return _in_order(settings)


def _shuffles(source: DataLoader[Any]) -> bool | None:
    """Whether a DataLoader shuffles its whole dataset; None if it has a sampler of another kind."""
    sampler: Any = source.sampler
    dataset: Any = source.dataset
    # torchdata has a RandomSampler of its own.
    ours = type(sampler).__module__.startswith(("torch.utils.data.", "torchdata."))
    name = type(sampler).__name__ if ours else ""
    if name not in ("RandomSampler", "SequentialSampler") or sampler.data_source is not dataset:
        return None
    if name == "SequentialSampler":
        return False
    whole = not sampler.replacement and sampler.num_samples == len(dataset)
    return True if whole else None


def _in_order(options: dict[str, Any]) -> dict[str, Any]:
    if not options.get("in_order", True):
        raise UsageError(
            "a loader with in_order=False: it could not tell which batch has come",
            remedy="Leave in_order out.",
        )
    return options


def check_sampler(sampler: Any) -> None:
    """Refuse what gives no order, and what deals samples to workers itself."""
    name = type(sampler).__name__
    if not hasattr(sampler, "__iter__") or isinstance(sampler, Iterator):
        raise UsageError(
            f"a {name} as sampler gives no order epoch after epoch",
            remedy="Give a list of indices, a torch.utils.data.Sampler or a class with __iter__.",
        )
    for part in parts_of(sampler):
        if isinstance(part, DistributedSampler) or getattr(part, "num_replicas", 1) != 1:
            raise UsageError(
                f"a {type(part).__name__} would deal the samples once more: the loader does that",
                remedy="Remove it; shuffle=True or False says the order.",
            )


def sizes_of(batch_size: Any, workers: int) -> list[int]:
    """Samples per batch of each worker of a group, shape [workers].

    Raises:
        UsageError: no whole numbers of 1 or more, or not one for each rank.
    """
    if not isinstance(batch_size, Mapping):
        batch_size = dict.fromkeys(range(workers), batch_size)
    sizes = {rank: batch_size[rank] for rank in range(workers) if rank in batch_size}
    missing = [str(rank) for rank in range(workers) if rank not in sizes]
    foreign = [repr(key) for key in batch_size if key not in sizes]
    if missing or foreign:
        wrong = [f"{words} {', '.join(n)}" for words, n in (("lacks", missing), ("also has", foreign)) if n]
        raise UsageError(
            f"batch_size by rank, for a group of {workers}, {' and '.join(wrong)}",
            remedy=f"Give a size for each rank in the group, 0 to {workers - 1}.",
        )
    for size in sizes.values():
        if type(size) is not int or size < 1:
            raise UsageError(
                f"a loader with batch_size={size!r}",
                remedy="Give batch_size, the samples per worker and step, a whole number of 1 or more.",
            )
    return list(sizes.values())
