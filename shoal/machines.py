"""How a member reaches the others of a run on several machines: by tcp, and through the coordinator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store

from shoal.keys import Keys
from shoal.link import Link
from shoal.site import Membership, introduced, plain_sockets
from shoal.store import LinkStore
from shoal.transport import LANES, Endpoint, Lane, Token
from shoal.transport.memory import Memory
from shoal.transport.sockets import Sockets
from shoal.wire import Frame


@dataclass(frozen=True)
class Here:
    """This process's machine: its name, the same for all members on it, and its address."""

    machine: str
    address: str


class Machines:
    """A member's site in a run on several machines.

    Args:
        link: this process's to the coordinator.
        keys: of the run; None = everyone on the network is trusted.
    """

    def __init__(self, membership: Membership, link: Link, here: Here, keys: Keys | None) -> None:
        self._m, self._link, self._here, self._keys = membership, link, here, keys
        self._machines: dict[str, str] = {}
        self.gloo = keys is None
        self._store = LinkStore(link, membership.config.timeouts.start)  # torch's groups do not keep it

    def endpoint(self) -> Endpoint:
        """See Site.endpoint. A server leaves in the store where it listens."""
        m, memory, serving = self._m, Memory(self._is_near), self._m.member.role == "server"
        self._store.set(f"machine/{m.member}", self._here.machine)
        if self._keys is not None:
            return Watched(self._locked(memory, self._keys), self._link)
        listen = self._listen_at(0) if serving else None
        return Watched(plain_sockets(m, listen, memory, self), self._link)

    def _locked(self, memory: Memory, keys: Keys) -> Endpoint:
        m, serving = self._m, self._m.member.role == "server"
        callers = {worker.name for worker in m.topology.workers_of(m.member)} if serving else set()
        lock = keys.lock(m.member.name, callers | m.topology.followers_of(m.member) if serving else ())
        listen = {lane: self._listen_at(place) for place, lane in enumerate(LANES)} if serving else None
        sockets = Sockets(m.member.name, listen, {}, m.config.timeouts.flush, memory, lock)
        for server, addresses in introduced(m, self, json.dumps(sockets.bound) if serving else None):
            sockets.dial(server, json.loads(addresses))
        return sockets

    def _listen_at(self, place: int) -> str:
        """Where this server listens; each has two ports, of which wires that are not locked use one."""
        first = self._m.config.cluster.start_port
        port = first and first + 2 * self._m.topology.servers.index(self._m.member) + place
        return f"tcp://{self._here.address}:{port or '*'}"

    def _is_near(self, peer: str) -> bool:
        """Whether a peer that has dialled, or is dialled, can read this member's memory."""
        if not self._m.config.cluster.share_memory:
            return False
        if peer not in self._machines:
            self._machines[peer] = self.store().get(f"machine/{peer}").decode()
        return self._machines[peer] == self._here.machine

    def store(self) -> Store:
        """See Site.store."""
        return self._store

    def check(self, waited: float = 0.0) -> None:
        """See Site.check; raises PeerFailed when another member has failed."""
        self._link.check(waited)


class Watched:
    """An endpoint that waits no longer than there is reason to."""

    def __init__(self, inner: Endpoint, link: Link) -> None:
        self.name = inner.name
        self._inner, self._link = inner, link
        self._waited = 0.0  # seconds without a message

    @property
    def memory(self) -> Memory:
        """See Endpoint.memory."""
        return self._inner.memory

    @property
    def traffic(self) -> Counter[str]:
        """See Endpoint.traffic."""
        return self._inner.traffic

    def send(self, peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
        """See Endpoint.send."""
        return self._inner.send(peer, lane, frames, turn)

    def recv(self, timeout: float) -> list[Frame] | None:
        """See Endpoint.recv; raises PeerFailed when another member has failed."""
        frames = self._inner.recv(timeout)
        if frames is not None:
            self._waited = 0.0
            return frames
        self._waited += timeout
        self._link.check(self._waited)
        return None

    def close(self) -> None:
        """See Endpoint.close."""
        self._inner.close()
