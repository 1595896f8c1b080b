"""A worker's half of a step on the wire: begin_step, share, commit, wait, close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from shoal.codecs import EXACT, Coded, Coding
from shoal.config import Timeouts
from shoal.errors import WaitTimeout
from shoal.feedback import Copies, Residuals
from shoal.leases import Ask, Block
from shoal.parameters import Frames, codec_of, frames_of
from shoal.partition import Chunk, Plan
from shoal.rows import Content
from shoal.start import Start
from shoal.topology import Member, Topology
from shoal.transport import Post, Token
from shoal.updater import Settings
from shoal.waiting import Outcome, Wait, Waiter
from shoal.wire import Commit, Hello, Init, Kind, Lease, Leave, Norm, Pull


@dataclass
class Decision:
    """What a worker decided about a step of an optimizer; fields as in wire.Commit."""

    counts: set[int]
    touched: dict[int, tuple[int, ...]]
    weight: float
    finite: bool = True
    scale: float = 1.0
    clip: float = 1.0
    settings: Settings | None = None
    cursor: tuple[int, ...] = ()
    stop: bool = False
    limit: float | None = None


class Exchange:
    """One worker's exchange with the servers of its group.

    Args:
        post: its letters.
        plan: what is exchanged.
        check: see Waiter.
        coding: how gradients and values are encoded.
    """

    def __init__(
        self,
        member: Member,
        topology: Topology,
        post: Post,
        plan: Plan,
        timeouts: Timeouts,
        check: Callable[[float], None],
        coding: Coding = EXACT,
    ) -> None:
        self.member = member
        self.plan = plan
        self.resent = 0
        self.steps: Counter[int] = Counter()
        self._post, self._timeouts = post, timeouts
        post.plan = plan.digest
        self._servers = [server.name for server in topology.servers_of(member)]
        self._chunks: dict[int, list[Chunk]] = {}
        self._owned: dict[int, dict[str, set[int]]] = {}
        for chunk in plan.chunks:
            self._chunks.setdefault(chunk.optimizer, []).append(chunk)
            owned = self._owned.setdefault(chunk.optimizer, {server: set() for server in self._servers})
            owned[self.server_of(chunk.number)].add(chunk.number)
        self._numbers: Counter[int] = Counter()
        self._sent: dict[int, Content | Coded] = {}
        self._frames = Frames()
        self._residuals = Residuals(coding)
        self._decided: dict[int, Decision] = {}
        self._tokens: dict[int, Token] = {}
        self._totals: Counter[str] = Counter()
        self._questions = self._pulls = self._loops = self._edits = 0
        self._commits: dict[tuple[str, int], Commit] = {}
        copies = Copies(coding)
        self._waiter = Waiter(member, post, plan, timeouts, self.server_of, check, self._resend, copies)

    @property
    def pushed(self) -> int:
        """Shares pushed so far, however often they were sent."""
        return self._totals.total()

    @property
    def traffic(self) -> Counter[str]:
        """Payload bytes sent so far, by receiver."""
        return self._post.endpoint.traffic

    def server_of(self, chunk: int) -> str:
        """The name of the server that owns a chunk."""
        return self._servers[self.plan.chunks[chunk].server]

    # The start.

    def join(self, hello: Hello, start: Start | None, late: str = "") -> tuple[Outcome, bool]:
        """Greet the servers, hand them the start (worker 0.0 only), take the common one.

        Args:
            late: why the start may be long in coming, if it may: the wait is then timeouts.finish's.

        Returns:
            the values of all chunks, and whether this worker's own start was another.
        """
        for server in self._servers:
            self._post.send(server, Kind.HELLO, hello)
        for chunk, entries, frames in start or ():
            self._post.send(self.server_of(chunk), Kind.INIT, Init(tuple(entries)), frames, chunk=chunk)
        first = "" if start is not None else "worker 0.0 to call prepare() and then for "
        what, timeout = (late, "finish") if late else (f"{first}the servers' welcome", "start")
        wait = Wait(what, timeout, answer=Kind.WELCOME, peers=set(self._servers))
        self._waiter.until(wait, lambda: not wait.peers)
        for optimizer in range(len(hello.optimizers)):
            owned = self._by_server(optimizer)  # a server without a chunk of it closes no step of it
            steps = [told[optimizer] for server, told in wait.steps.items() if owned[server]]
            self.steps[optimizer] = min(steps, default=0)
        return self.pull(late=late), wait.differs

    # One step.

    def begin_step(self, optimizer: int) -> int:
        """Start the next step of an optimizer; returns its number, counted from 1."""
        for chunk in self.chunks_of(optimizer):
            self._numbers[chunk.number] = 0
        return self.steps[optimizer] + 1

    def chunks_of(self, optimizer: int) -> Sequence[Chunk]:
        """The chunks that belong to an optimizer."""
        return self._chunks.get(optimizer, ())

    def share(self, chunk: Chunk, slot: Content, touched: Collection[int] = ()) -> None:
        """Push the gradient in the slot; the slot belongs to the wire until the chunk's values arrive.

        Args:
            touched: pieces of the chunk that have a gradient.
        """
        number = chunk.number
        self._numbers[number] += 1
        self._totals[self.server_of(number)] += 1
        self._sent[number] = self._residuals.encode(chunk, slot, touched)
        self._send_share(chunk)

    def _send_share(self, chunk: Chunk) -> None:
        number = chunk.number
        self._tokens[number] = self._post.send(
            self.server_of(number),
            Kind.SHARE,
            frames=self._frames.of(number, self._sent[number]),
            group=self.member.group,
            step=self.steps[chunk.optimizer] + 1,
            number=self._numbers[number],
            chunk=number,
            base=self._waiter.version[number],
            codec=codec_of(self._sent[number]),
            dtype=chunk.dtype,
        )

    def reclaim(self, chunk: Chunk) -> None:
        """Wait until the wire has sent what the slot holds, so that it may be written to again."""
        token, seconds = self._tokens.pop(chunk.number, None), self._timeouts.values
        if token is not None and not token.wait(seconds):
            raise WaitTimeout(
                f"waited {seconds:g} s (timeouts.values) for {self.server_of(chunk.number)} to take a "
                f"share of chunk {chunk.number}",
                member=self.member.name,
                step=self.steps[chunk.optimizer] + 1,
            )

    def norm(self, optimizer: int, decision: Decision) -> float:
        """The norm of the group's averaged gradient (float64), nan where a worker's is not finite."""
        step = self.steps[optimizer] + 1
        owned = self._by_server(optimizer)
        self._questions += 1
        asked: set[str] = set()

        def ask(server: str) -> None:
            numbers = {c: self._numbers[c] for c in owned[server] & decision.counts}
            touched = {c: t for c, t in decision.touched.items() if c in owned[server]}
            weight, finite, again = decision.weight, decision.finite, server in asked
            body = Norm(optimizer, numbers, touched, weight, finite, decision.scale, again)
            asked.add(server)
            group, number = self.member.group, self._questions
            self._post.send(server, Kind.NORM, body, group=group, step=step, number=number)

        wait = Wait(
            "the norm of the group's gradient", "values", optimizer, step, answer=Kind.NORM, again=ask
        )
        wait.number, wait.peers = self._questions, set(self._servers)
        for server in self._servers:
            ask(server)
        self._waiter.until(wait, lambda: not wait.peers)
        squared = sum(wait.norms[server] for server in self._servers)
        return float(squared**0.5) / decision.scale if squared == squared else squared

    def commit(self, optimizer: int, decision: Decision) -> None:
        """Tell every server of the group what this step is."""
        self._decided[optimizer] = decision
        for position, (server, chunks) in enumerate(self._by_server(optimizer).items()):
            body = Commit(
                optimizer,
                {c: self._numbers[c] for c in chunks if self._numbers[c]},
                tuple(sorted(chunks & decision.counts)),
                {c: t for c, t in decision.touched.items() if c in chunks},
                decision.weight,
                decision.finite,
                decision.scale,
                decision.clip,
                self._totals[server],
                decision.settings,
                decision.cursor if position == 0 else (),
                decision.stop,
                decision.limit,
            )
            self._commits[server, optimizer] = body
            self._send_commit(server, optimizer)
        chunks = {chunk.number for chunk in self.chunks_of(optimizer)}
        self._waiter.opened[optimizer] = Wait(
            "new values", "values", optimizer, self.steps[optimizer] + 1, chunks
        )

    def _send_commit(self, server: str, optimizer: int) -> None:
        body, step = self._commits[server, optimizer], self.steps[optimizer] + 1
        self._post.send(server, Kind.COMMIT, body, group=self.member.group, step=step)

    def _resend(self, server: str, optimizer: int, chunk: int) -> None:
        """A server lacks a share of the step in progress, or (chunk −1) the commit."""
        if chunk < 0:
            self._send_commit(server, optimizer)
        else:
            self.resent += 1
            self._send_share(self.plan.chunks[chunk])

    def taken(self, optimizer: int) -> int:
        """The last committed step of an optimizer; its values may still be on their way."""
        return self.steps[optimizer] + (optimizer in self._waiter.opened)

    def wait(self, optimizer: int, chunks: Collection[int] | None = None) -> Outcome:
        """Wait for the new values of all chunks of the optimizer; the committed step is then over.

        Args:
            chunks: wait for these only, and the step is not over yet.
        """
        wait = self._waiter.opened[optimizer]
        if chunks is not None:
            self._waiter.until(wait, lambda: wait.chunks.isdisjoint(chunks))
            return wait.outcome
        self._waiter.until(wait, lambda: not wait.chunks)
        del self._waiter.opened[optimizer]
        self.steps[optimizer] = wait.step
        decision = self._decided.pop(optimizer)
        counted = () if wait.outcome.skipped else decision.counts
        self._residuals.settle((chunk.number for chunk in self.chunks_of(optimizer)), counted, decision.scale)
        return wait.outcome

    def _by_server(self, optimizer: int) -> dict[str, set[int]]:
        return self._owned.get(optimizer) or {server: set() for server in self._servers}

    # Between steps, and the end.

    def pull(self, asked: Pull | None = None, late: str = "") -> Outcome:
        """All chunks' values: the group's own, or what is `asked` of the server group's present ones.

        Args:
            late: as in join().
        """
        self._pulls += 1
        number = -self._pulls if asked is None else self._pulls  # no older answer is taken for this one's
        for server in self._servers:
            self._post.send(server, Kind.PULL, asked, number=number, group=self.member.group)
        chunks = {chunk.number for chunk in self.plan.chunks}
        what, timeout = (late, "finish") if late else ("all values", "values")
        wait = Wait(what, timeout, chunks=chunks, number=number, asked=asked)
        self._waiter.until(wait, lambda: not wait.chunks)
        return wait.outcome

    def leave(self) -> None:
        """Say that this worker's loop has ended; others no longer wait for it."""
        self._loops += 1
        for server in self._servers:
            self._send_leave(server)

    def _send_leave(self, server: str) -> None:
        group, total = self.member.group, self._totals[server]
        self._post.send(server, Kind.LEAVE, Leave(total), group=group, number=self._loops)

    def editing(self) -> AbstractContextManager[None]:
        """A context in which the script changes values, to be handed to `edit` in it."""
        return nullcontext()

    def edit(self, edited: Mapping[int, Sequence[Content]]) -> None:
        """Hand the servers what the script has changed; waits until it is in.

        Args:
            edited: chunk → its new values; of a table the changed rows as they are now and as they were.
        """
        self._edits += 1
        servers = {self.server_of(chunk) for chunk in edited}
        what = "changed values to be stored"
        wait = Wait(what, "values", answer=Kind.STORED, peers=servers, number=self._edits)

        def send(server: str) -> None:
            for chunk in edited.keys() - wait.stored:
                if self.server_of(chunk) == server:
                    frames = [frame for content in edited[chunk] for frame in frames_of(content)]
                    group, edit = self.member.group, self._edits
                    self._post.send(server, Kind.INIT, Init(), frames, group=group, chunk=chunk, number=edit)

        wait.again = send
        for server in servers:
            send(server)
        self._waiter.until(wait, lambda: wait.stored >= edited.keys())

    def request(self, ask: Ask) -> None:
        """Ask server 0 for a block of leased data, unless that was asked; the answer may come at any wait."""
        if ask not in self._waiter.blocks:
            self._waiter.blocks[ask] = None
            self._send_ask(ask)

    def _send_ask(self, ask: Ask) -> None:
        self._post.send(self._servers[0], Kind.LEASE, Lease(ask), group=self.member.group)

    def block(self, ask: Ask) -> Block:
        """The block of leased data that a batch of the group is in; waits for it."""
        self.request(ask)
        blocks = self._waiter.blocks
        wait = Wait("the next block of leased data", "values", peers={self._servers[0]})
        wait.again = lambda server: self._send_ask(ask)
        while (block := blocks[ask]) is None:
            self._waiter.until(wait, lambda: blocks[ask] is not None)
        del blocks[ask]
        return block

    def settle(self) -> None:
        """After leave(): wait until all groups have left and their updates are everywhere."""
        what = "the other groups to finish and the last sync"
        wait = Wait(what, "finish", answer=Kind.LEAVE, peers=set(self._servers))
        wait.again, wait.number = self._send_leave, self._loops
        self._waiter.until(wait, lambda: not wait.peers)

    def close(self) -> None:
        """Say goodbye; servers end when all of their workers have."""
        for server in self._servers:
            self._post.send(server, Kind.STOP)
        self._post.close()
