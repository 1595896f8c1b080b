"""The rules of rounds, under every order of arrival that the protocol allows, against an oracle."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from shoal.admission import Admission
from shoal.errors import ProtocolError
from shoal.ledger import Life

PIECES = 3


@dataclass(frozen=True)
class Said:
    """What one worker decides about one step, before anything is sent."""

    optimizer: int
    pushed: dict[int, int]
    counts: dict[int, int]
    touched: dict[int, tuple[int, ...]]
    weight: float
    finite: bool
    asks: bool


@dataclass
class Case:
    """A cluster of groups on one server, and everything its workers will say."""

    groups: dict[int, int]
    chunks: dict[int, Owned]
    max_delay: int | None
    steps: dict[int, list[int]]  # group → optimizer of each iteration
    said: dict[tuple[int, int, int, int], Said] = field(default_factory=dict)  # group, rank, optimizer, step
    trailing: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # chunks never committed

    @classmethod
    def drawn(cls, rng: random.Random) -> Case:
        groups = {g: rng.randint(1, 3) for g in range(rng.randint(1, 3))}
        chunks = {c: Owned(rng.randint(0, 1), rng.random() < 0.25) for c in range(rng.randint(1, 4))}
        script = [rng.randint(0, 1) for _ in range(6)]  # one for all: max_delay cannot mend another order
        steps = {g: script[: rng.randint(0, 6)] for g in groups}
        case = cls(groups, chunks, rng.choice([None, 0, 1, 2]), steps)
        for group, optimizers in steps.items():
            done = Counter[int]()
            for optimizer in optimizers:
                done[optimizer] += 1
                case._say(rng, group, optimizer, done[optimizer])
            for rank in range(groups[group]):
                case.trailing[group, rank] = tuple(c for c in chunks if rng.random() < 0.1)
        return case

    def _say(self, rng: random.Random, group: int, optimizer: int, step: int) -> None:
        asks = rng.random() < 0.3
        for rank in range(self.groups[group]):
            ours = [c for c, owned in self.chunks.items() if owned.optimizer == optimizer]
            weight = rng.choice([0, 1, 1, 1, 3])
            most = 2 if weight else 0
            pushed = {c: n for c in ours if (n := rng.randint(0, most))}
            counts = {c: n for c, n in pushed.items() if rng.random() < 0.9}
            touched = {c: (rng.randrange(PIECES),) for c in counts if rng.random() < 0.3}
            finite = rng.random() < 0.9
            self.said[group, rank, optimizer, step] = Said(
                optimizer, pushed, counts, touched, weight, finite, asks
            )

    def average(self, group: int, chunk: int, optimizer: int, step: int) -> Average | None:
        """What the round's average must be; None = the step is skipped."""
        everyone = [(r, self.said[group, r, optimizer, step]) for r in range(self.groups[group])]
        weighty = [(r, s) for r, s in everyone if s.weight > 0]
        if not all(s.finite for _, s in weighty):
            return None
        sharing = [(r, s) for r, s in weighty if chunk in s.counts]
        over = sharing if self.chunks[chunk].buffer else weighty
        total = sum(s.weight for _, s in over)
        parts = None if len({s.weight for _, s in over}) < 2 else tuple(s.weight / total for _, s in sharing)
        touched = None
        if all(chunk in s.touched for _, s in sharing):
            touched = tuple(sorted({p for _, s in sharing for p in s.touched[chunk]}))
        return Average(chunk, group, tuple(r for r, _ in sharing), parts, len(over), touched)


Key = tuple[type, Life, int, int, int]


def key_of(event: Event) -> Key:
    """What makes a message the same message when it comes again."""
    match event:
        case Share(life, chunk, step, number, _):
            return Share, life, chunk, step, number
        case Commit(life, optimizer, step) | Norm(life, optimizer, step):
            return type(event), life, optimizer, step, 0
        case Pull(life) | Leave(life):
            return type(event), life, 0, 0, 0
    raise AssertionError(event)


