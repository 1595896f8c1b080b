"""Links that double or lose messages: the training is the same, and exactly the counters of faults move."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from cases import notes
from torch import Tensor, nn
from toys import ASKING, PATIENT, STEPS, config, learn, movement, walk

from shoal import Run
from shoal.errors import PeerFailed
from shoal.testing import Report, run_cluster
from shoal.transport import Lane, Token
from shoal.transport.faulty import Fate, Faulty
from shoal.wire import Frame, Header, Kind

BLOCKS: dict[str, dict[str, Any]] = {
    "sandblaster": {"nworkers_per_group": 3, "nservers_per_group": 2, "server_worker_separate": True},
    "allreduce": {"nworkers_per_group": 2, "nservers_per_group": 2},
}
HOGWILD = {"nworker_groups": 3, "nserver_groups": 3}
DOWNPOUR = {"nworker_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2}

COUNTS = ("rounds", "pushed", "applied")


class Chance:
    """Gives a message of one kind a fate, the first time that it is sent; all others arrive.

    Args:
        every: 1 = each of them, 2 = every second one, …
    """

    def __init__(self, kind: Kind, fate: Fate, every: int = 1) -> None:
        self.met = 0
        self._kind, self._fate, self._every = kind, fate, every
        self._known = Counter[tuple[object, ...]]()
        self._lock = threading.Lock()

    def __call__(self, header: Header, peer: str) -> Fate:
        same = (header.sender, peer, header.chunk, header.step, header.number)
        if header.kind in (Kind.SYNC, Kind.SYNCED):
            same = (*same, header.sequence)
        with self._lock:
            if header.kind is not self._kind or same in self._known:
                return "deliver"
            self._known[same] += 1
            if len(self._known) % self._every:
                return "deliver"
            self.met += 1
            return self._fate


def counters(report: Report) -> dict[str, int]:
    """Server-side counts; what servers call pushed comes from commits."""
    finals = [report.events[name].last("finished") for name in report.servers]
    found = {name: sum(final[name] for final in finals) for name in COUNTS}
    dropped = Counter[str]()
    for final in finals:
        dropped.update(final["dropped"])
    return found | dropped


def balanced(report: Report) -> bool:
    ledgers = [s.rounds.admission.ledger for s in report.servers.values() if s.rounds is not None]
    pushed = sum(report.events[name].last("finished")["pushed"] for name in report.results)
    return all(ledger.balance == 0 for ledger in ledgers) and pushed == sum(x.pushed for x in ledgers)


@cache
def faultless(name: str) -> Report:
    return run_cluster(learn, config(PATIENT, **BLOCKS[name]))


def test_without_faults_no_counter_of_faults_moves() -> None:
    for name in BLOCKS:
        report = faultless(name)
        assert (report.total("resent"), report.total("duplicate")) == (0, 0)
        assert balanced(report)
        assert len(set(report.results.values())) == 1


DOUBLED = (Kind.SHARE, Kind.COMMIT, Kind.VALUES, Kind.NORM, Kind.LEAVE)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", DOUBLED, ids=lambda kind: kind.name.lower())
def test_what_comes_twice_counts_once(name: str, kind: Kind) -> None:
    chance = Chance(kind, "double")
    report = run_cluster(learn, config(PATIENT, **BLOCKS[name]), judge=chance)
    assert chance.met > 0
    assert report.results == faultless(name).results
    assert counters(report) == counters(faultless(name))
    assert report.total("duplicate") == (chance.met if kind is Kind.SHARE else 0)
    assert report.total("resent") == 0
    assert balanced(report)


LOST = (Kind.COMMIT, Kind.VALUES, Kind.NORM, Kind.LEAVE)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.name.lower())
def test_what_is_lost_is_asked_for(name: str, kind: Kind) -> None:
    chance = Chance(kind, "lose", every=5 if kind is not Kind.LEAVE else 1)
    report = run_cluster(learn, config(ASKING, **BLOCKS[name]), judge=chance)
    assert chance.met > 0
    assert report.results == faultless(name).results
    assert counters(report) == counters(faultless(name))
    assert report.total("resent") == report.total("duplicate"), "at most an impatient question or two"
    assert balanced(report)


class ShareThenPull(Chance):
    """Loses shares, and besides the first question or request that follows."""

    def __init__(self) -> None:
        super().__init__(Kind.SHARE, "lose", every=9)
        self.pulls = 0

    def __call__(self, header: Header, peer: str) -> Fate:
        if header.kind is Kind.PULL and header.step == 1 and self.pulls < 2:
            self.pulls += 1
            return "lose"
        if header.kind is Kind.PULL:
            return "double" if header.sender.startswith("worker") else "deliver"
        return super().__call__(header, peer)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("judge", [lambda: Chance(Kind.SHARE, "lose", every=9), ShareThenPull])
def test_each_lost_share_is_sent_once_more(name: str, judge: type[ShareThenPull]) -> None:
    chance = judge()
    report = run_cluster(learn, config(ASKING, **BLOCKS[name]), judge=chance)
    assert chance.met > 1
    assert report.results == faultless(name).results
    assert counters(report) == counters(faultless(name))
    assert report.total("resent") - report.total("duplicate") == chance.met
    assert balanced(report)


def test_shares_lost_for_a_norm_are_asked_for_before_the_commit() -> None:
    """Every share of a step is lost once; the norm cannot be answered before they came again."""
    chance = Chance(Kind.SHARE, "lose")
    report = run_cluster(lambda run: learn(run, 1), config(ASKING, nworkers_per_group=2), judge=chance)
    assert report.total("resent") - report.total("duplicate") == chance.met > 0
    clean = run_cluster(lambda run: learn(run, 1), config(PATIENT, nworkers_per_group=2))
    assert report.results == clean.results


@pytest.mark.parametrize("block", [HOGWILD, DOWNPOUR], ids=["hogwild", "downpour"])
@pytest.mark.parametrize("fate", ["double", "lose"])
@pytest.mark.parametrize(
    "kind",
    [Kind.SHARE, Kind.COMMIT, Kind.VALUES, Kind.PULL, Kind.LEAVE, Kind.SYNC, Kind.SYNCED],
    ids=lambda kind: kind.name.lower(),
)
def test_asynchronous_groups_lose_nothing_and_double_nothing(
    block: dict[str, int], fate: Fate, kind: Kind
) -> None:
    groups, workers = block["nworker_groups"], block.get("nworkers_per_group", 1)
    chance = Chance(kind, fate, every=4 if fate == "lose" and kind in (Kind.SHARE, Kind.VALUES) else 1)
    timeouts = ASKING if fate == "lose" else PATIENT
    report = run_cluster(lambda run: walk(run), config(timeouts, **block), judge=chance)
    assert chance.met > 0 or (block is DOWNPOUR and kind in (Kind.SYNC, Kind.SYNCED))
    for values in report.results.values():
        assert torch.equal(values[-1], movement(dict.fromkeys(range(groups), STEPS), workers))
    doubled = chance.met if (fate, kind) == ("double", Kind.SHARE) else 0
    lost = chance.met if (fate, kind) == ("lose", Kind.SHARE) else 0
    assert report.total("resent") - lost == report.total("duplicate") - doubled
    assert balanced(report)


def test_a_lost_farewell_between_servers_is_sent_again() -> None:
    """Server 0.0 has all it needs when its last word to server 1.0 is lost; it must still be there."""
    lost = Counter[str]()

    def judge(header: Header, peer: str) -> Fate:
        if (
            header.kind is Kind.SYNCED
            and header.number
            and peer == "server 1.0"
            and lost[str(header.chunk)] < 2
        ):
            lost[str(header.chunk)] += 1
            return "lose"
        return "deliver"

    report = run_cluster(
        lambda run: walk(run), config(ASKING, nworker_groups=2, nserver_groups=2), judge=judge, timeout=15
    )
    assert lost
    for values in report.results.values():
        assert torch.equal(values[-1], movement({0: STEPS, 1: STEPS}, 1))


def test_an_old_answer_is_not_taken_for_the_common_end() -> None:
    """The last step's values come late, after the goodbye, when other groups have moved on."""
    links: dict[str, Faulty] = {}
    other_left, done = threading.Event(), threading.Event()

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.LEAVE and header.sender == "worker 1.0":
            other_left.set()
        if (
            header.kind is Kind.PULL
            and header.sender == "worker 0.0"
            and header.step == 0
            and other_left.is_set()
        ):
            links["server 0.0"].open()
        late = header.kind is Kind.VALUES and peer == "worker 0.0" and header.step == 2
        return "hold" if late and not links["server 0.0"].fates["hold"] else "deliver"

    def function(run: Run) -> list[Tensor]:
        def before(step: int) -> None:
            assert run.group == 0 or step == 1 or done.wait(20)

        def after(step: int) -> None:
            if run.group == 0 and step == 2:
                done.set()
                assert other_left.wait(20)

        return walk(run, 2, before=before, after=after)

    report = run_cluster(
        function,
        config(ASKING, nworker_groups=2),
        judge=judge,
        links=links.update,
    )
    assert links["server 0.0"].fates["hold"] == 1
    for values in report.results.values():
        assert torch.equal(values[-1], movement({0: 2, 1: 2}, 1))


