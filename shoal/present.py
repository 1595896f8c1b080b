"""What a server hands out between steps: present values, or their moving averages."""

from __future__ import annotations

from torch import Tensor

from shoal.shard import Shard
from shoal.wire import Pull


class Present:
    """A shard as it is when a worker asks; the workers of a group that ask together get the same bytes.

    Args:
        alone: nothing changes the shard before whoever asks goes on: it may be sent itself.
    """

    def __init__(self, shard: Shard, alone: bool) -> None:
        self._shard, self._alone = shard, alone
        self._kept: dict[int, tuple[Pull, dict[int, Tensor]]] = {}

    def of(self, group: int, chunk: int, asked: Pull) -> Tensor:
        """A chunk's values (flat) for a worker of the group.

        Raises:
            ProtocolError: averages are asked for, and none are kept.
        """
        if not asked.together:
            return self._take(chunk, asked.ema)
        if group not in self._kept or self._kept[group][0] != asked:
            copies = {c.number: self._take(c.number, asked.ema) for c in self._shard.chunks}
            self._kept[group] = asked, copies
        return self._kept[group][1][chunk]

    def forget(self, group: int) -> None:
        """The group has gone on: all of its workers have what they asked for together."""
        self._kept.pop(group, None)

    def _take(self, chunk: int, ema: bool) -> Tensor:
        if ema:
            return self._shard.averaged(chunk)
        values = self._shard.values(chunk)
        return values if self._alone else values.clone()
