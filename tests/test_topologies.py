"""Every shape of a cluster: who talks to whom, who holds what, and that nothing goes past a server."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from toys import STEPS, Line, Net, config, learn, movement, walk

from shoal import Run
from shoal.config import Config, load
from shoal.config.presets import PRESETS
from shoal.testing import Report, run_cluster
from shoal.topology import Topology
from shoal.transport.faulty import Fate, Faulty
from shoal.wire import Header, Kind

BLOCKS: dict[str, Config] = {
    **{name: load(name).model_copy(update={"timeouts": config().timeouts}) for name in PRESETS},
    "one of each": config(),
    "one of each, separate": config(server_worker_separate=True),
    "2x2 on 2x2": config(nworker_groups=2, nworkers_per_group=2, nserver_groups=2, nservers_per_group=2),
    "2x2 on 2x2, two per process": config(
        nworker_groups=2,
        nworkers_per_group=2,
        nserver_groups=2,
        nservers_per_group=2,
        nworkers_per_procs=2,
        nservers_per_procs=2,
    ),
    "4x2 on 2x3, separate": config(
        nworker_groups=4,
        nworkers_per_group=2,
        nserver_groups=2,
        nservers_per_group=3,
        server_worker_separate=True,
    ),
    "three workers beside two servers": config(nworkers_per_group=3, nservers_per_group=2),
    "two workers beside three servers": config(nworkers_per_group=2, nservers_per_group=3),
    "independent": config(nworker_groups=2, nworkers_per_group=2, nserver_groups=0),
    "eight workers, four servers": config(nworker_groups=2, nworkers_per_group=4, nservers_per_group=4),
    "eight in one group": config(nworkers_per_group=8, nservers_per_group=4, server_worker_separate=True),
    **{
        f"{groups} groups, max_delay {delay}": config(nworker_groups=groups, max_delay=delay)
        for groups in (2, 3)
        for delay in (0, 2, None)
    },
    "hogwild, seldom": config(nworker_groups=3, nserver_groups=3, sync_freq=10),
}


@pytest.fixture(params=BLOCKS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def report(name: str) -> Report:
    return run_cluster(walk, BLOCKS[name])


def test_all_groups_end_where_their_updates_lead(name: str, report: Report) -> None:
    topology = Topology.of(BLOCKS[name].cluster)
    groups = range(topology.worker_groups)
    for worker in topology.workers:
        alone = topology.server_groups > 1 and not topology.synchronised
        steps = {worker.group: STEPS} if alone else dict.fromkeys(groups, STEPS)
        assert torch.equal(report.results[worker.name][-1], movement(steps, topology.workers_per_group))


def test_payload_flows_between_those_who_train_together_and_nobody_else(name: str, report: Report) -> None:
    topology = Topology.of(BLOCKS[name].cluster)
    wanted = {(w.name, s.name) for w in topology.workers for s in topology.servers_of(w)}
    wanted |= {(s.name, p.name) for s in topology.servers for p in topology.peers_of(s)}
    for sender, link in report.links.items():
        for receiver in report.links:
            expected = (sender, receiver) in wanted or (receiver, sender) in wanted
            starts = sender.startswith("server 0.") and receiver.startswith("server") and not expected
            if starts and not topology.synchronised and sender[-1] == receiver[-1] and sender != receiver:
                shard = report.servers[sender]._shard  # the common start, once
                assert link.traffic[receiver] == sum(chunk.nbytes for chunk in shard.chunks)
            else:
                assert (link.traffic[receiver] > 0) == expected, f"{sender} to {receiver}"


def test_a_worker_sends_each_gradient_once(name: str, report: Report) -> None:
    """Payload to the servers of a worker is its whole gradient per step, and 0.0's start once."""
    topology = Topology.of(BLOCKS[name].cluster)
    model = sum(p.numel() * 8 for p in Line().parameters())
    for worker in topology.workers:
        copies = STEPS + (worker.name == "worker 0.0")
        assert report.links[worker.name].traffic.total() == model * copies


def test_every_ledger_balances(report: Report) -> None:
    for server in report.servers.values():
        assert server.rounds is not None
        assert server.rounds.admission.ledger.balance == 0
    servers = [report.events[name].last("finished") for name in report.servers]
    workers = [report.events[name].last("finished") for name in report.results]
    pushed = sum(final["pushed"] for final in workers)
    assert pushed == sum(final["pushed"] for final in servers)
    assert pushed == sum(final["applied"] for final in servers) > 0
    assert not any(final["dropped"] or final["duplicate"] for final in servers)
    assert not any(final["resent"] for final in workers)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_under_allreduce_each_member_holds_its_part_of_the_state(members: int) -> None:
    def function(run: Run) -> int:
        model = Line(8000)
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters()))
        for _ in run.epochs(2):
            optimizer.zero_grad()
            model().square().sum().backward()
            optimizer.step()
        return len(optimizer.state)

    block = config(nworkers_per_group=members, nservers_per_group=members)
    assert Topology.of(block.cluster).framework == "allreduce"
    report = run_cluster(function, block)
    assert set(report.results.values()) == {0}, "a worker's own optimizer keeps no state"
    held = [report.events[name].last("finished") for name in report.servers]
    elements = sum(p.numel() for p in Line(8000).parameters())
    assert sum(final["parameters"] for final in held) == elements
    for final in held:
        assert final["state_bytes"] == pytest.approx(2 * 8 * elements / members, rel=0.05)


@pytest.mark.parametrize("name", ["sandblaster", "downpour", "hogwild"])
def test_a_blocked_server_stops_training(name: str) -> None:
    links: dict[str, Faulty] = {}
    blocked, second, moved = threading.Event(), threading.Event(), []

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.VALUES and header.step == 2 and header.sender.endswith(".0"):
            blocked.set()
            return "hold"
        return "deliver"

    def watch() -> None:
        assert blocked.wait(20)
        moved.append(second.wait(0.5))
        for link in links.values():
            link.open()

    def function(run: Run) -> Any:
        return walk(run, after=lambda step: second.set() if step == 2 else None)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    report = run_cluster(function, BLOCKS[name], judge=judge, links=links.update)
    watcher.join(20)
    assert moved == [False]
    topology = Topology.of(BLOCKS[name].cluster)
    goal = movement(dict.fromkeys(range(topology.worker_groups), STEPS), topology.workers_per_group)
    assert torch.equal(report.results["worker 0.0"][-1], goal)


def test_the_result_needs_every_worker() -> None:
    block = config(nworkers_per_group=3, nservers_per_group=2)

    def without(idle: int | None) -> Any:
        def function(run: Run) -> bytes:
            if run.rank == idle:
                run._training.batch.weight = 0.0
            return learn(run)

        return run_cluster(function, block).results["worker 0.0"]

    results = [without(idle) for idle in (None, 0, 1, 2)]
    assert len(set(results)) == 4


def test_a_synchronous_cluster_ends_with_the_same_bits_everywhere() -> None:
    shapes = {"nworkers_per_group": 3, "nservers_per_group": 3}
    results = {
        *run_cluster(learn, config(**shapes)).results.values(),
        *run_cluster(learn, config(**shapes, server_worker_separate=True)).results.values(),
    }
    assert len(results) == 1
    assert len(next(iter(results))) > sum(p.numel() * 8 for p in Net().parameters())
