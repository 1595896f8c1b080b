"""A server member: who is there, what is trained, when it ends; the rounds themselves are in `rounds`."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress

from torch import Tensor

from shoal.acts import Owned
from shoal.admission import Admission
from shoal.asynchrony import Correction
from shoal.beside import Beside, OwnRounds, OwnShard
from shoal.codecs import Coding
from shoal.config import Config
from shoal.errors import ModelMismatch, ProtocolError
from shoal.events import Events
from shoal.leases import Leases
from shoal.parameters import as_bytes, checked
from shoal.partition import Plan, difference, plan_for
from shoal.rounds import Rounds, life_of
from shoal.schedule import UNSCHEDULED, Schedule, Schedules
from shoal.shard import Shard
from shoal.snapshots import Snapshots
from shoal.sync import Sync
from shoal.topology import Member, Topology
from shoal.totals import totals_of, totals_of_own
from shoal.transport import Post
from shoal.wire import VERSION, Hello, Init, Kind, Lease, Leave, Message, Refuse, Welcome

TICK = 0.2  # seconds between looks at the clock while nothing arrives
FIRST = Member("worker", 0, 0)


class Server:
    """One server member; `serve()` runs it until its workers have stopped.

    Args:
        post: its letters.
        events: where it reports.
        schedules: where the order of its messages is written to or read from.
        beside: what it has in common with its worker, where that has no other server and is in its process.
    """

    def __init__(
        self,
        member: Member,
        topology: Topology,
        config: Config,
        post: Post,
        events: Events,
        schedules: Schedules = UNSCHEDULED,
        beside: Beside | None = None,
    ) -> None:
        self.member, self.topology, self.config = member, topology, config
        self.rounds: Rounds | OwnRounds | None = None
        self._beside, self._lock = beside, nullcontext() if beside is None else beside.lock
        self._post, self._events = post, events
        self._schedule = Schedule(schedules, config, member)
        self._workers = {worker.name for worker in topology.workers_of(member)}
        self._peers = {peer.name for peer in topology.peers_of(member)}
        near = {server.name for server in topology.leaders_of(member)} | topology.followers_of(member)
        self._known = self._workers | self._peers | near
        self._model: Hello | None = None
        self._plan: Plan | None = None
        self._hellos: dict[str, Message] = {}
        self._starting: list[str] = []
        self._early: list[Message] = []
        self._early_values: list[Message] = []
        self._missing: set[int] = set()
        self._leaving: set[str] = set()
        self._loops: Counter[str] = Counter()
        self._settled = 0
        self._stopped: set[str] = set()
        self._lost: set[str] = set()
        self._waiting_for = topology.followers_of(member)
        self._leases = Leases(len(topology.worker_groups_of(member.group)), len(self._workers))
        self._handlers: dict[Kind, Callable[[Message], None]] = {
            Kind.HELLO: self._hello,
            Kind.WELCOME: self._welcomed,
            Kind.INIT: self._init,
            Kind.LEASE: self._lease,
            Kind.LEAVE: self._leave,
            Kind.STOP: self._stop,
        }

    def serve(self) -> None:
        """Handle messages until every worker has stopped; raises what went wrong, and tells the workers."""
        for leader in self.topology.leaders_of(self.member):
            self._post.send(leader.name, Kind.HELLO, Hello(VERSION))
        self._post.keep()
        try:
            while not self._stopped >= self._workers | self._peers:
                self._once()
            self._schedule.end()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            for name in self._hellos:
                if name in self._workers:
                    refuse = Refuse("PeerFailed", f"{self.member} failed:\n{text}")
                    self._post.send(name, Kind.REFUSE, refuse)
            raise
        self._report()

    def _once(self) -> None:
        try:
            message = self._post.receive(TICK)
            if message is not None and message.header.sender not in self._known:
                raise ProtocolError(f"{message.header.sender} is nobody whom {self.member} expects")
        except ProtocolError as error:  # a stranger's message: not ours to act on
            self._events.write("note", message=f"dropped a message: {error}")
            return
        if message is not None:
            with self._lock:
                self._deal(message)
        for loss in {error.what for error in self._post.flush()} - self._lost:
            self._lost.add(loss)  # who supervises the member decides what follows
            self._events.write("note", message=loss)
        if self.rounds is not None:
            now = time.monotonic()
            self.rounds.sync.tick(now)
            self._schedule.check(now)

    def _deal(self, message: Message) -> None:
        """Handle a message when it is its turn."""
        ready = [message]
        if self._schedule.kept and self.rounds is not None:
            with suppress(ProtocolError):  # who handles it says what is wrong with it
                ready = self._schedule.arrived(message, time.monotonic())
        for each in ready:
            self._take(each)

    def _take(self, message: Message) -> None:
        """Handle a message, or tell its sender why not."""
        try:
            self._handle(message)
        except ProtocolError as error:
            self._post.send(message.header.sender, Kind.REFUSE, Refuse(type(error).__name__, error.what))

    def _handle(self, message: Message) -> None:
        header = message.header
        greeting = header.kind in (Kind.HELLO, Kind.WELCOME, Kind.INIT)
        if not greeting and self.rounds is None:
            self._early.append(message)
        elif not greeting and header.plan != self._post.plan:
            raise ProtocolError(f"{header.sender} follows another plan ({header.plan[:8]})")
        elif header.kind in self._handlers:
            self._handlers[header.kind](message)
        else:
            raise ProtocolError(f"{header.sender} sent a {header.kind.name.lower()}, which no server expects")

    # The start: a model, its values, everybody's greeting.

    def _hello(self, message: Message) -> None:
        sender, hello = message.header.sender, message.body(Hello)
        if hello.shoal != VERSION:
            raise ProtocolError(f"{sender} runs Shoal {hello.shoal}, {self.member} runs {VERSION}")
        self._hellos[sender] = message
        self._waiting_for.discard(sender)
        if sender == FIRST.name and self._model is None:
            self._model = hello
        if self.rounds is not None:
            self._receive(message)
        self._begin()

    def _begin(self) -> None:
        """Get ready once worker 0.0's model is known, first hand or through server group 0."""
        if self._plan is None and (model := self._model) is not None:
            if self._beside is not None and not self._hellos.keys() >= self._workers:
                return  # the worker has not said yet who keeps the values
            self._shard = self._own_shard(model) or self._new_shard(model)
            self._plan = self._shard.plan
            self._post.plan = self._plan.digest
            for message in self._early_values:
                self._init(message)
        self._open_if_complete()

    def _own_shard(self, model: Hello) -> OwnShard | None:
        """The model of the worker beside, if that steps on it itself."""
        own = None if self._beside is None else self._beside.shard
        if own is None or any(differs(hello.body(Hello), model) for hello in self._from_workers()):
            return None
        if self.member.group:
            own.expect()
            self._missing = {chunk.number for chunk in own.chunks}
        return own

    def _new_shard(self, model: Hello) -> Shard:
        """Room for this server's part of the model."""
        plan = plan_for(self.topology, self.config.cluster, model.parameters, model.buffers)
        wide, allowed = self.config.cluster.server_dtype == "float32", self.config.allow_optimizers
        allocate = self._post.endpoint.memory.allocate
        shard = Shard(plan, self.member.index, model.optimizers, allowed, wide, allocate, model.ema)
        self._missing = {chunk.number for chunk in shard.chunks}
        return shard

    def _from_workers(self) -> list[Message]:
        return [hello for sender, hello in self._hellos.items() if sender in self._workers]

    def _init(self, message: Message) -> None:
        header = message.header
        if self._plan is None:  # the bulk lane overtook the control lane
            self._early_values.append(message)
            return
        if self.rounds is not None and header.number:
            self.rounds.edit(message)
            return
        if header.chunk not in self._missing:
            raise ProtocolError(
                f"{header.sender} sent values of chunk {header.chunk} at the wrong time or place"
            )
        chunk = self._plan.chunks[header.chunk]
        self._shard.load(chunk, message.body(Init).state, message.frames, header.sender)
        self._missing.discard(header.chunk)
        self._open_if_complete()

    def _welcomed(self, message: Message) -> None:
        model = message.body(Welcome).model
        if model is not None and self._model is None:
            self._model = model
            self._begin()

    def _open_if_complete(self) -> None:
        """Start serving once the values are here and those who follow this server can be reached."""
        if self._plan is None or self._missing or self._waiting_for or self.rounds is not None:
            return
        sync = Sync(
            self._shard,
            self.member.group,
            self._plan.server_groups,
            self.config.cluster.sync_freq,
            self._sender(Kind.SYNC),
            self._sender(Kind.SYNCED),
            self.config.timeouts.ask,
        )
        self.rounds = self._make_rounds(self._plan, sync)
        self._handlers |= self.rounds.handlers
        self._handlers |= {Kind.SYNC: self._sync_request, Kind.SYNCED: self._sync_reply}
        waiting, self._early = [*self._hellos.values(), *self._early], []
        self._schedule.begin(self._plan.digest, time.monotonic())
        for message in waiting:
            self._deal(message)

    def _make_rounds(self, plan: Plan, sync: Sync) -> Rounds | OwnRounds:
        topology, member = self.topology, self.member
        assert self._model is not None
        if isinstance(self._shard, OwnShard):
            return OwnRounds(self._shard, sync, self._post, sorted(self._peers))
        served = topology.worker_groups_of(member.group)
        chunks = {c.number: Owned(c.optimizer, c.buffer is not None) for c in self._shard.chunks}
        cluster = self.config.cluster
        groups = dict.fromkeys(served, topology.workers_per_group)
        admission = Admission(groups, chunks, cluster.max_delay, cluster.warmup_steps)
        self._shard.rounds = admission.version
        alone = len(served) == 1 and plan.server_groups == 1
        settings = tuple(spec.groups for spec in self._model.optimizers)
        peers = sorted(self._peers)
        allocate = self._post.endpoint.memory.allocate
        snapshots = Snapshots(plan, self._shard, Coding.of(cluster), alone, allocate)
        rounds = Rounds(plan, self._shard, admission, sync, self._post, settings, snapshots, peers)
        rounds.correction = Correction.of(cluster)
        rounds.begin_followers = self._hand_over
        if admission.warming:
            sync.hold()
        return rounds

    def _receive(self, message: Message) -> None:
        """Welcome a worker, or hand the model to a server of another group."""
        sender, model = message.header.sender, self._model
        assert model is not None and self.rounds is not None
        if Member.parse(sender).role == "server":
            if self.topology.source_of(Member.parse(sender)) == self.member:
                self._post.send(sender, Kind.WELCOME, Welcome(model=model))
                self._starting.append(sender)
                if not self.rounds.warming:
                    self._hand_over()
            return
        hello = message.body(Hello)
        if found := differs(hello, model):
            what = f"the model of {sender} differs from that of {FIRST}: {found}"
            self._post.send(sender, Kind.REFUSE, Refuse(ModelMismatch.__name__, what))
            return
        steps = self.rounds.join(life_of(message))
        self._post.send(sender, Kind.WELCOME, Welcome(steps, hello.checksum != model.checksum))

    # Between server groups.

    def _hand_over(self) -> None:
        """Give the servers that follow this one their start."""
        for name in self._starting:
            for chunk in self._shard.chunks:
                entries, frames = self._shard.export(chunk.number)
                raw = [bytes(frame) for frame in frames]
                self._post.send(name, Kind.INIT, Init(tuple(entries)), raw, chunk=chunk.number)
        self._starting.clear()

    def _sender(self, kind: Kind) -> Callable[..., None]:
        def send(group: int, chunk: int, sequence: int, final: int, tensor: Tensor) -> None:
            peer = Member("server", group, self.member.index).name
            self._post.send(
                peer, kind, frames=[as_bytes(tensor)], chunk=chunk, sequence=sequence, number=final
            )

        return send

    def _sync_request(self, message: Message) -> None:
        header, rounds = message.header, self.rounds
        assert rounds is not None
        tensor = checked(message.frames, rounds.chunk(message), header.sender)
        group = Member.parse(header.sender).group
        rounds.sync.requested(group, header.chunk, header.sequence, header.number, tensor)
        self._answer_leaving()

    def _sync_reply(self, message: Message) -> None:
        header, rounds = message.header, self.rounds
        assert rounds is not None
        tensor = checked(message.frames, rounds.chunk(message), header.sender)
        rounds.sync.answered(header.chunk, header.sequence, header.number, tensor, time.monotonic())
        self._answer_leaving()

    # Leased data.

    def _lease(self, message: Message) -> None:
        """A worker asks for a block of an epoch."""
        life, ask = life_of(message), message.body(Lease).ask
        block = self._leases.block(life.group, life.rank, ask)
        self._post.send(message.header.sender, Kind.LEASE, Lease(ask, block))

    # The end.

    @property
    def _ended(self) -> int:
        """The last loop that every worker has left, counted from 1."""
        return min(self._loops[worker] for worker in self._workers)

    def _leave(self, message: Message) -> None:
        assert self.rounds is not None
        sender, loop, before = message.header.sender, message.header.number, self._ended
        self._leaving.add(sender)
        if loop > self._loops[sender]:
            self._loops[sender] = loop
            self.rounds.leave(life_of(message), message.body(Leave).total)
            if self._ended > before:
                self.rounds.sync.flush(self._ended, time.monotonic())
        self._answer_leaving()

    def _answer_leaving(self) -> None:
        """Once all groups have left a loop and all differences are home, those who left may read the end."""
        assert self.rounds is not None
        if self.rounds.sync.flushed and self._ended > self._settled:
            self._settled = self._ended
            self.rounds.end_loop()
        for name in sorted(n for n in self._leaving if self._loops[n] <= self._settled):
            self._post.send(name, Kind.LEAVE, Leave(), number=self._loops[name])
            self._leaving.discard(name)

    def _stop(self, message: Message) -> None:
        """A worker goes, or a server that needs no more of this one; with a number, a loop is to end."""
        if message.header.number:
            if self.rounds is not None:
                self.rounds.heard_stop(message.header.number)
            return
        self._stopped.add(message.header.sender)
        if message.header.sender in self._workers and self._stopped >= self._workers:
            for peer in sorted(self._peers):
                self._post.send(peer, Kind.STOP)

    def _report(self) -> None:
        assert self.rounds is not None
        rounds, traffic = self.rounds, self._post.endpoint.traffic
        if isinstance(rounds, OwnRounds):
            self._events.write("finished", **totals_of_own(rounds, traffic))
        else:
            self._events.write("finished", **totals_of(rounds, traffic))


def differs(hello: Hello, model: Hello) -> str | None:
    """The first difference between two workers' models or optimizers, in words."""
    found = difference(model.parameters, hello.parameters) or difference(model.buffers, hello.buffers)
    if found is None and [o.name for o in model.optimizers] != [o.name for o in hello.optimizers]:
        found = f"optimizers {[o.name for o in hello.optimizers]}, there {[o.name for o in model.optimizers]}"
    if found is None and hello.ema != model.ema:
        found = f"ema={hello.ema}, there {model.ema}"
    return found
