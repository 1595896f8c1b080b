"""What a server owns: values, optimizer state, buffers, and the number of their latest change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.acts import Average
from shoal.ema import Ema
from shoal.errors import ProtocolError
from shoal.parameters import Allocate, as_bytes, checked, private
from shoal.partition import ITEMSIZE, Chunk, Plan
from shoal.rows import Content, Rows, changed_rows, numbers_of
from shoal.updater import Settings, Updater, resolve
from shoal.wire import Frame, OptimizerSpec, State


def average(shares: Sequence[Tensor], rule: Average) -> Tensor:
    """The averaged gradient of a chunk (flat), in float32 or wider.

    Shares are summed in the order of ranks, so that their order of arrival never shows.
    """
    wide = torch.promote_types(shares[0].dtype, torch.float32)
    if not shares[0].is_floating_point() and not shares[0].is_complex():
        wide = shares[0].dtype
    first = shares[0].to(wide)
    if rule.count == 1:
        return first
    if rule.parts is None:
        if len(shares) == 1:
            return first / rule.count
        total = first + shares[1]
        for share in shares[2:]:
            total += share
        return _divide(total, rule.count)
    total = first * rule.parts[0]
    for share, part in zip(shares[1:], rule.parts[1:], strict=True):
        total += share.to(wide) * part
    return total


def _divide(total: Tensor, count: int) -> Tensor:
    """Divide in place; by a power of two as a product, which is as exact and takes half the time."""
    return total.div_(count) if count & (count - 1) else total.mul_(1 / count)


def merge(shares: Sequence[Tensor], rule: Average) -> Tensor:
    """The merged buffer of a chunk (flat): averaged, or the maximum for integers and bools."""
    if shares[0].is_floating_point() or shares[0].is_complex():
        return average(shares, rule).to(shares[0].dtype)
    total = shares[0].clone()
    for share in shares[1:]:
        total = torch.maximum(total, share)
    return total


def pieces_in(values: Tensor, plan: Plan, chunk: Chunk) -> list[Tensor]:
    """Views of a chunk's values (flat), one for each piece, shaped as an `Updater` wants them."""
    pieces = []
    for piece in chunk.pieces:
        parameter = plan.parameters[piece.parameter]
        part = values[piece.at : piece.at + piece.stop - piece.start]
        if parameter.row:
            part = part.view(-1, parameter.row)
        pieces.append(part.view(parameter.shape) if parameter.whole else part)
    return pieces


def updated_in(chunk: Chunk, wide: bool) -> str:
    """The dtype of the values that the chunk's optimizer updates: float32 for a master's."""
    half = chunk.buffer is None and chunk.dtype in ("bfloat16", "float16")
    return "float32" if wide and half else chunk.dtype


