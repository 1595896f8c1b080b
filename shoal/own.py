"""One worker and a server of its own beside it: it steps on the model itself, nothing passes between both.

What a step does is what links would do, bit for bit: the same checks and the same arithmetic, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.arrivals import edited_parameter, thorough
from shoal.asynchrony import Correction
from shoal.beside import OwnShard
from shoal.config import Cluster
from shoal.errors import GradientEdited
from shoal.exchange import Exchange
from shoal.parameters import Replica, fingerprint
from shoal.partition import Chunk, Plan
from shoal.rows import Content, check_layout, mark_of, numbers_of
from shoal.shard import squared_norm
from shoal.site import Membership
from shoal.stepping import CLIP_LAST, Loop, Skips, finite, loss_scale
from shoal.transport import Post
from shoal.updater import bare_step
from shoal.waiting import Outcome
from shoal.wire import Kind, Pull

SMALL = 1 << 16  # elements; up to here one look at all gradients costs less than one at each


def steps_itself(cluster: Cluster, plan: Plan, ema: float | None) -> bool:
    """Whether nothing is asked of a worker's own server that the worker cannot do itself."""
    plain = (cluster.wire_dtype, cluster.server_dtype, cluster.data) == ("float32", "same", "dealt")
    if not plain or ema is not None:
        return False
    tables = any(chunk.row for chunk in plan.chunks)
    alone = not (tables or cluster.warmup_steps) and Correction.of(cluster) == Correction()
    return alone or plan.server_groups == 1


class Own(Exchange):
    """An exchange in which the worker does what it would have asked of its server.

    Args:
        shard: the model, as the server sees it.
        check: see Waiter.
    """

    def __init__(
        self,
        membership: Membership,
        post: Post,
        plan: Plan,
        shard: OwnShard,
        check: Callable[[float], None],
    ) -> None:
        m = membership
        super().__init__(m.member, m.topology, post, plan, m.config.timeouts, check)
        self.shard = shard
        self._left = False

    @property
    def pushed(self) -> int:
        """Shares that would have been pushed."""
        return self.shard.applied + self.shard.dropped

    def stepped(self, optimizer: int, stop: bool) -> bool:
        """A step is over: have the server look where it has something to do.

        Args:
            stop: all groups are to end their loops.

        Returns:
            whether this one is.
        """
        shard = self.shard
        with shard.lock:
            shard.stop_asked |= stop
            shard.returned |= self._left
            self._left = False
            stop |= shard.stopping
            needed = shard.stop_asked or shard.returned or shard.due()
        if needed:
            group, step = self.member.group, self.steps[optimizer]
            self._post.send(self._servers[0], Kind.COMMIT, group=group, step=step)
        return stop

    def pull(self, present: Pull | None = None, late: str = "") -> Outcome:
        """See Exchange.pull; from now until the next step the server looks at nothing in the model."""
        with self.shard.lock:
            values = self.shard.take() if present is None else self.shard.keep()
        return Outcome(dict(values))

    @contextmanager
    def editing(self) -> Iterator[None]:
        """See Exchange.editing; the values are the server's own."""
        with self.shard.lock:
            self.shard.install()
            try:
                yield
            finally:
                self.shard.edited()

    def edit(self, edited: Mapping[int, Sequence[Content]]) -> None:
        """The values are changed already."""

    def leave(self) -> None:
        """See Exchange.leave; what the script does to the model from now on is no step of the group's."""
        self._left = True
        with self.shard.lock:
            self.shard.keep()
        super().leave()


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
        with exchange.shard.lock:
            exchange.shard.install(self.number, counts and good)
            if counts and good:
                self._own_step()
            exchange.shard.closed(self.number, self._shares(len(gradients)) if counts else 0, good)
        exchange.steps[self.number] = step
        self._skips.judge(not good, step, scaler)
        self._coefficient, self._clipped, self.limit = 1.0, [], None
        self._seen = self._look(step + 1)
        self._loop.stopping |= exchange.stepped(self.number, self._loop.stop_asked)
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
        """Numbers of the buffers that have changed since the last step."""
        return self._exchange.shard.changed()

    def remember(self, step: int, pending: Collection[int] = ()) -> None:
        """Note the model as it is now, to notice what the script changes before `step`."""
        self._seen = self._look(step)
        self._exchange.shard.remember(pending)

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
        """The gradients that are there; raises UsageError for a sparse one where it should be dense.

        Rows that come more than once in a table's are summed, as a share's are.
        """
        found = [gradient for tensor in self._tensors if (gradient := tensor.grad) is not None]
        if self._tables or [gradient.layout for gradient in found].count(torch.strided) < len(found):
            for name, tensor, row in zip(self._names, self._tensors, self._rows, strict=True):
                check_layout(name, tensor.grad, row)
                if row and tensor.grad is not None:
                    tensor.grad = tensor.grad.coalesce()
            found = [gradient for tensor in self._tensors if (gradient := tensor.grad) is not None]
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
