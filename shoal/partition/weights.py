"""What part of the model each server should hold, where some are beside workers and some on further hosts."""

from __future__ import annotations

from typing import NamedTuple

from shoal.errors import UsageError


class Weights(NamedTuple):
    """Of each server beside a worker and of each further one; a part is a weight over the sum of all."""

    beside: int
    apart: int


def best_weights(workers: int, further: int) -> Weights:
    """The weights that make a step shortest, one server on each of n workers' hosts and of k further ones.

    With a part x of the model beside each worker and y on each further server, n·x + k·y = 1, a worker's host
    carries 1 − x for its worker and (n − 1)·x for its server each way, a further one n·y. Both are equal at
    x = (n − k) / (n² + kn − 2k) and y = 2(n − 1) / (n² + kn − 2k). With n further servers or more, x = 0. (Y.
    Jiang et al.: *A unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU
    clusters*, OSDI 2020.)

    Raises:
        UsageError: fewer than 1 worker or 0 further servers.
    """
    n, k = workers, further
    if n < 1 or k < 0:
        raise UsageError(
            f"{n} workers and {k} further servers", remedy="give at least 1 worker and 0 servers"
        )
    if n == 1:
        return Weights(1, 0)
    if k >= n:
        return Weights(0, 1)
    return Weights(n - k, 2 * (n - 1))
