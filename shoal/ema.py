"""Moving averages of parameters, kept beside the values that a server owns."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.partition import Chunk


def checked_decay(ema: float | None) -> float | None:
    """The decay of moving averages; raises UsageError for one that makes no average."""
    if ema is None or (not isinstance(ema, bool) and 0 <= ema < 1):
        return ema
    raise UsageError(f"ema={ema} is no decay", remedy="give a number from 0 to below 1, such as 0.999")


def averaged_in(chunk: Chunk) -> torch.dtype:
    """The dtype of a chunk's average: float32 or wider."""
    return torch.promote_types(getattr(torch, chunk.dtype), torch.float32)


def bytes_of(chunk: Chunk) -> int:
    """Bytes of a chunk's average; a table's rows have a count each."""
    return chunk.size * averaged_in(chunk).itemsize + chunk.rows * torch.int64.itemsize


class Ema:
    """The exponential moving average of each chunk of parameters.

    After every closed round of a chunk, average ← decay · average + (1 − decay) · value; after the first one,
    average ← value: what torch's AveragedModel makes of the steps. Rounds that left a chunk, or a row of a
    table, as it was are made up for when it changes or is read: k of them are
    average ← decayᵏ · average + (1 − decayᵏ) · value.

    Args:
        decay: 0 or more, below 1.
        chunks: those of parameters.
    """

    def __init__(self, decay: float, chunks: Iterable[Chunk]) -> None:
        self._decay = decay
        self._averages: dict[int, Tensor] = {}
        self._seen: dict[int, int] = {}
        self._seen_rows: dict[int, Tensor] = {}
        for chunk in chunks:
            shape = (chunk.rows, chunk.row) if chunk.row else (chunk.size,)
            self._averages[chunk.number] = torch.zeros(shape, dtype=averaged_in(chunk))
            if chunk.row:
                self._seen_rows[chunk.number] = torch.zeros(chunk.rows, dtype=torch.int64)
            else:
                self._seen[chunk.number] = 0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._averages

    def follow(self, chunk: int, values: Tensor, rounds: int, rows: Tensor | None = None) -> None:
        """Average up to round `rounds`; since the last time, each of them ended with these values (flat).

        Args:
            rows: only these rows of a table; None = all.
        """
        if chunk in self._seen_rows:
            self._follow_rows(chunk, values, rounds, slice(None) if rows is None else rows)
            return
        average, new = self._averages[chunk], rounds - self._seen[chunk]
        if new <= 0:
            return
        if self._seen[chunk]:
            average.lerp_(values.to(average.dtype), 1 - self._decay**new)
        else:
            average.copy_(values)
        self._seen[chunk] = rounds

    def _follow_rows(self, chunk: int, values: Tensor, rounds: int, rows: slice | Tensor) -> None:
        average, seen = self._averages[chunk], self._seen_rows[chunk]
        before = seen[rows]
        new = (rounds - before).clamp_(min=0)
        weight = torch.where(before > 0, 1 - self._decay ** new.double(), (new > 0).double())
        ends = values.view_as(average)[rows].to(average.dtype)
        average[rows] = average[rows].lerp(ends, weight.to(average.dtype)[:, None])
        seen[rows] = before + new

    def values(self, chunk: int) -> Tensor:
        """The chunk's average as far as it was followed (flat): not a copy."""
        return self._averages[chunk].view(-1)

    @property
    def nbytes(self) -> int:
        """Bytes held here."""
        return sum(tensor.nbytes for tensor in (*self._averages.values(), *self._seen_rows.values()))
