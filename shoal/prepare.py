"""The optimizer's step, and the hooks that push gradients while backward still runs."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.batch import Batch
from shoal.errors import GradientEdited, NonFiniteGradients, ParameterEdited
from shoal.exchange import Decision, Exchange
from shoal.parameters import Replica, fingerprint, pieces_of
from shoal.partition import Chunk
from shoal.rows import check_layout, mark_of, numbers_of
from shoal.updater import assign_settings, settings_of
from shoal.waiting import Outcome

SKIPS = 100
"""Rounds in a row that may be skipped for infinite or missing numbers."""


class Loop(Protocol):
    """What an optimizer's step needs of the training loop around it.

    Attributes:
        stop_asked: this worker wants all groups to end their loops.
        stopping: the group is to end its loop after this step.
    """

    batch: Batch
    stop_asked: bool
    stopping: bool

    def cursor(self) -> tuple[int, ...]:
        """The loaders' positions, for the commit."""
        ...

    def note(self, message: str) -> None:
        """Tell the user something, once."""
        ...

    def stepped(self) -> None:
        """An optimizer's step is over."""
        ...


@dataclass
class _Progress:
    """A chunk within the step in progress.

    Attributes:
        ready: pieces whose gradient a hook has copied into the slot.
        left: the share is on its way; the slot belongs to the wire.
        again: a hook fired after that.
        seen: piece → address and version counter of the gradient that was copied.
    """

    ready: set[int] = field(default_factory=set)
    left: bool = False
    again: bool = False
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    finite: bool = True


