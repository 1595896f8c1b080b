"""How fast the line to another machine is, tried at the start, and the chunks that suit it."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.config import Cluster
from shoal.partition import SMALLEST
from shoal.topology import Topology

FIRST = 1 << 16  # bytes of the first try; each is twice the one before
LAST = 1 << 24
LONG = 0.05  # seconds from which a try tells the rate: a shaper lets the first bytes pass at once
TURN = 0.01  # seconds that a chunk may keep the line from others
LEAST = 1 << 15  # bytes of a chunk: with less the processors decide, not the line


def line_rate(exchange: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic) -> float:
    """Bytes per second.

    Args:
        exchange: sends bytes to the other machine and waits for its word that they have come.
    """
    began = clock()
    exchange(b"")
    there_and_back = clock() - began
    size = FIRST
    while True:
        began = clock()
        exchange(bytes(size))
        took = clock() - began
        if took >= max(LONG, 4 * there_and_back) or size >= LAST:
            return size / max(took - there_and_back, 1e-9)
        size *= 2


def chunk_bytes(rate: float) -> int:
    """The size of chunks for a line of so many bytes per second; 0 = as the plan makes them.

    The first values return once a chunk of every worker has come, those of the last when all else is done:
    that argues for small ones. Each costs the processors up to a tenth of a turn: that argues against.
    """
    fitting = int(rate * TURN) >> 14 << 14
    return 0 if fitting >= SMALLEST else max(LEAST, fitting)


def suited(cluster: Cluster, topology: Topology, rate: float) -> Cluster:
    """The block with chunks that suit a line of so many bytes per second; 0 = there is no line.

    They stay as the block has them where it says so, and where no step waits for the line.
    """
    if not rate or cluster.chunk_bytes or topology.at_home:
        return cluster
    return cluster.model_copy(update={"chunk_bytes": chunk_bytes(rate)})
