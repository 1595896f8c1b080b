"""A worker's waits: each has a name and an end, asks after a while, and says who it waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal import errors
from shoal.config import Timeouts
from shoal.errors import PeerFailed, ShoalError, Stopped, WaitTimeout
from shoal.feedback import Copies
from shoal.leases import Ask, Block
from shoal.parameters import received
from shoal.partition import Plan
from shoal.rows import Content
from shoal.topology import Member
from shoal.transport import Post
from shoal.updater import Settings
from shoal.wire import Header, Kind, Lease, Message, Missing, NormAnswer, Pull, Refuse, Values, Welcome

SLICE = 0.2  # seconds of waiting between two looks at timeouts and at who else may have failed
ASKED = 16  # chunks that one round of asking asks for


@dataclass
class Outcome:
    """What came back for a step.

    Attributes:
        values: chunk → new values, or None where they did not change; of a table the rows that did.
        skipped: the group skipped the step because a gradient was not finite.
        staleness: the largest of the step's rounds, in versions.
        settings: the group's hyperparameters, where this worker's differed.
        stop: the group is to end its loop after this step.
    """

    values: dict[int, Content | None] = field(default_factory=dict)
    skipped: bool = False
    staleness: int = 0
    settings: Settings | None = None
    stop: bool = False


@dataclass
class Wait:
    """What a wait is for, and what has come so far.

    Attributes:
        what: in words, for the error.
        timeout: the name of its timeout.
        chunks: whose values are still missing.
        peers: who has still to answer.
        answer: the kind of answer that is expected from peers.
        number: what an answer carries that is this wait's and no older one's.
        asked: which values between steps.
        blamed: server → for whom it says that it waits.
        again: asks a peer once more.
    """

    what: str
    timeout: str
    optimizer: int = 0
    step: int = 0
    chunks: set[int] = field(default_factory=set)
    number: int = 0
    asked: Pull | None = None
    answer: Kind | None = None
    peers: set[str] = field(default_factory=set)
    outcome: Outcome = field(default_factory=Outcome)
    norms: dict[str, float] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    differs: bool = False
    steps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    blamed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    again: Callable[[str], None] | None = None

    def wants(self, header: Header) -> bool:
        """Whether values that came under this header are some that are still missing here."""
        here = header.chunk in self.chunks and header.number == self.number
        return here and self.step in (0, header.step)


class Waiter:
    """Handles what arrives while a worker waits.

    Args:
        server_of: the server that owns a chunk.
        check: called while waiting, with the seconds since an answer has come; raises when waiting makes no
            sense any more.
        resend: sends a server once more what it lacks of an optimizer's step: a chunk's share, or the
            commit (chunk −1).
        copies: what this worker had before, for values that come as differences.

    Attributes:
        version: chunk → version of the values that this worker has.
        opened: optimizer → the wait for its committed step's values, which may go on in portions, and between
            which others take place.
        blocks: what has been asked for of leased data → the answer, once it is here.
    """

    def __init__(
        self,
        member: Member,
        post: Post,
        plan: Plan,
        timeouts: Timeouts,
        server_of: Callable[[int], str],
        check: Callable[[float], None],
        resend: Callable[[str, int, int], None],
        copies: Copies,
    ) -> None:
        self.version: Counter[int] = Counter()
        self.opened: dict[int, Wait] = {}
        self.blocks: dict[Ask, Block | None] = {}
        self._member, self._post, self._plan, self._timeouts = member, post, plan, timeouts
        self._server_of, self._check, self._resend, self._copies = server_of, check, resend, copies
        self._handlers: dict[Kind, Callable[[Message, Wait], None]] = {
            Kind.WELCOME: self._welcome,
            Kind.VALUES: self._values,
            Kind.NORM: self._norm,
            Kind.PULL: self._send_again,
            Kind.HEARTBEAT: self._missing,
            Kind.STORED: self._stored,
            Kind.LEASE: self._lease,
            Kind.LEAVE: self._leave,
            Kind.REFUSE: self._refuse,
            Kind.STOP: self._stop,
        }

    def until(self, wait: Wait, done: Callable[[], bool]) -> None:
        """Handle messages until `done`; asks after a while, gives up after the named timeout."""
        limit: float = getattr(self._timeouts, wait.timeout)
        heard = asked = time.monotonic()
        while not done():
            message = self._post.receive(min(SLICE, self._timeouts.ask))
            now = time.monotonic()
            if message is not None:
                self._handlers.get(message.header.kind, self._unexpected)(message, wait)
                if message.header.kind not in (Kind.HEARTBEAT, Kind.PULL):  # those ask, they do not answer
                    heard = now
                continue
            self._check(now - heard)
            if now - max(asked, heard) >= self._timeouts.ask:
                asked = now
                self._ask(wait)
            if now - heard >= limit:
                raise self._timed_out(wait, limit)

    def _ask(self, wait: Wait) -> None:
        for server in sorted(wait.peers):
            if wait.again is not None:
                wait.again(server)
        for chunk in sorted(wait.chunks)[:ASKED]:
            self._ask_for(chunk, wait)

    def _ask_for(self, chunk: int, wait: Wait, base: int = 0) -> None:
        self._post.send(
            self._server_of(chunk),
            Kind.PULL,
            wait.asked,
            group=self._member.group,
            chunk=chunk,
            step=wait.step,
            number=wait.number,
            base=base,
        )

    def _timed_out(self, wait: Wait, limit: float) -> WaitTimeout:
        servers = sorted(wait.peers | {self._server_of(chunk) for chunk in wait.chunks})
        which = [f"{server}, which waits for {', '.join(wait.blamed[server])}" for server in wait.blamed]
        chunk = min(wait.chunks, default=None)
        version = f" (chunk {chunk}, version {self.version[chunk]})" if chunk is not None else ""
        return WaitTimeout(
            f"waited {limit:g} s (timeouts.{wait.timeout}) for {wait.what} from "
            f"{'; '.join(which) or ', '.join(servers)}{version}",
            member=self._member.name,
            step=wait.step or None,
            remedy=f"see the logs of those members; raise timeouts.{wait.timeout} if they are only slow",
        )

    # What may arrive meanwhile.

    def _welcome(self, message: Message, wait: Wait) -> None:
        body = message.body(Welcome)
        if wait.answer is not Kind.WELCOME:
            return
        wait.peers.discard(message.header.sender)
        wait.steps[message.header.sender] = body.steps
        wait.differs |= body.differs

    def _waits(self, running: Wait) -> list[Wait]:
        return [running, *(wait for wait in self.opened.values() if wait is not running)]

    def _values(self, message: Message, running: Wait) -> None:
        header = message.header
        wait = next((wait for wait in self._waits(running) if wait.wants(header)), None)
        if wait is None:
            return  # answered twice
        chunk, body, outcome = self._plan.chunks[header.chunk], message.body(Values), wait.outcome
        values = received(message.frames, header.codec, chunk, header.sender) if message.frames else None
        if wait.number <= 0:  # the group's own
            if not self._copies.current(chunk, body.base):
                self._ask_for(chunk.number, wait, base=-1)
                return
            values = self._copies.take(chunk, values, body)
        outcome.values[chunk.number] = values
        outcome.skipped |= body.skipped
        outcome.staleness = max(outcome.staleness, body.staleness)
        outcome.settings = body.settings or outcome.settings
        outcome.stop |= body.stop
        if wait.number <= 0:
            self.version[chunk.number] = header.version
        wait.chunks.discard(chunk.number)

    def _norm(self, message: Message, wait: Wait) -> None:
        asked = (Kind.NORM, wait.step, wait.number)
        if (wait.answer, message.header.step, message.header.number) == asked:
            wait.norms[message.header.sender] = message.body(NormAnswer).squared
            wait.peers.discard(message.header.sender)

    def _send_again(self, message: Message, running: Wait) -> None:
        header = message.header
        for wait in self._waits(running):
            if wait.step == header.step and self._concerns(header.chunk, wait):
                wait.blamed[header.sender] = (self._member.name,)
                self._resend(header.sender, wait.optimizer, header.chunk)

    def _concerns(self, chunk: int, wait: Wait) -> bool:
        if chunk < 0:  # the commit: a norm's wait comes before its own, and must not ask for another's
            return self.opened.get(wait.optimizer) is wait
        return self._plan.chunks[chunk].optimizer == wait.optimizer

    def _missing(self, message: Message, wait: Wait) -> None:
        wait.blamed[message.header.sender] = message.body(Missing).members

    def _stored(self, message: Message, wait: Wait) -> None:
        if (wait.answer, message.header.number) == (Kind.STORED, wait.number):
            wait.stored.add(message.header.chunk)

    def _lease(self, message: Message, wait: Wait) -> None:
        body = message.body(Lease)
        if body.ask in self.blocks:  # not answered twice
            self.blocks[body.ask] = body.block

    def _leave(self, message: Message, wait: Wait) -> None:
        if (wait.answer, message.header.number) == (Kind.LEAVE, wait.number):
            wait.peers.discard(message.header.sender)

    def _refuse(self, message: Message, wait: Wait) -> None:
        body = message.body(Refuse)
        kind = getattr(errors, body.error, PeerFailed)
        if not (isinstance(kind, type) and issubclass(kind, ShoalError)):
            kind = PeerFailed
        raise kind(body.what, member=self._member.name, step=wait.step or None)

    def _stop(self, message: Message, wait: Wait) -> None:
        raise Stopped

    def _unexpected(self, message: Message, wait: Wait) -> None:
        raise errors.ProtocolError(
            f"{message.header.sender} sent a {message.header.kind.name.lower()}, which no worker expects"
        )
