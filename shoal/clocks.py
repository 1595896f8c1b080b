"""How far each group is on each chunk, and who is ahead of whom by how much."""

from __future__ import annotations

from collections.abc import Iterable


class Clocks:
    """A clock per group and chunk: the last step of the group whose round on the chunk is closed.

    Args:
        max_delay: how many steps a group may be ahead of the slowest live one; None = any.
        live: the groups that take part from the start; the slowest is one of these.

    Attributes:
        closed: group → chunk → the last closed step.
        live: the groups that take part.
    """

    def __init__(
        self, groups: Iterable[int], chunks: Iterable[int], max_delay: int | None, live: Iterable[int]
    ) -> None:
        self._chunks = tuple(chunks)
        self.closed = {group: dict.fromkeys(self._chunks, 0) for group in groups}
        self.live = set(live)
        self._lead = {group: dict.fromkeys(self._chunks, 0) for group in self.closed}
        self._max_delay = max_delay

    def version(self, chunk: int) -> int:
        """Rounds closed on the chunk by all groups."""
        return sum(closed[chunk] for closed in self.closed.values())

    def at(self, group: int, chunk: int) -> int:
        """The group's clock: its closed rounds, and what it was set ahead by when it returned."""
        return self.closed[group][chunk] + self._lead[group][chunk]

    def slowest(self, chunk: int) -> tuple[int, ...]:
        """The live groups that are furthest behind on the chunk."""
        least = min((self.at(group, chunk) for group in self.live), default=0)
        return tuple(group for group in sorted(self.live) if self.at(group, chunk) == least)

    def allow(self, group: int, chunk: int) -> bool:
        """Whether the group may have the chunk's values of its last closed step."""
        if self._max_delay is None or not self.live:
            return True
        return self.at(group, chunk) - self.at(self.slowest(chunk)[0], chunk) <= self._max_delay

    def join(self, group: int) -> None:
        """The group takes part (again), level with the slowest of the others."""
        others = self.live - {group}
        for chunk in self._chunks if others else ():
            least = min(self.at(other, chunk) for other in others)
            self._lead[group][chunk] = least - self.closed[group][chunk]
        self.live.add(group)
