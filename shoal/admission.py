"""Which shares count, when a round closes, when its values may go: pure rules.

`admit(message)` takes one message and returns what to do about it, in order. It reads no clock and does no
I/O; time and death come in as messages. The server and any simulator run the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeVar

from shoal.acts import (
    Action,
    Answer,
    Apply,
    Ask,
    Average,
    Commit,
    Event,
    Gone,
    Hold,
    Join,
    Leave,
    Left,
    Measure,
    Norm,
    Owned,
    Pull,
    Release,
    Reply,
    Returned,
    Share,
    Tell,
    Warm,
)
from shoal.clocks import Clocks
from shoal.errors import ProtocolError
from shoal.ledger import Ledger, Life
from shoal.shares import Shares

_Said = TypeVar("_Said", Commit, Norm)


class Admission:
    """The rounds of one server.

    Args:
        groups: worker group → number of its workers, for the groups that this server serves.
        chunks: the server's chunks.
        max_delay: how many steps a group may be ahead of the slowest; None = any.
        warmup: how many steps group 0 takes before the other groups begin.
    """

    def __init__(
        self,
        groups: Mapping[int, int],
        chunks: Mapping[int, Owned],
        max_delay: int | None = None,
        warmup: int = 0,
    ) -> None:
        self.ledger = Ledger()
        self.rounds = 0
        self._workers = dict(groups)
        self._chunks = dict(chunks)
        self._warmup = warmup if chunks and 0 in groups else 0
        self._clocks = Clocks(groups, chunks, max_delay, {0} if self._warmup else groups)
        self._left: dict[int, set[int]] = {group: set() for group in groups}
        self._incarnation = dict.fromkeys(groups, 0)
        self._shares = Shares()
        self._commits: dict[tuple[int, int], dict[int, Commit]] = {}
        self._norms: dict[tuple[int, int], dict[int, Norm]] = {}
        self._averages: dict[tuple[int, int], list[Average]] = {}
        self._parameters: dict[int, list[int]] = {}
        for chunk, owned in chunks.items():
            if not owned.buffer:
                self._parameters.setdefault(owned.optimizer, []).append(chunk)
        self._parked: dict[int, dict[int, Reply]] = {chunk: {} for chunk in chunks}

    # What others may ask.

    def workers(self, group: int) -> int:
        """How many workers the group has."""
        return self._workers[group]

    def version(self, chunk: int) -> int:
        """Rounds closed on the chunk by all groups."""
        return self._clocks.version(chunk)

    def clock(self, group: int, chunk: int) -> int:
        """The group's clock on the chunk: its closed rounds, level with the slowest where it returned."""
        return self._clocks.at(group, chunk)

    def closed(self, group: int, chunk: int) -> int:
        """The last step of the group whose round on the chunk is closed."""
        return self._clocks.closed[group][chunk]

    def last_step(self, group: int, optimizer: int) -> int:
        """The last step of the group that is closed on every chunk of the optimizer here."""
        steps = [s for c, s in self._clocks.closed[group].items() if self._chunks[c].optimizer == optimizer]
        return min(steps, default=0)

    def has_left(self, group: int) -> bool:
        """Whether every worker of the group has left, or the group is gone."""
        return group not in self._clocks.live

    @property
    def warming(self) -> bool:
        """Whether group 0 still trains alone."""
        return self._warmup > 0

    def cold(self, group: int) -> bool:
        """Whether the group still waits for the end of group 0's warm-up."""
        return self.warming and group != 0

    # One message in, actions out.

    def admit(self, event: Event) -> list[Action]:
        """Take one message; returns what to do, in order. Raises ProtocolError for an impossible one."""
        match event:
            case Share():
                return self._share(event)
            case Commit():
                return self._commit(event)
            case Norm():
                return self._norm(event)
            case Pull():
                return self._pull(event)
            case Join():
                return self._join(event)
            case Leave():
                return self._leave(event)
            case Gone():
                return self._gone(event.group)

    def _share(self, share: Share) -> list[Action]:
        group, rank, incarnation = share.life
        if incarnation < self._incarnation[group]:
            return []  # its commit will never come; Join has settled that life
        closed = self._clocks.closed[group][share.chunk]
        if share.step > closed + 1:
            raise ProtocolError(
                f"worker {group}.{rank} pushed chunk {share.chunk} of step {share.step}, "
                f"but step {closed + 1} comes next"
            )
        self.ledger.duplicate += self._shares.repeats(share)
        if share.step <= closed:
            return [] if group in self._parked[share.chunk] else [Answer(share.chunk, group, rank, closed)]
        if not self._shares.hold(share):
            return []
        actions: list[Action] = [Hold(share)]
        actions += self._measure(group, self._chunks[share.chunk].optimizer)
        actions += self._close(group, share.chunk)
        return actions

    def _commit(self, commit: Commit) -> list[Action]:
        group, rank, incarnation = commit.life
        if incarnation < self._incarnation[group]:
            return []
        key = (group, commit.optimizer)
        commits = self._commits.setdefault(key, {})
        current = next(iter(commits.values())).step if commits else 0
        if commit.step < current or (rank in commits and commits[rank].step == commit.step):
            return []  # sent again; the worker asks for what it lacks
        if commit.step > current:
            if commits and self.last_step(*key) < current and self._owns(commit.optimizer):
                raise ProtocolError(
                    f"worker {group}.{rank} commits step {commit.step} while step {current} is open"
                )
            commits.clear()
        commits[rank] = commit
        self.ledger.tell(commit.life, commit.total)
        actions = self._return(group)
        for chunk, owned in self._chunks.items():
            if owned.optimizer == commit.optimizer:
                if self._clocks.closed[group][chunk] >= commit.step:  # closed here before its group died
                    self.ledger.drop(commit.life, "torn", commit.pushed.get(chunk, 0))
                    actions.append(Answer(chunk, group, rank, self._clocks.closed[group][chunk]))
                else:
                    actions += self._close(group, chunk)
        return actions

    def _close(self, group: int, chunk: int) -> list[Action]:
        """Close the chunk's round if all commits and all counting shares are in."""
        owned = self._chunks[chunk]
        commits = self._complete(self._commits.get((group, owned.optimizer), {}), group)
        if commits is None or self._clocks.closed[group][chunk] >= commits[0].step:
            return []
        counting = [c for c in commits if c.weight > 0]
        finite = all(c.finite for c in counting)
        average = self._average(group, chunk, counting) if finite else None
        if finite and average is None:
            return []
        ranks = average.ranks if average is not None else ()
        bases = [self._shares.base(group, rank, chunk) for rank in ranks]
        staleness = self.version(chunk) - min(bases) if bases and not owned.buffer else -1
        step = commits[0].step
        self._account(commits, chunk, average)
        self._clocks.closed[group][chunk] = step
        self.rounds += 1
        self._parked[chunk][group] = Reply(chunk, group, step, not finite, staleness)
        actions: list[Action] = []
        if average is not None and average.ranks:
            actions.append(Apply(average, step, staleness))
        actions += self._shares.release(group, chunk)
        return actions + self._unpark(chunk) + self._warm()

    def _account(self, commits: Iterable[Commit], chunk: int, average: Average | None) -> None:
        for commit in commits:
            pushed = commit.pushed.get(chunk, 0)
            if average is not None and commit.life.rank in average.ranks:
                self.ledger.apply(commit.life)
                pushed -= 1
            elif average is None and commit.counts.get(chunk):
                self.ledger.drop(commit.life, "non-finite")
                pushed -= 1
            self.ledger.drop(commit.life, "superseded", pushed)

    def _average(self, group: int, chunk: int, counting: Iterable[Commit | Norm]) -> Average | None:
        """How the counting shares combine; None while one is missing."""
        commits = tuple(counting)
        sharing = [c for c in commits if c.counts.get(chunk)]
        if not all(self._shares.has(group, c.life.rank, chunk, c.counts[chunk]) for c in sharing):
            return None
        over = sharing if self._chunks[chunk].buffer else commits
        weights = [c.weight for c in over]
        total = sum(weights)
        equal = len(set(weights)) <= 1
        parts = None if equal else tuple(c.weight / total for c in sharing)
        touched: set[int] | None = set()
        for commit in sharing:
            pieces = commit.touched.get(chunk)
            touched = None if pieces is None or touched is None else touched | set(pieces)
        return Average(
            chunk,
            group,
            tuple(c.life.rank for c in sharing),
            parts,
            len(over),
            None if touched is None else tuple(sorted(touched)),
        )

    def _norm(self, norm: Norm) -> list[Action]:
        group, rank, incarnation = norm.life
        if incarnation < self._incarnation[group]:
            return []
        norms = self._norms.setdefault((group, norm.optimizer), {})
        if norms and next(iter(norms.values())).step < norm.step:
            norms.clear()
        norms[rank] = norm
        self._averages.pop((group, norm.optimizer), None)
        actions = self._measure(group, norm.optimizer)
        if norm.again and not actions:
            for chunk, number in norm.counts.items():
                if not self._shares.has(group, rank, chunk, number):
                    actions.append(Ask(group, rank, chunk, norm.step))
        return actions

    def _measure(self, group: int, optimizer: int) -> list[Action]:
        """Answer the norm when all workers' questions and all their shares are in."""
        key = (group, optimizer)
        norms = self._complete(self._norms.get(key, {}), group)
        if norms is None:
            return []
        counting = [norm for norm in norms if norm.weight > 0]
        finite = all(norm.finite for norm in counting)
        averages = self._averages.setdefault(key, [])  # goes on where the last share's arrival left it
        for chunk in islice(self._parameters.get(optimizer, ()), len(averages), None) if finite else ():
            average = self._average(group, chunk, counting)
            if average is None:
                return []
            averages.append(average)
        step = norms[0].step
        if self.last_step(group, optimizer) >= step:
            return []
        self._norms[key] = {}
        return [Measure(group, optimizer, step, tuple(averages) if finite else None)]

    def _pull(self, pull: Pull) -> list[Action]:
        group, rank, _ = pull.life
        chunk = pull.chunk
        closed = self._clocks.closed[group][chunk]
        if group in self._parked[chunk]:
            return [Tell(group, rank, pull.step, (), self._clocks.slowest(chunk))]
        if closed >= pull.step:
            return [Answer(chunk, group, rank, closed, pull.whole)]
        commits = self._commits.get((group, self._chunks[chunk].optimizer), {})
        here = {r: c for r, c in commits.items() if c.step == pull.step}
        if rank not in here:
            return [Ask(group, rank, -1, pull.step)]
        missing = [r for r in range(self._workers[group]) if r not in here]
        for r, commit in here.items():
            number = commit.counts.get(chunk, 0)
            if number and not self._shares.has(group, r, chunk, number):
                missing.append(r)
        if rank in missing:
            return [Ask(group, rank, chunk, pull.step)]
        return [Tell(group, rank, pull.step, tuple(sorted(missing)), ())]

    # Who takes part.

    def _join(self, join: Join) -> list[Action]:
        group, _, incarnation = join.life
        if incarnation <= self._incarnation[group]:
            return []
        returned = self._incarnation[group] > 0
        self._incarnation[group] = incarnation
        actions: list[Action] = []
        if returned:
            actions += self._bury(group, incarnation)
            self._clocks.join(group)
            actions += [action for chunk in self._chunks for action in self._unpark(chunk)]
        return actions

    def _bury(self, group: int, incarnation: int) -> list[Release]:
        """Drop what an older life of the group left unfinished."""
        released, sent = self._shares.bury(group)
        for rank in range(self._workers[group]):
            self.ledger.settle(Life(group, rank, incarnation - 1), "dead", sent[rank])
        self._commits = {key: said for key, said in self._commits.items() if key[0] != group}
        self._norms = {key: said for key, said in self._norms.items() if key[0] != group}
        for parked in self._parked.values():
            parked.pop(group, None)
        return released

    def _return(self, group: int) -> list[Action]:
        """A group that had left commits again: it takes part from now on, level with the slowest.

        A share alone does not bring it back: one that no commit followed may arrive after its worker's leave.
        """
        self._left[group].clear()
        if group in self._clocks.live:
            return []
        self._clocks.join(group)
        return [Returned(group)]

    def _leave(self, leave: Leave) -> list[Action]:
        group, rank, incarnation = leave.life
        if incarnation < self._incarnation[group] or rank in self._left[group]:
            return []
        self.ledger.tell(leave.life, leave.total)
        self.ledger.settle(leave.life)
        self._left[group].add(rank)
        if len(self._left[group]) < self._workers[group]:
            return []
        forgotten = [a for chunk in self._chunks for a in self._shares.release(group, chunk)]
        return [*forgotten, *self._gone(group)]

    def _gone(self, group: int) -> list[Action]:
        self._clocks.live.discard(group)
        released = [action for chunk in self._chunks for action in self._unpark(chunk)]
        return [*released, Left(group), *self._warm()]

    def _warm(self) -> list[Action]:
        """Let the other groups begin, level with group 0, once it has closed its steps alone or has left."""
        if not self.warming or (not self.has_left(0) and min(self._clocks.closed[0].values()) < self._warmup):
            return []
        self._warmup = 0
        for group in self._workers:
            if group:
                self._clocks.join(group)
        return [Warm()]

    # Parking.

    def _unpark(self, chunk: int) -> list[Action]:
        """Replies on the chunk that `max_delay` lets go."""
        parked = self._parked[chunk]
        if not parked:
            return []
        ready = [group for group in parked if self._clocks.allow(group, chunk)]
        return [parked.pop(group) for group in ready]

    def _complete(self, said: Mapping[int, _Said], group: int) -> tuple[_Said, ...] | None:
        """All workers' messages in the order of ranks, or None while one is missing."""
        if len(said) < self._workers[group]:
            return None
        return tuple(said[rank] for rank in sorted(said))

    def _owns(self, optimizer: int) -> bool:
        return any(owned.optimizer == optimizer for owned in self._chunks.values())
