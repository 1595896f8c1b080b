"""One worker evaluates, the others get the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor
from torch.distributed import Store

from shoal.errors import PeerFailed, UsageError
from shoal.site import Membership, Site, wait_for


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
    """Results that one worker computes and all get, through the store."""

    def __init__(self, membership: Membership, site: Site) -> None:
        self._membership, self._site = membership, site
        self._store: Store | None = None

    def compute(self, key: str, function: Callable[[], Any], *, ours: bool, alone: bool) -> Any:
        """What `function` returns where it is `ours` to compute; `alone`: nobody else waits for it.

        Raises:
            PeerFailed: elsewhere, when the function failed; its own error where it ran.
            WaitTimeout: after timeouts.evaluate seconds.
        """
        if alone:
            return function()
        if self._store is None:
            self._store = self._site.store()
        if ours:
            return self._publish(self._store, key, function)
        what = "the worker that evaluates"
        content = wait_for(self._store, key, self._membership, "evaluate", what, self._site)
        result, error = msgspec.json.decode(content)
        if error is not None:
            raise PeerFailed(f"the evaluation failed: {error}", member=self._membership.member.name)
        return result

    @staticmethod
    def _publish(store: Store, key: str, function: Callable[[], Any]) -> Any:
        try:
            result = function()
            content = msgspec.json.encode((plain_value(result), None))
        except TypeError as error:
            store.set(key, msgspec.json.encode((None, str(error))).decode())
            raise UsageError(
                f"the evaluation's result cannot be sent to the other workers ({error})",
                remedy="return numbers, text, lists or dicts of them",
            ) from error
        except Exception as error:
            store.set(key, msgspec.json.encode((None, f"{type(error).__name__}: {error}")).decode())
            raise
        store.set(key, content.decode())
        return result
