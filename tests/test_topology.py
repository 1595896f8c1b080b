"""Who talks to whom and who lives where, for the four blocks, hybrids, and any block at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import PRESETS, Cluster, load
from shoal.config.schema import impossibilities
from shoal.errors import UsageError
from shoal.topology import Member, Topology, describe


def shape(
    workers: tuple[int, int] = (1, 1),
    servers: tuple[int, int] = (1, 1),
    per_process: tuple[int, int] = (1, 1),
    separate: bool = False,
) -> Topology:
    """The topology of a valid block: groups and members of each role, members per process."""
    cluster = Cluster(
        nworker_groups=workers[0],
        nworkers_per_group=workers[1],
        nserver_groups=servers[0],
        nservers_per_group=servers[1],
        nworkers_per_procs=per_process[0],
        nservers_per_procs=per_process[1],
        server_worker_separate=separate,
    )
    assert not list(impossibilities(cluster))
    return Topology.of(cluster)


def names(members: tuple[Member, ...]) -> str:
    return " ".join(member.short for member in members)


def homes(topology: Topology) -> dict[str, str | None]:
    hosts = {server.short: topology.host_of(server) for server in topology.servers}
    return {server: host.short if host else None for server, host in hosts.items()}


@pytest.mark.parametrize(
    ("preset", "framework", "processes"),
    [
        ("sandblaster", "sandblaster", 5),
        ("allreduce", "allreduce", 3),
        ("downpour", "downpour", 6),
        ("hogwild", "hogwild", 3),
    ],
)
def test_documented_blocks(preset: str, framework: str, processes: int) -> None:
    for source in (preset, str(Path(__file__).with_name("data") / f"{preset}.conf")):
        topology = Topology.of(load(source).cluster)
        assert (topology.framework, topology.processes, topology.os_processes) == (
            framework,
            processes,
            processes,
        )


@pytest.mark.parametrize(
    ("topology", "framework", "processes", "os_processes"),
    [
        pytest.param(shape(), "single", 1, 1, id="one of each"),
        pytest.param(shape(separate=True), "single", 2, 2, id="one of each, separate"),
        pytest.param(shape((2, 2), (2, 2)), "hybrid", 4, 4, id="2x2 on 2x2"),
        pytest.param(shape((2, 2), (2, 2), separate=True), "hybrid", 8, 8, id="2x2 on 2x2, separate"),
        pytest.param(shape((1, 8), (1, 4), separate=True), "sandblaster", 12, 12, id="8 workers, 4 servers"),
        pytest.param(shape((1, 8), (1, 4)), "hybrid", 8, 8, id="8 workers, 4 beside them"),
        pytest.param(shape((1, 2), (1, 4)), "hybrid", 4, 4, id="more servers than workers"),
        pytest.param(shape((1, 3), (1, 3), (1, 3)), "hybrid", 3, 3, id="3 servers beside one worker"),
        pytest.param(shape((1, 4), (1, 4), (2, 2)), "allreduce", 2, 4, id="1:1, two of each per process"),
        pytest.param(
            shape((1, 4), (1, 4), (2, 2), True), "sandblaster", 4, 8, id="two per process, separate"
        ),
        pytest.param(shape((2, 2), (1, 2)), "downpour", 4, 4, id="co-located downpour"),
        pytest.param(shape((2, 1), (1, 1), (2, 1)), "downpour", 1, 2, id="both groups in one process"),
        pytest.param(shape((4, 1), (2, 1)), "hybrid", 4, 4, id="two groups per server group"),
        pytest.param(
            shape((3, 1), (3, 2), separate=True), "hogwild", 9, 9, id="groups of one, servers apart"
        ),
        pytest.param(shape((1, 1), (0, 1)), "single", 1, 1, id="0 server groups, one worker"),
        pytest.param(shape((1, 3), (0, 1)), "allreduce", 3, 3, id="0 server groups, one worker group"),
        pytest.param(shape((3, 1), (0, 1)), "independent", 3, 3, id="0 server groups, groups of one"),
        pytest.param(
            shape((2, 2), (0, 5), (2, 3)), "independent", 2, 4, id="0 server groups, two per process"
        ),
    ],
)
def test_shapes(topology: Topology, framework: str, processes: int, os_processes: int) -> None:
    assert (topology.framework, topology.processes, topology.os_processes) == (
        framework,
        processes,
        os_processes,
    )


def test_group_to_group_in_blocks() -> None:
    topology = shape((6, 2), (3, 2))
    assert [topology.server_group_of(group) for group in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [topology.worker_groups_of(group) for group in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert names(topology.servers_of(Member("worker", 3, 1))) == "s1.0 s1.1"
    assert names(topology.workers_of(Member("server", 1, 0))) == "w2.0 w2.1 w3.0 w3.1"
    assert names(topology.peers_of(Member("server", 1, 1))) == "s0.1 s2.1"


def test_placement_follows_rank_across_groups() -> None:
    families = shape((2, 3), (1, 2), (2, 1)).families
    assert [names(family.workers) for family in families] == ["w0.0 w0.1", "w0.2 w1.0", "w1.1 w1.2"]
    assert [names(family.servers) for family in families] == ["s0.0", "s0.1", ""]
    apart = shape((2, 3), (2, 2), (2, 2), separate=True).families
    assert [names(family.servers) for family in apart] == ["", "", "", "s0.0 s0.1", "s1.0 s1.1"]
    assert [family.number for family in apart] == [0, 1, 2, 3, 4]


def test_hosts() -> None:
    assert homes(shape((1, 4), (1, 4), (2, 4))) == {
        "s0.0": "w0.0",
        "s0.1": "w0.1",
        "s0.2": "w0.0",
        "s0.3": "w0.1",
    }
    assert homes(shape((1, 2), (1, 3))) == {"s0.0": "w0.0", "s0.1": "w0.1", "s0.2": None}
    assert homes(shape((1, 2), (1, 2), separate=True)) == {"s0.0": None, "s0.1": None}


@pytest.mark.parametrize(("workers", "further"), [(1, 1), (2, 1), (4, 2), (3, 5)])
def test_mixed_servers_are_beside_their_workers_and_then_apart(workers: int, further: int) -> None:
    cluster = Cluster(
        nworkers_per_group=workers, nservers_per_group=workers + further, server_placement="mixed"
    )
    assert not list(impossibilities(cluster))
    topology = Topology.of(cluster)
    beside = {f"s0.{index}": f"w0.{index}" for index in range(workers)}
    assert homes(topology) == beside | {f"s0.{index + workers}": None for index in range(further)}
    assert (topology.framework, topology.processes, topology.os_processes) == (
        "hybrid",
        workers + further,
        workers + further,
    )


def test_a_server_left_over_is_not_allreduce() -> None:
    assert shape((1, 3), (1, 4)).framework == "hybrid"


def test_no_server_groups_means_own_servers_never_synchronised() -> None:
    assert homes(shape((2, 2), (0, 3), (4, 3))) == homes(shape((2, 2), (0, 1)))
    topology = shape((2, 2), (0, 1), (2, 1))
    assert homes(topology) == {"s0.0": "w0.0", "s0.1": "w0.1", "s1.0": "w1.0", "s1.1": "w1.1"}
    assert names(topology.servers_of(Member("worker", 1, 0))) == "s1.0 s1.1"
    assert not topology.synchronised
    assert not any(topology.peers_of(server) for server in topology.servers)


def test_names() -> None:
    member = Member("worker", 1, 0)
    assert (str(member), member.name, member.short) == ("worker 1.0", "worker 1.0", "w1.0")
    assert Member.parse("server 0.12") == Member("server", 0, 12)
    for wrong in (
        "worker",
        "worker 1",
        "w1.0",
        "Worker 1.0",
        "worker 1.0 ",
        "worker -1.0",
        "worker 01.0",
        "",
    ):
        with pytest.raises(UsageError, match="not the name of a member"):
            Member.parse(wrong)


def test_describe() -> None:
    assert describe(shape((2, 1), (2, 2))).splitlines() == [
        "framework     hogwild",
        "processes     4",
        "os processes  4",
        "",
        "worker 0.0  process 0  talks to server 0.0, server 0.1",
        "worker 1.0  process 1  talks to server 1.0, server 1.1",
        "",
        "server 0.0  process 0  a thread of worker 0.0",
        "server 0.1  process 1  a thread of worker 1.0",
        "server 1.0  process 2  a process of its own",
        "server 1.1  process 3  a process of its own",
        "",
        "server group 0  serves worker group 0  synchronises with server group 1",
        "server group 1  serves worker group 1  synchronises with server group 0",
    ]
    for preset in PRESETS:
        topology = Topology.of(load(preset).cluster)
        told = describe(topology)
        assert all(f"\n{member} " in told for member in (*topology.workers, *topology.servers))


counts = st.integers(1, 4)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any valid block of moderate size."""
    server_groups = draw(st.integers(0, 3))
    worker_groups = draw(counts) * max(server_groups, 1)
    workers, servers = draw(counts), draw(counts)
    return shape(
        (worker_groups, workers),
        (server_groups, servers),
        (draw(divisors(worker_groups * workers)), draw(divisors(server_groups * servers or 1))),
        bool(server_groups) and draw(st.booleans()),
    )


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@given(topologies())
def test_talking_agrees_in_both_directions(topology: Topology) -> None:
    for worker in topology.workers:
        servers = topology.servers_of(worker)
        assert len(servers) == topology.servers_per_group
        assert {server.group for server in servers} == {topology.server_group_of(worker.group)}
    pairs = {(worker, server) for worker in topology.workers for server in topology.servers_of(worker)}
    assert pairs == {
        (worker, server) for server in topology.servers for worker in topology.workers_of(server)
    }
    assert {server for _, server in pairs} == set(topology.servers)
    for group in range(topology.server_groups):
        assert all(topology.server_group_of(served) == group for served in topology.worker_groups_of(group))


