"""Gradients that live in their slots, so that a worker keeps them once (`run.hold()`)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from torch import Tensor

from shoal.parameters import Replica
from shoal.partition import Chunk


class Homes:
    """Moves a parameter's gradient into its slots, where these lie side by side in a CPU's memory.

    The script's `p.grad` stays its own: it may change it, because nothing leaves before `step()`, and what
    it keeps for longer gets memory of its own before the slots are written again (a view of it does not).

    Args:
        pieces: by parameter, the chunks that its gradient goes into, and as which of their pieces.
    """

    def __init__(self, replica: Replica, pieces: Sequence[Sequence[tuple[Chunk, int]]]) -> None:
        self._replica, self._pieces = replica, pieces
        self._flat: dict[int, Tensor | None] = {}
        self._given: dict[int, ref[Tensor]] = {}  # parameter → the gradient that lies in its slots

    def move(self, parameter: int) -> None:
        """Move the gradient into its slots; nothing in these may still be wanted."""
        if parameter not in self._flat:
            self._flat[parameter] = self._side_by_side(parameter)
        flat, tensor = self._flat[parameter], self._replica.tensors[parameter]
        gradient = tensor.grad
        if flat is None or gradient is None or self.has(parameter, gradient) or gradient.is_sparse:
            return
        self.vacate(parameter)
        home = flat.view(tensor.shape).data  # with a version counter of its own
        tensor.grad = home.copy_(gradient)
        self._given[parameter] = ref(home)

    def has(self, parameter: int, gradient: Tensor | None) -> bool:
        """Whether this gradient lies in its slots."""
        given = self._given.get(parameter)
        return given is not None and gradient is not None and given() is gradient

    def vacate(self, parameter: int) -> None:
        """Give the gradient that lies in the slots memory of its own, if the script still has it."""
        given = self._given.pop(parameter, None)
        kept = None if given is None else given()
        if kept is not None:
            kept.data = kept.clone()

    def vacate_all(self) -> None:
        """Leave all slots to the wire."""
        for parameter in list(self._given):
            self.vacate(parameter)

    def _side_by_side(self, parameter: int) -> Tensor | None:
        """The parameter's slots as one flat tensor."""
        tensor, places = self._replica.tensors[parameter], self._pieces[parameter]
        apart = tensor.device.type != "cpu" or not tensor.is_contiguous() or any(c.row for c, _ in places)
        if not places or apart:
            return None
        ordered = sorted(places, key=lambda place: place[0].pieces[place[1]].start)
        parts = [self._replica.piece(*place) for place in ordered]
        ends = [part.data_ptr() + part.nbytes for part in parts]
        if [part.data_ptr() for part in parts[1:]] != ends[:-1]:
            return None
        first = parts[0]
        return first.as_strided((tensor.numel(),), (1,), first.storage_offset())
