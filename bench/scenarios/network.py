"""Scenarios between hosts: network namespaces on one switch, with shaped interfaces.

A rank of torch.distributed is on each host; Shoal's ranks are workers in order, then servers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bench.figures import Claim
from bench.jobs.models import shape_of
from bench.lan import Lan, speed
from bench.scenarios.kinds import Rounds, Scenario, one_group, over, told
from bench.sides import Block, Job, Side, alone, on_hosts, peers
from shoal.config import Cluster
from shoal.limits import (
    Link,
    all_reduce,
    best_shares,
    exchange_loads,
    limit,
    one_host_each,
    overlapped,
    step_loads,
)
from shoal.partition import Parameter, make_plan
from shoal.topology import Topology

JOB = Job("lan", warmup=2, steps=8, wait=0.0)  # 10.5 MB, Adam; the layers compute nothing
COMPUTED = replace(JOB, wait=None)


def lan(hosts: int, rate: str, slow: dict[int, str] | None = None) -> Callable[[bool], Lan]:
    """Makes a network, given whether flows are even."""
    return partial(Lan, hosts, rate, rates=slow)


def least(block: Block, job: Job, rate: str, shards: Sequence[float] | None = None) -> float:
    """Seconds of a step of group 0 with every process on a host of its own; ``shards`` in bytes."""
    topology = Topology.of(Cluster(**dict(block)))  # type: ignore[arg-type]
    places = one_host_each(topology)
    count = topology.servers_per_group
    loads = step_loads(topology, places, shards or [job.nbytes / count] * count)
    return limit(loads, dict.fromkeys(places.values(), Link(speed(rate), speed(rate)))).seconds


def both(block: Block, job: Job, rate: str) -> tuple[Side, Side]:
    """Shoal on as many hosts as it has processes, with the limit of its step: trusted, and with CURVE."""
    seconds = least(block, job, rate)
    return (
        on_hosts("shoal", job, block, limit=seconds),
        on_hosts("shoal, curve", job, block, limit=seconds, security="curve"),
    )


def with_curve(what: str, below: tuple[str, str]) -> Claim:
    """The step with CURVE, told beside what is claimed of trusted wires."""
    return over(f"with CURVE: {what}", ("shoal, curve", "step_s"), below)


def rivals(engines: Sequence[str], hosts: int, job: Job, rate: str) -> tuple[Side, ...]:
    """DDP and its kin, with the limit of an all-reduce."""
    seconds = all_reduce(hosts, job.nbytes, speed(rate))
    return tuple(peers(engine, job, hosts, limit=seconds) for engine in engines)


def computing_sides(block: Block, hosts: int) -> tuple[Side, Side]:
    """Shoal and DDP where the layers do compute, on the few cores that all hosts share."""
    ddp = peers("ddp, computing", COMPUTED, hosts, engine="ddp")
    return on_hosts("shoal, computing", COMPUTED, block), ddp


OVER_DDP_COMPUTING = over(
    "with layers that compute: step over DDP", ("shoal, computing", "step_s"), ("ddp, computing", "step_s")
)


def allreduce_lan() -> Scenario:
    rate, hosts = "100mbit", 4
    block = one_group(hosts, hosts, separate=False)
    return Scenario(
        "allreduce-lan",
        "AllReduce, 4 hosts at 100 Mbit, 10.5 MB, Adam",
        (
            *both(block, JOB, rate),
            *rivals(("ddp", "zero", "fsdp"), hosts, JOB, rate),
            *computing_sides(block, hosts),
        ),
        (
            over("step over DDP", ("shoal", "step_s"), ("ddp", "step_s"), 1.0),
            with_curve("step over DDP", ("ddp", "step_s")),
            over("step over DDP with ZeRO", ("shoal", "step_s"), ("zero", "step_s")),
            over("step over FSDP2", ("shoal", "step_s"), ("fsdp", "step_s")),
            OVER_DDP_COMPUTING,
            over("optimizer memory over DDP", ("shoal", "state_bytes"), ("ddp", "state_bytes"), 0.30),
        ),
        network=lan(hosts, rate),
    )


def sandblaster_lan() -> Scenario:
    rate, block = "100mbit", one_group(4, 4, separate=True)
    return Scenario(
        "sandblaster-lan",
        "Sandblaster, 4 workers and 4 servers on 8 hosts at 100 Mbit, 10.5 MB, Adam; DDP on 4 of them",
        (
            *both(block, JOB, rate),
            *rivals(("ddp",), 4, JOB, rate),
            *computing_sides(block, 4),
        ),
        (
            told("step over the limit", ("shoal", "of_limit"), 1.15),
            over("step over DDP", ("shoal", "step_s"), ("ddp", "step_s"), 0.75),
            with_curve("step over the limit", ("shoal, curve", "limit_s")),
            with_curve("step over DDP", ("ddp", "step_s")),
            OVER_DDP_COMPUTING,
        ),
        network=lan(8, rate),
    )


def mixed_lan() -> Scenario:
    rate, workers = "100mbit", 4
    sides, claims = [], []
    for further in (1, 2, 3):
        name = f"{further} further"
        block = {**one_group(workers, workers + further, separate=False), "server_placement": "mixed"}
        shares = best_shares(workers, further)
        shards = [JOB.nbytes * part for part in [shares.beside] * workers + [shares.apart] * further]
        seconds = least(block, JOB, rate, shards)
        sides.append(on_hosts(name, JOB, block, limit=seconds))
        sides.append(on_hosts(f"{name}, curve", JOB, block, limit=seconds, security="curve"))
        claims.append(told(f"{name}: step over the limit", (name, "of_limit"), 1.25))
        claims.append(told(f"{name}, with CURVE: step over the limit", (f"{name}, curve", "of_limit")))
    return Scenario(
        "mixed-lan",
        "4 workers with a server beside each, and 1, 2 or 3 further servers, hosts at 100 Mbit, 10.5 MB, "
        "Adam; DDP on 4 of them",
        (*sides, *rivals(("ddp",), workers, JOB, rate)),
        (*claims, over("3 further: step over DDP", ("3 further", "step_s"), ("ddp", "step_s"))),
        network=lan(workers + 3, rate),
    )


def wide_lan() -> Scenario:
    rate = "50mbit"
    return Scenario(
        "wide-lan",
        "Sandblaster, 8 workers and 8 servers on 16 hosts at 50 Mbit, 10.5 MB, Adam; DDP on 8 of them",
        (
            *both(one_group(8, 8, separate=True), JOB, rate),
            *rivals(("ddp",), 8, JOB, rate),
        ),
        (
            over("step over DDP", ("shoal", "step_s"), ("ddp", "step_s"), 0.65),
            with_curve("step over DDP", ("ddp", "step_s")),
        ),
        network=lan(16, rate),
    )


def downpour(groups: int) -> Block:
    """Groups of one worker on three servers."""
    return {"nworker_groups": groups, "nservers_per_group": 3, "server_worker_separate": True}


def _downpour(name: str, about: str, job: Job, slow: dict[int, str]) -> Scenario:
    """Three groups, the last one slow, together and each of the two kinds alone on the same hosts."""
    fast = replace(job, slow_rank=-1)
    lone = replace(job, slow_rank=0 if job.slow_rank == 2 else -1, steps=max(4, job.steps // 4))
    return Scenario(
        name,
        about,
        (
            on_hosts("together", job, downpour(3)),
            on_hosts("together, curve", job, downpour(3), security="curve"),
            on_hosts("fast alone", fast, downpour(1), hosts=(0, 3, 4, 5)),
            on_hosts("slow alone", lone, downpour(1), hosts=(2, 3, 4, 5)),
            peers("ddp", job, 3),
        ),
        (
            _of_own_rates("rate over the sum of the groups' own", "together", 0.95),
            _of_own_rates("with CURVE: rate over the sum of the groups' own", "together, curve", None),
            over("rate over DDP's", ("together", "rate"), ("ddp", "rate"), None, "more"),
        ),
        network=lan(6, "100mbit", slow),
    )


def _of_own_rates(what: str, side: str, bound: float | None) -> Claim:
    """All groups' rate over what the groups of each kind do alone."""

    def ratio(sides: Rounds) -> float:
        return sides[side]["rate"] / (2 * sides["fast alone"]["rate"] + sides["slow alone"]["rate"])

    return Claim(what, ratio, (side, "fast alone", "slow alone"), bound, "more")


