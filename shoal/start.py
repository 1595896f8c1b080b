"""What a start is handed on as: values, and the state that optimizers already have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.parameters import Replica, as_bytes
from shoal.partition import Chunk
from shoal.rows import Rows, cut_state
from shoal.updater import pack, unpack
from shoal.wire import Frame, State

Start = Iterator[tuple[int, list[State], list[Frame]]]
"""A worker's start: of each chunk its number, and its state and values as INIT carries them."""


def start_of(optimizers: Sequence[Optimizer], replica: Replica) -> Start:
    """Each chunk, its state and its values as INIT carries them, values' frame first; made when asked for.

    Values lie in the slots, which nothing else needs yet: memory for all would not come back from the heap.
    """
    for chunk in replica.plan.chunks:
        slot = replica.slots[chunk.number]
        values = replica.read(chunk, None if isinstance(slot, Rows) else slot)
        yield chunk.number, *exported(optimizers[chunk.optimizer], replica, chunk, values)


def exported(
    optimizer: Optimizer, replica: Replica, chunk: Chunk, values: Tensor
) -> tuple[list[State], list[Frame]]:
    """A chunk's state and values (flat) as INIT carries them."""
    entries, frames = pack(_state(optimizer, replica, chunk, index) for index in range(len(chunk.pieces)))
    return entries, [as_bytes(values), *frames]


def load_state(
    optimizer: Optimizer, replica: Replica, chunk: Chunk, entries: Sequence[State], frames: Sequence[Frame]
) -> None:
    """Give an optimizer the state of a chunk that `exported` made, without the values' frame."""
    for entry, value in unpack(entries, frames):
        piece = chunk.pieces[entry.piece]
        tensor = replica.tensors[piece.parameter]
        state = optimizer.state[tensor]
        if isinstance(value, Tensor) and entry.key != "step":
            value = value.to(tensor.device)
        size, whole = piece.stop - piece.start, replica.plan.parameters[piece.parameter].whole
        if isinstance(value, Tensor) and value.shape == (size,) and not whole:
            known = state.setdefault(entry.key, value.new_empty(tensor.shape))
            known.view(-1)[piece.start : piece.stop] = value
        else:
            state[entry.key] = value


def _state(optimizer: Optimizer, replica: Replica, chunk: Chunk, index: int) -> dict[str, Any]:
    """A piece's part of an optimizer's state."""
    piece = chunk.pieces[index]
    tensor = replica.tensors[piece.parameter]
    whole = replica.plan.parameters[piece.parameter].whole
    state: dict[str, Any] = {}
    for key, value in optimizer.state.get(tensor, {}).items():
        if isinstance(value, Tensor) and value.shape == tensor.shape and not whole:
            value = cut_state(value, piece, chunk.row)
        state[key] = value
    return state