@given(topologies())
def test_peers_are_mutual(topology: Topology) -> None:
    expected = topology.server_groups - 1 if topology.synchronised else 0
    for server in topology.servers:
        peers = topology.peers_of(server)
        assert len(peers) == expected and server not in peers
        assert all(server in topology.peers_of(peer) and peer.index == server.index for peer in peers)


@given(topologies())
def test_every_member_is_in_exactly_one_family(topology: Topology) -> None:
    families = topology.families
    members = [member for family in families for member in (*family.workers, *family.servers)]
    assert sorted(members) == sorted((*topology.workers, *topology.servers))
    assert [family.number for family in families] == list(range(topology.processes))
    assert all(family.workers or family.servers for family in families)
    worker_families = len(topology.workers) // topology.workers_per_process
    server_families = len(topology.servers) // topology.servers_per_process
    assert topology.processes == (
        worker_families + server_families if topology.separate else max(worker_families, server_families)
    )
    for family in families:
        for server in family.servers:
            assert topology.host_of(server) in (family.workers or (None,))
    apart = [server for server in topology.servers if topology.host_of(server) is None]
    assert topology.os_processes == len(topology.workers) + len(apart)


@given(topologies())
def test_rank_is_a_bijection(topology: Topology) -> None:
    assert [topology.rank(worker) for worker in topology.workers] == list(range(len(topology.workers)))


@given(topologies())
def test_names_come_back(topology: Topology) -> None:
    for member in (*topology.workers, *topology.servers):
        assert Member.parse(member.name) == member


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"nworker_groups": 3, "nserver_groups": 3}, True),
        ({"nworker_groups": 3, "nserver_groups": 0}, True),
        ({"nworker_groups": 3, "nserver_groups": 3, "server_worker_separate": True}, False),
        ({"nworkers_per_group": 2, "nservers_per_group": 2}, False),
        ({"nworker_groups": 2}, False),
    ],
)
def test_who_pushes_to_nobody_elsewhere(block: dict[str, Any], expected: bool) -> None:
    assert Topology.of(Cluster(**block)).at_home is expected
