"""Hogwild as it runs: workers step on the model themselves, their servers exchange what has changed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import OPTIMIZERS, STEPS, Step, model_of, plain_step
from test_faults import Chance
from test_sync import BUFFERS, PARAMETERS, Group, World
from torch import Tensor, nn
from toys import ASKING, PATIENT, Line, config, movement, pull_of, walk

from shoal.beside import OwnRounds, OwnShard
from shoal.parameters import BufferAt, Replica
from shoal.partition import Plan
from shoal.run import Run
from shoal.testing import Report, run_cluster
from shoal.transport import Post
from shoal.transport.faulty import Fate
from shoal.transport.inprocess import Hub, InProcess
from shoal.wire import Kind

TWO = {"nworker_groups": 2, "nserver_groups": 2}
THREE = {"nworker_groups": 3, "nserver_groups": 3}
RARELY = 10**6


def stepped_themselves(report: Report) -> bool:
    return all(isinstance(server._shard, OwnShard) for server in report.servers.values())


# Nothing is lost or doubled.


@pytest.mark.parametrize("freq", [1, 2, 5, RARELY])
@pytest.mark.parametrize("block", [TWO, THREE], ids=["two", "three"])
def test_groups_add_their_updates(block: dict[str, int], freq: int) -> None:
    steps = {group: (9, 14, 5)[group] for group in range(block["nworker_groups"])}
    report = run_cluster(
        lambda run: walk(run, steps[run.group]), config(sync_freq=freq, **block), messages=False
    )
    for values in report.results.values():
        assert torch.equal(values[-1], movement(steps, 1))
    assert stepped_themselves(report)


@pytest.mark.parametrize("fate", ["double", "lose"])
@pytest.mark.parametrize(
    "kind", [Kind.COMMIT, Kind.LEAVE, Kind.SYNC, Kind.SYNCED], ids=lambda kind: kind.name.lower()
)
def test_links_that_double_or_lose_change_nothing(kind: Kind, fate: Fate) -> None:
    chance = Chance(kind, fate, every=2 if kind is Kind.COMMIT else 1)
    timeouts = ASKING if fate == "lose" else PATIENT
    report = run_cluster(lambda run: walk(run, 8), config(timeouts, **THREE), judge=chance, messages=False)
    assert chance.met > 0
    for values in report.results.values():
        assert torch.equal(values[-1], movement(dict.fromkeys(range(3), 8), 1))


class Whole(nn.Module):
    """The parameters and buffers of the worlds in `test_sync`."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in PARAMETERS:
            self.register_parameter(
                parameter.name, nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float64))
            )
        for buffer in BUFFERS:
            fill = 0 if buffer.dtype == "int64" else 1
            self.register_buffer(
                buffer.name, torch.full(buffer.shape, fill, dtype=getattr(torch, buffer.dtype))
            )


class Stepping(Group):
    """A server group whose worker steps on the model itself."""

    def make(self, plan: Plan) -> OwnShard:
        self.model = Whole()
        places = [BufferAt(self.model, buffer.name) for buffer in BUFFERS]
        replica = Replica(plan, list(self.model.parameters()), places)
        return OwnShard(replica, [torch.optim.SGD(self.model.parameters(), lr=1.0)], True, threading.RLock())

    def step(self, rng: random.Random, now: float) -> dict[int, Tensor]:
        """A step on some chunks; returns what it has changed."""
        shard, model = self.shard, self.model
        if rng.random() < 0.5:
            model.variance.copy_(torch.tensor([rng.uniform(0.5, 2.0) for _ in range(5)]))
            model.count.add_(1)
        shard.install(0)
        moved = {}
        for chunk in shard.chunks:
            if chunk.buffer is None and rng.random() < 0.7:
                values = [rng.randint(-9, 9) for _ in range(chunk.size)]
                moved[chunk.number] = torch.tensor(values, dtype=torch.float64)
                present = shard._replica.read(chunk)
                shard._replica.install(chunk, present + moved[chunk.number])
        shard.closed(0, len(moved), True)
        if self.sync.due():
            for chunk in shard.chunks:
                self.sync.closed(chunk.number, now)
        return moved

    def end(self, now: float) -> None:
        self.shard.keep()
        for parameter in self.model.parameters():  # whatever becomes of the model
            parameter.data.fill_(torch.nan)
        super().end(now)


