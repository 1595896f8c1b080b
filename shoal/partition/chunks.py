"""Slices laid end to end become chunks, and so do buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal.partition.plan import ATOM, ITEMSIZE, Buffer, Chunk, Parameter, Piece, Slice


@dataclass
class _Draft:
    """A chunk that has no number and no place yet; ``size`` in elements."""

    optimizer: int
    master: int
    buffer: int | None = None
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0
    row: int = 0


_Spaces = dict[str, list[_Draft]]  # one server's chunks, by dtype


def drafted(
    parameters: Sequence[Parameter], slices: Sequence[Slice], servers: int, limit: int
) -> list[_Spaces]:
    """The chunks of all slices, for each server; ``limit`` in bytes."""
    drafts: list[_Spaces] = [{} for _ in range(servers)]
    for s in slices:
        parameter = parameters[s.parameter]
        elements = max(ATOM, limit // ITEMSIZE[parameter.dtype] // ATOM * ATOM)
        _append(drafts[s.server].setdefault(parameter.dtype, []), parameter, s, elements)
    return drafts


def _append(space: list[_Draft], parameter: Parameter, s: Slice, limit: int) -> None:
    """Lays a slice behind what is there, in chunks of ``limit`` elements; a whole one goes into one chunk.

    So does a table's, into one of its own: only its touched rows travel.
    """
    start, in_one = s.start, parameter.whole or parameter.row > 0
    kind = (parameter.optimizer, s.master, 0)
    while start < s.stop:
        need = s.stop - start if in_one else min(parameter.atom, s.stop - start)
        alike = space and (space[-1].optimizer, space[-1].master, space[-1].row) == kind
        if parameter.row or not alike or space[-1].size + need > limit:
            space.append(_Draft(parameter.optimizer, s.master, row=parameter.row))
        draft = space[-1]
        taken = need if in_one else min(s.stop - start, limit - draft.size)
        draft.pieces.append(Piece(s.parameter, start, start + taken, draft.size))
        start, draft.size = start + taken, draft.size + taken


def add_buffers(buffers: Sequence[Buffer], drafts: Sequence[_Spaces], server_groups: int) -> None:
    """Puts each on the server with the fewest bytes of buffers so far; their masters take turns."""
    loads = [0] * len(drafts)
    turn = 0
    for index, buffer in enumerate(buffers):
        if buffer.numel:
            server = loads.index(min(loads))
            loads[server] += buffer.numel * ITEMSIZE[buffer.dtype]
            draft = _Draft(buffer.optimizer, turn % server_groups, index, size=buffer.numel)
            drafts[server].setdefault(buffer.dtype, []).append(draft)
            turn += 1


def numbered(drafts: Sequence[_Spaces]) -> Iterator[Chunk]:
    """The final chunks: by server, then dtype, then place."""
    number = 0
    for server, spaces in enumerate(drafts):
        for dtype, space in spaces.items():
            start = 0
            for d in space:
                stop, pieces = start + d.size, tuple(d.pieces)
                place = number, server, dtype, start, stop
                yield Chunk(*place, d.optimizer, d.master, pieces, d.buffer, d.row)
                number, start = number + 1, stop
