"""A server beside its only worker: what it owns is the worker's model, and nothing travels between the two.

The worker's optimizer steps on the model itself. The server does what concerns others: it takes a start or
hands one on, exchanges differences with other server groups, and brings loops to their end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from shoal.errors import ProtocolError
from shoal.ledger import Life
from shoal.parameters import Replica, buffer_mark, checked
from shoal.partition import Chunk
from shoal.rows import numbers_of
from shoal.start import exported, load_state
from shoal.sync import Sync
from shoal.transport import Post
from shoal.updater import state_bytes
from shoal.wire import Frame, Kind, Message, State


class OwnShard:
    """What a server owns where that is the model of the worker beside it.

    The worker alone writes to the model, when it steps; what other groups have changed waits here until then.
    Buffers, which a forward changes too, are seen as they were at the last step that counted. Who uses it has
    `lock`.

    Args:
        synchronised: other server groups exchange values with this one.
        lock: see Beside.

    Attributes:
        steps: optimizer → steps that the worker has taken.
        applied, dropped: shares that would have been pushed.
        due: whether a chunk's next exchange is to begin; who exchanges sets it.
        returned: the worker has stepped after the end of a loop, and its server does not know yet.
        stop_asked: the worker asks all groups to end their loops, and its server has not told them yet.
        stopping: the worker is to end its loop, because another group asks for it.
    """

    def __init__(
        self,
        replica: Replica,
        optimizers: Sequence[torch.optim.Optimizer],
        synchronised: bool,
        lock: threading.RLock,
    ) -> None:
        self.plan, self.chunks, self.lock = replica.plan, replica.plan.chunks, lock
        self.steps: Counter[int] = Counter()
        self.applied = self.dropped = 0
        self.due: Callable[[], bool] = lambda: False
        self.returned = self.stop_asked = self.stopping = False
        self.synchronised = synchronised
        self._replica, self._optimizers = replica, optimizers
        self._new: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        self._end: dict[int, Tensor] = {}
        self._buffers = [chunk for chunk in self.chunks if chunk.buffer is not None and synchronised]
        self._marks: dict[int, tuple[int, ...]] = {}
        for chunk in self._buffers:
            replica.fill_buffer(chunk)
        self.remember()

    # For the server.

    def rounds(self, chunk: int) -> int:
        """The rounds closed on a chunk."""
        return self.steps[self.chunks[chunk].optimizer]

    @property
    def taken(self) -> tuple[int, ...]:
        """The steps taken of each optimizer."""
        return tuple(self.steps[number] for number in range(len(self._optimizers)))

    def values(self, chunk: int) -> Tensor:
        """The chunk's present values (flat)."""
        if self.chunks[chunk].buffer is not None:
            return numbers_of(self._replica.slots[chunk])
        known = self._new.get(chunk, self._kept.get(chunk))
        return self._replica.read(self.chunks[chunk]) if known is None else known

    def assign(self, chunk: int, values: Tensor) -> None:
        """Set the chunk's values (flat); the worker has them from its next step on."""
        self._new[chunk] = values.clone()
        if self.chunks[chunk].buffer is not None:
            self.values(chunk).copy_(values)

    def export(self, chunk: int) -> tuple[list[State], list[Frame]]:
        """Everything about a chunk as it travels; see Shard.export."""
        number = self.chunks[chunk].optimizer
        return exported(self._optimizers[number], self._replica, self.chunks[chunk], self.values(chunk))

    def expect(self) -> None:
        """The start is another worker's: what the optimizers know is forgotten."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def load(self, chunk: Chunk, entries: Sequence[State], frames: Sequence[Frame], sender: str) -> None:
        """Take over what `export` made, while the worker waits for it; see Shard.load."""
        self.assign(chunk.number, checked(frames[:1], chunk, sender))
        load_state(self._optimizers[chunk.optimizer], self._replica, chunk, entries, frames[1:])

    def end(self) -> None:
        """A loop has ended: the present values are what all groups have at its end."""
        self._end = self.keep()

    @property
    def parameters(self) -> int:
        """Elements of parameters held here."""
        return sum(chunk.size for chunk in self.chunks if chunk.buffer is None)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state held here."""
        return sum(map(state_bytes, self._optimizers))

    # For the worker.

    def install(self, optimizer: int | None = None, counts: bool = True) -> None:
        """Have in the model what other groups have changed, of one optimizer's chunks or of all.

        Args:
            counts: what the worker has made of buffers since its last step is part of this one, and stays.
        """
        changed = self.changed() if counts else set()
        self._end, self._kept = {}, {}
        for number in list(self._new):
            if optimizer in (None, self.chunks[number].optimizer):
                values = self._new.pop(number)
                if self.chunks[number].buffer not in changed:
                    self._replica.install(self.chunks[number], values)
        for chunk in self._buffers:
            if optimizer in (None, chunk.optimizer):
                if chunk.buffer in changed:
                    self._replica.fill_buffer(chunk)
                self._marks[chunk.number] = self._mark(chunk)

    def closed(self, optimizer: int, shares: int, applied: bool) -> None:
        """The worker has taken a step, in which so many chunks had a gradient."""
        self.steps[optimizer] += 1
        if applied:
            self.applied += shares
        else:
            self.dropped += shares

    def keep(self) -> dict[int, Tensor]:
        """All present values; until the next step they are kept here, whatever becomes of the model."""
        if self.synchronised:
            known = self._kept.keys() | self._new.keys()
            trained = (chunk for chunk in self.chunks if chunk.buffer is None and chunk.number not in known)
            self._kept |= {chunk.number: self._replica.read(chunk) for chunk in trained}
        buffers = {chunk.number: self.values(chunk.number).clone() for chunk in self._buffers}
        return buffers | self._kept | self._new

    def take(self) -> dict[int, Tensor]:
        """What the worker puts in its model now: all present values, after a loop those of its end."""
        values = self._end or self.keep()
        new, self._new = self._new, {}
        for number, tensor in new.items():
            later = self._new if self._end and values[number] is not tensor else self._kept
            later[number] = tensor
        return values

    def edited(self) -> None:
        """The values are those in the model again, which the script has changed."""
        self._new, self._kept = {}, {}
        for chunk in self._buffers:
            self._replica.fill_buffer(chunk)
        self.keep()

    def changed(self) -> set[int]:
        """The buffers that have changed in the model since the last step."""
        changed = (c for c in self._buffers if self._marks[c.number] != self._mark(c))
        return {chunk.buffer for chunk in changed if chunk.buffer is not None}

    def remember(self, pending: Collection[int] = ()) -> None:
        """From now on buffers count as unchanged, but for these."""
        for chunk in self._buffers:
            self._marks[chunk.number] = () if chunk.buffer in pending else self._mark(chunk)

    def _mark(self, chunk: Chunk) -> tuple[int, ...]:
        assert chunk.buffer is not None
        return buffer_mark(self._replica.places[chunk.buffer].tensor)


