"""Worker groups beside each other: staleness, how far they may drift, one start, and a shut sync link."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toys import Line, config, movement, pull_of, walk

from shoal import Run
from shoal.errors import ShoalError
from shoal.testing import Report, Script, run_cluster
from shoal.transport.faulty import Fate, Faulty
from shoal.wire import Header, Kind

DOWNPOUR = {"nworker_groups": 2, "server_worker_separate": True}


def staleness(report: Report) -> dict[str, int]:
    found = Counter[str]()
    for recorded in report.events.values():
        found.update(recorded.last("finished").get("staleness", {}))
    return dict(found)


def test_a_scripted_interleaving_gives_the_known_staleness() -> None:
    turns = Script(passes("000110"))
    report = run_cluster(lambda run: scripted_walk(run, turns, {0: 4, 1: 2}), config(**DOWNPOUR))
    chunks = len(report.servers["server 0.0"]._shard.chunks)
    # Group 0: 0, 0, 0, then 2 for the two rounds of group 1. Group 1: 3 on values of the start, then 0.
    assert staleness(report) == {"0": 4 * chunks, "2": chunks, "3": chunks}


def passes(groups: str) -> list[str]:
    """The points of a script in which both groups start, then take one whole step each, in this order."""
    return ["0 starts", "1 starts", *(f"{group} {what}" for group in groups for what in ("pushes", "has"))]


def scripted_walk(run: Run, turns: Script, steps: dict[int, int]) -> list[Tensor]:
    def before(step: int) -> None:
        if step == 1:
            turns.turn(f"{run.group} starts")
        turns.turn(f"{run.group} pushes")

    return walk(
        run,
        steps[run.group],
        before=before,
        after=lambda step: turns.turn(f"{run.group} has"),
    )


def test_a_server_in_lockstep_could_not_follow_that_script() -> None:
    turns = Script(passes("001"), timeout=0.7)
    with pytest.raises(ShoalError, match=r"waited 0\.7 s for the turn"):
        run_cluster(lambda run: scripted_walk(run, turns, {0: 2, 1: 1}), config(max_delay=0, **DOWNPOUR))


def test_groups_of_one_server_group_add_their_updates() -> None:
    steps = {0: 5, 1: 3, 2: 1}
    report = run_cluster(
        lambda run: walk(run, steps[run.group]), config(nworker_groups=3, nworkers_per_group=2)
    )
    for values in report.results.values():
        assert torch.equal(values[-1], movement(steps, 2))


class Race:
    """How far each group is, and how far ahead one has ever been of the slowest that still runs."""

    def __init__(self, steps: dict[int, int]) -> None:
        self.steps, self.ahead = steps, 0
        self._done = dict.fromkeys(steps, 0)
        self._moved = threading.Condition()

    def after(self, group: int) -> Callable[[int], None]:
        """What a worker does after a step."""

        def note(step: int) -> None:
            with self._moved:
                self._done[group] = max(self._done[group], step)
                running = [self._done[g] for g, n in self.steps.items() if self._done[g] < n]
                self.ahead = max([self.ahead, *(self._done[group] - slow for slow in running)])
                self._moved.notify_all()

        return note

    def until(self, group: int, step: int, seconds: float = 20.0) -> bool:
        """Wait until a group has finished a step."""
        with self._moved:
            return self._moved.wait_for(lambda: self._done[group] >= step, seconds)


@pytest.mark.parametrize("delay", [0, 2, None])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_nobody_runs_further_ahead_than_max_delay(delay: int | None, groups: int, workers: int) -> None:
    """The last group is slow: in each step it first waits until the fastest is as far as it may go."""
    steps = {g: 7 - g for g in range(groups)}
    race, slow = Race(steps), groups - 1
    ahead = steps[0] if delay is None else delay
    further = []

    def function(run: Run) -> list[Tensor]:
        def before(step: int) -> None:
            if run.group == slow:
                assert race.until(0, min(steps[0], step - 1 + ahead))
                if delay is not None and step == 2 and run.rank_in_group == 0:
                    further.append(race.until(0, step + ahead, seconds=0.3))

        return walk(run, steps[run.group], before=before, after=race.after(run.group))

    report = run_cluster(
        function,
        config(nworker_groups=groups, nworkers_per_group=workers, nservers_per_group=2, max_delay=delay),
    )
    # A worker hears of its own group's step a little before or after another group's: one step of slack.
    assert ahead <= race.ahead <= ahead + 1 or delay is None
    assert delay is None or further == [False]
    for values in report.results.values():
        assert torch.equal(values[-1], movement(steps, workers))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_group_that_ends_early_holds_nobody_back(delay: int) -> None:
    steps = {0: 9, 1: 1, 2: 0}
    report = run_cluster(lambda run: walk(run, steps[run.group]), config(nworker_groups=3, max_delay=delay))
    assert torch.equal(report.results["worker 0.0"][-1], movement(steps, 1))
    assert {name: len(values) - 1 for name, values in report.results.items()} == {
        "worker 0.0": 9,
        "worker 1.0": 1,
        "worker 2.0": 0,
    }


@pytest.mark.parametrize(
    "block",
    [
        {"nworker_groups": 2, "nworkers_per_group": 3},
        {"nworker_groups": 3, "nworkers_per_group": 2, "nservers_per_group": 2, "max_delay": 1},
        {"nworker_groups": 2, "nserver_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2},
    ],
)
def test_all_workers_of_a_group_get_the_same_bytes_for_a_step(block: dict[str, int]) -> None:
    report = run_cluster(lambda run: walk(run, 12), config(**block))
    for group in range(block["nworker_groups"]):
        first, *others = (report.results[f"worker {group}.{r}"] for r in range(block["nworkers_per_group"]))
        for values in others:
            assert all(torch.equal(a, b) for a, b in zip(first, values, strict=True))


@pytest.mark.parametrize("groups", [2, 3])
def test_with_the_sync_link_shut_every_hogwild_group_takes_all_its_steps(groups: int) -> None:
    links: dict[str, Faulty] = {}
    ended = threading.Barrier(groups, timeout=20)

    def judge(header: Header, peer: str) -> Fate:
        return "hold" if header.kind in (Kind.SYNC, Kind.SYNCED) else "deliver"

    def function(run: Run) -> tuple[list[Tensor], int]:
        def after(step: int) -> None:
            if step == 6:
                if ended.wait() == 0:
                    for name, link in links.items():
                        assert not name.startswith("server") or link.fates["hold"] > 0
                        link.open()
                ended.wait()

        return walk(run, 6, after=after), run.global_step

    report = run_cluster(
        function, config(nworker_groups=groups, nserver_groups=groups), judge=judge, links=links.update
    )
    for group in range(groups):
        values, steps = report.results[f"worker {group}.0"]
        assert steps == 6
        assert torch.equal(values[5], movement({group: 6}, 1)), "before the link opens each group is alone"
        assert torch.equal(values[-1], movement(dict.fromkeys(range(groups), 6), 1))


@pytest.mark.parametrize("workers", [1, 2])
def test_independent_groups_share_the_start_and_nothing_else(workers: int) -> None:
    def function(run: Run) -> tuple[Tensor, Tensor]:
        model = Line()
        with torch.no_grad():
            model.short.fill_(float(run.rank))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        start = model().detach().clone()
        for step in run.epochs(3):
            optimizer.zero_grad()
            (model() * pull_of(run.rank, step + 1)).sum().backward()
            optimizer.step()
        run.evaluate(lambda: 0)
        return start, model().detach().clone()

    report = run_cluster(function, config(nworker_groups=3, nserver_groups=0, nworkers_per_group=workers))
    for group in range(3):
        goal = movement({group: 3}, workers)
        for rank in range(workers):
            start, end = report.results[f"worker {group}.{rank}"]
            assert torch.equal(start, torch.zeros_like(start))
            assert torch.equal(end, goal)
    assert report.total("exchanges") == 0


HOGWILD = {"nworker_groups": 3, "nserver_groups": 3}


@pytest.mark.parametrize(
    ("block", "messages"),
    [
        ({"nworker_groups": 2}, True),
        ({"nworker_groups": 2, "nserver_groups": 2}, True),
        (HOGWILD, True),
        (HOGWILD, False),
        ({"nworker_groups": 4, "nserver_groups": 2, "nservers_per_group": 2}, True),
    ],
    ids=["downpour", "hogwild 2", "hogwild 3", "hogwild 3, workers that step themselves", "hybrid"],
)
@pytest.mark.parametrize("loops", [(1, 1), (3, 0, 2), (0, 2)])
def test_several_loops_end_together_however_late_a_group_begins(
    block: dict[str, int], messages: bool, loops: tuple[int, ...]
) -> None:
    """Group 0 has left each loop before the last group begins it."""
    groups, late = block["nworker_groups"], block["nworker_groups"] - 1
    left = [threading.Event() for _ in loops]

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.LEAVE and header.sender == "worker 0.0":
            left[header.number - 1].set()
        return "deliver"

    def function(run: Run) -> list[Tensor]:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        ends, taken = [], 0
        for loop, steps in enumerate(loops):
            if run.group == late:
                assert left[loop].wait(20)
                assert not threading.Event().wait(0.05)  # for what is wrong to happen
            for _ in run.epochs(steps):
                taken += 1
                optimizer.zero_grad()
                (model() * pull_of(run.rank, taken)).sum().backward()
                optimizer.step()
            run.evaluate(lambda: 0)
            ends.append(model().detach().clone())
        return ends

    report = run_cluster(function, config(**block), judge=judge, timeout=20, messages=messages)
    for ends in report.results.values():
        for loop, end in enumerate(ends):
            assert torch.equal(end, movement(dict.fromkeys(range(groups), sum(loops[: loop + 1])), 1))


@pytest.mark.parametrize("block", [{"nworker_groups": 2}, {"nworker_groups": 3, "nserver_groups": 3}])
def test_a_gradient_that_is_never_stepped_holds_nobody_up(block: dict[str, int]) -> None:
    """Its shares leave during backward, and may arrive after their worker's goodbye."""
    links: dict[str, Faulty] = {}

    def judge(header: Header, peer: str) -> Fate:
        return "hold" if header.kind is Kind.SHARE and header.step == 3 else "deliver"

    def function(run: Run) -> Tensor:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in run.epochs(3):
            optimizer.zero_grad()
            (model() * pull_of(run.rank, step + 1)).sum().backward()
            if step < 2:
                optimizer.step()
        threading.Timer(0.05, links[f"worker {run.group}.0"].open).start()
        run.evaluate(lambda: 0)
        return model().detach().clone()

    report = run_cluster(function, config(**block), judge=judge, links=links.update, timeout=20)
    groups = block["nworker_groups"]
    for end in report.results.values():
        assert torch.equal(end, movement(dict.fromkeys(range(groups), 2), 1))
    ledgers = [s.rounds.admission.ledger for s in report.servers.values() if s.rounds]
    assert all(ledger.balance == 0 for ledger in ledgers)
    assert sum(ledger.dropped["superseded"] for ledger in ledgers) > 0


def test_steps_after_a_loop_belong_to_another_loop() -> None:
    def function(run: Run) -> list[Tensor]:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

        def step(number: int) -> None:
            optimizer.zero_grad()
            (model() * pull_of(run.rank, number)).sum().backward()
            optimizer.step()

        for _ in run.epochs(1):
            step(1)
        step(2)
        step(3)
        for _ in run.epochs(1):
            step(4)
        run.evaluate(lambda: 0)
        return [model().detach().clone()]

    report = run_cluster(function, config(nworker_groups=3, nserver_groups=3), timeout=20)
    for (end,) in report.results.values():
        assert torch.equal(end, movement({0: 4, 1: 4, 2: 4}, 1))
