"""How a member reaches the others of its run: wires, and a store to meet at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import FileStore, HashStore, Store

from shoal.beside import Beside
from shoal.config import Config
from shoal.errors import ShoalError, WaitTimeout
from shoal.schedule import UNSCHEDULED, Schedules
from shoal.topology import Member, Topology
from shoal.transport import Endpoint
from shoal.transport.inprocess import Hub, InProcess
from shoal.transport.memory import Memory
from shoal.transport.plain import PlainSockets


@dataclass(frozen=True)
class Membership:
    """What a member knows when it starts.

    Attributes:
        run_id: the run's secret, which every message carries.
        run_dir: where the run writes; None = nowhere.
        private: directory of sockets and of the store, readable by this user alone.
        schedules: where the order of servers' messages is written to or read from.
        local_rank: this process's number on its machine; None = the worker's number in the run.
        beside: what a worker and its server have in common, where they have only each other in one process.
        line_rate: bytes per second between machines; 0 = it is not known.
    """

    config: Config
    topology: Topology
    member: Member
    run_id: str
    run_dir: Path | None
    private: Path
    incarnation: int = 1
    schedules: Schedules = UNSCHEDULED
    local_rank: int | None = None
    beside: Beside | None = None
    line_rate: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where a worker's model belongs; see Run.device."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        rank = self.topology.rank(self.member) if self.local_rank is None else self.local_rank
        return torch.device("cuda", rank % torch.cuda.device_count())


class Site(Protocol):
    """What differs between members that are threads, processes of one machine, and processes of several.

    Attributes:
        gloo: whether workers may use torch's own groups, whose wires nobody locks, without being asked.
    """

    gloo: bool

    def endpoint(self) -> Endpoint:
        """This member's end of the wires."""
        ...

    def store(self) -> Store:
        """Where members leave small values for each other."""
        ...

    def check(self, waited: float = 0.0) -> None:
        """Called while waiting; raises when another member has failed.

        Args:
            waited: seconds since an answer has come.
        """
        ...


class OneMachine:
    """Members that are processes of one machine: sockets and a file in the private directory."""

    gloo = True

    def __init__(self, membership: Membership) -> None:
        self._m = membership

    def endpoint(self) -> Endpoint:
        """See Site.endpoint."""
        m = self._m
        listen = self._listen_at(m.member) if m.member.role == "server" else None
        return plain_sockets(m, listen, Memory(lambda peer: m.config.cluster.share_memory), self)

    def _listen_at(self, server: Member) -> str:
        cluster = self._m.config.cluster
        if cluster.transport != "tcp":
            return f"ipc://{self._m.private / server.short}"
        port = cluster.start_port and cluster.start_port + self._m.topology.servers.index(server)
        return f"tcp://127.0.0.1:{port}"

    def store(self) -> Store:
        """See Site.store."""
        return FileStore(str(self._m.private / "store"), -1)

    def check(self, waited: float = 0.0) -> None:
        """See Site.check; a failed process is the launcher's to notice."""


class OneProcess:
    """Members that are threads of one process: a hub and a store in memory."""

    gloo = False

    def __init__(self, hub: Hub, name: str, store: Store | None = None) -> None:
        self._hub, self._name, self._store = hub, name, store
        self._failures: list[BaseException] = []

    def endpoint(self) -> Endpoint:
        """See Site.endpoint."""
        return InProcess(self._hub, self._name)

    def store(self) -> Store:
        """See Site.store."""
        self._store = self._store or HashStore()
        return self._store

    def guard(self, serve: Callable[[], None]) -> Callable[[], None]:
        """A thread's target that keeps a failure for `check()`."""

        def run() -> None:
            try:
                serve()
            except BaseException as error:
                self._failures.append(error)

        return run

    def check(self, waited: float = 0.0) -> None:
        """See Site.check."""
        for error in self._failures:
            raise error


def plain_sockets(membership: Membership, listen: str | None, memory: Memory, site: Site) -> PlainSockets:
    """A member's sockets, with the servers dialled that it speaks to first.

    Args:
        listen: a server's address; the port that it is given is left in the store.

    Raises:
        LaunchError: it cannot listen there.
        WaitTimeout, PeerFailed: a server does not listen, or does not answer.
    """
    m = membership
    sockets = PlainSockets(m.member.name, m.run_id, listen, m.config.timeouts.flush, memory, m.line_rate)
    for server, address in introduced(m, site, None if listen is None else sockets.bound):
        sockets.dial(server, address, m.config.timeouts.start)
    return sockets


def introduced(membership: Membership, site: Site, address: str | None) -> Iterator[tuple[str, str]]:
    """Leave in the store where a server listens; then the servers that a member dials, and where they listen.

    Raises:
        WaitTimeout: a server does not listen in time.
    """
    m, store = membership, site.store()
    if address is not None:
        store.set(f"address/{m.member}", address)
    for server in m.topology.dialled_by(m.member):
        found = wait_for(store, f"address/{server}", m, "start", f"{server} to listen", site.check)
        yield server.name, found.decode()


def wait_for(
    store: Store,
    key: str,
    membership: Membership,
    timeout: str,
    what: str,
    check: Callable[[], None] | None = None,
) -> bytes:
    """A value that another member leaves in the store.

    Args:
        timeout: the name of one of the configuration's timeouts.
        what: for whom or what this waits, in words.
        check: called now and then; raises when waiting makes no sense any more.

    Raises:
        WaitTimeout: it has not come in time.
    """
    limit: float = getattr(membership.config.timeouts, timeout)
    waited = 0.0
    while True:
        piece = min(1.0, limit - waited)
        try:
            store.wait([key], timedelta(seconds=piece))
            return bytes(store.get(key))
        except ShoalError:
            raise
        except RuntimeError:  # torch raises its own kinds of it for a timeout
            waited += piece
        if check is not None:
            check()
        if waited >= limit:
            raise WaitTimeout(
                f"waited {limit:g} s (timeouts.{timeout}) for {what}",
                member=membership.member.name,
                remedy=f"see that member's log; raise timeouts.{timeout} if it is only slow",
            )
