"""torch's store on the coordinator: Gloo and NCCL find each other through it, over an authenticated wire."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from shoal.coordinator import Answer
from shoal.link import Link


class LinkStore(Store):
    """A torch.distributed.Store whose values the coordinator keeps.

    Args:
        limit: seconds that `get` and `wait` wait unless told otherwise.
    """

    def __init__(self, link: Link, limit: float) -> None:
        super().__init__()
        self._link, self._limit = link, limit

    def _ask(
        self, verb: str, keys: Sequence[str] = (), values: Sequence[bytes] = (), limit: float = 0.0
    ) -> tuple[bytes, ...]:
        try:
            answer: Answer = self._link.ask(verb, keys, values, limit)
        except TimeoutError as error:
            raise DistStoreError(str(error)) from None
        if answer.refused:
            raise DistStoreError(f"waited {limit:g} s for {', '.join(keys)}")
        return answer.values

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """A value; waits for it."""
        return self._ask("wait", [key], limit=self._limit)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values; waits for them."""
        return list(self._ask("wait", keys, limit=self._limit))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Leave several values at once."""
        self._ask("set", keys, [_bytes(value) for value in values])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises:
            DistStoreError: they have not within the timeout.
        """
        self._ask("wait", keys, limit=self._limit if timeout is None else timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 where there is none yet; the sum."""
        return int(self._ask("add", [key], [b"%d" % amount])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is the expected one, or if none is there and none expected; the value then."""
        return self._ask("compare_set", [key], [_bytes(expected), _bytes(desired)])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return self._ask("check", keys)[0] == b"1"

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._ask("delete", [key])[0] == b"1"

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask("count")[0])

    def has_extended_api(self) -> bool:
        """Whether several values can be had and set at once."""
        return True

    # What torch calls them from C++.
    deleteKey, getNumKeys, multiGet, multiSet = delete_key, num_keys, multi_get, multi_set
    compareSet, hasExtendedApi = compare_set, has_extended_api


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
