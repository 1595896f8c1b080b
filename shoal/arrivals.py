"""New values on their way into the model: waited for, checked, installed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shoal.errors import MissedWait, ParameterEdited
from shoal.exchange import Exchange
from shoal.parameters import Replica, buffer_mark, fingerprint
from shoal.partition import Chunk
from shoal.rows import numbers_of
from shoal.waiting import Outcome

WAIT = "call run.wait() before the script uses parameters itself: with overlap=True only forwards wait"


class Watch:
    """The model as it was when it was last looked at, to notice what has changed since, by whose hand.

    Args:
        parameters: numbers of those that the optimizer trains.
        member: this worker's name, for errors.
    """

    def __init__(self, replica: Replica, parameters: Collection[int], member: str) -> None:
        self._replica, self._parameters, self._member = replica, parameters, member
        self._seen: dict[int, tuple[int, int]] = {}
        self._fingerprints: dict[int, int] = {}
        self._buffers: list[tuple[int, ...]] = [()] * len(replica.places)

    def remember(
        self, step: int, parameters: Iterable[int] | None = None, buffers: Iterable[int] | None = None
    ) -> None:
        """Note parameters and buffers (by default all) as they are now, before `step`."""
        for number in self._parameters if parameters is None else parameters:
            tensor = self._replica.tensors[number]
            self._seen[number] = (tensor.data_ptr(), tensor._version)
            self._fingerprints.pop(number, None)
            if thorough(step):
                self._fingerprints[number] = fingerprint(tensor)
        for number in range(len(self._buffers)) if buffers is None else buffers:
            self._buffers[number] = buffer_mark(self._replica.places[number].tensor)

    def pend(self, buffers: Iterable[int]) -> None:
        """Let buffers count as changed whatever they hold."""
        for number in buffers:
            self._buffers[number] = ()

    def changed(self, buffer: int) -> bool:
        """Whether a buffer has been written to since."""
        return self._buffers[buffer] != buffer_mark(self._replica.places[buffer].tensor)

    def check(self, step: int, parameters: Iterable[int] | None = None) -> None:
        """Raise ParameterEdited where the script has changed one of these parameters (by default all)."""
        for number in self._parameters if parameters is None else parameters:
            tensor = self._replica.tensors[number]
            edited = self._seen[number] != (tensor.data_ptr(), tensor._version)
            if not edited and number in self._fingerprints:
                edited = self._fingerprints[number] != fingerprint(tensor)
            if edited:
                raise edited_parameter(self._replica.plan.parameters[number].name, self._member, step)


class Arrivals:
    """The new values of one optimizer, from a step's commit until they are in the model.

    Attributes:
        missing: chunks whose new values are not in the model yet.
        broken: a wait has failed or was missed, or what came could not be installed.
    """

    def __init__(self, optimizer: int, exchange: Exchange, replica: Replica, watch: Watch) -> None:
        self.missing: set[int] = set()
        self.broken = False
        self._optimizer, self._exchange, self._replica, self._watch = optimizer, exchange, replica, watch
        self._chunks = {chunk.number for chunk in exchange.chunks_of(optimizer)}
        self._expected = False
        self._outcome: Outcome | None = None

    def expect(self) -> None:
        """A step was committed: new values of all chunks will come."""
        self.missing, self._expected, self._outcome = set(self._chunks), True, None

    def receive(self) -> None:
        """Wait until all values are here, as the next step's first share must; none goes into the model."""
        if self._expected and self._outcome is None:
            self.broken = True  # until it has gone well
            self._outcome = self._exchange.wait(self._optimizer)
            self._exchange.begin_step(self._optimizer)
            self.broken = False

    def install(self, chunks: Collection[int], checked: bool = False) -> None:
        """Wait for the new values of those chunks that are missing, and write them into the model.

        Args:
            checked: the script cannot have changed anything since the commit.

        Raises:
            ParameterEdited, MissedWait: it has, and the new values would undo that.
        """
        coming = sorted(self.missing.intersection(chunks))
        if not coming:
            return
        self.broken = True  # until it has gone well
        outcome = self._outcome or self._exchange.wait(self._optimizer, coming)
        new = {self._replica.plan.chunks[number]: outcome.values[number] for number in coming}
        parameters = {piece.parameter for chunk in new for piece in chunk.pieces}
        buffers = _buffers(chunk for chunk, values in new.items() if checked or values is not None)
        if not checked:
            self._watch.check(self._step, parameters)
            self._check_buffers(buffers)
        for chunk, values in new.items():
            if values is not None:
                self._replica.install(chunk, values)
            del outcome.values[chunk.number]
        self._watch.remember(self._step, parameters, buffers)
        self.missing.difference_update(coming)
        self.broken = False

    def release(self) -> None:
        """The script goes on while values are missing: from now on changes of buffers are its own."""
        missing = (self._replica.plan.chunks[number] for number in self.missing)
        self._watch.remember(self._step, (), _buffers(missing))

    def complete(self, checked: bool = False) -> Outcome | None:
        """Wait for all values and have them in the model; returns what came with a step's, once."""
        self.receive()
        self.install(self.missing, checked)
        outcome, self._outcome, self._expected = self._outcome, None, False
        return outcome

    def check_gradients(self) -> None:
        """Raise MissedWait for a gradient that no hook has seen, where new values are still missing."""
        for chunk in (self._replica.plan.chunks[number] for number in self.missing):
            for index, piece in enumerate(chunk.pieces):
                gradient = self._replica.tensors[piece.parameter].grad
                # One that the slot holds was pushed with the step before, and kept.
                old = gradient is None or self._replica.holds(chunk, index, gradient)
                if gradient is not None and not old and numbers_of(gradient).any():
                    raise self.missed(piece.parameter)

    def missed(self, parameter: int) -> MissedWait:
        """The error of a gradient that was made with old values."""
        self.broken = True
        name = self._replica.plan.parameters[parameter].name
        return MissedWait(
            f"a gradient of {name} was made with values that the step before has replaced",
            member=self._exchange.member.name,
            step=self._step,
            remedy=WAIT,
        )

    @property
    def _step(self) -> int:
        return self._exchange.taken(self._optimizer) + 1

    def _check_buffers(self, buffers: Iterable[int]) -> None:
        for number in buffers:
            if self._watch.changed(number):
                raise MissedWait(
                    f"the script changed {self._replica.plan.buffers[number].name} before its new values "
                    "were in place",
                    member=self._exchange.member.name,
                    step=self._step,
                    remedy=WAIT,
                )


def _buffers(chunks: Iterable[Chunk]) -> list[int]:
    return [chunk.buffer for chunk in chunks if chunk.buffer is not None]


def edited_parameter(name: str, member: str, step: int) -> ParameterEdited:
    """The error for a parameter that the script has changed."""
    return ParameterEdited(
        f"parameter {name} was changed by the script; its values are the servers', who would undo the change",
        member=member,
        step=step,
        remedy="change parameters inside `with run.edit():`, or let an optimizer do it",
    )


def thorough(step: int) -> bool:
    """Version counters miss edits through .data: these steps compare bytes as well."""
    return step <= 3 or step % 100 == 0
