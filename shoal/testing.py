"""A whole cluster in one process, with members as threads, for tests of yours and ours.

Messages, rules and arithmetic are those of real runs; only the wires are queues. Workers share torch's global
random generator, so seed inside the function that is run, or use models without dropout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, Store

from shoal import session
from shoal.beside import Beside
from shoal.config import Cluster, Config, Timeouts, load
from shoal.errors import ShoalError
from shoal.events import Events
from shoal.schedule import UNSCHEDULED, Schedules
from shoal.server import Server
from shoal.session import Run
from shoal.site import Membership, OneProcess
from shoal.topology import Topology
from shoal.transport import Endpoint, Post
from shoal.transport.faulty import Faulty, Judge
from shoal.transport.inprocess import Hub
from shoal.wire import Kind

QUICK = Timeouts(start=20, values=20, flush=20, ask=0.1, evaluate=20, finish=20)

CHUNK = 1 << 18  # bytes; so that models as small as those of tests have several


class Recorded(Events):
    """Events kept in memory."""

    def __init__(self, member: str) -> None:
        super().__init__(None, member)
        self.written: list[dict[str, Any]] = []

    def write(self, event: str, **fields: object) -> None:
        """See Events.write."""
        self.written.append({"event": event, **fields})

    def last(self, event: str) -> dict[str, Any]:
        """The latest event of a kind; {} if there is none."""
        return next((e for e in reversed(self.written) if e["event"] == event), {})


class Script:
    """Lets threads pass named points only in a given order.

    Args:
        order: the names, as often as they are passed.
    """

    def __init__(self, order: Sequence[str], timeout: float = 20.0) -> None:
        self._order, self._at, self._timeout = list(order), 0, timeout
        self._moved = threading.Condition()

    def turn(self, name: str) -> None:
        """Wait until `name` is next, then pass."""
        with self._moved:
            ready = self._moved.wait_for(
                lambda: self._order[self._at : self._at + 1] == [name], self._timeout
            )
            if not ready:
                raise ShoalError(f"waited {self._timeout:g} s for the turn of {name!r} at {self._at}")
            self._at += 1
            self._moved.notify_all()


@dataclass
class Report:
    """What a cluster did.

    Attributes:
        results: worker name → what its function returned.
        events: member name → what it reported.
        links: member name → its end of the wires, with the fates of its messages.
        servers: server name → the server, for a look inside.
    """

    results: dict[str, Any] = field(default_factory=dict)
    events: dict[str, Recorded] = field(default_factory=dict)
    links: dict[str, Faulty] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def total(self, field_name: str) -> int:
        """A number of the final reports, summed over those members that report it."""
        finals = (recorded.last("finished") for recorded in self.events.values())
        return sum(final.get(field_name, 0) for final in finals)


def config_of(cluster: str | Cluster | Config | Mapping[str, Any]) -> Config:
    """A configuration with short timeouts, and small chunks, from a preset, a block, or a block's fields."""
    if isinstance(cluster, Config):
        return cluster
    if isinstance(cluster, str):
        cluster = load(cluster).cluster
    block = cluster if isinstance(cluster, Cluster) else Cluster(**cluster)
    if not block.chunk_bytes:
        block = block.model_copy(update={"chunk_bytes": CHUNK})
    return Config(cluster=block, timeouts=QUICK)


def run_cluster(
    function: Callable[[Run], Any],
    cluster: str | Cluster | Config | Mapping[str, Any],
    *,
    judge: Judge | None = None,
    links: Callable[[dict[str, Faulty]], None] | None = None,
    timeout: float = 60.0,
    schedules: Schedules = UNSCHEDULED,
    messages: bool = True,
) -> Report:
    """Run `function` in every worker of a cluster of threads.

    Args:
        function: the training, given its run; `shoal.init()` inside it gives the same one.
        judge: decides the fate of every message; all are delivered without one.
        links: called with all members' links before anything starts.
        schedules: folders that the order of servers' messages is recorded in or replayed from.
        messages: False: workers with a server of their own step on the model itself, as in a real run.

    Raises:
        the first error of any member.
    """
    config = config_of(cluster)
    topology = Topology.of(config.cluster)
    hub, store, report = Hub(config.cluster.share_memory), HashStore(), Report()
    failed = threading.Event()
    threads = []
    _link(hub, topology, judge or (lambda header, peer: "deliver"), report)
    if links is not None:
        links(report.links)

    def guarded(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except SystemExit:
            pass
        except BaseException as error:
            report.errors.append(error)
            failed.set()
            for worker in topology.workers:  # nobody waits for one that has failed
                Post(OneProcess(hub, name).endpoint(), "test").send(worker.name, Kind.STOP)

    common = {worker: Beside() for worker in topology.workers if topology.paired(worker) and not messages}
    for member in topology.servers:
        post = Post(report.links[member.name], "test")
        events, host = report.events[member.name], topology.host_of(member)
        beside = None if host is None else common.get(host)
        server = Server(member, topology, config, post, events, schedules, beside)
        report.servers[member.name] = server
        work = partial(_serve, server, post)
        threads.append(threading.Thread(target=guarded, args=(member.name, work), daemon=True))
    for member in topology.workers:
        site = _Site(report.links[member.name], store, failed)
        membership = Membership(config, topology, member, "test", None, Path(), beside=common.get(member))
        run = Run(membership, site, report.events[member.name])
        work = partial(_work, run, member.name, function, report)
        threads.append(threading.Thread(target=guarded, args=(member.name, work), daemon=True))
    for thread in threads:
        thread.start()
    _join(threads, failed, timeout)
    if report.errors:
        raise report.errors[0]
    return report


def _link(hub: Hub, topology: Topology, judge: Judge, report: Report) -> None:
    for member in (*topology.servers, *topology.workers):
        report.links[member.name] = Faulty(OneProcess(hub, member.name).endpoint(), judge)
        report.events[member.name] = Recorded(member.name)


def _serve(server: Server, post: Post) -> None:
    try:
        server.serve()
    finally:
        post.close()


def _work(run: Run, name: str, function: Callable[[Run], Any], report: Report) -> None:
    session.in_thread(run)
    report.results[name] = function(run)
    session.finish()


def _join(threads: Sequence[threading.Thread], failed: threading.Event, timeout: float) -> None:
    for thread in threads:
        while thread.is_alive() and not failed.is_set() and timeout > 0:
            thread.join(0.05)
            timeout -= 0.05
    if timeout <= 0 and not failed.is_set():
        raise ShoalError("the cluster did not finish in time", remedy="raise timeout, or look for a deadlock")


class _Site(OneProcess):
    def __init__(self, link: Endpoint, store: Store, failed: threading.Event) -> None:
        super().__init__(Hub(), link.name, store)
        self._link, self._stop = link, failed

    def endpoint(self) -> Endpoint:
        return self._link

    def check(self, waited: float = 0.0) -> None:
        if self._stop.is_set():
            raise SystemExit(3)