class Worker:
    """One worker of a case: two lanes to the server, and what it still waits for."""

    def __init__(self, world: World, group: int, rank: int) -> None:
        self.life = Life(group, rank, 1)
        self.lanes: dict[str, list[Event]] = {"bulk": [], "control": []}
        self.total = self.at = 0
        self.step = Counter[int]()
        self.missing: set[int] = set()
        self.waits_for_norm = self.left = False
        self.optimizer = 0
        self._world = world
        self.begin()

    @property
    def said(self) -> Said:
        group, rank, _ = self.life
        return self._world.case.said[group, rank, self.optimizer, self.step[self.optimizer]]

    def begin(self) -> None:
        """Begin the next step, or leave."""
        case, (group, rank, _) = self._world.case, self.life
        if self.at == len(case.steps[group]):
            for chunk in case.trailing[group, rank]:
                self._share(chunk, self.step[case.chunks[chunk].optimizer] + 1, 1)
            self.lanes["control"].append(Leave(self.life, self.total))
            self.left = True
            return
        self.optimizer = case.steps[group][self.at]
        self.at += 1
        self.step[self.optimizer] += 1
        for chunk, count in self.said.pushed.items():
            for number in range(1, count + 1):
                self._share(chunk, self.step[self.optimizer], number)
        if self.said.asks:
            self.waits_for_norm = True
            self.ask()
        else:
            self.commit()

    def _share(self, chunk: int, step: int, number: int) -> None:
        self.total += 1
        self.lanes["bulk"].append(Share(self.life, chunk, step, number, 0))

    def share_again(self, chunk: int) -> None:
        self.lanes["bulk"].append(
            Share(self.life, chunk, self.step[self.optimizer], self.said.pushed[chunk], 0)
        )

    def ask(self, again: bool = False) -> None:
        said, step = self.said, self.step[self.optimizer]
        body = (said.counts, said.touched, said.weight, said.finite, again)
        self.lanes["control"].append(Norm(self.life, self.optimizer, step, *body))

    def commit(self) -> None:
        self.missing = {c for c, o in self._world.case.chunks.items() if o.optimizer == self.optimizer}
        self.commit_again()
        if not self.missing:  # nothing of this optimizer lives here
            self.begin()

    def commit_again(self) -> None:
        said, step = self.said, self.step[self.optimizer]
        self.lanes["control"].append(
            Commit(
                self.life,
                said.optimizer,
                step,
                said.pushed,
                said.counts,
                said.touched,
                said.weight,
                said.finite,
                self.total,
            )
        )

    def remind(self) -> None:
        """Nothing came for a while."""
        if self.left:
            self.lanes["control"].append(Leave(self.life, self.total))
        elif self.waits_for_norm:
            self.ask(again=True)
        else:
            for chunk in self.missing:
                self.lanes["control"].append(Pull(self.life, chunk, self.step[self.optimizer]))

    def values(self, chunk: int, step: int) -> None:
        if not self.waits_for_norm and chunk in self.missing and step == self.step[self.optimizer]:
            self.missing.discard(chunk)
            if not self.missing:
                self.begin()


