"""A worker's half of the protocol, against servers whose messages the test writes."""

from __future__ import annotations

import pytest
import torch

from shoal.config import Cluster, Timeouts
from shoal.errors import WaitTimeout
from shoal.exchange import Decision, Exchange
from shoal.parameters import as_bytes
from shoal.partition import Parameter, make_plan
from shoal.topology import Member, Topology
from shoal.transport import Post
from shoal.transport.inprocess import Hub, InProcess
from shoal.wire import VERSION, Commit, Hello, Kind, OptimizerSpec, Values, Welcome

SPEC = OptimizerSpec("torch.optim:SGD", {"lr": 0.1}, ({"lr": 0.1},))
PARAMETERS = (
    Parameter("large", (256,), "float32", optimizer=0),
    Parameter("small", (2,), "float32", optimizer=1),
)
HELLO = Hello(VERSION, PARAMETERS, (), (SPEC, SPEC))
QUICK = Timeouts(start=1, values=1, flush=1, ask=0.1, evaluate=1, finish=1)


class Stage:
    """One worker, and two servers that say what they are told to."""

    def __init__(self) -> None:
        topology = Topology.of(Cluster(nservers_per_group=2, server_worker_separate=True))
        self.plan = make_plan(PARAMETERS, (), servers=2)
        hub, worker = Hub(), Member("worker", 0, 0)
        self.servers = [Post(InProcess(hub, server.name), "a run") for server in topology.servers]
        post = Post(InProcess(hub, worker.name), "a run")
        self.exchange = Exchange(worker, topology, post, self.plan, QUICK, lambda *_: None)

    def send(self, server: int, kind: Kind, body: Values | Welcome | None = None, **fields: int) -> None:
        values = kind is Kind.VALUES
        frames = [as_bytes(torch.zeros(self.plan.chunks[fields["chunk"]].size))] if values else []
        self.servers[server].send("worker 0.0", kind, body, frames, **fields)

    def welcome(self, *steps: tuple[int, int]) -> None:
        """Each server's welcome, then the values that the worker asks for first."""
        for server, told in enumerate(steps):
            self.send(server, Kind.WELCOME, Welcome(told))
        for chunk in self.plan.chunks:
            self.send(chunk.server, Kind.VALUES, Values(), chunk=chunk.number, number=-1)


def test_a_returning_worker_goes_on_after_the_least_step_of_those_who_have_a_part_of_it() -> None:
    stage = Stage()
    (owner,) = {chunk.server for chunk in stage.plan.chunks if chunk.optimizer == 1}
    assert {chunk.server for chunk in stage.plan.chunks if chunk.optimizer == 0} == {0, 1}
    stage.welcome((3, 0), (4, 5)) if owner else stage.welcome((3, 5), (4, 0))
    stage.exchange.join(HELLO, None)
    assert [stage.exchange.begin_step(optimizer) for optimizer in (0, 1)] == [4, 6]


def test_the_word_that_an_older_edit_is_stored_says_nothing_of_this_one() -> None:
    stage = Stage()
    stage.welcome((0, 0), (0, 0))
    stage.exchange.join(HELLO, None)
    chunk = stage.plan.chunks[0]
    edited = {chunk.number: (torch.ones(chunk.size),)}
    stage.send(chunk.server, Kind.STORED, chunk=chunk.number, number=1)
    stage.exchange.edit(edited)
    stage.send(chunk.server, Kind.STORED, chunk=chunk.number, number=1)  # it had been asked twice
    with pytest.raises(WaitTimeout, match="changed values to be stored"):
        stage.exchange.edit(edited)


@pytest.mark.parametrize(("committed", "asked"), [(0, 1), (1, 0)])
def test_a_commit_that_a_server_lacks_is_sent_again_during_the_next_optimizers_norm(
    committed: int, asked: int
) -> None:
    stage = Stage()
    stage.welcome((0, 0), (0, 0))
    stage.exchange.join(HELLO, None)
    owner = next(chunk.server for chunk in stage.plan.chunks if chunk.optimizer == 1)
    nothing = Decision(set(), {}, 1.0)
    stage.exchange.commit(committed, nothing)
    stage.send(owner, Kind.PULL, step=1)
    with pytest.raises(WaitTimeout, match="the norm of the group's gradient"):
        stage.exchange.norm(asked, nothing)
    heard = iter(lambda: stage.servers[owner].receive(0.0), None)
    commits = [message.body(Commit).optimizer for message in heard if message.header.kind is Kind.COMMIT]
    assert commits == [committed, committed]
