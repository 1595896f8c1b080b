"""Counts of shares that add up: pushed = applied + dropped.

A worker numbers its shares of a chunk within a step from 1, and its commit says how many it pushed and
whether the last one counts. So the accounts follow from commits alone: a share that a link lost and that did
not count is still accounted for, and one that a link delivered twice is not counted twice.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

Reason = Literal["superseded", "dead", "non-finite", "evicted", "torn"]


class Life(NamedTuple):
    """One life of one worker: its group, its rank in the group, its incarnation."""

    group: int
    rank: int
    incarnation: int


class Ledger:
    """What became of every share that was pushed to one server."""

    def __init__(self) -> None:
        self.applied = 0
        self.duplicate = 0
        self.dropped: Counter[Reason] = Counter()
        self._told: Counter[Life] = Counter()
        self._accounted: Counter[Life] = Counter()

    @property
    def pushed(self) -> int:
        """Shares pushed so far, as the workers' commits told."""
        return self._told.total()

    @property
    def balance(self) -> int:
        """Shares pushed whose fate is open; 0 once every worker has settled."""
        return self.pushed - self.applied - self.dropped.total()

    def tell(self, life: Life, total: int) -> None:
        """Note a worker's word: it has pushed `total` shares to this server in this life."""
        self._told[life] = max(self._told[life], total)

    def apply(self, life: Life) -> None:
        """Account for one share that went into an update."""
        self.applied += 1
        self._accounted[life] += 1

    def drop(self, life: Life, reason: Reason, count: int = 1) -> None:
        """Account for `count` shares that never will."""
        if count:
            self.dropped[reason] += count
            self._accounted[life] += count

    def settle(self, life: Life, reason: Reason = "superseded", unseen: int = 0) -> None:
        """Close the account of a worker that leaves or is gone: what no commit decided is dropped.

        Args:
            unseen: shares of this life that are here but that no commit has told of.
        """
        self._told[life] = max(self._told[life], self._accounted[life] + unseen)
        self.drop(life, reason, self._told[life] - self._accounted[life])