class World:
    """Runs a case through one order of arrival, and holds admission against the oracle after each message."""

    def __init__(self, case: Case, rng: random.Random, faults: float) -> None:
        self.case, self.rng, self.faults = case, rng, faults
        self.admission = Admission(case.groups, case.chunks, case.max_delay)
        self.applied: dict[tuple[int, int, int], Average] = {}
        self.closed_by_us = Counter[tuple[int, int]]()
        self.replied = Counter[tuple[int, int]]()
        self.payloads: dict[tuple[int, int, int], Share] = {}
        self.delivered = Counter[Key]()
        self.measured = Counter[tuple[int, int, int]]()
        self.live = set(case.groups)
        self.gone: list[int] = []
        self.workers = {(g, r): Worker(self, g, r) for g, n in case.groups.items() for r in range(n)}

    def run(self) -> None:
        for _ in range(5_000):
            ready = [(w, lane) for w in self.workers.values() for lane in w.lanes if w.lanes[lane]]
            if not ready:
                if not self.live:
                    return
                for worker in self.workers.values():
                    worker.remind()
                continue
            worker, lane = self.rng.choice(ready)
            if self.rng.random() < self.faults:  # lost
                worker.lanes[lane].pop(0)
                continue
            event = worker.lanes[lane][0]
            if self.rng.random() >= self.faults:  # else it comes once more
                worker.lanes[lane].pop(0)
            self.deliver(event)
        raise AssertionError("no end in sight")

    def deliver(self, event: Event) -> None:
        if isinstance(event, Norm) and self.measured[event.life.group, event.optimizer, event.step]:
            return  # the server answers from memory
        self.delivered[key_of(event)] += 1
        for action in self.admission.admit(event):
            self.act(action)
        self.check()

    def act(self, action: Action) -> None:
        match action:
            case Hold(share):
                self.payloads[share.life.group, share.life.rank, share.chunk] = share
            case Release(group, rank, chunk):
                del self.payloads[group, rank, chunk]
            case Apply(average, step, _):
                self._applied(average, step)
            case Reply(chunk, group, step, skipped, _):
                self._replied(chunk, group, step, skipped)
            case Answer(chunk, group, rank, step):
                assert self.replied[group, chunk] == step, "what is parked must not be answered"
                self.workers[group, rank].values(chunk, step)
            case Ask(group, rank, chunk, step):
                worker = self.workers[group, rank]
                if not worker.left and step == worker.step[worker.optimizer]:
                    worker.commit_again() if chunk < 0 else worker.share_again(chunk)
            case Measure():
                self._measured(action)
            case Left(group):
                self.live.discard(group)
                self.gone.append(group)
            case Returned():
                raise AssertionError("nobody returns here")
            case Tell():
                pass

    def _applied(self, average: Average, step: int) -> None:
        key = (average.group, average.chunk, step)
        assert key not in self.applied
        optimizer = self.case.chunks[average.chunk].optimizer
        for rank in average.ranks:
            share = self.payloads[average.group, rank, average.chunk]
            said = self.case.said[average.group, rank, optimizer, step]
            assert (share.step, share.number) == (step, said.counts[average.chunk])
        self.applied[key] = average

    def _replied(self, chunk: int, group: int, step: int, skipped: bool) -> None:
        optimizer = self.case.chunks[chunk].optimizer
        self.replied[group, chunk] += 1
        assert self.replied[group, chunk] == step
        assert skipped == (self.case.average(group, chunk, optimizer, step) is None)
        for rank in range(self.case.groups[group]):
            if self.rng.random() >= self.faults:
                self.workers[group, rank].values(chunk, step)

    def _measured(self, action: Measure) -> None:
        group, optimizer, step = action.group, action.optimizer, action.step
        self.measured[group, optimizer, step] += 1
        wanted = [
            self.case.average(group, chunk, optimizer, step)
            for chunk, owned in self.case.chunks.items()
            if owned.optimizer == optimizer and not owned.buffer
        ]
        everyone = [self.case.said[group, r, optimizer, step] for r in range(self.case.groups[group])]
        finite = all(s.finite for s in everyone if s.weight > 0)
        assert action.averages == (tuple(wanted) if finite else None)
        for rank in range(self.case.groups[group]):
            life = Life(group, rank, 1)
            assert self.delivered[Norm, life, optimizer, step, 0]
            for average in action.averages or ():
                if rank in average.ranks:
                    number = everyone[rank].counts[average.chunk]
                    assert self.payloads[group, rank, average.chunk].number == number
            worker = self.workers[group, rank]
            if worker.waits_for_norm and (worker.optimizer, worker.step[optimizer]) == (optimizer, step):
                worker.waits_for_norm = False
                worker.commit()

    # The oracle.

    def _should_be_closed(self, group: int, chunk: int) -> int:
        """The last step whose commits and counting shares have all been delivered."""
        optimizer, step = self.case.chunks[chunk].optimizer, 0
        while (group, 0, optimizer, step + 1) in self.case.said:
            average = self.case.average(group, chunk, optimizer, step + 1)
            for rank in range(self.case.groups[group]):
                life = Life(group, rank, 1)
                if not self.delivered[Commit, life, optimizer, step + 1, 0]:
                    return step
                number = self.case.said[group, rank, optimizer, step + 1].counts.get(chunk, 0)
                needed = average is not None and rank in average.ranks
                if needed and not self.delivered[Share, life, chunk, step + 1, number]:
                    return step
            step += 1
        return step

    def check(self) -> None:
        admission, delay = self.admission, self.case.max_delay
        for chunk in self.case.chunks:
            clocks = {g: self._should_be_closed(g, chunk) for g in self.case.groups}
            assert {g: admission.closed(g, chunk) for g in clocks} == clocks
            assert admission.version(chunk) == sum(clocks.values())
            slowest = min((clocks[g] for g in self.live), default=None)
            for group, clock in clocks.items():
                free = delay is None or slowest is None or clock - slowest <= delay
                assert self.replied[group, chunk] == (clock if free else clock - 1)
        again = sum(n - 1 for (kind, *_), n in self.delivered.items() if kind is Share)
        assert admission.ledger.duplicate == again

    def finish(self) -> None:
        """What must hold when all have left."""
        case, ledger = self.case, self.admission.ledger
        wanted, skipped, superseded = {}, 0, 0
        for (group, rank, optimizer, step), said in case.said.items():
            for chunk, owned in case.chunks.items():
                if owned.optimizer != optimizer:
                    continue
                average = case.average(group, chunk, optimizer, step)
                if average is not None and average.ranks:
                    wanted[group, chunk, step] = average
                applied = average is not None and rank in average.ranks
                dropped = average is None and chunk in said.counts
                skipped += dropped
                superseded += said.pushed.get(chunk, 0) - applied - dropped
        superseded += sum(map(len, case.trailing.values()))
        assert self.applied == wanted
        assert ledger.applied == sum(len(average.ranks) for average in wanted.values())
        assert ledger.dropped == Counter({"non-finite": skipped, "superseded": superseded})
        assert ledger.pushed == sum(worker.total for worker in self.workers.values())
        assert ledger.balance == 0
        assert sorted(self.gone) == sorted(case.groups)
        assert all(self.admission.has_left(group) for group in case.groups)
        asked = {(g, o, s) for (g, _, o, s), said in case.said.items() if said.asks}
        assert set(self.measured) == asked


