"""The least time that a step can take on a network, and the link that decides it.

A bound by bytes alone: whatever the order and the size of messages, the interface of a host has to carry, in
and out, what members on it exchange with members elsewhere; members of one host exchange without it. Bytes
are the model's, headers left out; times are seconds, speeds bytes per second; both directions go at once.

In a step each worker of a group pushes its gradient of each shard to the shard's server, and pulls the
shard's new values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from shoal.errors import UsageError
from shoal.partition import Plan
from shoal.partition.weights import best_weights
from shoal.topology import Member, Topology

WIRE: Mapping[str, float] = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5, "int8": 0.25}
"""Bytes on the wire per byte of a float32 model, by wire dtype; scales and the like left out."""

Places = Mapping[Member, str]
"""The host that each member is on."""


class Way(NamedTuple):
    """One direction of a host's interface."""

    host: str
    direction: Literal["in", "out"]


Loads = Mapping[Way, float]
"""Bytes that have to go each way."""


@dataclass(frozen=True)
class Link:
    """The speeds of a host's interface, in bytes per second."""

    inward: float
    outward: float

    def __post_init__(self) -> None:
        if not (self.inward > 0 and self.outward > 0):
            raise UsageError(
                f"a link with {self.inward:g} bytes per second in and {self.outward:g} out",
                remedy="give both speeds a number above 0",
            )


class Limit(NamedTuple):
    """The least seconds, and what decides them; None where nothing has to be carried."""

    seconds: float
    way: Way | None


def one_host_each(topology: Topology, processes_per_host: int = 1) -> dict[Member, str]:
    """Places for all members: the block's processes in their order, so many on ``host 0``, on ``host 1``…"""
    return {
        member: f"host {family.number // processes_per_host}"
        for family in topology.families
        for member in (*family.workers, *family.servers)
    }


def shards_of(plan: Plan) -> list[float]:
    """Bytes of each server of a group, by its index."""
    return [float(sum(chunk.nbytes for chunk in plan.chunks_of(server))) for server in range(plan.servers)]


def top_k(fraction: float, itemsize: int = 4) -> float:
    """The factor of ``WIRE`` for the largest ``fraction`` of all numbers, each with its place in 4 bytes."""
    return fraction * (itemsize + 4) / itemsize


def step_loads(
    topology: Topology,
    places: Places,
    shards: Sequence[float],
    group: int = 0,
    *,
    push: float = 1.0,
    pull: float = 1.0,
) -> Loads:
    """What one step of a worker group puts on the interfaces.

    Args:
        shards: bytes of each server of a group, by its index.
        push, pull: bytes on the wire per byte of the model, as in ``WIRE``.
    """
    loads: defaultdict[Way, float] = defaultdict(float)
    for worker in topology.workers:
        if worker.group != group:
            continue
        for server in topology.servers_of(worker):
            _carry(loads, places[worker], places[server], shards[server.index] * push)
            _carry(loads, places[server], places[worker], shards[server.index] * pull)
    return loads


def exchange_loads(topology: Topology, places: Places, plan: Plan) -> Loads:
    """What one exchange of the whole model between all server groups puts on the interfaces.

    Each follower sends the master of a chunk a difference and gets new values back.
    """
    loads: defaultdict[Way, float] = defaultdict(float)
    for server in topology.servers:
        for chunk in plan.chunks_of(server.index):
            master = Member("server", chunk.master, server.index)
            if topology.synchronised and server != master:
                _carry(loads, places[server], places[master], chunk.nbytes)
                _carry(loads, places[master], places[server], chunk.nbytes)
    return loads


def _carry(loads: defaultdict[Way, float], source: str, target: str, count: float) -> None:
    if source != target and count:
        loads[Way(source, "out")] += count
        loads[Way(target, "in")] += count


def limit(loads: Loads, links: Mapping[str, Link]) -> Limit:
    """The least time for loads that go together, and the way that takes it."""
    times = [Limit(count / _speed(way, links), way) for way, count in loads.items()]
    return max(times, default=Limit(0.0, None), key=lambda found: found.seconds)


def rates(demands: Sequence[Loads], links: Mapping[str, Link]) -> list[float]:
    """Steps per second of groups that do not wait for each other but share links, as evenly as can be.

    All rates rise together; those that need a way that is full stay where they are, the others rise on. So no
    group could be faster without making one slower that is no faster than it.

    Args:
        demands: for each group what one of its steps puts on the interfaces.
    """
    rate = [0.0] * len(demands)
    rising = set(range(len(demands)))
    room = {way: _speed(way, links) for loads in demands for way, count in loads.items() if count > 0}
    while rising:
        wanted = {way: sum(demands[g].get(way, 0.0) for g in rising) for way in room}
        times = {way: room[way] / want for way, want in wanted.items() if want > 0}
        if not times:
            for group in rising:
                rate[group] = inf
            break
        rise = min(times.values())
        for group in rising:
            rate[group] += rise
        room = {way: left - rise * wanted[way] for way, left in room.items()}
        full = {way for way, time in times.items() if time <= rise * (1 + 1e-12)}
        rising -= {g for g in rising if any(demands[g].get(way, 0.0) > 0 for way in full)}
    return rate


def _speed(way: Way, links: Mapping[str, Link]) -> float:
    if way.host not in links:
        raise UsageError(f"no link is known for {way.host}", remedy=f"there are: {', '.join(links)}")
    return links[way.host].inward if way.direction == "in" else links[way.host].outward


class Shares(NamedTuple):
    """Parts of the model: on each server beside a worker, and on each server with a host of its own."""

    beside: float
    apart: float


def best_shares(workers: int, further: int) -> Shares:
    """The shares that make a step the shortest: ``best_weights``, over their sum."""
    beside, on_further = best_weights(workers, further)
    whole = workers * beside + further * on_further
    return Shares(beside / whole, on_further / whole)


def all_reduce(hosts: int, size: float, speed: float) -> float:
    """Seconds of an all-reduce: 2(n − 1)/n · M/B for M bytes between n hosts of B bytes per second."""
    return 2 * (hosts - 1) / hosts * size / speed


def apart(workers: int, servers: int, size: float, speed: float) -> float:
    """Seconds with every server on a host of its own: M · max(1, n/k) / B."""
    return size * max(1.0, workers / servers) / speed


def mixed(workers: int, further: int, size: float, speed: float) -> float:
    """Seconds at ``best_shares``: 2n(n − 1)M / ((n² + kn − 2k)B) where further servers are fewer than n."""
    beside, on_further = best_shares(workers, further)
    return max(1 + (workers - 2) * beside, workers * on_further) * size / speed


def overlapped(computing: float, exchanging: float, layers: int) -> float:
    """Seconds of a step whose exchange goes on beside computing, in as many equal layers.

    Gradients leave during backward, which is two thirds of computing, the last layer's first. No value leaves
    before its gradients are all there, nor before every worker has committed the step, after its backward.

    Args:
        computing: seconds of forward and backward.
        exchanging: seconds that the network needs for all gradients, or for all values.
    """
    forward, backward, part = computing / 3, computing * 2 / 3, exchanging / layers
    return max(
        backward + exchanging + forward / layers,  # all values after the commit, then one layer's forward
        backward + 2 * part + forward,  # the first layer's gradients, its values, then the whole forward
        computing / layers + exchanging + part,  # all gradients, then the last one's values
    )
