"""Tables whose gradients are sparse: only the rows that a step touched are pushed, averaged and sent back.

A table is the weight of `nn.Embedding` or `nn.EmbeddingBag` with `sparse=True`. It is cut between rows, and
what travels of a chunk of it are row numbers, counted from the chunk's first row, and those rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.acts import Average
from shoal.errors import ParameterEdited, UsageError
from shoal.partition import Piece


@dataclass(frozen=True)
class Rows:
    """Some rows of a chunk of a table: `index` (int64, n, ascending) and `values` (n × elements per row)."""

    index: Tensor
    values: Tensor

    def __mul__(self, factor: float) -> Rows:
        """Every value times `factor`."""
        return Rows(self.index, self.values * factor)

    def clamp(self, least: float, most: float) -> Rows:
        """Every value within these two."""
        return Rows(self.index, self.values.clamp(least, most))

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows in another dtype."""
        return Rows(self.index, self.values.to(dtype))

    def sparse(self, rows: int) -> Tensor:
        """A sparse tensor (rows × elements per row), 0 in all other rows."""
        shape = (rows, self.values.shape[1])
        return torch.sparse_coo_tensor(
            self.index[None], self.values, shape, is_coalesced=True, check_invariants=False
        )


Content = Tensor | Rows
"""What is pushed or sent of a chunk: all of it (flat), or some rows."""


def no_rows(width: int, dtype: torch.dtype) -> Rows:
    """Not one row of a table with `width` elements per row."""
    return Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=dtype))


def rows_of(sparse: Tensor, piece: Piece) -> Rows:
    """The part of a table's sparse tensor that falls into a piece of the table, on the CPU."""
    whole = sparse.detach().coalesce()
    index, values = whole.indices()[0].cpu(), whole.values().cpu()
    width = values.shape[1]
    first, last = piece.start // width, piece.stop // width
    begin, end = torch.searchsorted(index, torch.tensor([first, last])).tolist()
    return Rows(index[begin:end] - first, values[begin:end].contiguous())


def numbers_of(content: Tensor | Rows) -> Tensor:
    """The numbers in a chunk's content, or in a gradient of any layout."""
    if isinstance(content, Rows):
        return content.values
    return content._values() if content.is_sparse else content


def cut_state(value: Tensor, piece: Piece, row: int) -> Tensor:
    """A piece's part of optimizer state that has its parameter's shape: flat, or rows × elements per row."""
    if value.is_sparse:
        return rows_of(value, piece).sparse((piece.stop - piece.start) // row)
    part = value.detach().reshape(-1)[piece.start : piece.stop]
    return part.view(-1, row) if row else part


def mark_of(gradient: Tensor) -> tuple[int, int]:
    """Address and version counter: tells whether a gradient is still the one that it was."""
    return numbers_of(gradient).data_ptr(), gradient._version


def average_rows(shares: Sequence[Rows], rule: Average) -> Rows:
    """The averaged gradient of a table's chunk, in float32 or wider: all rows that some share has.

    The rules are those of a dense chunk: summed in the order of ranks; a worker without a row counts as zero.
    """
    first = shares[0].to(torch.promote_types(shares[0].values.dtype, torch.float32))
    if rule.count == 1:
        return first
    index = torch.cat([share.index for share in shares]).unique()  # type: ignore[no-untyped-call]
    total = torch.zeros(len(index), first.values.shape[1], dtype=first.values.dtype)
    for rank, share in enumerate(shares):
        values = share.values.to(total.dtype)
        if rule.parts is not None:
            values = values * rule.parts[rank]
        total.index_add_(0, torch.searchsorted(index, share.index), values)
    return Rows(index, total if rule.parts is not None else total.div_(rule.count))


def edited_rows(present: Tensor, new: Rows, old: Rows) -> Rows:
    """What a script changed in a table's rows, added to what others did meanwhile: exact where nobody did."""
    values = present[new.index]
    return Rows(new.index, torch.where(values == old.values, new.values, values + (new.values - old.values)))


def changed_rows(before: Tensor, after: Tensor, row: int) -> tuple[Rows, Rows]:
    """The rows that differ between two states of a chunk (flat): as they are after, as they were before."""
    old, new = before.view(-1, row), after.view(-1, row)
    index = (old != new).any(1).nonzero()[:, 0]
    return Rows(index, new[index]), Rows(index, old[index])


def tables_of(models: Sequence[nn.Module]) -> dict[Tensor, int]:
    """Weights that nothing but sparse lookups holds, with the elements of a row."""
    held: dict[Tensor, int] = {}
    for module in (module for model in models for module in model.modules()):
        table = module.weight if _is_lookup(module) and module.sparse else None
        for parameter in module._parameters.values():
            if parameter is not None:
                row = parameter.shape[1] if parameter is table else 0
                held[parameter] = min(row, held.get(parameter, row))
    return {parameter: row for parameter, row in held.items() if row}


def _is_lookup(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def refuse_max_norm(models: Sequence[nn.Module], trained: Sequence[Tensor]) -> None:
    """Raise ParameterEdited for a lookup whose forward changes a weight that an optimizer trains."""
    held = set(trained)
    for name, module in _named(models):
        if _is_lookup(module) and module.max_norm is not None and module.weight in held:
            raise ParameterEdited(
                f"{name or type(module).__name__} has max_norm, with which its forward changes the weight; "
                "the weight's values are the servers', who would undo the change",
                remedy="leave max_norm out and scale what the lookup returns: its result divided by its norm",
            )


def _named(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for model in models:
        yield from model.named_modules()


def check_layout(name: str, gradient: Tensor | None, row: int) -> None:
    """Raise UsageError for a gradient that is sparse where the parameter is no table, or the reverse."""
    if gradient is None or gradient.layout is (torch.sparse_coo if row else torch.strided):
        return
    if row:
        raise UsageError(
            f"{name} belongs to a module with sparse=True, and its gradient is not sparse: "
            "something else than lookups uses it",
            remedy="build its module with sparse=False",
        )
    raise UsageError(
        f"{name} has a sparse gradient, and it is not (only) the weight of nn.Embedding or nn.EmbeddingBag "
        "with sparse=True",
        remedy="build its module with sparse=False",
    )