def play(seed: int, order: int, faults: float) -> World:
    case = Case.drawn(random.Random(seed))
    world = World(case, random.Random(order), faults)
    world.run()
    world.finish()
    return world


@given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.3]))
@settings(max_examples=250, deadline=None)
def test_every_order_of_arrival_obeys_the_rules(seed: int, order: int, faults: float) -> None:
    play(seed, order, faults)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2**32), min_size=2, max_size=3))
@settings(max_examples=60, deadline=None)
def test_arrival_order_never_shows(seed: int, orders: list[int]) -> None:
    worlds = [play(seed, order, faults) for order, faults in zip(orders, (0.0, 0.2, 0.2), strict=False)]
    for world in worlds[1:]:
        assert world.applied == worlds[0].applied
        assert world.admission.rounds == worlds[0].admission.rounds
        assert world.admission.ledger.dropped == worlds[0].admission.ledger.dropped


# One rule at a time, by hand.


def share(rank: int, step: int, chunk: int = 0, number: int = 1, base: int = 0, group: int = 0) -> Share:
    return Share(Life(group, rank, 1), chunk, step, number, base)


def commit(
    rank: int,
    step: int,
    counts: dict[int, int] | None = None,
    *,
    weight: float = 1,
    finite: bool = True,
    touched: dict[int, tuple[int, ...]] | None = None,
    group: int = 0,
    life: int = 1,
    total: int = 0,
) -> Commit:
    counts = {0: 1} if counts is None else counts
    return Commit(
        Life(group, rank, life), 0, step, counts, counts, touched or {}, weight, finite, total or step
    )


def averages(actions: list[Action]) -> list[Average]:
    return [action.average for action in actions if isinstance(action, Apply)]


def replies(actions: list[Action]) -> list[tuple[int, int]]:
    return [(action.group, action.step) for action in actions if isinstance(action, Reply)]


def one_step(admission: Admission, group: int, step: int, base: int = 0) -> list[Action]:
    """A whole step of a group of one worker."""
    first = admission.admit(share(0, step, base=base, group=group))
    return first + admission.admit(commit(0, step, group=group))


def closing(*events: Event, workers: int, chunks: dict[int, Owned] | None = None) -> list[Action]:
    admission = Admission({0: workers}, chunks or {0: Owned(0)})
    return [action for event in events for action in admission.admit(event)]


