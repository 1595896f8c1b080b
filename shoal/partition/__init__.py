"""Parameters become slices on servers, and slices become chunks: the plan.

Pure: the same parameters give the same plan on every member, whatever their names are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.config import Cluster
from shoal.errors import UsageError
from shoal.partition import balanced, singa
from shoal.partition.chunks import add_buffers, drafted, numbered
from shoal.partition.plan import ITEMSIZE, Buffer, Chunk, Parameter, Piece, Plan, Slice, difference
from shoal.partition.weights import best_weights
from shoal.topology import Topology

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
    "plan_for",
]

_SLICERS = ("balanced", "singa")
SMALLEST, LARGEST = 1 << 20, 8 << 20  # bytes of a chunk, where nobody says otherwise


def make_plan(
    parameters: Iterable[Parameter],
    buffers: Iterable[Buffer],
    servers: int,
    server_groups: int = 1,
    slicer: str = "balanced",
    chunk_bytes: int = 0,
    weights: Sequence[int] = (),
) -> Plan:
    """Places every element on one of ``servers`` and gives it one of ``server_groups`` as its master.

    ``balanced``: parameters are cut only at multiples of 64 elements, tables between rows. Call a whole
    parameter, a row, or 64 elements (or the rest) of another parameter an atom. The most loaded server
    exceeds the least loaded one by at most the bytes of the largest atom; a server that holds some of a
    parameter that may be cut, by at most the bytes of the largest atom of those. So max/min ≤ 1.1 wherever
    the mean load is 11 largest atoms or more. Each server's shard is divided among the
    master server groups into consecutive parts, whose bounds lie within one atom of equal bytes. ``weights``
    give each server a part of its own, its weight over their sum, within an atom and a byte; 0 = nothing.
    Servers take turns of ``chunk_bytes``, so that each part of the model keeps all of them busy.

    ``singa``: the rule of Apache SINGA 0.3, in elements; a server may be left with nothing.

    A chunk has at most ``chunk_bytes`` (but room for 64 elements), unless it is one whole parameter, a
    server's rows of one table, or one buffer. 0 = an eighth of the largest part, between 1 and 8 MiB: enough
    to begin with the first while the last are made, and no more. What has no elements is placed nowhere.

    Raises:
        UsageError: a count below 1, an unknown slicer, weights that do not fit, or an unknown dtype.
    """
    parameters, buffers = tuple(parameters), tuple(buffers)
    _check(parameters + buffers, servers, server_groups, chunk_bytes)
    _check_slicer(slicer, weights, servers)
    weights = weights or (1,) * servers
    volume = sum(parameter.nbytes for parameter in parameters)
    chunk_bytes = chunk_bytes or _fitting(volume * max(weights) // sum(weights))
    if slicer == "singa":
        slices = singa.slices(parameters, servers, server_groups)
    else:
        slices = balanced.slices(parameters, weights, server_groups, stripe=chunk_bytes)
    drafts = drafted(parameters, slices, servers, chunk_bytes)
    add_buffers(buffers, drafts, server_groups)
    return Plan(parameters, buffers, servers, server_groups, tuple(slices), tuple(numbered(drafts)))


def plan_for(
    topology: Topology, cluster: Cluster, parameters: Iterable[Parameter], buffers: Iterable[Buffer]
) -> Plan:
    """The plan of a model under a cluster block."""
    groups = topology.server_groups if topology.synchronised else 1
    servers, weights = topology.servers_per_group, _weights(topology, cluster)
    return make_plan(parameters, buffers, servers, groups, cluster.slicer, cluster.chunk_bytes, weights)


def _weights(topology: Topology, cluster: Cluster) -> list[int]:
    """Of each server of a group, those beside workers first; none where all have equal parts."""
    if cluster.server_placement == "auto":
        return []
    beside = topology.workers_per_group
    further = topology.servers_per_group - beside
    weights = best_weights(beside, further)
    return [weights.beside] * beside + [weights.apart] * further


def _fitting(part: int) -> int:
    """The size of chunks for so many bytes on a server."""
    return min(max(part // 8, SMALLEST), LARGEST)


def _check(tensors: Sequence[Parameter | Buffer], servers: int, server_groups: int, chunk_bytes: int) -> None:
    counts = {"servers": servers, "server_groups": server_groups, "chunk_bytes": chunk_bytes}
    for name, count in counts.items():
        least = 0 if name == "chunk_bytes" else 1
        if count < least:
            remedy = f"Give {name} a value of {least} or more."
            raise UsageError(f"a plan with {name} = {count}", remedy=remedy)
    for tensor in tensors:
        if tensor.dtype not in ITEMSIZE:
            raise UsageError(
                f"{tensor.name} has dtype {tensor.dtype}, which servers do not know",
                remedy=f"Convert it to one of: {', '.join(ITEMSIZE)}.",
            )


def _check_slicer(slicer: str, weights: Sequence[int], servers: int) -> None:
    if slicer not in _SLICERS:
        raise UsageError(f"there is no slicer {slicer!r}", remedy=f"Choose one of: {', '.join(_SLICERS)}.")
    if weights and slicer == "singa":
        raise UsageError("the slicer singa knows no weights", remedy="Use the slicer balanced.")
    if weights and (len(weights) != servers or min(weights) < 0 or not any(weights)):
        remedy = "Give each server a whole number, 0 or more, and not 0 to all."
        raise UsageError(f"weights {list(weights)} for {servers} servers", remedy=remedy)
