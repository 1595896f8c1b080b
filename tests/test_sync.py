"""Exchange between server groups: with integers nothing may be lost or doubled, whatever the network does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import SIZE, STEPS, Line, config, movement, pull_of, walk

from shoal import Run
from shoal.partition import Buffer, Parameter, Plan, make_plan
from shoal.shard import Shard
from shoal.sync import Sync
from shoal.testing import run_cluster
from shoal.updater import spec_of

PARAMETERS = (Parameter("a", (300,), "float64"), Parameter("b", (200,), "float64"))
BUFFERS = (Buffer("variance", (5,), "float64"), Buffer("count", (), "int64"), Buffer("mean", (2,), "float64"))


class Post(NamedTuple):
    """A message on its way."""

    kind: str
    sender: int
    receiver: int
    chunk: int
    sequence: int
    final: int
    tensor: Tensor


class Group:
    """One server group of one server, its share of rounds still to be taken."""

    def __init__(self, number: int, groups: int, plan: Plan, freq: int, network: list[Post]) -> None:
        self.closed = Counter[int]()
        self.shard = self.make(plan)

        def send(kind: str) -> Callable[[int, int, int, int, Tensor], None]:
            def send(group: int, chunk: int, sequence: int, final: int, tensor: Tensor) -> None:
                network.append(Post(kind, number, group, chunk, sequence, final, tensor.clone()))

            return send

        self.sync = Sync(self.shard, number, groups, freq, send("sync"), send("synced"), patience=1.0)
        self.number, self.rounds, self.flushing = number, 0, False

    def make(self, plan: Plan) -> Any:
        """What this group owns: parameters at 0 and statistics at 1."""
        spec = spec_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1), ())
        shard = Shard(plan, 0, [spec], ())
        for chunk in shard.chunks:
            if chunk.buffer is not None and chunk.dtype == "float64":
                shard.assign(chunk.number, torch.ones(chunk.size, dtype=torch.float64))
        shard.rounds = self.closed.__getitem__
        return shard

    def end(self, now: float) -> None:
        """No more rounds."""
        self.flushing = True
        self.sync.flush(1, now)

    def close(self, chunk: int, now: float) -> None:
        """A round has closed on a chunk."""
        self.closed[chunk] += 1
        self.sync.closed(chunk, now)

    def receive(self, post: Post, now: float) -> None:
        if post.kind == "sync":
            self.sync.requested(post.sender, post.chunk, post.sequence, post.final, post.tensor.clone())
        else:
            self.sync.answered(post.chunk, post.sequence, post.final, post.tensor.clone(), now)


class World:
    """Groups that take rounds while a network delays, reorders, doubles and loses what they say."""

    def __init__(self, groups: int, freq: int, seed: int, kind: type[Group] = Group) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self.plan = make_plan(PARAMETERS, BUFFERS, 1, groups, chunk_bytes=640)
        self.network: list[Post] = []
        self.groups = [kind(g, groups, self.plan, freq, self.network) for g in range(groups)]
        for group in self.groups:
            group.rounds = self.rng.randint(0, 60)
        self.total = {c.number: torch.zeros(c.size, dtype=torch.float64) for c in self.plan.chunks}
        self.largest = {c.number: 0 for c in self.plan.chunks}

    def run(self) -> None:
        for _ in range(20_000):
            if all(group.sync.flushed for group in self.groups):
                return
            self.rng.choice((self.train, self.carry, self.carry))()
            self.check_buffers()
        raise AssertionError("no end in sight")

    def train(self) -> None:
        """One group closes a round on one chunk, or ends; or time passes."""
        group = self.rng.choice(self.groups)
        if group.rounds:
            group.rounds -= 1
            self.round(group)
        elif not group.flushing:
            group.end(self.now)
        else:
            self.now += self.rng.random()
            group.sync.tick(self.now)

    def round(self, group: Group) -> None:
        chunk = self.rng.choice(self.plan.chunks)
        values = group.shard.values(chunk.number)
        if chunk.buffer is None:
            change = torch.tensor([self.rng.randint(-9, 9) for _ in range(chunk.size)], dtype=torch.float64)
            self.total[chunk.number] += change
            group.shard.assign(chunk.number, values + change)
        elif chunk.dtype == "float64":
            fresh = [self.rng.uniform(0.5, 2.0) for _ in range(chunk.size)]
            group.shard.assign(chunk.number, torch.tensor(fresh, dtype=torch.float64))
        else:
            group.shard.assign(chunk.number, values + 1)
            self.largest[chunk.number] = max(self.largest[chunk.number], int(values))
        group.close(chunk.number, self.now)

    def carry(self) -> None:
        if not self.network:
            return
        place = self.rng.randrange(len(self.network))
        post = self.network[place]
        fate = self.rng.random()
        if fate < 0.8:
            self.network.pop(place)
        if fate > 0.1:  # else lost for good; between 0.8 and 1 it stays and comes once more
            self.groups[post.receiver].receive(post, self.now)

    def check_buffers(self) -> None:
        for group in self.groups:
            for chunk in self.plan.chunks:
                if chunk.buffer is not None and chunk.dtype == "float64":
                    values = group.shard.values(chunk.number)
                    assert float(values.min()) >= 0.5 and float(values.max()) <= 2.0


@given(st.integers(2, 4), st.sampled_from([1, 2, 5, 1000]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_or_doubled_and_all_end_equal(groups: int, freq: int, seed: int) -> None:
    world = World(groups, freq, seed)
    assert {c.master for c in world.plan.chunks if c.buffer is None} == set(range(groups))
    world.run()
    for chunk in world.plan.chunks:
        first, *others = (group.shard.values(chunk.number) for group in world.groups)
        assert all(torch.equal(first, other) for other in others)
        if chunk.buffer is None:
            assert torch.equal(first, world.total[chunk.number])
        elif chunk.dtype == "int64":
            assert int(first) == world.largest[chunk.number]


def pair(freq: int) -> tuple[list[Group], list[Post]]:
    network: list[Post] = []
    plan = make_plan((Parameter("a", (64,), "float64"),), (), 1, 2)
    groups = [Group(g, 2, plan, freq, network) for g in range(2)]
    master = plan.chunks[0].master
    return [groups[master], groups[1 - master]], network


def test_what_happens_while_an_exchange_is_in_flight_is_kept() -> None:
    (master, follower), network = pair(1)
    follower.shard.assign(0, follower.shard.values(0) + 1)
    follower.close(0, 0.0)
    master.shard.assign(0, master.shard.values(0) + 10)
    follower.shard.assign(0, follower.shard.values(0) + 100)
    follower.close(0, 0.0)
    assert [post.kind for post in network] == ["sync"], "one exchange in flight"
    master.receive(network.pop(), 0.0)
    follower.receive(network.pop(), 0.0)
    assert follower.shard.values(0)[0] == 111
    master.receive(network.pop(), 0.0)
    assert master.shard.values(0)[0] == 111


def test_an_exchange_comes_after_sync_freq_rounds_and_is_reported() -> None:
    (master, follower), network = pair(3)
    for _ in range(2):
        follower.close(0, 0.0)
        master.close(0, 0.0)
    assert not network
    follower.close(0, 0.0)
    assert len(network) == 1
    master.receive(network.pop(), 0.0)
    follower.receive(network.pop(), 0.0)
    assert (follower.sync.exchanges, follower.sync.exchanged_rounds) == (1, 3)


def test_an_unanswered_request_is_sent_again_and_less_and_less_often() -> None:
    (_, follower), network = pair(1)
    follower.close(0, 0.0)
    for tenths in range(1, 80):
        follower.sync.tick(tenths / 10)
    assert len(network) == 1 + 3, "after 1, 3 and 7 seconds"
    assert {post.sequence for post in network} == {1}


def test_a_single_server_group_has_nothing_to_exchange() -> None:
    network: list[Post] = []
    group = Group(0, 1, make_plan(PARAMETERS, BUFFERS, 1, 1), 1, network)
    for chunk in group.shard.chunks:
        group.close(chunk.number, 0.0)
    group.sync.flush(1, 0.0)
    assert group.sync.flushed
    assert not network


# In a cluster.

HYBRID = {
    "nworker_groups": 2,
    "nserver_groups": 2,
    "nworkers_per_group": 2,
    "nservers_per_group": 2,
}


@pytest.mark.parametrize("freq", [1, 3])
@pytest.mark.parametrize(
    "block",
    [
        {"nworker_groups": 2, "nserver_groups": 2},
        {"nworker_groups": 3, "nserver_groups": 3},
        {"nworker_groups": 4, "nserver_groups": 4, "server_worker_separate": True},
        HYBRID,
        {"nworker_groups": 4, "nserver_groups": 2, "nservers_per_group": 2},
    ],
    ids=["hogwild 2", "hogwild 3", "hogwild 4", "hybrid", "two groups each"],
)
def test_all_groups_of_a_cluster_end_where_all_updates_lead(block: dict[str, int], freq: int) -> None:
    report = run_cluster(lambda run: walk(run, 5), config(sync_freq=freq, **block))
    groups, workers = block["nworker_groups"], block.get("nworkers_per_group", 1)
    goal = movement(dict.fromkeys(range(groups), 5), workers)
    for values in report.results.values():
        assert torch.equal(values[-1], goal)
    assert report.total("exchanges") > 0


class Counted(Line):
    """A line with a variance and a count."""

    variance: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("block", [{"nworker_groups": 3, "nserver_groups": 3}, HYBRID])
def test_buffers_stay_within_what_workers_measured(block: dict[str, int]) -> None:
    def function(run: Run) -> list[tuple[Tensor, int]]:
        model = Counted()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        seen = []
        for step in run.epochs(STEPS):
            optimizer.zero_grad()
            (model() * pull_of(run.rank, step, SIZE)).sum().backward()
            model.variance.fill_(1.0 + run.rank)
            model.count += 1
            optimizer.step()
            seen.append((model.variance.clone(), int(model.count)))
        run.evaluate(lambda: 0)
        return [*seen, (model.variance.clone(), int(model.count))]

    report = run_cluster(function, config(**block))
    workers = block["nworker_groups"] * block.get("nworkers_per_group", 1)
    for values in report.results.values():
        for variance, _ in values:
            assert float(variance.min()) >= 1.0 and float(variance.max()) <= workers
        assert torch.equal(values[-1][0], report.results["worker 0.0"][-1][0])
        assert values[-1][1] >= STEPS
        assert values[-1][1] == report.results["worker 0.0"][-1][1]
