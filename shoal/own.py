"""One worker with a server of its own: the parameters are the server's where they are, and nothing travels.

What a step does is what links would do, bit for bit: the same checks and the same arithmetic, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.arrivals import edited_parameter, thorough
from shoal.errors import GradientEdited
from shoal.exchange import Exchange, Start
from shoal.parameters import Replica, fingerprint
from shoal.partition import Chunk, Plan
from shoal.rows import Content, check_layout, mark_of, numbers_of
from shoal.shard import squared_norm
from shoal.site import Membership
from shoal.stepping import CLIP_LAST, Loop, Skips, finite, loss_scale
from shoal.transport import Post
from shoal.updater import bare_step
from shoal.waiting import Outcome
from shoal.wire import Hello, Kept, Kind, Pull

SMALL = 1 << 16  # elements; up to here one look at all gradients costs less than one at each


def keeps_its_own(membership: Membership, ema: float | None) -> bool:
    """Whether this worker is alone with its server, of which nothing is asked that it cannot do itself."""
    m, cluster = membership, membership.config.cluster
    alone = m.topology.workers_per_group == m.topology.servers_per_group == 1 and not m.topology.separate
    followed = m.topology.synchronised and len(m.topology.workers) > 1
    plain = (cluster.wire_dtype, cluster.server_dtype, cluster.data) == ("float32", "same", "dealt")
    return alone and not followed and plain and not m.schedules.kept and ema is None and not m.links


class Own(Exchange):
    """An exchange without links: the worker does what it would have asked of its server.

    Args:
        post: for one last word to the server, which reports for the two.
        state_bytes: of the optimizers' state, when asked.
    """

    def __init__(
        self, membership: Membership, post: Post, plan: Plan, state_bytes: Callable[[], int]
    ) -> None:
        m = membership
        super().__init__(m.member, m.topology, post, plan, m.config.timeouts, lambda waited: None)
        self.rounds = self.applied = self.dropped = 0
        self._state_bytes = state_bytes

    def closed(self, chunks: Sequence[Chunk], shares: int, applied: bool) -> None:
        """A step has closed its rounds on these chunks, of which so many had a gradient."""
        self.rounds += len(chunks)
        if applied:
            self.applied += shares
        else:
            self.dropped += shares

    @property
    def pushed(self) -> int:
        """Shares that would have been pushed."""
        return self.applied + self.dropped

    def join(self, hello: Hello, start: Start | None, late: str = "") -> tuple[Outcome, bool]:
        """There is nobody to greet, and the start is this worker's."""
        return Outcome(), False

    def pull(self, present: Pull | None = None, late: str = "") -> Outcome:
        """The present values are in the model."""
        return Outcome()

    def edit(self, edited: Mapping[int, Sequence[Content]]) -> None:
        """The script has changed the server's own values."""

    def leave(self) -> None:
        """Nobody waits."""

    def settle(self) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Tell the server what it would have counted, and that it may go."""
        sizes = (chunk.size for chunk in self.plan.chunks if chunk.buffer is None)
        kept = Kept(self.rounds, self.applied, self.dropped, sum(sizes), self._state_bytes())
        for server in self._servers:
            self._post.send(server, Kind.STOP, kept)
        self._post.close()


class OwnStepper:
    """One optimizer whose step is its own class's; what it has in common with `Stepper` is told there."""

    broken = False
    travels = False

    def __init__(
        self, number: int, optimizer: torch.optim.Optimizer, replica: Replica, exchange: Own, loop: Loop
    ) -> None:
        self.number, self.staleness, self.stop = number, 0, False
        self._optimizer, self._replica, self._exchange, self._loop = optimizer, replica, exchange, loop
        self._own_step = bare_step(optimizer)  # its hooks run around ours
        self._chunks = list(exchange.chunks_of(number))
        self._full = sum(chunk.buffer is None for chunk in self._chunks)
        rows = {p.parameter: chunk.row for chunk in self._chunks for p in chunk.pieces}
        self._names = [replica.plan.parameters[index].name for index in rows]
        self._tensors = [replica.tensors[index] for index in rows]
        self._rows = list(rows.values())
        self._tables = any(self._rows)
        self._fused = sum(t.numel() for t in self._tensors) <= SMALL and not self._tables
        self._fused &= all(tensor.dtype in (torch.float32, torch.float64) for tensor in self._tensors)
        self._fused &= len({tensor.device for tensor in self._tensors}) == 1
        device = self._tensors[0].device if self._tensors else None
        self._found, self._one = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._skips = Skips(optimizer, exchange.member.name, loop)
        self._coefficient, self._clipped = 1.0, list[Any]()
        self.limit: float | None = None
        self.remember(exchange.steps[number] + 1)

    def step(self, scaler: Any = None) -> None:
        """The optimizer's own step, unless a gradient is not finite or no sample is behind it."""
        exchange, step = self._exchange, self._exchange.steps[self.number] + 1
        self._check(step)
        gradients = self._gradients()
        if self._clipped and [mark_of(gradient) for gradient in gradients] != self._clipped:
            what, member = "a gradient was changed after clipping", exchange.member.name
            raise GradientEdited(what, member=member, step=step, remedy=CLIP_LAST)
        counts = self._loop.batch.weight > 0
        good = not counts or self._finite(gradients)
        if counts and good:
            self._scale(gradients, loss_scale(scaler, self._optimizer))
            self._own_step()
        exchange.closed(self._chunks, self._shares(len(gradients)) if counts else 0, good)
        exchange.steps[self.number] = step
        self._skips.judge(not good, step, scaler)
        self._coefficient, self._clipped, self.limit = 1.0, [], None
        self.remember(step + 1)
        self._loop.stopping |= self._loop.stop_asked
        self._loop.batch.stepped()
        self._loop.stepped()

    def clip_grad_norm_(self, max_norm: float, scaler: Any = None) -> float:
        """See Stepper.clip_grad_norm_."""
        scale = loss_scale(scaler, self._optimizer)
        gradients = self._gradients()
        if self._loop.batch.weight > 0 and not self._finite(gradients):
            norm = math.nan
        else:
            flat = {c.number: self._flat(c) for c in self._chunks if c.buffer is None}
            norm = squared_norm(flat) ** 0.5 / scale
        self._coefficient = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else 1.0
        self._clipped = [mark_of(gradient) for gradient in gradients]
        return norm

    def complete(self) -> None:
        """All values are always in the model."""

    def forgive(self) -> None:
        """No chunk leaves at all."""

    def drives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the stepper of that optimizer."""
        return optimizer is self._optimizer

    def pending(self) -> set[int]:
        """Buffers are pushed nowhere."""
        return set()

    def remember(self, step: int, pending: Collection[int] = ()) -> None:
        """Note the model as it is now, to notice what the script changes before `step`."""
        self._seen = self._look(step)

    def _look(self, step: int) -> list[tuple[int, ...]]:
        look: list[tuple[int, ...]] = [(tensor.data_ptr(), tensor._version) for tensor in self._tensors]
        if thorough(step):
            look = [(*seen, fingerprint(t)) for seen, t in zip(look, self._tensors, strict=True)]
        return look

    def _check(self, step: int) -> None:
        seen, self._seen = self._seen, self._look(step)
        if seen != self._seen:
            index = next(i for i, (a, b) in enumerate(zip(seen, self._seen, strict=True)) if a != b)
            raise edited_parameter(self._names[index], self._exchange.member.name, step)

    def _gradients(self) -> list[Tensor]:
        """The gradients that are there; raises UsageError for a sparse one where it should be dense."""
        found = [gradient for tensor in self._tensors if (gradient := tensor.grad) is not None]
        if self._tables or [gradient.layout for gradient in found].count(torch.strided) < len(found):
            for name, tensor, row in zip(self._names, self._tensors, self._rows, strict=True):
                check_layout(name, tensor.grad, row)
        return found

    def _finite(self, gradients: list[Tensor]) -> bool:
        if not self._fused or not gradients:
            return all(finite(numbers_of(gradient)) for gradient in gradients)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
        if not self._found.item():
            return True
        self._found.zero_()
        return False

    def _scale(self, gradients: list[Tensor], scale: float) -> None:
        for factor in (1 / scale, self._coefficient):
            if factor != 1:
                for gradient in gradients:
                    numbers_of(gradient).mul_(factor)
        if self.limit is not None:
            for gradient in gradients:
                numbers_of(gradient).clamp_(-self.limit, self.limit)

    def _shares(self, gradients: int) -> int:
        """Chunks that have a gradient."""
        if gradients == len(self._tensors):
            return self._full
        tensors = self._replica.tensors
        return sum(any(tensors[p.parameter].grad is not None for p in c.pieces) for c in self._chunks)

    def _flat(self, chunk: Chunk) -> Content:
        """The gradient of a chunk as its slot would hold it."""
        for index, piece in enumerate(chunk.pieces):
            self._replica.fill(chunk, index, self._replica.tensors[piece.parameter].grad)
        return self._replica.slots[chunk.number]