def test_equal_weights_are_one_division() -> None:
    actions = closing(share(1, 1), share(0, 1), commit(1, 1), commit(0, 1), workers=2)
    assert averages(actions) == [Average(0, 0, (0, 1), None, 2, None)]


def test_other_weights_are_parts_of_the_total() -> None:
    actions = closing(share(0, 1), share(1, 1), commit(1, 1, weight=3), commit(0, 1, weight=1), workers=2)
    assert averages(actions) == [Average(0, 0, (0, 1), (0.25, 0.75), 2, None)]


def test_weight_zero_is_left_out_though_its_commit_is_awaited() -> None:
    admission = Admission({0: 2}, {0: Owned(0)})
    for event in (share(0, 1), share(1, 1), commit(0, 1)):
        assert not averages(admission.admit(event))
    actions = admission.admit(commit(1, 1, weight=0, finite=False))
    assert averages(actions) == [Average(0, 0, (0,), None, 1, None)]


def test_untouched_by_all_is_a_round_without_an_update() -> None:
    actions = closing(commit(0, 1, {}), commit(1, 1, {}), workers=2)
    assert not averages(actions)
    assert replies(actions) == [(0, 1)]
    assert not next(a for a in actions if isinstance(a, Reply)).skipped


def test_touched_by_some_counts_the_others_as_zero() -> None:
    actions = closing(
        share(0, 1), commit(0, 1, touched={0: (2,)}), commit(1, 1, {}), commit(2, 1, {}), workers=3
    )
    assert averages(actions) == [Average(0, 0, (0,), None, 3, (2,))]


def test_touched_pieces_are_the_union() -> None:
    shares = [share(0, 1), share(1, 1)]
    some = closing(*shares, commit(0, 1, touched={0: (2,)}), commit(1, 1, touched={0: (0,)}), workers=2)
    assert averages(some) == [Average(0, 0, (0, 1), None, 2, (0, 2))]
    every = closing(*shares, commit(0, 1, touched={0: (2,)}), commit(1, 1), workers=2)
    assert averages(every)[0].touched is None


def test_a_buffer_is_averaged_over_those_that_pushed_it() -> None:
    buffer = {0: Owned(0, buffer=True)}
    actions = closing(share(1, 1), commit(0, 1, {}), commit(1, 1), commit(2, 1, {}), workers=3, chunks=buffer)
    assert averages(actions) == [Average(0, 0, (1,), None, 1, None)]


def test_one_worker_that_is_not_finite_skips_all_chunks() -> None:
    chunks = {0: Owned(0), 1: Owned(0), 2: Owned(0, buffer=True), 3: Owned(1)}
    counts = {0: 1, 1: 1, 2: 1}
    actions = closing(
        *(share(r, 1, c) for r in (0, 1) for c in counts),
        commit(0, 1, counts),
        commit(1, 1, counts, finite=False),
        workers=2,
        chunks=chunks,
    )
    assert not averages(actions)
    skipped = {a.chunk for a in actions if isinstance(a, Reply) and a.skipped}
    assert skipped == {0, 1, 2}


def test_a_share_that_arrives_after_its_step_was_skipped_is_no_duplicate() -> None:
    admission = Admission({0: 1}, {0: Owned(0)})
    admission.admit(commit(0, 1, finite=False))
    admission.admit(share(0, 1))
    assert admission.ledger.duplicate == 0
    admission.admit(share(0, 1))
    assert admission.ledger.duplicate == 1


def test_a_chunk_closes_alone() -> None:
    admission = Admission({0: 1}, {0: Owned(0), 1: Owned(0)})
    admission.admit(share(0, 1, 0))
    actions = admission.admit(commit(0, 1, {0: 1, 1: 1}))
    assert [average.chunk for average in averages(actions)] == [0]
    assert (admission.closed(0, 0), admission.closed(0, 1), admission.last_step(0, 0)) == (1, 0, 0)
    assert averages(admission.admit(share(0, 1, 1)))


