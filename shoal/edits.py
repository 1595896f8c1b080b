"""Values that a script has changed by hand: what it changed is added to what others did meanwhile."""

from __future__ import annotations

import torch

from shoal.errors import ProtocolError
from shoal.ledger import Life
from shoal.parameters import checked, received
from shoal.partition import Chunk
from shoal.rows import Rows, edited_rows
from shoal.shard import Shard
from shoal.snapshots import Snapshots
from shoal.wire import Message


class Edits:
    """A server's part in `run.edit`; each edit is made once, however often it comes.

    Args:
        snapshots: what groups have, of which an edit is a change.
    """

    def __init__(self, shard: Shard, snapshots: Snapshots) -> None:
        self._shard, self._snapshots = shard, snapshots
        self._last: dict[tuple[Life, int], int] = {}

    def edit(self, message: Message, life: Life, chunk: Chunk) -> None:
        """A group's worker has changed a chunk; raises ProtocolError for what cannot be an edit of it."""
        if message.header.number > self._last.get((life, chunk.number), 0):
            self._last[life, chunk.number] = message.header.number
            if chunk.row:
                self._rows(message, chunk)
            else:
                self._values(message, life.group, chunk)

    def _values(self, message: Message, group: int, chunk: Chunk) -> None:
        edited = checked(message.frames, chunk, message.header.sender)
        snapshot = self._snapshots.last(chunk.number, group)
        if snapshot is None:
            raise ProtocolError(f"{message.header.sender} changes chunk {chunk.number}, which it never had")
        self._shard.assign(chunk.number, self._snapshots.edit(snapshot, edited))

    def _rows(self, message: Message, chunk: Chunk) -> None:
        sender, frames = message.header.sender, message.frames
        new, old = (received(part, "rows", chunk, sender) for part in (frames[:2], frames[2:]))
        if not (isinstance(new, Rows) and isinstance(old, Rows) and torch.equal(new.index, old.index)):
            raise ProtocolError(f"{sender} changed rows of chunk {chunk.number} and says not which they were")
        self._shard.assign(chunk.number, edited_rows(self._shard.table(chunk.number), new, old))