class Shard:
    """One server's part of the model.

    Args:
        plan: the plan; `server` is this server's index in its group.
        optimizers: the job's optimizers by name.
        allowed: classes outside torch.optim that the job allows.
        wide: keep float32 master values (and state) of parameters in half precision.
        allocate: gives the memory that values lie in.
        ema: the decay of the parameters' moving averages; None = none are kept.

    Attributes:
        rounds: the rounds that all groups have closed on a chunk; whoever counts them sets it.
    """

    def __init__(
        self,
        plan: Plan,
        server: int,
        optimizers: Sequence[OptimizerSpec],
        allowed: Sequence[str],
        wide: bool = False,
        allocate: Allocate = private,
        ema: float | None = None,
    ) -> None:
        self.plan = plan
        self.chunks = plan.chunks_of(server)
        self.rounds: Callable[[int], int] = lambda chunk: 0
        self.lsn = 0
        self.revision = {chunk.number: 0 for chunk in self.chunks}
        self._spaces = {
            dtype: allocate(size * ITEMSIZE[dtype]).view(getattr(torch, dtype))
            for dtype, size in plan.spaces(server).items()
        }
        self._views = {c.number: self._spaces[c.dtype][c.start : c.stop] for c in self.chunks}
        self._tables = {c.number: self._views[c.number].view(-1, c.row) for c in self.chunks if c.row}
        self._rows = {number: torch.zeros(len(t), dtype=torch.int64) for number, t in self._tables.items()}
        self._masters = {
            c.number: torch.zeros(c.size, dtype=getattr(torch, updated_in(c, wide)))
            for c in self.chunks
            if updated_in(c, wide) != c.dtype
        }
        classes = [resolve(spec.name, allowed) for spec in optimizers]
        self._updaters = {
            c.number: Updater(
                classes[c.optimizer],
                optimizers[c.optimizer],
                pieces_in(self._masters.get(c.number, self._views[c.number]), plan, c),
                [plan.parameters[p.parameter].settings for p in c.pieces],
            )
            for c in self.chunks
            if c.buffer is None
        }
        self._ema = None if ema is None else Ema(ema, (c for c in self.chunks if c.buffer is None))

    def values(self, chunk: int) -> Tensor:
        """The chunk's values (flat): the shard itself, not a copy."""
        return self._views[chunk]

    def table(self, chunk: int) -> Tensor:
        """A table's chunk (rows × elements per row): the shard itself, not a copy."""
        return self._tables[chunk]

    def news(self, chunk: int, since: int) -> Rows:
        """Copies of the rows of a table's chunk that have changed after the shard's change number `since`."""
        index = (self._rows[chunk] > since).nonzero()[:, 0]
        return Rows(index, self._tables[chunk][index])

    def _changed(self, chunk: int, rows: Tensor | None = None) -> None:
        """A chunk has changed; of a table the rows with these numbers, None = all."""
        self.lsn += 1
        self.revision[chunk] = self.lsn
        if chunk in self._rows:
            self._rows[chunk][slice(None) if rows is None else rows] = self.lsn

    def step(self, chunk: int, gradient: Content, touched: Sequence[int] | None, settings: Settings) -> None:
        """Apply an averaged gradient (float32 or wider; rounded once to the chunk's dtype)."""
        updater, master = self._updaters[chunk], self._masters.get(chunk)
        updated = self._views[chunk] if master is None else master
        rows = updater.moved(gradient) if isinstance(gradient, Rows) else None
        self._follow(chunk, rows, before=1)
        updater.step(gradient.to(updated.dtype), touched, settings)
        self._follow(chunk, rows)
        if master is not None:
            self._views[chunk].copy_(master)
        self._changed(chunk, rows)

    def assign(self, chunk: int, values: Content) -> None:
        """Set the chunk's values (flat), or some rows of a table."""
        rows, master = None, self._masters.get(chunk)
        before = None if master is None else self._views[chunk].clone()
        if isinstance(values, Rows):
            rows = values.index
        elif chunk in self._tables:
            new, _ = changed_rows(self._views[chunk], values, self._tables[chunk].shape[1])
            rows = new.index
        self._follow(chunk, rows)  # rounds that are over ended with the old values
        if isinstance(values, Rows):
            self._tables[chunk][values.index] = values.values
        else:
            self._views[chunk].copy_(values)
        if master is not None:  # where nothing has changed, the master keeps its finer value
            changed = self._views[chunk] != before
            master[changed] = self._views[chunk][changed].float()
        self._changed(chunk, rows)

    def _follow(self, chunk: int, rows: Tensor | None = None, before: int = 0) -> None:
        """Have the average of the rounds up to now, or of those before the last."""
        if self._ema is not None and chunk in self._ema:
            values = self._masters.get(chunk, self._views[chunk])
            self._ema.follow(chunk, values, self.rounds(chunk) - before, rows)

    def averaged(self, chunk: int) -> Tensor:
        """A copy of a chunk's moving average (flat, in the chunk's dtype); of a buffer, its values.

        Raises:
            ProtocolError: no averages are kept.
        """
        if self._ema is None:
            raise ProtocolError("somebody asks for moving averages, and none are kept")
        self._follow(chunk)
        begun = chunk in self._ema and self.rounds(chunk) > 0
        values = self._ema.values(chunk) if begun else self._views[chunk]
        return values.to(self._views[chunk].dtype, copy=True)

    def export(self, chunk: int) -> tuple[list[State], list[Frame]]:
        """Everything about a chunk as it travels: its values' frame first, then its state's."""
        updater = self._updaters.get(chunk)
        entries, frames = updater.export() if updater else ([], [])
        return entries, [as_bytes(self._views[chunk]), *frames]

    def load(self, chunk: Chunk, entries: Sequence[State], frames: Sequence[Frame], sender: str) -> None:
        """Take over what `export` made; raises ProtocolError for a wrong size."""
        self.assign(chunk.number, checked(frames[:1], chunk, sender))
        if entries:
            self._updaters[chunk.number].load(entries, frames[1:])

    @property
    def parameters(self) -> int:
        """Elements of parameters held here."""
        return sum(chunk.size for chunk in self.chunks if chunk.buffer is None)

    @property
    def ema_bytes(self) -> int:
        """Bytes of moving averages held here."""
        return 0 if self._ema is None else self._ema.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state held here."""
        return sum(updater.state_bytes for updater in self._updaters.values())


def squared_norm(averages: Mapping[int, Content]) -> float:
    """Sum of squares over averaged chunks, in float64."""
    return sum(float(numbers_of(a).abs().double().square().sum()) for a in averages.values())