def test_the_newest_number_counts_in_either_order_of_commit_and_share() -> None:
    for events in (
        (share(0, 1, number=1), share(0, 1, number=2), commit(0, 1, {0: 2}, total=2)),
        (share(0, 1, number=1), commit(0, 1, {0: 2}, total=2), share(0, 1, number=2)),
        (share(0, 1, number=2), share(0, 1, number=1), commit(0, 1, {0: 2}, total=2)),
    ):
        admission = Admission({0: 1}, {0: Owned(0)})
        actions = [action for event in events for action in admission.admit(event)]
        assert len(averages(actions)) == 1
        held = [action.share.number for action in actions if isinstance(action, Hold)]
        assert held[-1] == 2
        assert dict(admission.ledger.dropped) == {"superseded": 1}


def test_staleness_is_the_rounds_of_others_since_the_base() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)})
    found = [
        action.staleness
        for actions in (
            one_step(admission, 0, 1),
            one_step(admission, 0, 2, base=1),
            one_step(admission, 1, 1, base=0),
            one_step(admission, 0, 3, base=2),
        )
        for action in actions
        if isinstance(action, Apply)
    ]
    assert found == [0, 0, 2, 1]


def test_a_step_out_of_order_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"worker 0\.0 pushed chunk 0 of step 2, but step 1"):
        Admission({0: 1}, {0: Owned(0)}).admit(share(0, 2))
    admission = Admission({0: 2}, {0: Owned(0)})
    admission.admit(commit(0, 1))
    with pytest.raises(ProtocolError, match="while step 1 is open"):
        admission.admit(commit(1, 2))


# How far groups may drift apart.


def test_lockstep_at_delay_zero() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)}, max_delay=0)
    assert replies(one_step(admission, 0, 1)) == []
    assert sorted(replies(one_step(admission, 1, 1))) == [(0, 1), (1, 1)]


def test_delay_two_lets_a_group_be_two_ahead() -> None:
    admission = Admission({0: 1, 1: 1, 2: 1}, {0: Owned(0)}, max_delay=2)
    assert [replies(one_step(admission, 0, step)) for step in (1, 2, 3)] == [[(0, 1)], [(0, 2)], []]
    assert replies(one_step(admission, 1, 1)) == [(1, 1)]
    assert (0, 3) in replies(one_step(admission, 2, 1))


def test_without_a_bound_nothing_is_parked() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)})
    assert [replies(one_step(admission, 0, step)) for step in range(1, 40)] == [
        [(0, step)] for step in range(1, 40)
    ]


@pytest.mark.parametrize("end", [Leave(Life(1, 0, 1), 0), Gone(1)])
def test_a_group_that_ends_releases_those_who_waited_for_it(end: Event) -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)}, max_delay=0)
    one_step(admission, 0, 1)
    assert replies(admission.admit(end)) == [(0, 1)]


def test_one_of_two_workers_that_leaves_releases_nobody() -> None:
    admission = Admission({0: 1, 1: 2}, {0: Owned(0)}, max_delay=0)
    one_step(admission, 0, 1)
    assert replies(admission.admit(Leave(Life(1, 0, 1), 0))) == []
    assert replies(admission.admit(Leave(Life(1, 0, 1), 0))) == [], "the same worker once more"
    assert replies(admission.admit(Leave(Life(1, 1, 1), 0))) == [(0, 1)]


def test_a_returning_group_is_level_with_the_slowest() -> None:
    admission = Admission({0: 1, 1: 1, 2: 1}, {0: Owned(0)}, max_delay=1)
    for group in (0, 1, 2):
        admission.admit(Join(Life(group, 0, 1)))
        one_step(admission, group, 1)
    admission.admit(Gone(1))
    for step in range(2, 9):
        one_step(admission, 2, step)
        one_step(admission, 0, step)
    one_step(admission, 0, 9)
    admission.admit(Join(Life(1, 0, 2)))
    assert [admission.clock(group, 0) for group in (0, 1, 2)] == [9, 8, 8]
    assert [admission.closed(group, 0) for group in (0, 1, 2)] == [9, 1, 8]
    assert replies(one_step(admission, 2, 9)) == [(2, 9)]
    assert replies(one_step(admission, 2, 10)) == [], "two ahead of the one that returned"


