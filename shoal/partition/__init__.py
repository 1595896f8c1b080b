"""Parameters become slices on servers, and slices become chunks: the plan.

Pure: the same parameters give the same plan on every member, whatever their names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shoal.errors import UsageError
from shoal.partition import balanced, singa
from shoal.partition.chunks import add_buffers, drafted, numbered
from shoal.partition.plan import ITEMSIZE, Buffer, Chunk, Parameter, Piece, Plan, Slice, difference

__all__ = [
    "ITEMSIZE",
    "Buffer",
    "Chunk",
    "Parameter",
    "Piece",
    "Plan",
    "Slice",
    "difference",
    "make_plan",
]

_SLICERS: dict[str, Callable[[Sequence[Parameter], int, int], list[Slice]]] = {
    "balanced": balanced.slices,
    "singa": singa.slices,
}


def make_plan(
    parameters: Iterable[Parameter],
    buffers: Iterable[Buffer],
    servers: int,
    server_groups: int = 1,
    slicer: str = "balanced",
    chunk_bytes: int = 262144,
) -> Plan:
    """Places every element on one of ``servers`` and gives it one of ``server_groups`` as its master.

    ``balanced``: parameters are cut only at multiples of 64 elements, tables between rows. Call a whole
    parameter, a row, or 64 elements (or the rest) of another parameter an atom. The most loaded server
    exceeds the least loaded one by at most the bytes of the largest atom; a server that holds some of a
    parameter that may be cut, by at most the bytes of the largest atom of those. So max/min ≤ 1.1 wherever
    the mean load is 11 largest atoms or more. Each server's shard is divided among the master server groups
    into consecutive parts, whose bounds lie within one atom of equal bytes.

    ``singa``: the rule of Apache SINGA 0.3, in elements; a server may be left with nothing.

    A chunk has at most ``chunk_bytes`` (but room for 64 elements), unless it is one whole parameter, a
    server's rows of one table, or one buffer. What has no elements is placed nowhere.

    Raises:
        UsageError: a count below 1, an unknown slicer, or a dtype that servers do not know.
    """
    parameters, buffers = tuple(parameters), tuple(buffers)
    _check(parameters + buffers, servers, server_groups, chunk_bytes)
    if slicer not in _SLICERS:
        raise UsageError(f"there is no slicer {slicer!r}", remedy=f"Choose one of: {', '.join(_SLICERS)}.")
    slices = _SLICERS[slicer](parameters, servers, server_groups)
    drafts = drafted(parameters, slices, servers, chunk_bytes)
    add_buffers(buffers, drafts, server_groups)
    return Plan(parameters, buffers, servers, server_groups, tuple(slices), tuple(numbered(drafts)))


def _check(tensors: Sequence[Parameter | Buffer], servers: int, server_groups: int, chunk_bytes: int) -> None:
    counts = {"servers": servers, "server_groups": server_groups, "chunk_bytes": chunk_bytes}
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"a plan with {name} = {count}", remedy=f"Give {name} a value of 1 or more.")
    for tensor in tensors:
        if tensor.dtype not in ITEMSIZE:
            raise UsageError(
                f"{tensor.name} has dtype {tensor.dtype}, which servers do not know",
                remedy=f"Convert it to one of: {', '.join(ITEMSIZE)}.",
            )
