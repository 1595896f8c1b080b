"""What is behind the next step of a worker: how many samples, and whether their gradients may leave early."""

from __future__ import annotations

from types import TracebackType


class Batch:
    """The samples behind the next step.

    Attributes:
        weight: the worker's part in its group's average; at 0 it is left out.
        samples: drawn from loaders so far.
        held: while above 0, gradients leave at `step()` only.
        lasting: how many of these holds have no end.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.samples = 0
        self.held = self.lasting = 0
        self._stepped = True
        self._weighed = False

    def drawn(self, weight: int) -> None:
        """A batch of `weight` samples goes to the user; batches between two steps accumulate."""
        self.samples += weight
        if not self._weighed:
            self.weight = weight if self._stepped else self.weight + weight
        self._stepped = False

    def weigh(self, weight: float) -> None:
        """The script says what the step weighs, in place of the number of samples drawn."""
        self.weight, self._weighed = weight, True

    def stepped(self) -> None:
        """An optimizer has stepped: the next batch begins a new step."""
        if self._weighed:
            self.weight, self._weighed = 1.0, False
        self._stepped = True


class Hold:
    """Gradients leave at `step()` only, from its making on; as a context, until the context ends."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        batch.held += 1
        batch.lasting += 1

    def __enter__(self) -> None:
        self._batch.lasting -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch.held -= 1
