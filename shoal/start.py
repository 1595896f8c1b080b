"""A worker's start for the servers: its values, and the state that its optimizers already have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.exchange import Start
from shoal.parameters import Replica, as_bytes
from shoal.partition import Chunk
from shoal.rows import Rows, cut_state
from shoal.updater import pack


def start_of(optimizers: Sequence[Optimizer], replica: Replica) -> Start:
    """Each chunk, its state and its values as INIT carries them, values' frame first; made when asked for.

    Values lie in the slots, which nothing else needs yet: memory for all would not come back from the heap.
    """
    for chunk in replica.plan.chunks:
        optimizer = optimizers[chunk.optimizer]
        entries, frames = pack(_state(optimizer, replica, chunk, index) for index in range(len(chunk.pieces)))
        slot = replica.slots[chunk.number]
        values = replica.read(chunk, None if isinstance(slot, Rows) else slot)
        yield chunk.number, entries, [as_bytes(values), *frames]


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