class Steps(World):
    """A world in which workers step on their models, now and then look at present values, and edit."""

    def round(self, group: Group) -> None:
        assert isinstance(group, Stepping)
        for number, change in group.step(self.rng, self.now).items():
            self.total[number] += change
        chance = self.rng.random()
        if chance < 0.1:
            group.shard.keep()
        elif chance < 0.2:
            group.shard.install()
            chunk = next(chunk for chunk in group.shard.chunks if chunk.buffer is None)
            group.shard._replica.install(chunk, group.shard._replica.read(chunk) + 1)
            group.shard.edited()
            self.total[chunk.number] += 1


@given(st.integers(2, 4), st.sampled_from([1, 2, 5, 1000]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_the_network_does_all_is_kept_and_all_end_equal(groups: int, freq: int, seed: int) -> None:
    world = Steps(groups, freq, seed, Stepping)
    world.run()
    for chunk in world.plan.chunks:
        first, *others = (group.shard.values(chunk.number) for group in world.groups)
        assert all(torch.equal(first, other) for other in others)
        if chunk.buffer is None:
            assert torch.equal(first, world.total[chunk.number])


def test_what_a_forward_made_of_a_buffer_stays_and_what_others_made_comes_else() -> None:
    (group,) = Steps(1, 1, 0, Stepping).groups
    shard, model = group.shard, group.model
    (chunk,) = (c for c in shard.chunks if c.buffer is not None and c.dtype == "int64")

    def after(forward: int, others: int, counts: bool = True) -> tuple[int, int]:
        if forward:
            model.count.add_(forward)
        shard.assign(chunk.number, torch.tensor([others]))
        assert int(shard.values(chunk.number)) == others
        shard.install(0, counts)
        return int(model.count), int(shard.values(chunk.number))

    assert after(0, 7) == (7, 7)
    assert after(1, 20) == (8, 8)
    assert after(1, 30, counts=False) == (30, 30)
    model.count.add_(1)
    shard.install(0, counts=False)
    assert int(shard.values(chunk.number)) == 30, "a step that does not count tells nobody"


def test_what_others_begin_after_a_loops_end_is_no_part_of_it_and_comes_with_the_next_step() -> None:
    (group,) = Steps(1, 1, 0, Stepping).groups
    shard, first = group.shard, group.shard.chunks[0]
    before, during, after = (torch.full((first.size,), value, dtype=torch.float64) for value in (1, 2, 3))
    shard.assign(first.number, before)
    shard.keep()
    shard.assign(first.number, during)
    shard.end()
    shard.assign(first.number, after)
    assert torch.equal(shard.take()[first.number], during)
    after.zero_()  # what was assigned may be used again
    assert float(shard.values(first.number).min()) == 3
    shard.install(0)
    assert float(shard._replica.read(first).min()) == 3


def test_what_becomes_of_the_model_after_an_edit_and_before_a_step_is_no_ones_business() -> None:
    (group,) = Steps(1, 1, 0, Stepping).groups
    shard, first = group.shard, group.shard.chunks[0]
    shard.install()
    shard._replica.install(first, torch.ones(first.size, dtype=torch.float64))
    shard.edited()
    shard._replica.install(first, torch.zeros(first.size, dtype=torch.float64))
    assert torch.equal(shard.values(first.number), torch.ones(first.size, dtype=torch.float64))


def test_a_stop_is_for_the_loop_that_it_names() -> None:
    (group,) = Steps(1, 1, 0, Stepping).groups
    rounds = OwnRounds(group.shard, group.sync, Post(InProcess(Hub(), "server 0.0"), "run"), ())
    for loop, stops in ((2, False), (1, True)):
        rounds.heard_stop(loop)
        assert group.shard.stopping is stops
    rounds.end_loop()
    for loop, stops in ((1, False), (2, True)):
        rounds.heard_stop(loop)
        assert group.shard.stopping is stops


# The same as with links.


def compared(
    step: Step, make: Callable[[Any], torch.optim.Optimizer], messages: bool, preset: Sequence[int] = ()
) -> Report:
    """Two groups that exchange what they have changed at the end, where it can be compared.

    Args:
        preset: ranks of workers that have trained already.
    """

    models = [model_of() for _ in range(2)]  # threads share one generator of random numbers
    trained = threading.Barrier(2)

    def work(run: Run) -> dict[str, Tensor]:
        model = models[run.rank]
        optimizer = make(model.parameters())
        if run.rank in preset:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(run.rank + 1)
            model(torch.eye(12, 8)).square().mean().backward()
            optimizer.step()
        run.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(run.rank)
        for _ in run.epochs(5):
            step(run, model, optimizer, torch.randn(12, 8, generator=generator))
            trained.wait(20)
        run.evaluate(lambda: 0)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    return run_cluster(work, {**TWO, "sync_freq": RARELY}, messages=messages)


def check(step: Step, make: Callable[[Any], torch.optim.Optimizer], preset: Sequence[int] = ()) -> None:
    linked, own = (compared(step, make, messages, preset) for messages in (True, False))
    assert stepped_themselves(own) and not stepped_themselves(linked)
    for worker, wanted in linked.results.items():
        for key, value in wanted.items():
            assert torch.equal(value, own.results[worker][key]), (worker, key)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_groups_end_where_links_end(name: str, optimizer: str) -> None:
    check(STEPS[name], OPTIMIZERS[optimizer])


@pytest.mark.parametrize("preset", [(0, 1), (1,)], ids=["both have a state", "the other one has a state"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_values_and_state_of_the_first_worker_are_everyones_start(
    optimizer: str, preset: Sequence[int]
) -> None:
    check(plain_step, OPTIMIZERS[optimizer], preset)


@pytest.mark.parametrize("freq", [10, RARELY])
def test_a_loop_after_another_is_exchanged_as_seldom(freq: int) -> None:
    def work(run: Run) -> None:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            for step in run.epochs(40):
                threading.Event().wait(0.003)  # the computation
                advance(model, optimizer, step + 1, run.rank)
            run.evaluate(lambda: 0)

    report = run_cluster(work, config(sync_freq=freq, **TWO), messages=False)
    followed = len(report.servers["server 0.0"]._shard.chunks)  # each by one of the two
    assert 2 * followed <= report.total("exchanges") <= 2 * (40 // freq + 1) * followed
    assert report.total("exchanged_rounds") == 2 * 40 * followed


def test_the_accounts_are_those_of_links() -> None:
    reports = [
        run_cluster(lambda run: walk(run), config(**THREE), messages=messages) for messages in (True, False)
    ]
    for field in ("pushed", "applied", "rounds", "parameters", "duplicate"):
        assert reports[0].total(field) == reports[1].total(field) > 0 or field == "duplicate"


# While groups train.


def advance(model: Line, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    (model() * pull_of(rank, step)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("edits", [False, True], ids=["", "and edits"])
def test_an_evaluation_shows_what_others_did_and_the_next_step_has_it(edits: bool) -> None:
    done = threading.Event()

    def work(run: Run) -> Tensor:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in run.epochs(2):
            if run.rank == 0 and step == 1:
                own, deadline = model().detach().clone(), time.monotonic() + 20
                while torch.equal(shown := run.evaluate(lambda: model().detach().clone()), own):
                    assert time.monotonic() < deadline
                assert torch.equal(model(), own), "an evaluation leaves the model as it was"
                if edits:
                    with run.edit(), torch.no_grad():
                        model.short += 1000
                done.set()
            advance(model, optimizer, step + 1, run.rank)
            if run.rank == 0 and step == 1:
                moved = (shown != own)[:-3]
                assert (model.long[moved] != (own - pull_of(0, 2))[:-3][moved]).any()
        if run.rank == 1:
            assert done.wait(20)
        run.evaluate(lambda: 0)
        return model().detach().clone()

    goal = movement({0: 2, 1: 2}, 1)
    goal[-3:] += 1000 * edits
    for end in run_cluster(work, config(**TWO), messages=False).results.values():
        assert torch.equal(end, goal)


def test_two_optimizers_each_take_in_their_own_at_their_own_steps() -> None:
    def work(run: Run) -> Tensor:
        model = Line()
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (model.long, model.short)]
        model, *optimizers = run.prepare(model, *optimizers)
        for step in run.epochs(12):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model() * pull_of(run.rank, step + 1)).sum().backward()
            for optimizer in optimizers[: 1 + step % 2]:  # the second every other time
                optimizer.step()
        run.evaluate(lambda: 0)
        return model().detach().clone()

    goal = movement({0: 12, 1: 12, 2: 12}, 1)
    goal[-3:] = -sum(pull_of(rank, step)[-3:] for rank in range(3) for step in range(2, 13, 2))
    for end in run_cluster(work, config(**THREE), messages=False).results.values():
        assert torch.equal(end, goal)


@pytest.mark.parametrize("freq", [1, RARELY])
def test_edits_are_added_to_what_others_did(freq: int) -> None:
    def work(run: Run) -> Tensor:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in run.epochs(6):
            advance(model, optimizer, step + 1, run.rank)
            if step % 2:
                with run.edit(), torch.no_grad():
                    model.long += 1000 * (run.rank + 1)
        run.evaluate(lambda: 0)
        return model().detach().clone()

    goal = movement({0: 6, 1: 6}, 1)
    goal[:-3] += 3 * (1000 + 2000)
    for end in run_cluster(work, config(sync_freq=freq, **TWO), messages=False).results.values():
        assert torch.equal(end, goal)


@pytest.mark.parametrize("stopper", [0, 2])
def test_any_group_stops_all(stopper: int) -> None:
    def work(run: Run) -> tuple[int, Tensor]:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        taken = 0
        for step in run.epochs(10**9):
            advance(model, optimizer, step + 1, run.rank)
            taken += 1
            if run.rank == stopper and taken == 5:
                run.stop()
        for step in run.epochs(2):  # a stop is for one loop
            advance(model, optimizer, step + 1, run.rank)
        run.evaluate(lambda: 0)
        return taken, model().detach().clone()

    results = run_cluster(work, config(**THREE), messages=False).results
    assert results[f"worker {stopper}.0"][0] in (5, 6)
    goal = movement({int(name[7]): taken for name, (taken, _) in results.items()}, 1)
    goal += movement(dict.fromkeys(range(3), 2), 1)
    for _, end in results.values():
        assert torch.equal(end, goal)


@pytest.mark.parametrize("change", [lambda model: model.half(), lambda model: model.long.data.zero_()])
def test_what_the_script_does_after_its_loop_reaches_nobody(change: Callable[[Line], Any]) -> None:
    changed = threading.Event()

    def work(run: Run) -> Tensor:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in run.epochs(3):
            if run.rank == 1 and step == 2:
                assert changed.wait(20)
            advance(model, optimizer, step + 1, run.rank)
        if run.rank == 0:
            change(model)
            changed.set()
        run.evaluate(lambda: 0)
        return model().detach().clone()

    results = run_cluster(work, config(**TWO), messages=False).results
    assert torch.equal(results["worker 1.0"], movement({0: 3, 1: 3}, 1))


def test_groups_without_exchange_begin_alike_too() -> None:
    def work(run: Run) -> Tensor:
        torch.manual_seed(run.rank)
        model = nn.Linear(8, 4)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model.weight.detach().clone()

    results = run_cluster(work, {"nworker_groups": 2, "nserver_groups": 0}, messages=False).results
    assert torch.equal(results["worker 0.0"], results["worker 1.0"])