def test_a_parked_group_is_told_whom_it_waits_for_and_gets_nothing() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)}, max_delay=0)
    one_step(admission, 0, 1)
    assert admission.admit(Pull(Life(0, 0, 1), 0, 1)) == [Tell(0, 0, 1, (), (1,))]
    assert admission.admit(share(0, 1)) == [], "a doubled share is no way around"


def test_a_worker_is_told_whom_its_group_lacks() -> None:
    admission = Admission({0: 3}, {0: Owned(0)})
    admission.admit(commit(0, 1))
    assert admission.admit(Pull(Life(0, 0, 1), 0, 1)) == [Ask(0, 0, 0, 1)]
    admission.admit(share(0, 1))
    admission.admit(commit(2, 1))
    assert admission.admit(Pull(Life(0, 0, 1), 0, 1)) == [Tell(0, 0, 1, (1, 2), ())]
    assert admission.admit(Pull(Life(0, 1, 1), 0, 1)) == [Ask(0, 1, -1, 1)]


def test_a_trailing_share_does_not_bring_a_group_back() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)}, max_delay=0)
    admission.admit(Leave(Life(1, 0, 1), 1))
    assert not any(isinstance(a, Returned) for a in admission.admit(share(0, 1, group=1)))
    assert admission.has_left(1)
    assert replies(one_step(admission, 0, 1)) == [(0, 1)]
    assert Returned(1) in admission.admit(commit(0, 1, group=1))
    assert not admission.has_left(1)


def test_a_group_that_came_back_can_leave_again() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)}, max_delay=0)
    admission.admit(Leave(Life(1, 0, 1), 0))
    one_step(admission, 1, 1)
    one_step(admission, 0, 1)
    assert replies(one_step(admission, 0, 2)) == [], "lockstep again"
    actions = admission.admit(Leave(Life(1, 0, 1), 1))
    assert Left(1) in actions
    assert replies(actions) == [(0, 2)]


def test_a_leave_that_comes_late_costs_no_share() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)})
    one_step(admission, 0, 1)
    admission.admit(Leave(Life(0, 0, 1), 1))
    admission.admit(share(0, 2))
    admission.admit(commit(0, 2, {0: 2}, total=3))
    admission.admit(Leave(Life(0, 0, 1), 1))
    admission.admit(share(0, 2))
    assert averages(admission.admit(share(0, 2, number=2)))


# Norms.


def norm(rank: int, step: int, counts: dict[int, int], *, finite: bool = True, again: bool = False) -> Norm:
    return Norm(Life(0, rank, 1), 0, step, counts, {}, 1, finite, again)


def measures(actions: list[Action]) -> list[Measure]:
    return [action for action in actions if isinstance(action, Measure)]


def test_the_norm_waits_for_all_questions_and_all_shares() -> None:
    counts = {0: 1, 1: 1}
    events = [norm(r, 1, counts) for r in (0, 1)] + [share(r, 1, c) for r in (0, 1) for c in (0, 1)]
    for turn in range(len(events)):
        admission = Admission({0: 2}, {0: Owned(0), 1: Owned(0), 2: Owned(0, buffer=True)})
        order = events[turn:] + events[:turn]
        for event in order[:-1]:
            assert not measures(admission.admit(event))
        (measure,) = measures(admission.admit(order[-1]))
        assert measure.averages is not None
        assert [average.chunk for average in measure.averages] == [0, 1]


def test_the_norm_of_what_is_not_finite_is_not_measured() -> None:
    admission = Admission({0: 2}, {0: Owned(0)})
    admission.admit(norm(0, 1, {0: 1}))
    (measure,) = measures(admission.admit(norm(1, 1, {0: 1}, finite=False)))
    assert measure.averages is None


def test_the_norm_asks_for_a_share_that_was_lost() -> None:
    admission = Admission({0: 1}, {0: Owned(0)})
    assert admission.admit(norm(0, 1, {0: 1})) == []
    assert admission.admit(norm(0, 1, {0: 1})) == [], "doubled by the link"
    assert admission.admit(norm(0, 1, {0: 1}, again=True)) == [Ask(0, 0, 0, 1)]
    assert measures(admission.admit(share(0, 1)))


# Lives.


def with_life(event: Share, life: int) -> Share:
    return Share(event.life._replace(incarnation=life), event.chunk, event.step, event.number, event.base)


