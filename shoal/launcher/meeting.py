"""How the ranks that torchrun has started become members of one run."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from torch.distributed import DistStoreError

from shoal.config import Config
from shoal.coordinator import NAME, OVER, VISITOR, Answer, Coordinator
from shoal.errors import LaunchError, UsageError
from shoal.keys import Keys, Lock, read_secret
from shoal.launcher import environment
from shoal.launcher.environment import Place
from shoal.launcher.folder import Folder
from shoal.launcher.hints import Hints
from shoal.launcher.line import line_rate
from shoal.launcher.local import processes
from shoal.link import MARGIN, Link
from shoal.machine import address, identity, interface_of
from shoal.machines import Here, Machines
from shoal.rundir import RunDir, fresh
from shoal.site import Membership, OneMachine, Site
from shoal.store import LinkStore
from shoal.topology import Member, Topology, machines_of
from shoal.wire import VERSION


class Record(msgspec.Struct, frozen=True):
    """What rank 0 decides for all.

    Attributes:
        run_id: the run's secret, which every message carries.
        run_dir: where the run writes; None = nowhere.
    """

    run_id: str
    run_dir: str | None

    @classmethod
    def new(cls, config: Config, wanted: Path | None) -> Record:
        """For a run that writes to `wanted`, or below the block's workspace, or nowhere."""
        workspace = config.cluster.workspace
        if wanted is None and workspace is not None:
            wanted = fresh(workspace)
        run_dir = None if wanted is None else str(_free(wanted).path)
        return cls(os.urandom(16).hex(), run_dir)


class Meeting(Protocol):
    """A process's hold on its run.

    Attributes:
        record: what rank 0 has decided; there after `join`.
        line_rate: bytes per second between machines, 0 = there is one only; there after `join`.
    """

    record: Record
    line_rate: float

    def join(self, wanted: Path | None) -> None:
        """Find the others; raises LaunchError if they do not come.

        Args:
            wanted: where the run is to write, if the user has said that.
        """
        ...

    @property
    def private(self) -> Path:
        """A folder that only this user's processes on this machine may enter."""
        ...

    def site(self, membership: Membership) -> Site:
        """How a member in this process reaches the others."""
        ...

    def fail(self, what: str) -> None:
        """This process has failed: tell the others why."""
        ...

    def leave(self) -> None:
        """Let go of everything; the process ends."""
        ...


def meeting(place: Place, config: Config, topology: Topology) -> Meeting:
    """Where the ranks meet; after what this machine alone can tell is right.

    Raises:
        LaunchError: there is no secret, or no address that others reach.
        UsageError: a transport that does not lead from machine to machine.
    """
    cluster = config.cluster
    if place.together and cluster.transport != "tcp" and len(cluster.hosts) <= 1:
        return OnOneMachine(place, config)
    if cluster.transport == "ipc":
        raise UsageError(
            "cluster.transport is ipc, and torchrun has started processes on several machines",
            remedy="leave it at auto",
        )
    return OnSeveral(place, config, topology)


class OnOneMachine:
    """Ranks of one machine meet in a private folder, whose path is all that the hint says."""

    line_rate = 0.0

    def __init__(self, place: Place, config: Config) -> None:
        self._place, self._config = place, config

    def join(self, wanted: Path | None) -> None:
        """See Meeting.join."""
        place, key = self._place, f"folder/{self._place.attempt}"
        self._hints = hints = Hints(place, self._config.timeouts.start)  # rank 0 may be the store's host
        if place.rank == 0:
            self.record = Record.new(self._config, wanted)
            self._folder = Folder.make()
            (self.private / "run").write_bytes(msgspec.json.encode(self.record))
            hints.leave(key, str(self.private))
        else:
            self._folder = Folder(Path(hints.find(key, "rank 0 to begin")))
            self.record = msgspec.json.decode((self.private / "run").read_bytes(), type=Record)

    @property
    def private(self) -> Path:
        """See Meeting.private."""
        return self._folder.path

    def site(self, membership: Membership) -> Site:
        """See Meeting.site."""
        return OneMachine(membership)

    def fail(self, what: str) -> None:
        """See Meeting.fail; torchrun ends the others at once."""

    def leave(self) -> None:
        """See Meeting.leave."""
        self._folder.leave()


class Hint(msgspec.Struct, frozen=True):
    """Where the coordinator is.

    Attributes:
        name: of this life of it; its keys have it in them.
        fingerprint: of the secret; "" where everyone is trusted.
    """

    address: str
    name: str
    fingerprint: str


