"""Exchange between server groups: differences are added at a chunk's master, nothing is lost.

Follower: Δ = cur − B, B' = cur; on the reply M: cur ← M + (cur − B'), B ← M. Master: cur ← cur + Δ, once per
(chunk, group, sequence). SINGA 0.3 set B ← cur on the reply instead, which lost every update made while an
exchange was in flight. Buffers are averaged instead, so that a variance stays a variance.

Tables with sparse gradients travel between server groups whole, as differences: `sync_freq` says how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import ProtocolError
from shoal.partition import Chunk


class Owned(Protocol):
    """The values that a server owns; see Shard."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    @property
    def rounds(self) -> Callable[[int], int]: ...

    def values(self, chunk: int) -> Tensor: ...

    def assign(self, chunk: int, values: Tensor) -> None: ...


class Send(Protocol):
    """Sends a chunk's tensor to the peer in a server group; `final`: the loop that it ends, or 0."""

    def __call__(self, group: int, chunk: int, sequence: int, final: int, tensor: Tensor) -> None: ...


@dataclass
class _Following:
    """A follower's side of one chunk.

    Attributes:
        exchanged: rounds that the last difference sent has covered, and those before.
    """

    base: Tensor
    exchanged: int = 0
    sequence: int = 0
    sent: Tensor | None = None
    final: int = 0
    covered: int = 0
    due: float = 0.0
    patience: float = 0.0


class Sync:
    """One server's exchanges with its peers in the other server groups.

    Args:
        shard: whose values move.
        group: this server's group; `groups`: how many there are.
        sync_freq: rounds that close on a chunk before its next exchange.
        request, reply: send a difference to a master, a master's values to a follower.
        patience: seconds after which an unanswered request is sent again (then twice as long, and so on).
    """

    def __init__(
        self,
        shard: Owned,
        group: int,
        groups: int,
        sync_freq: int,
        request: Send,
        reply: Send,
        patience: float,
    ) -> None:
        self.exchanges = 0
        self.exchanged_rounds = 0
        self._shard, self._groups = shard, groups
        self._frequency, self._patience = sync_freq, patience
        self._request, self._reply = request, reply
        self._chunks: dict[int, Chunk] = {c.number: c for c in shard.chunks} if groups > 1 else {}
        self._following = {
            number: _Following(shard.values(number).clone())
            for number, chunk in self._chunks.items()
            if chunk.master != group
        }
        self._answered: dict[tuple[int, int], int] = {}
        self._finals: dict[int, dict[int, tuple[int, int]]] = {
            n: {} for n in self._chunks if n not in self._following
        }
        self._open: set[int] = set()
        self._loop = 0
        self._flushing = False
        self._begun = True

    def hold(self) -> None:
        """The other groups have no start yet: exchange nothing before `begin()`."""
        self._begun = False

    def begin(self) -> None:
        """The present values are every group's start."""
        self._begun = True
        for chunk, state in self._following.items():
            state.base.copy_(self._shard.values(chunk))
            state.exchanged = self._shard.rounds(chunk)

    # Beside training.

    def closed(self, chunk: int, now: float) -> None:
        """A local round has closed on the chunk."""
        if (state := self._following.get(chunk)) and self._due(chunk, state):
            self._send(chunk, state, now)

    def due(self) -> bool:
        """Whether `closed` would begin an exchange of some chunk."""
        return any(self._due(chunk, state) for chunk, state in self._following.items())

    def _due(self, chunk: int, state: _Following) -> bool:
        rounds = self._shard.rounds(chunk) - state.exchanged
        return self._begun and state.sent is None and rounds >= self._frequency

    def _send(self, chunk: int, state: _Following, now: float, final: int = 0) -> None:
        values = self._shard.values(chunk)
        averaged = self._chunks[chunk].buffer is not None
        state.sent = values.clone() if averaged else values - state.base
        state.base.copy_(values)
        rounds = self._shard.rounds(chunk)
        state.covered, state.exchanged = rounds - state.exchanged, rounds
        state.sequence += 1
        state.final = final
        state.due, state.patience = now + self._patience, self._patience
        self._request(self._chunks[chunk].master, chunk, state.sequence, final, state.sent)

    def tick(self, now: float) -> None:
        """Send again what has not been answered in time."""
        for chunk, state in self._following.items():
            if state.sent is not None and now >= state.due:
                state.patience *= 2
                state.due = now + state.patience
                self._request(self._chunks[chunk].master, chunk, state.sequence, state.final, state.sent)

    def requested(self, group: int, chunk: int, sequence: int, final: int, tensor: Tensor) -> None:
        """Master: a follower's difference (flat) arrived."""
        if chunk not in self._finals:
            raise ProtocolError(f"server group {group} does not follow this one on chunk {chunk}")
        if sequence > self._answered.get((chunk, group), 0):
            self._answered[chunk, group] = sequence
            self._shard.assign(chunk, self._merged(chunk, tensor))
            if final:
                self._finals[chunk][group] = (sequence, final)
        if final and group in self._finals[chunk]:
            self._try_final(chunk)
        else:
            self._reply(group, chunk, sequence, final, self._shard.values(chunk).clone())

    def _merged(self, chunk: int, tensor: Tensor) -> Tensor:
        values = self._shard.values(chunk)
        if self._chunks[chunk].buffer is None:
            return values + tensor
        if values.is_floating_point() or values.is_complex():
            return values + (tensor - values) / self._groups
        return torch.maximum(values, tensor)

    def answered(self, chunk: int, sequence: int, final: int, master: Tensor, now: float) -> None:
        """Follower: the master's values (flat) arrived."""
        state = self._following.get(chunk)
        if state is None or state.sent is None or sequence != state.sequence:
            return  # sent twice
        values = self._shard.values(chunk)
        if torch.equal(values, state.base):
            moved = master
        elif self._chunks[chunk].buffer is None:
            moved = master + (values - state.base)
        else:
            moved = self._merged(chunk, master)
        self._shard.assign(chunk, moved)
        state.base.copy_(master)
        state.sent = None
        self.exchanges += 1
        self.exchanged_rounds += state.covered
        if self._flushing and final == self._loop:
            self._open.discard(chunk)
        elif self._flushing:
            self._send(chunk, state, now, final=self._loop)
        elif self._due(chunk, state):
            self._send(chunk, state, now)

    # At the end: all groups equal.

    def flush(self, loop: int, now: float) -> None:
        """All groups of this server have left this loop: bring every difference home, then become equal."""
        self._flushing, self._loop = True, loop
        self._open = set(self._chunks)
        for chunk, state in self._following.items():
            if state.sent is None:
                self._send(chunk, state, now, final=loop)
        for chunk in self._finals:
            self._try_final(chunk)

    def _try_final(self, chunk: int) -> None:
        """Answer all followers once they, and this server, are at the end of one loop; laggards at once."""
        if not self._flushing:
            return
        finals = self._finals[chunk]
        level = [loop for _, loop in finals.values()] == [self._loop] * (self._groups - 1)
        for group, (sequence, loop) in list(finals.items()):
            if level or loop < self._loop:
                del finals[group]
                self._reply(group, chunk, sequence, loop, self._shard.values(chunk).clone())
        if level:
            self._open.discard(chunk)

    def resume(self) -> None:
        """A group has returned: training goes on."""
        self._flushing = False

    @property
    def flushed(self) -> bool:
        """Whether every difference is home and all groups are equal."""
        return self._flushing and not self._open
