"""Every wait has a name and an end, and says who waited for whom."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.config import Cluster, Config, Timeouts
from shoal.errors import WaitTimeout
from shoal.session import Run
from shoal.testing import run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

SHORT = Timeouts(start=1, values=1, flush=1, ask=0.1, evaluate=1, finish=1)
SANDBLASTER = Cluster(nworkers_per_group=3, nservers_per_group=2, server_worker_separate=True)
HASTY = Cluster(nworker_groups=2, nworkers_per_group=1, server_worker_separate=True, max_delay=0)


def train(run: Run, steps: int = 3) -> None:
    model = nn.Linear(40, 40)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()


def losing(kind: Kind, sender: str, after: int = 0) -> Callable[[Header, str], Fate]:
    """A judge that loses a sender's messages of a kind from a step on."""

    def judge(header: Header, peer: str) -> Fate:
        lost = header.kind is kind and header.sender == sender and header.step > after
        return "lose" if lost else "deliver"

    return judge


@pytest.mark.parametrize(
    ("cluster", "judge", "said"),
    [
        pytest.param(
            SANDBLASTER,
            losing(Kind.COMMIT, "worker 0.1", after=1),
            ("step 2", "timeouts.values", "server 0.0, which waits for worker 0.1", "version 1"),
            id="a peer's commit",
        ),
        pytest.param(
            SANDBLASTER,
            losing(Kind.SHARE, "worker 0.2"),
            ("step 1", "timeouts.values", "which waits for worker 0.2", "version 0"),
            id="a peer's share",
        ),
        pytest.param(
            Cluster(),
            losing(Kind.SHARE, "worker 0.0"),
            ("step 1", "timeouts.values", "which waits for worker 0.0", "version 0"),
            id="one's own share",
        ),
        pytest.param(
            SANDBLASTER,
            losing(Kind.WELCOME, "server 0.1", after=-1),
            ("timeouts.start", "the servers' welcome from", "server 0.1"),
            id="a server's welcome",
        ),
        pytest.param(
            SANDBLASTER,
            losing(Kind.LEAVE, "server 0.1", after=-1),
            ("timeouts.finish", "server 0.1"),
            id="the end",
        ),
        pytest.param(
            HASTY,
            losing(Kind.COMMIT, "worker 1.0", after=1),
            (
                "step 2",
                "timeouts.values",
                r"which waits for worker (group 1|1\.0) ",
            ),  # whoever is first to tell
            id="a slower group",
        ),
    ],
)
def test_a_wait_says_who_waited_for_whom(cluster: Cluster, judge: Any, said: tuple[str, ...]) -> None:
    with pytest.raises(WaitTimeout) as caught:
        run_cluster(train, Config(cluster=cluster, timeouts=SHORT), judge=judge)
    text = str(caught.value)
    assert text.startswith("worker ")
    for words in said:
        assert re.search(words, text)


def test_a_peer_that_evaluates_too_long_is_named() -> None:
    def evaluating(run: Run) -> None:
        model = nn.Linear(4, 4)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if run.rank_in_group:
            run.evaluate(lambda: 0)  # the group's worker 0 never comes
        else:
            next(iter(run.epochs(1)))

    with pytest.raises(WaitTimeout, match=r"timeouts\.(evaluate|finish)"):
        run_cluster(evaluating, Config(cluster=SANDBLASTER, timeouts=SHORT))


@pytest.mark.parametrize("call", [lambda run: run.barrier(), lambda run: run.mean(1.0)])
def test_a_peer_that_does_not_gather_is_named(call: Callable[[Run], object]) -> None:
    def gathering(run: Run) -> None:
        train(run, steps=1)
        if run.rank_in_group != 1:
            call(run)

    with pytest.raises(WaitTimeout, match=r"1 s \(timeouts\.values\) for worker 0\.1, which has not called"):
        run_cluster(gathering, Config(cluster=SANDBLASTER, timeouts=SHORT))