def died_in_the_middle() -> Admission:
    """Two workers committed step 1 with two chunks; chunk 0 is closed, chunk 1 lacks a share."""
    admission = Admission({0: 2}, {0: Owned(0), 1: Owned(0)})
    for rank in (0, 1):
        admission.admit(Join(Life(0, rank, 1)))
    for event in (share(0, 1, 0), share(0, 1, 1), share(1, 1, 0)):
        admission.admit(event)
    for rank in (0, 1):
        admission.admit(commit(rank, 1, {0: 1, 1: 1}, total=2))
    assert (admission.closed(0, 0), admission.closed(0, 1)) == (1, 0)
    return admission


def test_a_returning_group_resumes_after_its_least_closed_step() -> None:
    admission = died_in_the_middle()
    actions = admission.admit(Join(Life(0, 0, 2)))
    assert actions == [Release(0, 0, 1)]
    assert admission.admit(Join(Life(0, 1, 2))) == []
    assert admission.last_step(0, 0) == 0


def test_a_torn_step_is_finished_by_the_next_life_and_counted() -> None:
    admission = died_in_the_middle()
    admission.admit(Join(Life(0, 0, 2)))
    actions: list[Action] = []
    for rank in (0, 1):
        for chunk in (0, 1):
            actions += admission.admit(with_life(share(rank, 1, chunk), 2))
        actions += admission.admit(commit(rank, 1, {0: 1, 1: 1}, life=2, total=2))
    assert [(average.chunk, average.ranks) for average in averages(actions)] == [(1, (0, 1))]
    assert {a.rank for a in actions if isinstance(a, Answer) and a.chunk == 0} == {0, 1}
    assert admission.last_step(0, 0) == 1
    ledger = admission.ledger
    assert dict(ledger.dropped) == {"dead": 2, "torn": 2}
    assert (ledger.pushed, ledger.applied, ledger.balance, ledger.duplicate) == (8, 4, 0, 0)


def test_an_older_life_says_nothing_any_more() -> None:
    admission = died_in_the_middle()
    admission.admit(Join(Life(0, 0, 2)))
    before = (admission.ledger.pushed, dict(admission.ledger.dropped), admission.ledger.duplicate)
    for event in (
        share(1, 1, 1),
        commit(0, 1, {0: 1, 1: 1}, total=2),
        norm(0, 1, {0: 1}),
        Leave(Life(0, 0, 1), 9),
    ):
        assert admission.admit(event) == []
    assert before == (admission.ledger.pushed, dict(admission.ledger.dropped), admission.ledger.duplicate)
    assert admission.ledger.balance == 0


def test_shares_of_a_life_that_never_committed_are_dead() -> None:
    admission = Admission({0: 1}, {0: Owned(0)})
    admission.admit(Join(Life(0, 0, 1)))
    admission.admit(share(0, 1, number=1))
    admission.admit(share(0, 1, number=2))
    admission.admit(Join(Life(0, 0, 2)))
    assert dict(admission.ledger.dropped) == {"dead": 2}
    assert admission.ledger.balance == 0


def test_a_group_that_returns_no_longer_holds_others_back() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0)}, max_delay=0)
    for group in (0, 1):
        admission.admit(Join(Life(group, 0, 1)))
    one_step(admission, 0, 1)
    assert replies(admission.admit(Join(Life(1, 0, 2)))) == [(0, 1)]


def test_each_share_is_looked_at_once_for_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions come on the lane that is faster; looking at all chunks again for each share took seconds."""
    looks = Counter[int]()
    average = Admission._average

    def counted(self: Admission, group: int, chunk: int, counting: Any) -> Average | None:
        looks[chunk] += 1
        return average(self, group, chunk, counting)

    monkeypatch.setattr(Admission, "_average", counted)
    count = 50
    admission = Admission({0: 1}, {chunk: Owned(0) for chunk in range(count)})
    admission.admit(norm(0, 1, dict.fromkeys(range(count), 1)))
    actions = [action for chunk in range(count) for action in admission.admit(share(0, 1, chunk))]
    assert [average.chunk for average in measures(actions)[0].averages or ()] == list(range(count))
    assert max(looks.values()) <= 2, "once in vain, once with it"