class Beside:
    """What a worker and the server beside it, a thread of its process, have in common.

    Attributes:
        lock: held by the server while it handles a message, and by the worker while it steps.
        shard: the worker's model; None where the server keeps the values, as elsewhere.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.shard: OwnShard | None = None


class OwnRounds:
    """What a server does about the steps of a worker that takes them itself.

    Args:
        peers: names of the servers that this one synchronises with.
    """

    warming = False

    def __init__(self, shard: OwnShard, sync: Sync, post: Post, peers: Sequence[str]) -> None:
        self.shard, self.sync = shard, sync
        self.handlers: dict[Kind, Callable[[Message], None]] = {Kind.COMMIT: self.commit}
        self._post, self._peers = post, peers
        self._loop = 1
        shard.due = sync.due

    def commit(self, message: Message) -> None:
        """The worker has stepped, and something is to be done."""
        if self.shard.returned:
            self.shard.returned = False
            self.sync.resume()
        if self.shard.stop_asked:
            self.shard.stop_asked = False
            for peer in self._peers:
                self._post.send(peer, Kind.STOP, number=self._loop)
        for chunk in self.shard.chunks:
            self.sync.closed(chunk.number, time.monotonic())

    def heard_stop(self, loop: int) -> None:
        """A server of another group says that this loop is to end."""
        self.shard.stopping |= loop == self._loop

    def end_loop(self) -> None:
        """All groups have left and flushed."""
        self.shard.end()
        self._loop, self.shard.stopping = self._loop + 1, False

    def join(self, life: Life) -> tuple[int, ...]:
        """The worker is there; returns the last step of each optimizer."""
        return self.shard.taken

    def leave(self, life: Life, total: int) -> None:
        """The worker has left a loop."""

    def edit(self, message: Message) -> None:
        """Nobody else changes these values by hand."""
        raise ProtocolError(f"{message.header.sender} changes values that are another worker's own")

    def chunk(self, message: Message) -> Chunk:
        """The chunk that a message is about; raises ProtocolError where there is none."""
        header = message.header
        if header.chunk not in range(len(self.shard.chunks)):
            raise ProtocolError(f"{header.sender} sent a {header.kind.name.lower()} for chunk {header.chunk}")
        return self.shard.chunks[header.chunk]
