"""What a server does with shares: admit → apply → reply."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from typing import Any

from torch import Tensor

from shoal import acts
from shoal.acts import Action
from shoal.admission import Admission
from shoal.asynchrony import Correction
from shoal.edits import Edits
from shoal.errors import ProtocolError, ShoalError
from shoal.ledger import Life
from shoal.parameters import Frames, codec_of, frames_of, received
from shoal.partition import Chunk, Plan
from shoal.present import Present
from shoal.rows import Content, Rows, average_rows
from shoal.shard import Shard, average, merge, squared_norm
from shoal.snapshots import Snapshot, Snapshots
from shoal.sync import Sync
from shoal.topology import Member
from shoal.transport import Post
from shoal.updater import Settings
from shoal.wire import Commit, Kind, Message, Missing, Norm, NormAnswer, Pull, Values


class Rounds:
    """The rounds of one server, from messages to updates and replies.

    Args:
        peers: names of the servers that this one synchronises with.

    Attributes:
        correction: what is done to an update because groups run beside each other.
        begin_followers: called when group 0's warm-up is over: other server groups get their start.
    """

    def __init__(
        self,
        plan: Plan,
        shard: Shard,
        admission: Admission,
        sync: Sync,
        post: Post,
        settings: tuple[Settings, ...],
        snapshots: Snapshots,
        peers: Sequence[str] = (),
    ) -> None:
        self.admission, self.shard, self.sync = admission, shard, sync
        self.correction = Correction()
        self.begin_followers: Callable[[], None] = lambda: None
        self.staleness: Counter[int] = Counter()
        self.cursors: dict[str, tuple[int, ...]] = {}
        self._plan, self._post, self._snapshots = plan, post, snapshots
        self._present = Present(shard, snapshots.alone)
        self._start = settings
        self._owned: list[set[int]] = [set() for _ in settings]
        for chunk in shard.chunks:
            self._owned[chunk.optimizer].add(chunk.number)
        self._frames = Frames()
        self._payloads: dict[tuple[int, int, int], Content] = {}
        self._commits: dict[tuple[int, int], dict[int, Commit]] = {}
        self._settings: dict[tuple[int, int, int], Settings] = {}
        self._questions: dict[tuple[int, int], tuple[Life, int]] = {}
        self._norms: dict[Life, tuple[int, float]] = {}
        self._peers = tuple(peers)
        self._loop = 1
        self._stopping = False
        self._cold: dict[tuple[int, int], int] = {}
        self._edits = Edits(shard, snapshots)

    @property
    def handlers(self) -> dict[Kind, Callable[[Message], None]]:
        """What is done about which kind of message."""
        return {Kind.SHARE: self.share, Kind.COMMIT: self.commit, Kind.NORM: self.norm, Kind.PULL: self.pull}

    @property
    def warming(self) -> bool:
        """Whether worker group 0 still makes the others' start."""
        return self.admission.warming

    def join(self, life: Life) -> tuple[int, ...]:
        """A worker is there; returns the last step of each optimizer that its group has closed."""
        self._admit(acts.Join(life))
        return tuple(self.admission.last_step(life.group, number) for number in range(len(self._start)))

    def leave(self, life: Life, total: int) -> None:
        """A worker has left a loop, after pushing so many shares."""
        self._admit(acts.Leave(life, total))

    # One handler per kind of message.

    def share(self, message: Message) -> None:
        """A worker's gradient of a chunk arrived."""
        header, chunk = message.header, self.chunk(message)
        payload = received(message.frames, header.codec, chunk, header.sender)
        if isinstance(payload, Rows) != bool(chunk.row):
            raise ProtocolError(f"{header.sender} pushed all of chunk {chunk.number}, a table's: rows only")
        share = acts.Share(life_of(message), chunk.number, header.step, header.number, header.base)
        for action in self.admission.admit(share):
            if isinstance(action, acts.Hold):
                self._payloads[share.life.group, share.life.rank, chunk.number] = payload
            else:
                self.do(action)

    def commit(self, message: Message) -> None:
        """A worker's word about a step arrived."""
        body, life = message.body(Commit), life_of(message)
        self._check(message, body.optimizer, body.pushed.keys() | body.touched.keys())
        if foreign := set(body.counts) - body.pushed.keys():
            raise ProtocolError(f"{message.header.sender} counts chunk {min(foreign)}, which it did not push")
        commits = self._commits.setdefault((life.group, body.optimizer), {})
        if body.settings is not None:
            self._set(life, body.optimizer, body.settings)
        commits[life.rank] = body
        if body.cursor:
            self.cursors[message.header.sender] = body.cursor
        if body.stop:
            self._stop_loop()
        self._admit(
            acts.Commit(
                life,
                body.optimizer,
                message.header.step,
                body.pushed,
                {chunk: body.pushed[chunk] for chunk in body.counts},
                body.touched,
                body.weight,
                body.finite,
                body.total,
            )
        )

    def norm(self, message: Message) -> None:
        """A worker asks for the norm of its group's averaged gradient."""
        body, life, step = message.body(Norm), life_of(message), message.header.step
        self._check(message, body.optimizer, body.numbers.keys() | body.touched.keys())
        question = message.header.number
        answered, squared = self._norms.get(life, (0, 0.0))
        if question == answered:  # asked again, because the answer was lost
            self._send_norm(life, NormAnswer(body.optimizer, squared), step)
        elif question > answered:
            self._questions[life.group, life.rank] = (life, question)
            said = (body.numbers, body.touched, body.weight, body.finite, body.again)
            self._admit(acts.Norm(life, body.optimizer, step, *said))

    def pull(self, message: Message) -> None:
        """A worker asks for values of a step (number 0), its group's last (below 0), or the present ones."""
        header = message.header
        life, number = life_of(message), header.number
        for chunk in self.shard.chunks if header.chunk < 0 else (self.chunk(message),):
            if number > 0:
                frames = frames_of(self._present.of(life.group, chunk.number, message.body(Pull)))
                self._post.send(
                    header.sender,
                    Kind.VALUES,
                    Values(),
                    frames,
                    chunk=chunk.number,
                    dtype=chunk.dtype,
                    number=number,
                    version=self.admission.version(chunk.number),
                    lsn=self.shard.revision[chunk.number],
                )
            elif self.admission.cold(life.group):
                self._cold[life.group, life.rank] = number
            elif number < 0:
                self._answer(chunk.number, life.group, life.rank, number)
            else:
                self._admit(acts.Pull(life, chunk.number, header.step, whole=header.base < 0))
        if self.admission.cold(life.group):
            self._tell(acts.Tell(life.group, life.rank, header.step, (), (0,)))

    def edit(self, message: Message) -> None:
        """A group has changed a chunk by hand."""
        chunk = self.chunk(message)
        self._edits.edit(message, life_of(message), chunk)
        header = message.header
        self._post.send(header.sender, Kind.STORED, chunk=chunk.number, number=header.number)

    def _agreed(self, key: tuple[int, int], ranks: Sequence[int]) -> Commit:
        """A commit of the round; in loss scale and clipping they are all alike."""
        first, *others = (self._commits[key][rank] for rank in ranks)
        for rank, other in zip(ranks[1:], others, strict=True):
            if (other.scale, other.clip, other.limit) != (first.scale, first.clip, first.limit):
                one, two = _worker(key[0], ranks[0]), _worker(key[0], rank)
                raise ShoalError(
                    f"{one} and {two} scale or clip one step differently (loss scale, coefficient, limit): "
                    f"{(first.scale, first.clip, first.limit)} and {(other.scale, other.clip, other.limit)}",
                    remedy="all workers of a group clip alike, with GradScalers of the same settings",
                )
        return first

    def _stop_loop(self) -> None:
        """A worker asks all groups to end their loops: each hears it with the values of its next step."""
        if not self._stopping:
            self._stopping = True
            for peer in self._peers:
                self._post.send(peer, Kind.STOP, number=self._loop)

    def heard_stop(self, loop: int) -> None:
        """A server of another group says that this loop is to end."""
        self._stopping |= loop == self._loop

    def end_loop(self) -> None:
        """All groups have left and flushed: a group that asks now gets this end, whatever others begin."""
        self._loop, self._stopping = self._loop + 1, False
        for chunk, group in self._snapshots:
            self._present.forget(group)
            self._snapshot(self._standing(chunk, group), whole=True)

    def _standing(self, chunk: int, group: int) -> acts.Reply:
        """A reply that answers no round."""
        return acts.Reply(chunk, group, self.admission.closed(group, chunk), False, -1)

    def _begin_all(self) -> None:
        """Worker group 0 has warmed the model up: what it has become is the others' start."""
        self.sync.begin()
        self.begin_followers()
        for (group, rank), number in self._cold.items():
            for chunk in self.shard.chunks:
                self._answer(chunk.number, group, rank, number)
        self._cold.clear()

    # Actions.

    def _admit(self, event: acts.Event) -> None:
        for action in self.admission.admit(event):
            self.do(action)

    def do(self, action: Action) -> None:
        """Carry out what admission decided."""
        match action:
            case acts.Apply():
                self._apply(action)
            case acts.Reply():
                self._reply(action)
            case acts.Answer(chunk, group, rank, _, whole):
                self._answer(chunk, group, rank, whole=whole)
            case acts.Release(group, rank, chunk):
                self._payloads.pop((group, rank, chunk), None)
            case acts.Measure():
                self._measure(action)
            case acts.Ask(group, rank, chunk, step):
                self._post.send(_worker(group, rank), Kind.PULL, chunk=chunk, step=step)
            case acts.Tell():
                self._tell(action)
            case acts.Left():
                pass  # its workers' leaves say of which loop
            case acts.Returned():
                self.sync.resume()
            case acts.Warm():
                self._begin_all()
            case acts.Hold():
                raise AssertionError("only a share is held")

    def _shares(self, rule: acts.Average) -> list[Any]:
        return [self._payloads[rule.group, rank, rule.chunk] for rank in rule.ranks]

    def _averaged(self, rule: acts.Average) -> Content:
        table = self._plan.chunks[rule.chunk].row > 0
        return average_rows(self._shares(rule), rule) if table else average(self._shares(rule), rule)

    def _apply(self, action: acts.Apply) -> None:
        rule = action.average
        chunk = self._plan.chunks[rule.chunk]
        if chunk.buffer is not None:
            self.shard.assign(rule.chunk, merge(self._shares(rule), rule))
        else:
            key = (rule.group, chunk.optimizer)
            commit = self._agreed(key, rule.ranks)
            gradient = self._averaged(rule)
            if commit.scale != 1:
                gradient = gradient * (1 / commit.scale)
            if commit.clip != 1:
                gradient = gradient * commit.clip
            if commit.limit is not None:
                gradient = gradient.clamp(-commit.limit, commit.limit)
            last = self._snapshots.last(rule.chunk, rule.group)
            if isinstance(gradient, Tensor) and last is not None and not self._snapshots.alone:
                assert isinstance(last.known, Tensor)  # only a table's gradient is rows, and its values
                gradient = self.correction.gradient(gradient, self.shard.values(rule.chunk), last.known)
            settings = self._settings.get((*key, 0), self._start[chunk.optimizer])
            settings = self.correction.settings(settings, action.staleness)
            self.shard.step(rule.chunk, gradient, rule.touched, settings)
            self.staleness[action.staleness] += 1
        self.sync.closed(rule.chunk, time.monotonic())

    def _measure(self, action: acts.Measure) -> None:
        squared = float("nan")
        if action.averages is not None:
            squared = squared_norm({a.chunk: self._averaged(a) for a in action.averages if a.ranks})
        for rank in range(self.admission.workers(action.group)):
            life, question = self._questions[action.group, rank]
            self._norms[life] = (question, squared)
            self._send_norm(life, NormAnswer(action.optimizer, squared), action.step)

    def _send_norm(self, life: Life, answer: NormAnswer, step: int) -> None:
        question, _ = self._norms[life]
        self._post.send(_worker(life.group, life.rank), Kind.NORM, answer, step=step, number=question)

    def _tell(self, action: acts.Tell) -> None:
        names = [_worker(action.group, rank) for rank in action.ranks]
        names += [f"worker group {group}" for group in action.groups]
        self._post.send(
            _worker(action.group, action.rank), Kind.HEARTBEAT, Missing(tuple(names)), step=action.step
        )

    # Replies.

    def _reply(self, reply: acts.Reply) -> None:
        self._present.forget(reply.group)
        snapshot = self._snapshot(reply)
        for rank in range(self.admission.workers(reply.group)):
            self._send_snapshot(snapshot, rank, resend=False)

    def _snapshot(self, reply: acts.Reply, whole: bool = False) -> Snapshot:
        """What the group gets from now on; `whole`: all values, for who may have none of them."""
        return self._snapshots.take(reply, self.admission.version(reply.chunk), self._stopping, whole)

    def _answer(self, chunk: int, group: int, rank: int, number: int = 0, whole: bool = False) -> None:
        snapshot = self._snapshots.last(chunk, group)
        if snapshot is None or (number and not isinstance(snapshot.sent, Tensor)):
            snapshot = self._snapshot(self._standing(chunk, group), whole=True)
        self._send_snapshot(snapshot, rank, resend=True, number=number, whole=whole)

    def _send_snapshot(
        self, snapshot: Snapshot, rank: int, resend: bool, number: int = 0, whole: bool = False
    ) -> None:
        """Send a worker its group's snapshot; `whole`: all of its values, though it is a difference."""
        reply, sent, base = snapshot.reply, snapshot.sent, snapshot.base
        if whole:
            sent, base = snapshot.known, 0
        sent = sent if snapshot.news or resend else None
        settings = self._settings_for(reply, rank)
        self._post.send(
            _worker(reply.group, rank),
            Kind.VALUES,
            Values(reply.skipped, reply.staleness, settings, snapshot.stop, snapshot.edition, base),
            [] if sent is None else self._frames.of((reply.chunk, reply.group), sent),
            chunk=reply.chunk,
            codec=codec_of(sent),
            dtype=self._plan.chunks[reply.chunk].dtype,
            group=reply.group,
            step=reply.step,
            number=number,
            version=snapshot.version,
            lsn=snapshot.revision,
        )

    # Hyperparameters: worker 0 of the group decides.

    def _set(self, life: Life, optimizer: int, settings: Settings) -> None:
        """A worker's settings have changed; equal ones are kept once, which makes comparing them cheap."""
        peers = ((life.group, optimizer, rank) for rank in range(self.admission.workers(life.group)))
        known = (self._settings[peer] for peer in peers if self._settings.get(peer) == settings)
        self._settings[life.group, optimizer, life.rank] = next(known, settings)

    def _settings_for(self, reply: acts.Reply, rank: int) -> Settings | None:
        """The group's settings, for a worker that last committed with others."""
        optimizer = self._plan.chunks[reply.chunk].optimizer
        ours = self._settings.get((reply.group, optimizer, 0))
        return ours if self._settings.get((reply.group, optimizer, rank)) != ours else None

    def chunk(self, message: Message) -> Chunk:
        """The chunk that a message is about; raises ProtocolError where it is not this server's."""
        header = message.header
        if header.chunk not in self.shard.revision:
            raise ProtocolError(f"{header.sender} sent a {header.kind.name.lower()} for chunk {header.chunk}")
        return self._plan.chunks[header.chunk]

    def _check(self, message: Message, optimizer: int, chunks: Set[int]) -> None:
        """Raises ProtocolError where a worker speaks of what is not this server's."""
        if optimizer not in range(len(self._start)):
            raise ProtocolError(f"{message.header.sender} speaks of optimizer {optimizer}, which is not here")
        if foreign := chunks - self._owned[optimizer]:
            raise ProtocolError(f"{message.header.sender} speaks of chunk {min(foreign)}, which is not here")


@lru_cache
def _worker(group: int, rank: int) -> str:
    return Member("worker", group, rank).name


def life_of(message: Message) -> Life:
    """Which life of which worker sent a message."""
    return _life(message.header.sender, message.header.life)


@lru_cache
def _life(sender: str, incarnation: int) -> Life:
    member = Member.parse(sender)
    return Life(member.group, member.index, incarnation)
