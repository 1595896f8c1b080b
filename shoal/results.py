"""Results that some workers compute and all get; values as they travel and are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor
from torch.distributed import Store

from shoal.errors import PeerFailed, UsageError
from shoal.site import Membership, Site, wait_for
from shoal.topology import Member


def plain_value(value: Any) -> Any:
    """A result as it can travel: numbers, text, None, lists and dicts; tensors and arrays become numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return value


def loggable(name: str, value: Any) -> Any:
    """What is kept of a logged value: a tensor stays one, since reading it would wait for a GPU.

    Raises:
        UsageError: it is no number, no text, no tensor of one element.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    number = value.item() if getattr(value, "size", None) == 1 else value  # numpy's
    if number is None or isinstance(number, (int, float, str)):
        return number
    raise UsageError(
        f"{name} cannot be logged: it is a {type(value).__name__}",
        remedy="log a number, text, or a tensor of one element",
    )


def plain_number(value: Any) -> Any:
    """A logged value as it is written down."""
    return value.item() if isinstance(value, Tensor) else value


class Shared:
    """Results that one worker computes, or several in parts, and all get, through the store."""

    def __init__(self, membership: Membership, site: Site) -> None:
        self._m, self._site = membership, site
        self._opened: Store | None = None

    def compute(self, key: str, function: Callable[[], Any], *, by: Member, alone: bool) -> Any:
        """What `function` returns on the member `by`; `alone`: nobody else waits for it.

        Raises:
            PeerFailed: elsewhere, when the function failed; its own error where it ran.
            WaitTimeout: after timeouts.evaluate seconds.
        """
        if alone:
            return function()
        return self._give(key, function) if by == self._m.member else self._get(key, by)

    def mean(
        self, key: str, by: Sequence[Member], part: Callable[[Callable[[], None]], tuple[int, Any]]
    ) -> Any:
        """The mean of the results of all members in `by`, weighted by their samples.

        Args:
            part: returns samples and result, both of this member's part; it calls what it is given now and
                then, which raises when another part has failed.

        Raises:
            PeerFailed, WaitTimeout: as compute().
            UsageError: there are no samples, or the results have no mean.
        """
        if self._m.member in by:
            self._give(key, lambda: part(lambda: self._check(key)))
        return weighted_mean([self._get(key, member) for member in by])

    @property
    def _store(self) -> Store:
        self._opened = self._opened or self._site.store()
        return self._opened

    def _give(self, key: str, function: Callable[[], Any]) -> Any:
        """What the function returns, or its error: here, and for those who wait."""
        mine, failed = f"{key}/{self._m.member}", f"{key}/failed"
        try:
            result = function()
            content = _packed(result)
        except Exception as error:
            if not self._store.check([failed]):
                text = f"the evaluation failed on {self._m.member}: {type(error).__name__}: {error}"
                self._store.set(failed, text)
            self._store.set(mine, "")
            raise
        self._store.set(mine, content)
        return result

    def _get(self, key: str, member: Member) -> Any:
        def check() -> None:
            self._check(key)

        content = wait_for(
            self._store, f"{key}/{member}", self._m, "evaluate", f"{member} to evaluate", check
        )
        check()
        return msgspec.msgpack.decode(bytes.fromhex(content.decode()))

    def _check(self, key: str) -> None:
        self._site.check()
        if self._store.check([f"{key}/failed"]):
            raise PeerFailed(self._store.get(f"{key}/failed").decode(), member=self._m.member.name)


def _packed(result: Any) -> str:
    try:
        return msgspec.msgpack.encode(plain_value(result)).hex()
    except TypeError as error:
        raise UsageError(
            f"the evaluation's result cannot be sent to the other workers ({error})",
            remedy="return numbers, text, lists or dicts of them",
        ) from error


def weighted_mean(parts: Sequence[tuple[int, Any]]) -> Any:
    """The mean of results weighted by samples: of numbers, or number by number in lists and dicts.

    Raises:
        UsageError: there are no samples, or results are of different forms or hold something else.
    """
    total = sum(samples for samples, _ in parts)
    if not total:
        raise UsageError("an evaluation of no samples", remedy="give run.evaluate data that has some")
    return _mean([(samples / total, result) for samples, result in parts if samples])


def _mean(parts: Sequence[tuple[float, Any]]) -> Any:
    (_, first), *_ = parts
    results = [result for _, result in parts]

    def at(place: Any) -> Any:
        return _mean([(weight, result[place]) for weight, result in parts])

    if isinstance(first, dict) and all(isinstance(r, dict) and r.keys() == first.keys() for r in results):
        return {key: at(key) for key in first}
    if isinstance(first, list) and all(isinstance(r, list) and len(r) == len(first) for r in results):
        return [at(place) for place in range(len(first))]
    if all(isinstance(result, (int, float)) for result in results):
        return sum(weight * result for weight, result in parts)
    raise UsageError(
        f"parts of an evaluation have no mean: {', '.join(sorted({type(r).__name__ for r in results}))}",
        remedy="return numbers, or lists or dicts of them, of one form on every worker",
    )