def test_a_reply_that_cannot_be_sent_keeps_no_other_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sends of a server fail amid its replies; who lacks them asks for them, and it is noted once."""
    failed: list[int] = []

    def break_once(links: dict[str, Faulty]) -> None:
        link = links["server 0.0"]
        send = link.send

        def failing(peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
            if lane == "bulk" and peer == "worker 0.0" and turn and len(failed) < 2:
                failed.append(turn)
                raise PeerFailed(f"{peer} cannot be reached any more")
            return send(peer, lane, frames, turn)

        monkeypatch.setattr(link, "send", failing)

    block = {"nworkers_per_group": 2, "chunk_bytes": 16384 // 8, "share_memory": False}
    report = run_cluster(lambda run: walk(run), config(ASKING, **block), links=break_once, timeout=20)
    assert len(failed) == 2
    for values in report.results.values():
        assert torch.equal(values[-1], movement({0: STEPS}, 2))
    told = notes(report, "server 0.0")
    assert told == ["worker 0.0 cannot be reached any more"]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "table"])
@pytest.mark.parametrize("fate", ["double", "lose"])
def test_an_edit_is_made_once(fate: Fate, sparse: bool) -> None:
    """What is lost of it is sent again, and what comes twice counts once."""
    chance = Chance(Kind.INIT, fate)

    def judge(header: Header, peer: str) -> Fate:
        return chance(header, peer) if header.number else "deliver"  # the start has none

    def work(run: Run) -> float:
        model = nn.Embedding(30, 4, sparse=sparse, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in run.epochs(2):
            optimizer.zero_grad()
            model(torch.arange(30)).sum().backward()
            optimizer.step()
            with run.edit(), torch.no_grad():
                model.weight += 1000
        run.evaluate(lambda: 0)
        assert model.weight.min() == model.weight.max()
        return model.weight[0, 0].item()

    report = run_cluster(work, config(ASKING, **DOWNPOUR), judge=judge)
    assert chance.met > 0
    assert set(report.results.values()) == {2 * 2 * (1000 - 1)}