def downpour_nic() -> Scenario:
    return _downpour(
        "downpour-nic",
        "Downpour, 3 groups of 1 worker on 3 servers, 6 hosts at 100 Mbit, one group's host at 25; 10.5 MB, "
        "Adam, 0.8 s of computation per step",
        Job("lan", steps=16, wait=0.8),
        {2: "25mbit"},
    )


def downpour_compute() -> Scenario:
    return _downpour(
        "downpour-compute",
        "Downpour, 3 groups of 1 worker on 3 servers, 6 hosts at 100 Mbit; 10.5 MB, Adam, 0.8 s of "
        "computation per step, in one group 3.2 s",
        Job("lan", steps=16, wait=0.8, slow_rank=2),
        {},
    )


def hogwild_lan() -> Scenario:
    """The shortest interval is that at which an exchange takes no longer than the rounds between two."""
    rate, hosts, wait = "10mbit", 4, 0.05
    job = Job("mnist", steps=400, wait=wait)
    groups: Block = {"nworker_groups": hosts, "nserver_groups": hosts}
    topology = Topology.of(Cluster(nworker_groups=hosts, nserver_groups=hosts))
    places = one_host_each(topology)
    plan = make_plan([Parameter("all", (job.nbytes // 4,), "float32")], [], 1, hosts)
    links = dict.fromkeys(places.values(), Link(speed(rate), speed(rate)))
    seconds = limit(exchange_loads(topology, places, plan), links).seconds
    interval = math.ceil(seconds / wait)
    return Scenario(
        "hogwild-lan",
        "Distributed Hogwild, 4 hosts at 10 Mbit, MNIST MLP (0.8 MB), Adam, 50 ms of computation per step; "
        f"an exchange takes the links {seconds:.2f} s at least, so sync_freq is {interval}",
        (
            on_hosts("shoal", job, {**groups, "sync_freq": interval}),
            on_hosts("shoal, curve", job, {**groups, "sync_freq": interval}, security="curve"),
            on_hosts("no exchange", job, {"nworker_groups": hosts, "nserver_groups": 0}),
            peers("ddp", replace(job, steps=20), hosts, limit=all_reduce(hosts, job.nbytes, speed(rate))),
        ),
        (
            over("rate over that without network", ("shoal", "rate"), ("no exchange", "rate"), 0.95, "more"),
            over(
                "with CURVE: rate over that without network",
                ("shoal, curve", "rate"),
                ("no exchange", "rate"),
                None,
                "more",
            ),
            over("rate over DDP's", ("shoal", "rate"), ("ddp", "rate"), None, "more"),
        ),
        network=lan(hosts, rate),
    )


def overlap_lan() -> Scenario:
    rate = "100mbit"
    block = one_group(4, 4, separate=True)
    seconds = least(block, JOB, rate)
    job = replace(JOB, wait=2 * seconds)
    learned = replace(job, overlap=True)
    layers = len(shape_of(job.model).widths) - 1
    return Scenario(
        "overlap-lan",
        "Sandblaster, 4 workers and 4 servers on 8 hosts at 100 Mbit, 10.5 MB, Adam, computation "
        f"({2 * seconds:.2f} s per step) twice as long as communication at its limit",
        (
            alone("computation alone", job),
            on_hosts("shoal", job, block),
            on_hosts("shoal, overlap=True", learned, block, limit=overlapped(2 * seconds, seconds, layers)),
            on_hosts("shoal, overlap=True, curve", learned, block, security="curve"),
            peers("ddp", job, 4),
        ),
        (
            over(
                "step over computation alone, overlap=True",
                ("shoal, overlap=True", "step_s"),
                ("computation alone", "step_s"),
                1.08,
            ),
            told("step over its limit, overlap=True", ("shoal, overlap=True", "of_limit")),
            over(
                "with CURVE: step over computation alone, overlap=True",
                ("shoal, overlap=True, curve", "step_s"),
                ("computation alone", "step_s"),
            ),
            over("step over computation alone", ("shoal", "step_s"), ("computation alone", "step_s")),
            over("DDP's step over computation alone", ("ddp", "step_s"), ("computation alone", "step_s")),
        ),
        network=lan(8, rate),
    )


def wire_dtype_lan() -> Scenario:
    """Interfaces count headers as well, so bytes do not fall quite as the numbers' sizes do."""
    rate, job = "100mbit", replace(JOB, steps=4)
    block = one_group(2, 2, separate=True)
    sides = [on_hosts("float32", job, block, limit=least(block, job, rate))]
    claims = []
    for dtype, bound in (("bfloat16", 1.9), ("int8", 3.5)):
        sides.append(on_hosts(dtype, job, {**block, "wire_dtype": dtype}))
        claims.append(
            over(f"{dtype}: fewer bytes", ("float32", "host_out"), (dtype, "host_out"), bound, "more")
        )
        claims.append(over(f"{dtype}: step over float32's", (dtype, "step_s"), ("float32", "step_s")))
    about = "Sandblaster, 2 workers and 2 servers on 4 hosts at 100 Mbit, 10.5 MB, Adam: bytes carried"
    return Scenario("wire-dtype-lan", about, tuple(sides), tuple(claims), network=lan(4, rate))


SCENARIOS = (
    allreduce_lan,
    sandblaster_lan,
    mixed_lan,
    wide_lan,
    downpour_nic,
    downpour_compute,
    hogwild_lan,
    overlap_lan,
    wire_dtype_lan,
)
