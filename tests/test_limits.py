"""The limit calculator, against closed forms and against every other way to divide a model."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf, isclose
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Cluster, load
from shoal.errors import UsageError
from shoal.limits import (
    WIRE,
    Limit,
    Link,
    Way,
    all_reduce,
    apart,
    best_shares,
    exchange_loads,
    limit,
    mixed,
    one_host_each,
    overlapped,
    rates,
    shards_of,
    step_loads,
    top_k,
)
from shoal.partition import Parameter, make_plan, plan_for
from shoal.topology import Member, Topology

SIZE, SPEED = 10.5e6, 12.5e6  # a model's bytes; 100 Mbit per second


def on_equal_hosts(cluster: Cluster, shards: Sequence[float], push: float = 1, pull: float = 1) -> Limit:
    """The limit of a step of group 0 with each process of the block on a host of its own."""
    topology = Topology.of(cluster)
    places = one_host_each(topology)
    links = dict.fromkeys(places.values(), Link(SPEED, SPEED))
    return limit(step_loads(topology, places, shards, push=push, pull=pull), links)


def group(workers: int, servers: int, separate: bool) -> Cluster:
    return Cluster(nworkers_per_group=workers, nservers_per_group=servers, server_worker_separate=separate)


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8])
def test_servers_beside_their_workers_are_an_all_reduce(hosts: int) -> None:
    found = on_equal_hosts(group(hosts, hosts, False), [SIZE / hosts] * hosts)
    assert isclose(found.seconds, all_reduce(hosts, SIZE, SPEED), abs_tol=1e-12)
    assert (found.way is None) == (hosts == 1)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 4), (4, 2), (3, 5), (8, 8)])
def test_servers_apart(workers: int, servers: int) -> None:
    found = on_equal_hosts(group(workers, servers, True), [SIZE / servers] * servers)
    assert isclose(found.seconds, apart(workers, servers, SIZE, SPEED))


def test_the_figures_of_a_hundred_megabit() -> None:
    assert round(all_reduce(4, SIZE, SPEED), 2) == 1.26
    assert round(apart(4, 4, SIZE, SPEED), 2) == 0.84
    assert [round(mixed(4, k, SIZE, SPEED), 3) for k in range(6)] == [1.26, 1.12, 1.008, 0.916, 0.84, 0.84]


def shards_in(workers: int, further: int, beside: float, on_further: float) -> list[float]:
    return [beside * SIZE] * workers + [on_further * SIZE] * further


@given(st.integers(1, 9), st.integers(0, 12))
def test_the_best_shares_are_the_model_and_reach_the_closed_form(workers: int, further: int) -> None:
    shares = best_shares(workers, further)
    shards = shards_in(workers, further, *shares)
    assert min(shares) >= 0 and isclose(sum(shards), SIZE)
    found = on_equal_hosts(group(workers, workers + further, False), shards)
    assert isclose(found.seconds, mixed(workers, further, SIZE, SPEED), abs_tol=1e-9)
    if workers > max(1, further):
        n, k = workers, further
        formula = Fraction(2 * n * (n - 1), n * n + k * n - 2 * k)
        assert isclose(found.seconds, float(formula) * SIZE / SPEED)


@given(st.integers(1, 9), st.integers(1, 12))
def test_a_mixed_plan_reaches_the_least_time(workers: int, further: int) -> None:
    changed = {"nservers_per_group": workers + further, "server_placement": "mixed"}
    cluster = Cluster(nworkers_per_group=workers, **changed)  # type: ignore[arg-type]
    model = [Parameter("all", (int(SIZE) // 4,), "float32")]
    plan = plan_for(Topology.of(cluster), cluster, model, [])
    found = on_equal_hosts(cluster, shards_of(plan))
    assert isclose(found.seconds, mixed(workers, further, SIZE, SPEED), rel_tol=1e-3)


@given(st.data(), st.integers(1, 5), st.integers(0, 6))
def test_no_other_shares_are_better(data: st.DataObject, workers: int, further: int) -> None:
    """Each server has a share of its own, and those beside workers need not be alike."""
    servers = workers + further
    counts = data.draw(st.lists(st.integers(0, 12), min_size=servers, max_size=servers).filter(any))
    shards = [count / sum(counts) * SIZE for count in counts]
    found = on_equal_hosts(group(workers, servers, False), shards)
    assert found.seconds >= mixed(workers, further, SIZE, SPEED) * (1 - 1e-9)


@pytest.mark.parametrize(("workers", "further"), [(2, 1), (3, 1), (4, 1), (4, 2), (4, 3), (4, 4), (5, 8)])
def test_no_division_on_a_grid_is_better(workers: int, further: int) -> None:
    times = []
    for percent in range(101):
        beside, on_further = percent / 100 / workers, (100 - percent) / 100 / further
        shards = shards_in(workers, further, beside, on_further)
        times.append(on_equal_hosts(group(workers, workers + further, False), shards).seconds)
    least = mixed(workers, further, SIZE, SPEED)
    assert least <= min(times) * (1 + 1e-9)
    assert min(times) <= least * 1.05  # and the grid comes near it


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 12), st.randoms())
def test_no_order_of_values_overlaps_more(
    computing: float, exchanging: float, layers: int, random: Random
) -> None:
    orders = [list(range(layers)), random.sample(range(layers), layers)]
    least = overlapped(computing, exchanging, layers)
    assert all(least <= overlap(computing, exchanging, order) * (1 + 1e-9) for order in orders)


def test_computing_twice_as_long_as_the_exchange_hides_most_of_it() -> None:
    best = [1, 0, *range(2, 10)]  # the first layer's gradients are the last to arrive
    assert isclose(overlapped(2, 1, 10), 2.4) and isclose(overlap(2, 1, best), 2.4)


def overlap(computing: float, exchanging: float, order: Sequence[int]) -> float:
    """Seconds of one step, layer by layer; values leave in the order of layers given, when they may."""
    layers = len(order)
    part, backward, forward = exchanging / layers, computing * 2 / 3 / layers, computing / 3 / layers
    pushed, now, wire = {}, 0.0, 0.0
    for layer in reversed(range(layers)):
        now += backward
        wire = pushed[layer] = max(wire, now) + part
    arrived, wire = {}, now
    for layer in order:
        wire = arrived[layer] = max(wire, pushed[layer]) + part
    for layer in range(layers):
        now = max(now, arrived[layer]) + forward
    return now


def test_the_slowest_way_decides() -> None:
    topology = Topology.of(group(2, 1, True))
    places = one_host_each(topology)
    links = dict.fromkeys(places.values(), Link(SPEED, SPEED))
    loads = step_loads(topology, places, [SIZE])
    assert limit(loads, links).way == Way("host 2", "in")  # two pushes come in where one server is
    slow = {**links, "host 1": Link(SPEED, SPEED / 10)}
    assert limit(loads, slow) == Limit(SIZE / SPEED * 10, Way("host 1", "out"))


def test_members_of_one_host_need_no_network() -> None:
    topology = Topology.of(group(2, 2, True))
    together = one_host_each(topology, processes_per_host=4)
    assert limit(step_loads(topology, together, [SIZE, SIZE]), {}) == Limit(0.0, None)
    pairs = one_host_each(topology, processes_per_host=2)
    assert set(pairs.values()) == {"host 0", "host 1"}
    loads = step_loads(topology, pairs, [SIZE / 2] * 2)
    assert loads[Way("host 0", "out")] == loads[Way("host 1", "in")] == 2 * SIZE


def test_fewer_bytes_on_the_wire_take_less_time() -> None:
    cluster, shards = group(4, 4, True), [SIZE / 4] * 4
    exact = on_equal_hosts(cluster, shards).seconds
    for dtype, factor in WIRE.items():
        found = on_equal_hosts(cluster, shards, push=WIRE[dtype], pull=WIRE[dtype])
        assert isclose(found.seconds, exact * factor)
    assert isclose(on_equal_hosts(cluster, shards, push=0.25).seconds, exact)  # the pulls decide
    assert top_k(0.01) == 0.02 and top_k(0.01, itemsize=2) == 0.03


def downpour(groups: int) -> Topology:
    return Topology.of(Cluster(nworker_groups=groups, nservers_per_group=2, server_worker_separate=True))


def test_groups_share_what_they_share() -> None:
    """Three workers on two servers, whose hosts are full when each group does 2/3 of a step a second."""
    topology = downpour(3)
    places = one_host_each(topology)
    links = dict.fromkeys(places.values(), Link(SIZE, SIZE))
    demands = [step_loads(topology, places, [SIZE / 2] * 2, group) for group in range(3)]
    assert [limit(loads, links).seconds for loads in demands] == [1.0] * 3
    assert rates(demands, links) == pytest.approx([2 / 3] * 3)
    slow = {**links, places[Member("worker", 1, 0)]: Link(SIZE / 4, SIZE)}
    assert rates(demands, slow) == pytest.approx([0.875, 0.25, 0.875])


def test_a_group_that_needs_no_link_has_no_limit() -> None:
    way = Way("a", "in")
    assert rates([{}, {way: 5.0}], {"a": Link(10, 10)}) == [inf, 2.0]


@given(
    st.lists(
        st.dictionaries(st.sampled_from([Way(h, d) for h in "abc" for d in ("in", "out")]), st.floats(1, 9)),
        min_size=1,
        max_size=4,
    )
)
def test_rates_fill_the_links_and_not_more(demands: list[dict[Way, float]]) -> None:
    links = {"a": Link(10, 20), "b": Link(5, 5), "c": Link(100, 3)}
    found = rates(demands, links)

    def used(way: Way) -> float:
        return sum(rate * loads.get(way, 0) for rate, loads in zip(found, demands, strict=True) if loads)

    speeds = {
        way: links[way.host].inward if way.direction == "in" else links[way.host].outward
        for loads in demands
        for way in loads
    }
    assert all(used(way) <= speed * (1 + 1e-9) for way, speed in speeds.items())
    for rate, loads in zip(found, demands, strict=True):
        full = [way for way in loads if used(way) >= speeds[way] * (1 - 1e-9)]
        assert full or rate == inf
        if loads:  # on one of its full ways nobody is faster
            assert any(
                rate >= other * (1 - 1e-9)
                for way in full
                for other in [max(r for r, o in zip(found, demands, strict=True) if way in o)]
            )


def test_an_exchange_between_server_groups() -> None:
    """A star around each chunk's master: of three groups each masters a third and follows in the rest."""
    topology = Topology.of(load("hogwild").cluster)
    plan = make_plan([Parameter("weight", (3 * 64 * 100,), "float32")], [], 1, 3)
    (size,) = shards_of(plan)
    assert size == 3 * 64 * 100 * 4
    loads = exchange_loads(topology, one_host_each(topology), plan)
    assert set(loads.values()) == {size * 4 / 3}  # 2/3 as a follower, 2 × 1/3 as a master
    alone = Topology.of(Cluster(nworker_groups=3, nserver_groups=0))
    assert exchange_loads(alone, one_host_each(alone), plan) == {}


def test_a_plan_gives_the_bytes_of_its_servers() -> None:
    plan = make_plan([Parameter("weight", (1000, 64), "float32")], [], 3)
    assert sum(shards_of(plan)) == 256000
    assert max(shards_of(plan)) - min(shards_of(plan)) <= 256
    assert shards_of(make_plan([Parameter("w", (4,), "float32")], [], 2)) in ([16.0, 0.0], [0.0, 16.0])


def test_mistakes_have_a_remedy() -> None:
    with pytest.raises(UsageError, match="0 bytes per second in"):
        Link(0, 1)
    with pytest.raises(UsageError, match="no link is known for b"):
        limit({Way("b", "in"): 1}, {"a": Link(1, 1)})
    with pytest.raises(UsageError, match="0 workers"):
        best_shares(0, 1)
