"""What each worker group was last sent of each chunk, and what brings it from there to the present values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import acts
from shoal.codecs import Coded, Coding, decoded, move, wide
from shoal.parameters import Allocate, laid_out
from shoal.partition import Chunk, Plan
from shoal.rows import Content
from shoal.shard import Shard


@dataclass
class Snapshot:
    """What every worker of a group gets of a chunk for a step, the same bytes to all.

    Attributes:
        revision: lsn of the chunk's last change when it was taken.
        sent: all values; of a table the rows that have changed since the group's last snapshot; or an encoded
            difference to edition `base`. None: the values are those of edition `base`.
        known: the values that the group has with it; of a table what was sent.
        edition, base: as in wire.Values.
        news: whether the group has not been sent these bytes before.
        stop: the group is to end its loop after this step.
        edited: the group has changed `known` by hand since, so that the next snapshot has to be all values.
    """

    reply: acts.Reply
    version: int
    revision: int
    sent: Content | Coded | None
    known: Content
    edition: int
    base: int
    news: bool
    stop: bool
    edited: bool = False


class Snapshots:
    """The last snapshot of each chunk and group.

    Args:
        coding: how values are encoded. What that leaves out of a difference is in the next one, because that
            is to what the group has.
        alone: one worker group, and no other server group: the shard itself may then be sent, because nothing
            changes it before every worker has it.
        allocate: gives the memory that snapshots lie in.
    """

    def __init__(self, plan: Plan, shard: Shard, coding: Coding, alone: bool, allocate: Allocate) -> None:
        self.alone = alone
        self._plan, self._shard, self._coding, self._allocate = plan, shard, coding, allocate
        self._last: dict[tuple[int, int], Snapshot] = {}
        self._rooms: dict[int, dict[int, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The chunks and groups of which there is one."""
        return iter(list(self._last))

    def last(self, chunk: int, group: int) -> Snapshot | None:
        """The last one; None before the first."""
        return self._last.get((chunk, group))

    def take(self, reply: acts.Reply, version: int, stop: bool, whole: bool = False) -> Snapshot:
        """What the group gets from now on.

        Args:
            whole: all values, for who may have none of them.
        """
        chunk, last = self._plan.chunks[reply.chunk], self.last(reply.chunk, reply.group)
        values, revision = self._shard.values(chunk.number), self._shard.revision[chunk.number]
        news = last is None or last.revision != revision
        content: Content | Coded | None = values
        known: Content = values
        edition = base = 0
        if last is not None and chunk.row and not whole:
            content = known = self._shard.news(chunk.number, last.revision)
        elif self._coding.applies(chunk):
            known = self._room(chunk, reply.group)
            edition, base = (last.edition, last.edition) if last is not None else (0, 0)
            if last is None or last.edited or whole:
                content, base, news = known.copy_(values), 0, True
            else:
                content = self._difference(chunk, values, known) if news else None
            edition += news
        elif not self.alone:
            # The group has all of the last snapshot, or this round could not have closed: reuse its memory.
            content = known = self._room(chunk, reply.group).copy_(values)
        snapshot = Snapshot(reply, version, revision, content, known, edition, base, news, stop)
        self._last[reply.chunk, reply.group] = snapshot
        return snapshot

    def _difference(self, chunk: Chunk, values: Tensor, known: Tensor) -> Coded:
        """How far the values are from what a group has, encoded; from now on it has what that leads to."""
        difference = self._coding.encode(values.to(wide(values.dtype)) - known, chunk)
        move(known, decoded(difference, chunk))
        return difference

    def _room(self, chunk: Chunk, group: int) -> Tensor:
        """Where a group's snapshots of a chunk lie, one after the other."""
        if chunk.row:  # all of a table is sent but rarely
            return torch.empty_like(self._shard.values(chunk.number))
        if group not in self._rooms:
            chunks = [chunk for chunk in self._shard.chunks if not chunk.row]
            kept = [c for c in chunks if self._coding.applies(c) or not self.alone]
            self._rooms[group] = laid_out(kept, self._allocate)
        return self._rooms[group][chunk.number]

    def edit(self, snapshot: Snapshot, edited: Tensor) -> Tensor:
        """The group has changed a chunk to these values (flat); returns what the shard's become with that.

        What it changed is added to what others did meanwhile.
        """
        values, known = self._shard.values(snapshot.reply.chunk), snapshot.known
        assert isinstance(known, Tensor)
        if torch.equal(values, known):
            merged = edited
        elif self.alone:  # the rest of an encoded difference is still to come, and nobody else's change
            merged = torch.where(edited == known, values, edited)
        else:
            merged = values + (edited - known)
        if known.data_ptr() != values.data_ptr():
            known.copy_(edited)
        snapshot.edited = True
        return merged
