"""A worker's waits: each has a name and an end, asks after a while, and says who it waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal import errors
from shoal.config import Timeouts
from shoal.errors import PeerFailed, ShoalError, Stopped, WaitTimeout
from shoal.parameters import received
from shoal.partition import Plan
from shoal.rows import Content
from shoal.topology import Member
from shoal.transport import Post
from shoal.updater import Settings
from shoal.wire import Kind, Message, Missing, NormAnswer, Refuse, Values, Welcome

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
        blamed: server → for whom it says that it waits.
        again: asks a peer once more.
    """

    what: str
    timeout: str
    optimizer: int = 0
    step: int = 0
    chunks: set[int] = field(default_factory=set)
    number: int = 0
    answer: Kind | None = None
    peers: set[str] = field(default_factory=set)
    outcome: Outcome = field(default_factory=Outcome)
    norms: dict[str, float] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    differs: bool = False
    steps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    blamed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    again: Callable[[str], None] | None = None


class Waiter:
    """Handles what arrives while a worker waits.

    Args:
        server_of: the server that owns a chunk.
        check: called while waiting; raises when something else in this process has failed.
        resend: sends a server once more what it lacks of an optimizer's step: a chunk's share, or the
            commit (chunk −1).

    Attributes:
        version: chunk → version of the values that this worker has.
    """

    def __init__(
        self,
        member: Member,
        post: Post,
        plan: Plan,
        timeouts: Timeouts,
        server_of: Callable[[int], str],
        check: Callable[[], None],
        resend: Callable[[str, int, int], None],
    ) -> None:
        self.version: Counter[int] = Counter()
        self._member, self._post, self._plan, self._timeouts = member, post, plan, timeouts
        self._server_of, self._check, self._resend = server_of, check, resend
        self._handlers: dict[Kind, Callable[[Message, Wait], None]] = {
            Kind.WELCOME: self._welcome,
            Kind.VALUES: self._values,
            Kind.NORM: self._norm,
            Kind.PULL: self._send_again,
            Kind.HEARTBEAT: self._missing,
            Kind.STORED: self._stored,
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
            self._check()
            if now - asked >= self._timeouts.ask:
                asked = now
                self._ask(wait)
            if now - heard >= limit:
                raise self._timed_out(wait, limit)

    def _ask(self, wait: Wait) -> None:
        for server in sorted(wait.peers):
            if wait.again is not None:
                wait.again(server)
        for chunk in sorted(wait.chunks)[:ASKED]:
            self._post.send(
                self._server_of(chunk),
                Kind.PULL,
                group=self._member.group,
                chunk=chunk,
                step=wait.step,
                number=wait.number,
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

    def _values(self, message: Message, wait: Wait) -> None:
        header = message.header
        stale = wait.step and header.step != wait.step
        if header.chunk not in wait.chunks or stale or header.number != wait.number:
            return  # answered twice
        chunk, body = self._plan.chunks[header.chunk], message.body(Values)
        outcome = wait.outcome
        outcome.values[chunk.number] = (
            received(message.frames, header.codec, chunk, header.sender) if message.frames else None
        )
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

    def _send_again(self, message: Message, wait: Wait) -> None:
        header = message.header
        if header.step != wait.step:
            return
        wait.blamed[header.sender] = (self._member.name,)
        self._resend(header.sender, wait.optimizer, header.chunk)

    def _missing(self, message: Message, wait: Wait) -> None:
        wait.blamed[message.header.sender] = message.body(Missing).members

    def _stored(self, message: Message, wait: Wait) -> None:
        if (wait.answer, message.header.number) == (Kind.STORED, wait.number):
            wait.stored.add(message.header.chunk)

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
