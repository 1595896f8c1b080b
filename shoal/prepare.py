"""The optimizer's step, and the hooks that push gradients while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.arrivals import Arrivals, Watch, thorough
from shoal.errors import GradientEdited
from shoal.exchange import Decision, Exchange
from shoal.homes import Homes
from shoal.parameters import Replica, pieces_of
from shoal.partition import Chunk
from shoal.rows import check_layout, mark_of, numbers_of
from shoal.stepping import CLIP_LAST, Loop, Skips, finite, loss_scale
from shoal.updater import assign_settings, settings_of
from shoal.waiting import Outcome


@dataclass
class _Progress:
    """A chunk within the step in progress.

    Attributes:
        ready: pieces whose gradient a hook has copied into the slot.
        left: the share is on its way, if only to the slot, which belongs to the wire.
        again: a hook fired after that.
        seen: piece → address and version counter of the gradient that was copied.
        sound: pieces that were seen to be finite when they were copied.
    """

    ready: set[int] = field(default_factory=set)
    left: bool = False
    again: bool = False
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    sound: set[int] = field(default_factory=set)
    finite: bool = True


class Stepper:
    """One prepared optimizer: what its hooks and its `step()` do.

    Args:
        number: which optimizer of the plan this is.
        workers: how many workers the group has.
        loop: the training loop around it.

    Attributes:
        arrivals: the new values, from the commit until they are in the model.
        limit: what an element of the averaged gradient is clipped to in the coming step; None = nothing.
        at_once: the chunks whose new values `step()` waits for; None = for all.
        stop: the group has been told to end its loop.
        travels: the optimizer's state is with the servers.
    """

    travels = True

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
        self.at_once: Collection[int] | None = None
        self.stop = False
        self._optimizer, self._replica, self._exchange = optimizer, replica, exchange
        self._workers, self._loop, self._batch = workers, loop, loop.batch
        self._chunks = list(exchange.chunks_of(number))
        self._pieces = pieces_of(self._chunks, len(replica.tensors))
        self._progress = {chunk.number: _Progress() for chunk in self._chunks}
        self._late: set[int] = set()
        self._settings: tuple[dict[str, Any], ...] | None = None
        self._clipped = False
        self._coefficient = 1.0
        self.limit: float | None = None
        self._scale = 1.0
        self._skips = Skips(optimizer, exchange.member.name, loop)
        trained = [index for index, pieces in enumerate(self._pieces) if pieces]
        self._watch = Watch(replica, trained, exchange.member.name)
        self.arrivals = Arrivals(number, exchange, replica, self._watch)
        self._homes = Homes(replica, self._pieces)
        self._unheard = set(trained)
        self._listen()
        self.remember(exchange.begin_step(number))

    def _listen(self) -> None:
        """Put a hook on each parameter that requires a gradient by now; it may have been frozen before."""
        for index in [i for i in self._unheard if self._replica.tensors[i].requires_grad]:
            hook = self._hook(index)
            self._replica.tensors[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._unheard.discard(index)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(tensor: Tensor) -> None:
            for chunk, piece in self._pieces[index]:
                if chunk.number in self.arrivals.missing:
                    raise self.arrivals.missed(index)
                self._ready(chunk, piece, tensor)
            if self._batch.lasting and self.at_once is None:  # with overlap the slots may be in use
                self._homes.move(index)

        stage = self._replica.stage
        return on_gradient if stage is None else stage.between(on_gradient)

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
        self._fill(chunk, piece, tensor.grad, early=True)
        progress.ready.add(piece)
        complete = len(progress.ready) == len(chunk.pieces)
        if complete and chunk.number not in self._late and self._batch.weight > 0:
            self._push(chunk)

    def _fill(self, chunk: Chunk, piece: int, gradient: Tensor | None, early: bool = False) -> None:
        check_layout(self._name(chunk, piece), gradient, chunk.row)
        parameter = chunk.pieces[piece].parameter
        progress = self._progress[chunk.number]
        progress.sound.discard(piece)
        if early or not self._homes.has(parameter, gradient):  # the script may yet change what leaves early
            self._homes.vacate(parameter)
            if self._replica.fill(chunk, piece, gradient):
                progress.sound.add(piece)
        if gradient is not None:
            progress.seen[piece] = mark_of(gradient)

    def _push(self, chunk: Chunk) -> None:
        """Have the chunk sent as soon as its gradients are in the slot."""
        progress, stage = self._progress[chunk.number], self._replica.stage
        progress.left, progress.again = True, False
        if stage is None:
            self._send(chunk)
        else:
            stage.once_copied(chunk.number, partial(self._send, chunk))

    def _send(self, chunk: Chunk) -> None:
        self.arrivals.receive()  # no share leaves before all values of the step before are here
        progress, slot = self._progress[chunk.number], self._replica.slots[chunk.number]
        progress.finite = chunk.buffer is not None or self._finite(chunk, progress.sound)
        self._exchange.share(chunk, slot, progress.seen)

    def _finite(self, chunk: Chunk, sound: Collection[int]) -> bool:
        """Whether the chunk's gradient is finite, of which some pieces are known to be."""
        if not sound:
            return finite(numbers_of(self._replica.slots[chunk.number]))
        doubtful = (index for index in range(len(chunk.pieces)) if index not in sound)
        return all(finite(self._replica.piece(chunk, index)) for index in doubtful)

    # At step().

    def step(self, scaler: Any = None) -> None:
        """Commit what this step is; wait for the new values, or with overlap leave that to who needs them."""
        self.arrivals.check_gradients()
        self.complete()
        self._watch.check(self._step)
        self._scale = loss_scale(scaler, self._optimizer)
        decision = self._decide(compare=scaler is not None)
        decision.clip, decision.limit = self._coefficient, self.limit
        settings = settings_of(self._optimizer)
        decision.settings = settings if settings != self._settings else None
        decision.cursor, decision.stop = self._loop.cursor(), self._loop.stop_asked
        self._replica.settle()  # with this commit servers may write where the last values came from
        self._exchange.commit(self.number, decision)
        self._settings = settings
        self.arrivals.expect()
        self._begin()
        if self.at_once is None or scaler is not None:  # a scaler wants to know now whether the step counted
            self._take(self.arrivals.complete(checked=True), scaler)
        else:
            self.arrivals.install(self.at_once, checked=True)
            self.arrivals.release()
        self._loop.stopping |= self.stop  # here only, at one step by all workers of the group
        self._batch.stepped()
        self._loop.stepped()

    def complete(self) -> None:
        """Have all new values in the model."""
        self._take(self.arrivals.complete())

    def forgive(self) -> None:
        """Chunks that once left too early may leave during backward again."""
        self._late.clear()

    def drives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the stepper of that optimizer."""
        return optimizer is self._optimizer

    def clip_grad_norm_(self, max_norm: float, scaler: Any = None) -> float:
        """Clip the group's averaged gradient to `max_norm`; returns its norm before clipping."""
        self.arrivals.receive()
        self._homes.vacate_all()  # the script could still change what leaves now
        self._scale, self._clipped = loss_scale(scaler, self._optimizer), False
        norm = self._exchange.norm(self.number, self._decide(compare=scaler is not None))
        self._coefficient = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else 1.0
        self._clipped = True
        return norm

    def _decide(self, compare: bool = False) -> Decision:
        """Push what has not left, and say which shares count."""
        decision = Decision(set(), {}, self._batch.weight, scale=self._scale)
        compare = compare or thorough(self._step)
        self._flush()
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
            if any(g is None for g in gradients):  # `in` would ask each tensor whether it equals None
                touched = tuple(i for i, g in enumerate(gradients) if g is not None)
                decision.touched[chunk.number] = touched
        self._flush()
        decision.finite = all(self._progress[number].finite for number in decision.counts)
        return decision

    def _flush(self) -> None:
        """Send what still waits for its gradients to be in the slot."""
        if self._replica.stage is not None:
            self._replica.stage.look(wait=True)

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
            same = not compare and progress.seen.get(piece) == mark_of(gradient)
            # Gradients that are views of one tensor count changes together; only bytes tell whose it was.
            same = same or self._replica.holds(chunk, piece, gradient)
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
        if progress.left:
            return True
        if self._batch.weight == 0 or not self._watch.changed(chunk.buffer):
            return False
        self._replica.fill_buffer(chunk)
        self._push(chunk)
        return True

    # The new values.

    def _take(self, outcome: Outcome | None, scaler: Any = None) -> None:
        """Take in what came with a step's values; None = nothing new."""
        if outcome is None:
            return
        if outcome.settings is not None:
            assign_settings(self._optimizer, outcome.settings)
            self._loop.note(
                "this worker's hyperparameters differed from its group's worker 0's and were set to them"
            )
        self.staleness = outcome.staleness
        self.stop |= outcome.stop
        self._skips.judge(outcome.skipped, self._exchange.steps[self.number], scaler)

    def _begin(self) -> None:
        """Get ready for the next step."""
        self._listen()
        for progress in self._progress.values():
            progress.ready.clear()
            progress.seen.clear()
            progress.left = progress.again = False
            progress.finite = True
        self._clipped, self._coefficient, self.limit = False, 1.0, None

    @property
    def broken(self) -> bool:
        """A wait for new values has failed."""
        return self.arrivals.broken

    @property
    def _step(self) -> int:
        """The step in progress."""
        return self._exchange.taken(self.number) + 1

    def pending(self) -> set[int]:
        """Numbers of the buffers that have changed since the last step, and that the next one pushes."""
        return {number for number in range(len(self._replica.places)) if self._watch.changed(number)}

    def remember(self, step: int, pending: Collection[int] = ()) -> None:
        """Note the model as it is now, to notice what changes before `step`, and by whose hand.

        Args:
            pending: buffers that count as changed all the same.
        """
        self._watch.remember(step)
        self._watch.pend(pending)

    def _name(self, chunk: Chunk, piece: int) -> str:
        return self._replica.plan.parameters[chunk.pieces[piece].parameter].name

    def _edited(self, name: str, when: str) -> GradientEdited:
        return GradientEdited(
            f"the gradient of {name} was changed {when}",
            member=self._exchange.member.name,
            step=self._step,
            remedy=CLIP_LAST,
        )