class OnSeveral:
    """Ranks on several machines meet at the coordinator, which is beside rank 0; the hint says where that is.

    A hint that somebody has forged leads nowhere: without the secret nobody can answer as the coordinator.
    Every life of rank 0 has a coordinator with a number of its own, so that nobody joins a dead one for long.
    """

    def __init__(self, place: Place, config: Config, topology: Topology) -> None:
        self._place, self._config, self._topology = place, config, topology
        self._member = processes(topology)[place.rank]
        self._here = _here(place, config, topology, self._member)
        trusted = config.cluster.security == "trusted"
        self._secret = None if trusted else read_secret(environment.secret_file())
        self._terms = config.model_dump_json().encode()

    def join(self, wanted: Path | None) -> None:
        """See Meeting.join."""
        self._hints = Hints(self._place, self._config.timeouts.start)
        self._coordinator = self._begin(wanted) if self._place.rank == 0 else None
        self._link, self.record = self._reach()
        self._keys = None if self._secret is None else Keys(self._secret, self.record.run_id)
        if self.record.run_dir is not None:
            RunDir(Path(self.record.run_dir)).furnish()
        environment.lead_gloo(interface_of(self._here.address))
        self.line_rate = self._rate()

    def _rate(self) -> float:
        """The rate of the line between the first and the last machine, which the last rank tries."""
        limit = self._config.timeouts.start
        store = LinkStore(self._link, limit)
        if self._place.rank == self._place.world_size - 1:
            rate = line_rate(lambda content: store.set("line", content))
            store.set("line", b"")  # the coordinator need not keep what was sent to try the line
            store.set("line_rate", str(rate))
        try:
            return float(store.get("line_rate"))
        except DistStoreError:
            raise LaunchError(
                f"{self._member} waited {limit:g} s (timeouts.start) for the last rank to begin",
                remedy="start torchrun on all machines; see the log of the last one",
            ) from None

    def _lock(self, run: str, name: str) -> Lock | None:
        return Keys(self._secret, run).lock(name, [VISITOR]) if self._secret is not None else None

    def _begin(self, wanted: Path | None) -> Coordinator:
        """Be the first: make the coordinator, and say where it is."""
        cluster, name = self._config.cluster, os.urandom(8).hex()
        port = cluster.start_port and cluster.start_port + 2 * len(self._topology.servers)
        coordinator = Coordinator(
            f"tcp://{self._here.address}:{port or '*'}",
            self._lock(name, NAME),
            [member.name for member in processes(self._topology)],
            self._terms,
            msgspec.json.encode(Record.new(self._config, wanted)),
            self._config.timeouts.heartbeat,
        )
        print_of = Keys(self._secret, name).fingerprint() if self._secret is not None else ""
        hint = Hint(coordinator.address, name, print_of)
        number = self._hints.count("coordinators", 1)
        self._hints.leave(f"coordinator/{number}", msgspec.json.encode(hint).decode())
        return coordinator

    def _reach(self) -> tuple[Link, Record]:
        """Join, at the latest coordinator that is there."""
        limit = self._config.timeouts.start
        until = time.monotonic() + limit
        number = max(1, self._hints.count("coordinators", 0))
        while True:
            word = self._hints.find(f"coordinator/{number}", "rank 0 to begin")
            hint = msgspec.json.decode(word, type=Hint)
            if (found := self._try(hint)) is not None:
                return found
            if self._hints.look(f"coordinator/{number + 1}", MARGIN) is not None:
                number += 1
            if time.monotonic() > until:
                raise LaunchError(
                    f"{self._member} waited {limit:g} s (timeouts.start) for the coordinator, beside rank 0 "
                    f"at {hint.address}",
                    remedy="let the network pass its port (cluster.start_port fixes it), or name the network "
                    "that all machines are on with cluster.interface",
                )

    def _try(self, hint: Hint) -> tuple[Link, Record] | None:
        """Join at this coordinator; None if it does not answer, or belongs to an attempt that is over."""
        ours = Keys(self._secret, hint.name).fingerprint() if self._secret is not None else ""
        if ours != hint.fingerprint:
            raise LaunchError(
                f"the secret that {self._member} has is not that of worker 0.0",
                remedy=f"copy {environment.secret_file()} from that machine to this one; cluster.security "
                "has to be the same on both",
            )
        link = Link(self._member.name, hint.address, self._lock(hint.name, VISITOR), self._silence)
        try:
            answer = link.ask("join", [self._member.name], [VERSION.encode(), self._terms])
        except TimeoutError:
            answer = Answer(refused=OVER)
        if answer.refused:
            link.close()
            if answer.refused != OVER:
                raise LaunchError(answer.refused, remedy="let all machines have the same version and files")
            return None
        return link, msgspec.json.decode(answer.values[0], type=Record)

    @property
    def _silence(self) -> float:
        return self._config.timeouts.heartbeat

    @property
    def private(self) -> Path:
        """See Meeting.private; nothing is there, for members meet at addresses."""
        return Path(tempfile.gettempdir())

    def site(self, membership: Membership) -> Site:
        """See Meeting.site."""
        return Machines(membership, self._link, self._here, self._keys)

    def fail(self, what: str) -> None:
        """See Meeting.fail."""
        with suppress(TimeoutError):
            self._link.ask("failed", values=[what.encode()])

    def leave(self) -> None:
        """See Meeting.leave."""
        with suppress(TimeoutError):
            self._link.ask("leave")
        self._link.close()
        if self._coordinator is not None:
            self._coordinator.close()


def _here(place: Place, config: Config, topology: Topology, member: Member) -> Here:
    hosts = config.cluster.hosts
    machine = f"host {machines_of(hosts, topology)[member]}" if hosts else identity()
    return Here(machine, address(config.cluster.interface, place.address))


def _free(wanted: Path) -> RunDir:
    """The directory, or where it exists, as after a restart, DIRECTORY.1 and so on."""
    names = itertools.chain([wanted.name], (f"{wanted.name}.{n}" for n in itertools.count(1)))
    return RunDir.create(next(path for name in names if not (path := wanted.with_name(name)).exists()))
