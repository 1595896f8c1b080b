"""Who belongs to which group, who talks to whom, and who lives in whose process.

Everything here follows from the counts of a cluster block that has been checked; nothing is stored
beyond them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from shoal.config.schema import Cluster
from shoal.errors import ConfigError, Mistake, UsageError

Role = Literal["worker", "server"]


@dataclass(frozen=True, order=True)
class Member:
    """One worker or one server: ``worker 1.0`` is worker 0 of worker group 1."""

    role: Role
    group: int
    index: int

    @property
    def name(self) -> str:
        """The full name, such as ``worker 1.0``."""
        return f"{self.role} {self.group}.{self.index}"

    @property
    def short(self) -> str:
        """The name for files and addresses, such as ``w1.0``."""
        return f"{self.role[0]}{self.group}.{self.index}"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Member:
        """The member of this full name.

        Raises:
            UsageError: the text is no member's name.
        """
        parts = re.fullmatch(r"(worker|server) (0|[1-9][0-9]*)\.(0|[1-9][0-9]*)", name)
        if parts is None:
            raise UsageError(f"{name!r} is not the name of a member", remedy="A name looks like: worker 1.0")
        return cls(cast(Role, parts[1]), int(parts[2]), int(parts[3]))


@dataclass(frozen=True)
class Family:
    """Members that live and die together: what the cluster block calls a process."""

    number: int
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]


@dataclass(frozen=True)
class Topology:
    """The shape of a run, made by :meth:`of`.

    ``server_groups`` and ``servers_per_group`` are the real counts, also where the block says
    ``nserver_groups 0``; ``synchronised`` is whether server groups exchange what they learn.
    """

    worker_groups: int
    workers_per_group: int
    server_groups: int
    servers_per_group: int
    workers_per_process: int
    servers_per_process: int
    separate: bool
    synchronised: bool

    @classmethod
    def of(cls, cluster: Cluster) -> Topology:
        """The topology of a valid cluster block.

        With ``nserver_groups 0`` each worker has one server of its own beside it.
        """
        alone = cluster.nserver_groups == 0
        return cls(
            worker_groups=cluster.nworker_groups,
            workers_per_group=cluster.nworkers_per_group,
            server_groups=cluster.nworker_groups if alone else cluster.nserver_groups,
            servers_per_group=cluster.nworkers_per_group if alone else cluster.nservers_per_group,
            workers_per_process=cluster.nworkers_per_procs,
            servers_per_process=cluster.nworkers_per_procs if alone else cluster.nservers_per_procs,
            separate=cluster.server_worker_separate,
            synchronised=cluster.nserver_groups > 1,
        )

    @cached_property
    def workers(self) -> tuple[Member, ...]:
        """All workers, by group, then index."""
        return _members("worker", range(self.worker_groups), self.workers_per_group)

    @cached_property
    def servers(self) -> tuple[Member, ...]:
        """All servers, by group, then index."""
        return _members("server", range(self.server_groups), self.servers_per_group)

    @property
    def framework(self) -> str:
        """The name of what this shape amounts to; the first that fits."""
        if len(self.workers) == 1 and len(self.servers) == 1:
            return "single"
        if self.worker_groups == 1:
            if self.separate:
                return "sandblaster"
            return "allreduce" if self._one_to_one else "hybrid"
        if self.server_groups == 1:
            return "downpour"
        if not self.synchronised:
            return "independent"
        alone = self.workers_per_group == 1 and self.server_groups == self.worker_groups
        return "hogwild" if alone else "hybrid"

    @property
    def _one_to_one(self) -> bool:
        return len(self.servers) == len(self.workers) == len(set(self._hosts.values()))

    @property
    def processes(self) -> int:
        """What the block calls processes: the number of families."""
        return len(self.families)

    @property
    def os_processes(self) -> int:
        """Operating-system processes: workers, and servers that are no worker's thread."""
        return len(self.workers) + len(self.servers) - len(self._hosts)

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """All families, by number: workers' first, then, if separate, servers'."""
        workers, servers = defaultdict(list), defaultdict(list)
        for rank, worker in enumerate(self.workers):
            workers[rank // self.workers_per_process].append(worker)
        offset = len(workers) if self.separate else 0
        for rank, server in enumerate(self.servers):
            servers[rank // self.servers_per_process + offset].append(server)
        numbers = sorted(workers.keys() | servers.keys())
        return tuple(Family(n, tuple(workers[n]), tuple(servers[n])) for n in numbers)

    def server_group_of(self, worker_group: int) -> int:
        """The server group that a worker group trains on."""
        return worker_group // (self.worker_groups // self.server_groups)

    def worker_groups_of(self, server_group: int) -> tuple[int, ...]:
        """The worker groups that train on a server group, in order."""
        share = self.worker_groups // self.server_groups
        return tuple(range(server_group * share, (server_group + 1) * share))

    def servers_of(self, worker: Member) -> tuple[Member, ...]:
        """The servers a worker talks to, by index."""
        return _members("server", [self.server_group_of(worker.group)], self.servers_per_group)

    def workers_of(self, server: Member) -> tuple[Member, ...]:
        """The workers a server talks to, by group, then index."""
        return _members("worker", self.worker_groups_of(server.group), self.workers_per_group)

    def peers_of(self, server: Member) -> tuple[Member, ...]:
        """The servers of the same index in the other server groups; none if these are not synchronised."""
        others = [g for g in range(self.server_groups) if g != server.group and self.synchronised]
        return tuple(Member("server", group, server.index) for group in others)

    def source_of(self, server: Member) -> Member | None:
        """The server that hands worker 0.0's start to this one; None in server group 0."""
        return Member("server", 0, server.index) if server.group else None

    def leaders_of(self, server: Member) -> list[Member]:
        """The servers that this one dials: its source, then its peers in lower groups."""
        last = server.group if self.synchronised else min(server.group, 1)
        return [Member("server", group, server.index) for group in range(last)]

    def dialled_by(self, member: Member) -> Sequence[Member]:
        """The servers that a member speaks to first; others wait for it to do so."""
        return self.leaders_of(member) if member.role == "server" else self.servers_of(member)

    def followers_of(self, server: Member) -> set[str]:
        """The names of the servers that dial this one."""
        return {other.name for other in self.servers if server in self.leaders_of(other)}

    def host_of(self, server: Member) -> Member | None:
        """The worker in whose process a server is a thread; None = a process of its own."""
        return self._hosts.get(server)

    def paired(self, member: Member) -> bool:
        """Whether this is a worker whose only server is beside it and has no other worker, or that server."""
        worker = member if member.role == "worker" else self.host_of(member)
        if worker is None:
            return False
        server, *others = self.servers_of(worker)
        lone = not others and self.workers_of(server) == (worker,) and self.host_of(server) == worker
        return lone and member in (worker, server)

    @property
    def at_home(self) -> bool:
        """Whether every worker has all its servers beside it, in one process."""
        return all(self.host_of(s) == worker for worker in self.workers for s in self.servers_of(worker))

    def rank(self, worker: Member) -> int:
        """A worker's number over all groups, from 0."""
        return worker.group * self.workers_per_group + worker.index

    @cached_property
    def _hosts(self) -> dict[Member, Member]:
        return {
            server: family.workers[place % len(family.workers)]
            for family in self.families
            if family.workers
            for place, server in enumerate(family.servers)
        }


def machines_of(hosts: Sequence[str], topology: Topology) -> dict[Member, int]:
    """Which machine each member is on, by `cluster.hosts`; empty where that is.

    A machine is a text such as worker 0.0, server 0.0.

    Raises:
        ConfigError: a member that stands there twice, or not at all, or that there is none of.
    """
    found: dict[Member, int] = {}
    if not hosts:
        return found
    mistakes = []
    known = {*topology.workers, *topology.servers}
    for number, names in enumerate(hosts):
        for name in names.split(","):
            member = Member.parse(name.strip())
            if member not in known or member in found:
                what = "is on two machines" if member in found else "is no member of this cluster"
                mistakes.append(Mistake("cluster.hosts", member.name, what))
            found[member] = number
    missing = [member.name for member in sorted(known - found.keys()) if topology.host_of(member) is None]
    if missing:
        mistakes.append(Mistake("cluster.hosts", ", ".join(missing), "must be on one of the machines"))
    if mistakes:
        raise ConfigError(mistakes)
    return found


def _members(role: Role, groups: Iterable[int], size: int) -> tuple[Member, ...]:
    return tuple(Member(role, group, index) for group in groups for index in range(size))


def describe(topology: Topology) -> str:
    """What a topology amounts to, for people: lines of plain text, aligned, without a final newline."""
    head: list[tuple[str, ...]] = [
        ("framework", topology.framework),
        ("processes", str(topology.processes)),
        ("os processes", str(topology.os_processes)),
    ]
    process = {m: f"process {f.number}" for f in topology.families for m in (*f.workers, *f.servers)}
    workers = [(w.name, process[w], f"talks to {_names(topology.servers_of(w))}") for w in topology.workers]
    servers = [(s.name, process[s], _home(topology.host_of(s))) for s in topology.servers]
    groups = [(f"server group {g}", *_relations(topology, g)) for g in range(topology.server_groups)]
    return "\n\n".join(table(rows) for rows in (head, workers, servers, groups))


def _home(host: Member | None) -> str:
    return f"a thread of {host}" if host else "a process of its own"


def _relations(topology: Topology, group: int) -> tuple[str, str]:
    peers = topology.peers_of(Member("server", group, 0))
    others = ", ".join(f"server group {peer.group}" for peer in peers)
    trains = ", ".join(f"worker group {g}" for g in topology.worker_groups_of(group))
    return f"serves {trains}", f"synchronises with {others or 'none'}"


def _names(members: Iterable[Member]) -> str:
    return ", ".join(member.name for member in members)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as aligned lines of text, without a final newline."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