class Stepper:
    """One prepared optimizer: what its hooks and its `step()` do.

    Args:
        number: which optimizer of the plan this is.
        workers: how many workers the group has.
        loop: the training loop around it.
    """

    def __init__(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        replica: Replica,
        exchange: Exchange,
        workers: int,
        loop: Loop,
    ) -> None:
        self.number, self.staleness = number, 0
        self._optimizer, self._replica, self._exchange = optimizer, replica, exchange
        self._workers, self._loop, self._batch = workers, loop, loop.batch
        self._chunks = list(exchange.chunks_of(number))
        self._pieces = pieces_of(self._chunks, len(replica.tensors))
        self._progress = {chunk.number: _Progress() for chunk in self._chunks}
        self._late: set[int] = set()
        self._settings: tuple[dict[str, Any], ...] | None = None
        self._clipped = False
        self._coefficient = 1.0
        self._scale = 1.0
        self._skipped_in_a_row = 0
        self._installed: dict[int, tuple[int, int]] = {}
        self._fingerprints: dict[int, int] = {}
        self._buffers: list[tuple[int, ...]] = []
        for index, pieces in enumerate(self._pieces):
            tensor = replica.tensors[index]
            if pieces and tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
        self._begin()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(tensor: Tensor) -> None:
            for chunk, piece in self._pieces[index]:
                self._ready(chunk, piece, tensor)

        return on_gradient

    # During backward.

    def _ready(self, chunk: Chunk, piece: int, tensor: Tensor) -> None:
        """A gradient has arrived: copy it into the slot; push the chunk when it is complete."""
        progress = self._progress[chunk.number]
        if progress.left:  # a second backward: the chunk goes once more, at step()
            progress.again = True
            self._late.add(chunk.number)
            return
        if self._batch.held:  # not complete, or not wanted yet
            progress.ready.discard(piece)
            return
        self._fill(chunk, piece, tensor.grad)
        progress.ready.add(piece)
        complete = len(progress.ready) == len(chunk.pieces)
        if complete and chunk.number not in self._late and self._batch.weight > 0:
            self._push(chunk)

    def _fill(self, chunk: Chunk, piece: int, gradient: Tensor | None) -> None:
        check_layout(self._name(chunk, piece), gradient, chunk.row)
        self._replica.fill(chunk, piece, gradient)
        if gradient is not None:
            self._progress[chunk.number].seen[piece] = mark_of(gradient)

    def _push(self, chunk: Chunk) -> None:
        progress, slot = self._progress[chunk.number], self._replica.slots[chunk.number]
        progress.left, progress.again = True, False
        progress.finite = chunk.buffer is not None or _finite(numbers_of(slot))
        self._exchange.share(chunk, slot)

    # At step().

    def step(self, scaler: Any = None) -> None:
        """Commit what this step is, wait for the new values, install them."""
        self._check_parameters()
        self._scale = _loss_scale(scaler, self._optimizer)
        decision = self._decide(compare=scaler is not None)
        decision.clip = self._coefficient
        settings = settings_of(self._optimizer)
        decision.settings = settings if settings != self._settings else None
        decision.cursor, decision.stop = self._loop.cursor(), self._loop.stop_asked
        self._exchange.commit(self.number, decision)
        self._settings = settings
        outcome = self._exchange.wait(self.number)
        self._install(outcome)
        self._judge(outcome, scaler)
        self._batch.stepped()
        self._begin()
        self._loop.stepped()

    def forgive(self) -> None:
        """Chunks that once left too early may leave during backward again."""
        self._late.clear()

    def drives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the stepper of that optimizer."""
        return optimizer is self._optimizer

    def clip_grad_norm_(self, max_norm: float, scaler: Any = None) -> float:
        """Clip the group's averaged gradient to `max_norm`; returns its norm before clipping."""
        self._scale, self._clipped = _loss_scale(scaler, self._optimizer), False
        norm = self._exchange.norm(self.number, self._decide(compare=scaler is not None))
        self._coefficient = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else 1.0
        self._clipped = True
        return norm

    def _decide(self, compare: bool = False) -> Decision:
        """Push what has not left, and say which shares count."""
        decision = Decision(set(), {}, self._batch.weight, scale=self._scale)
        compare = compare or self._thorough(self._exchange.steps[self.number] + 1)
        for chunk in self._chunks:
            if chunk.buffer is not None:
                if self._push_buffer(chunk):
                    decision.counts.add(chunk.number)
                continue
            gradients = [self._replica.tensors[p.parameter].grad for p in chunk.pieces]
            if all(g is None for g in gradients) or self._batch.weight == 0:
                continue
            if not self._up_to_date(chunk, gradients, compare):
                self._push_late(chunk, gradients)
            decision.counts.add(chunk.number)
            decision.finite &= self._progress[chunk.number].finite
            if any(g is None for g in gradients):  # `in` would ask each tensor whether it equals None
                touched = tuple(i for i, g in enumerate(gradients) if g is not None)
                decision.touched[chunk.number] = touched
        return decision

    def _up_to_date(self, chunk: Chunk, gradients: list[Tensor | None], compare: bool) -> bool:
        """Whether the share that has left holds the present gradients; raises for an edited one."""
        progress = self._progress[chunk.number]
        if not progress.left or progress.again:
            return False
        fresh = True
        for piece, gradient in enumerate(gradients):
            if gradient is None:
                fresh &= piece not in progress.seen  # dropped after its push: it counts as zero
                continue
            same = progress.seen.get(piece) == mark_of(gradient)
            if compare:
                same = self._replica.holds(chunk, piece, gradient)
            edited = not same and (self._workers > 1 or self._clipped)
            if edited and numbers_of(gradient).any():  # zeros are zero_grad's
                when = "after clipping" if self._clipped else "after it was pushed to the servers"
                raise self._edited(self._name(chunk, piece), when)
            fresh &= same
        return fresh

    def _push_late(self, chunk: Chunk, gradients: list[Tensor | None]) -> None:
        if self._clipped:
            first = next(i for i, g in enumerate(gradients) if g is not None)
            raise self._edited(self._name(chunk, first), "after clipping")
        self._exchange.reclaim(chunk)
        self._progress[chunk.number].seen.clear()
        for piece, gradient in enumerate(gradients):
            self._fill(chunk, piece, gradient)
        self._push(chunk)

    def _push_buffer(self, chunk: Chunk) -> bool:
        """Push a buffer that changed since the last step."""
        assert chunk.buffer is not None
        progress = self._progress[chunk.number]
        tensor = self._replica.places[chunk.buffer].tensor
        if progress.left:
            return True
        if self._batch.weight == 0 or self._buffers[chunk.buffer] == _mark(tensor):
            return False
        self._replica.fill_buffer(chunk)
        self._push(chunk)
        return True

    # The new values.

    def _install(self, outcome: Outcome) -> None:
        for number, values in outcome.values.items():
            if values is not None:
                self._replica.install(self._replica.plan.chunks[number], values)
        if outcome.settings is not None:
            assign_settings(self._optimizer, outcome.settings)
            self._loop.note(
                "this worker's hyperparameters differed from its group's worker 0's and were set to them"
            )
        self.staleness = outcome.staleness
        self._loop.stopping |= outcome.stop

    def _judge(self, outcome: Outcome, scaler: Any) -> None:
        """Count skipped rounds, and let a GradScaler know what the group found."""
        step = self._exchange.steps[self.number]
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if outcome.skipped else 0
        if scaler is not None:
            found = torch.full((), float(outcome.skipped), device=scaler._scale.device)
            scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"] = {found.device: found}
        if outcome.skipped and scaler is None:
            self._loop.note("a gradient was not finite; the group skips such steps and counts them")
        if self._skipped_in_a_row >= SKIPS:
            raise NonFiniteGradients(
                f"the last {SKIPS} steps of the group were skipped, because a gradient was not finite",
                member=self._exchange.member.name,
                step=step,
                remedy="lower the learning rate, clip with run.clip_grad_norm_, or look for log(0) and 0/0",
            )

    def _begin(self) -> None:
        """Get ready for the next step."""
        step = self._exchange.begin_step(self.number)
        for progress in self._progress.values():
            progress.ready.clear()
            progress.seen.clear()
            progress.left = progress.again = False
            progress.finite = True
        self._clipped, self._coefficient = False, 1.0
        self.remember(step)

    def remember(self, step: int) -> None:
        """Note the model as it is now, to notice what changes before `step`, and by whose hand."""
        self._buffers = [_mark(place.tensor) for place in self._replica.places]
        self._fingerprints.clear()
        for index, pieces in enumerate(self._pieces):
            if pieces:
                tensor = self._replica.tensors[index]
                self._installed[index] = (tensor.data_ptr(), tensor._version)
                if self._thorough(step):
                    self._fingerprints[index] = fingerprint(tensor)

    def _check_parameters(self) -> None:
        for index, known in self._installed.items():
            tensor = self._replica.tensors[index]
            edited = known != (tensor.data_ptr(), tensor._version)
            if not edited and index in self._fingerprints:
                edited = self._fingerprints[index] != fingerprint(tensor)
            if edited:
                raise ParameterEdited(
                    f"parameter {self._replica.plan.parameters[index].name} was changed by the script; "
                    "its values are the servers', who would undo the change",
                    member=self._exchange.member.name,
                    step=self._exchange.steps[self.number] + 1,
                    remedy="change parameters inside `with run.edit():`, or let an optimizer do it",
                )

    @staticmethod
    def _thorough(step: int) -> bool:
        """Version counters miss edits through .data: these steps compare bytes as well."""
        return step <= 3 or step % 100 == 0

    def _name(self, chunk: Chunk, piece: int) -> str:
        return self._replica.plan.parameters[chunk.pieces[piece].parameter].name

    def _edited(self, name: str, when: str) -> GradientEdited:
        return GradientEdited(
            f"the gradient of {name} was changed {when}",
            member=self._exchange.member.name,
            step=self._exchange.steps[self.number] + 1,
            remedy="clip with run.clip_grad_norm_(max_norm), the last thing before optimizer.step(); "
            "p.grad is this worker's own gradient, and it leaves during backward",
        )


def _loss_scale(scaler: Any, optimizer: torch.optim.Optimizer) -> float:
    """The factor that the gradients still carry."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return 1.0 if stage.name == "UNSCALED" else float(scaler.get_scale())


def _mark(buffer: Tensor) -> tuple[int, ...]:
    """Tells whether a buffer was written to; by its bytes too, as batch norm's kernels count no versions."""
    version = buffer.data_ptr(), buffer._version
    counted = isinstance(buffer, torch.nn.Parameter) or not buffer.is_floating_point()
    return version if counted else (*version, fingerprint(buffer))


def _finite(values: Tensor) -> bool:
    """Whether all values are finite; the sum is the cheap test, and right unless it overflows."""
    if not (values.is_floating_point() or values.is_complex()):
        return True
    if cmath.isfinite(values.sum().item()):
        return True
    return bool(values.isfinite().all())
