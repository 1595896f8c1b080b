"""What groups beside each other may do to an update, against updates made by hand; and that all get there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import notes
from test_groups import passes
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toys import SIZE, Line, config, movement, pull_of, walk

from shoal import Run
from shoal.acts import Commit, Leave, Owned, Reply, Share, Warm
from shoal.admission import Admission
from shoal.config import Timeouts
from shoal.errors import UsageError, WaitTimeout
from shoal.ledger import Life
from shoal.testing import Script, run_cluster

Build = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

ORDER = "0001101"  # groups of DOWNPOUR in the order of their steps
DOWNPOUR: dict[str, Any] = {"nworker_groups": 2, "server_worker_separate": True}
OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda values: torch.optim.SGD(values, lr=0.5, momentum=0.5),
    "Adam": lambda values: torch.optim.Adam(values, lr=0.25),
}


def train(
    run: Run,
    build: Build,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> list[Tensor]:
    """The values at the start and after each step; a step's gradient is `pull_of` its worker."""
    model = Line()
    model, optimizer = run.prepare(model, build(list(model.parameters())))
    seen = [model().detach().clone()]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = (model() * pull_of(run.rank, step)).sum()
        before(step)
        loss.backward()
        optimizer.step()
        seen.append(model().detach().clone())
        after(step)
    return seen


def by_hand(build: Build, rate: Callable[[int], float], strength: float) -> dict[int, list[Tensor]]:
    """What each group sees in ORDER; `rate`: staleness → factor of the rate."""
    values = torch.zeros(SIZE + 3, dtype=torch.float64)
    optimizer = build([values])
    (settings,) = optimizer.param_groups
    lr, version, step = settings["lr"], {0: 0, 1: 0}, {0: 0, 1: 0}
    then: dict[int, Tensor] = {}
    seen = {0: [values.clone()], 1: [values.clone()]}
    for now, group in enumerate(map(int, ORDER)):
        step[group] += 1
        gradient = pull_of(group, step[group])
        moved = values - then.get(group, torch.zeros_like(values))
        settings["lr"] = lr * rate(now - version[group])
        values.grad = gradient + strength * gradient * gradient * moved
        optimizer.step()
        then[group], version[group] = values.clone(), now + 1
        seen[group].append(values.clone())
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("block", "rate", "strength"),
    [
        pytest.param({}, lambda stale: 1.0, 0.0, id="nothing"),
        pytest.param({"staleness_rate": True}, lambda stale: 1 / (stale + 1), 0.0, id="staleness_rate"),
        pytest.param({"delay_compensation": 2**-9}, lambda stale: 1.0, 2**-9, id="delay_compensation"),
        pytest.param({"group_scale": "mean"}, lambda stale: 0.5, 0.0, id="group_scale"),
        pytest.param(
            {"staleness_rate": True, "delay_compensation": 2**-7, "group_scale": "mean"},
            lambda stale: 0.5 / (stale + 1),
            2**-7,
            id="all",
        ),
    ],
)
def test_an_interleaving_gives_the_updates_made_by_hand(
    name: str, block: dict[str, Any], rate: Callable[[int], float], strength: float
) -> None:
    turns, build = Script(passes(ORDER)), OPTIMIZERS[name]

    def function(run: Run) -> list[Tensor]:
        def before(step: int) -> None:
            if step == 1:
                turns.turn(f"{run.group} starts")
            turns.turn(f"{run.group} pushes")

        steps = ORDER.count(str(run.group))
        return train(run, build, steps, before, lambda step: turns.turn(f"{run.group} has"))

    report = run_cluster(function, config(**DOWNPOUR, **block))
    expected = by_hand(build, rate, strength)
    for group in (0, 1):
        for ours, theirs in zip(report.results[f"worker {group}.0"], expected[group], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    plain = by_hand(build, lambda stale: 1.0, 0.0)
    assert not block or not torch.allclose(expected[1][-1], plain[1][-1])


@pytest.mark.parametrize("servers", [1, 2, 0])
def test_mean_divides_by_the_groups_of_the_whole_run(servers: int) -> None:
    block = {"nworker_groups": 2, "nserver_groups": servers, "group_scale": "mean"}
    report = run_cluster(lambda run: walk(run, 3)[-1], config(**block))
    for group in (0, 1):
        goal = movement({group: 3}, 1) if servers == 0 else movement({0: 3, 1: 3}, 1) / 2
        assert torch.equal(report.results[f"worker {group}.0"], goal)


@pytest.mark.parametrize("block", [{"staleness_rate": True}, {"group_scale": "mean"}])
def test_a_rate_that_is_not_used_at_each_update_cannot_be_divided(block: dict[str, Any]) -> None:
    def function(run: Run) -> None:
        model = nn.Linear(3, 3)
        run.prepare(model, torch.optim.Rprop(model.parameters()))

    with pytest.raises(UsageError, match=rf"cluster\.{next(iter(block))}.* Rprop does not move by lr"):
        run_cluster(function, config(**DOWNPOUR, **block))


# Warm-up.

WARM = 3
SHAPES: dict[str, dict[str, Any]] = {
    "downpour": {"nworker_groups": 3, "nworkers_per_group": 2, "nservers_per_group": 2},
    "in lockstep": {"nworker_groups": 2, "max_delay": 0},
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3},
    "hybrid": {"nworker_groups": 4, "nserver_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2},
    "independent": {"nworker_groups": 2, "nserver_groups": 0, "nworkers_per_group": 2},
}


@pytest.mark.parametrize("steps", [WARM + 2, WARM - 1], ids=["long enough", "ends before"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_first_group_has_made_alone_is_everyone_s_start(shape: str, steps: int) -> None:
    begun, size = threading.Event(), SHAPES[shape].get("nworkers_per_group", 1)
    groups = SHAPES[shape]["nworker_groups"] - (steps < WARM)  # those that meet before they go on
    all_there = threading.Barrier(groups * size, timeout=20)

    def function(run: Run) -> list[Tensor]:
        def before(step: int) -> None:
            if run.group:
                begun.set()
            elif step == min(steps, WARM) and run.rank_in_group == 0:
                assert not begun.wait(0.05), "too early"
            if step == (1 if run.group else WARM + 1):
                all_there.wait()

        return train(run, OPTIMIZERS["Adam"], steps, before)

    report = run_cluster(function, config(**SHAPES[shape], warmup_steps=WARM))
    warm = report.results["worker 0.0"][min(steps, WARM)]
    for name, seen in report.results.items():
        assert torch.equal(seen[0], warm if name[7] != "0" else torch.zeros_like(warm)), name


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "independent"])
def test_no_update_is_lost_or_made_twice_in_a_warm_up(shape: str) -> None:
    block = SHAPES[shape]
    steps = {group: 6 - group for group in range(block["nworker_groups"])}
    report = run_cluster(lambda run: walk(run, steps[run.group])[-1], config(**block, warmup_steps=WARM))
    for end in report.results.values():
        assert torch.equal(end, movement(steps, block.get("nworkers_per_group", 1)))


def test_clocks_are_level_after_a_warm_up() -> None:
    admission = Admission({0: 1, 1: 1}, {0: Owned(0), 1: Owned(0)}, max_delay=0, warmup=2)

    def step(group: int, number: int, chunks: tuple[int, ...] = (0, 1)) -> list[Any]:
        life, actions = Life(group, 0, 1), []
        for chunk in chunks:
            actions += admission.admit(Share(life, chunk, number, 1, 0))
        ones = dict.fromkeys((0, 1), 1)
        return actions + admission.admit(Commit(life, 0, number, ones, ones, {}, 1.0, True, 2 * number))

    assert len([a for a in step(0, 1) if isinstance(a, Reply)]) == 2, "nobody waits for groups that wait"
    assert Warm() not in step(0, 2, chunks=(0,)), "one chunk is not there yet"
    assert admission.cold(1)
    assert admission.admit(Share(Life(0, 0, 1), 1, 2, 1, 0))[-1] == Warm()
    assert not admission.cold(1)
    assert not any(isinstance(a, Reply) for a in step(0, 3)), "from now on it does"
    replies = [a for a in step(1, 1) if isinstance(a, Reply)]
    assert sorted((a.group, a.chunk) for a in replies) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Warm() not in admission.admit(Leave(Life(0, 0, 1), 6))


@pytest.mark.parametrize("servers", [1, 2])
def test_who_waits_for_the_warm_up_says_so(servers: int) -> None:
    stuck = threading.Event()

    def function(run: Run) -> None:
        if run.group == 0:
            model = Line()
            run.prepare(model, torch.optim.SGD(model.parameters()))
            stuck.wait(10)
        else:
            try:
                walk(run)
            finally:
                stuck.set()

    timeouts = Timeouts(start=20, values=20, flush=1, ask=0.1, evaluate=20, finish=0.5)
    block = {"nworker_groups": 2, "nserver_groups": servers, "warmup_steps": 4}
    message = (
        r"waited 0\.5 s \(timeouts\.finish\) for the start that worker group 0 makes in its first 4 steps "
        r"\(cluster\.warmup_steps\)"
    )
    with pytest.raises(WaitTimeout, match=message):
        run_cluster(function, config(timeouts, **block))


# Cautions.


def test_what_several_groups_change_is_told_once_at_the_start() -> None:
    def function(run: Run) -> None:
        model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        run.prepare(model, optimizer)

    def told(**block: int) -> list[str]:
        report = run_cluster(function, config(**block))
        assert not notes(report, "worker 1.0")
        return [note.partition(":")[0] for note in notes(report, "worker 0.0")]

    said = ["running statistics (1)", "SGD's momentum 0.9", "SGD's lr is scheduled"]
    assert told(nworker_groups=2) == said
    assert told(nworker_groups=2, nserver_groups=2) == [said[0], said[2]]
    assert told(nworker_groups=2, nserver_groups=0) == []


# A convex task whose optimum is known.

FRAMEWORKS: dict[str, dict[str, Any]] = {
    "single": {},
    "sandblaster": {"nworkers_per_group": 3, "nservers_per_group": 2, "server_worker_separate": True},
    "allreduce": {"nworkers_per_group": 3, "nservers_per_group": 3},
    **{f"downpour {n}": {"nworker_groups": n, "nworkers_per_group": 2} for n in (2, 3, 4)},
    **{f"hogwild {n}": {"nworker_groups": n, "nserver_groups": n} for n in (2, 3, 4)},
    **{f"independent {n}": {"nworker_groups": n, "nserver_groups": 0} for n in (2, 3, 4)},
    "hybrid 4": {"nworker_groups": 4, "nserver_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2},
}
CORRECTED = {"staleness_rate": True, "delay_compensation": 0.01, "group_scale": "mean", "warmup_steps": 5}
TASKS = [
    *((framework, {}, 0.03) for framework in FRAMEWORKS),
    *((framework, CORRECTED, 0.12) for framework in ("downpour 3", "hogwild 3", "hybrid 4")),
]


@pytest.mark.parametrize(("framework", "block", "rate"), TASKS)
def test_every_framework_reaches_the_optimum_of_least_squares(
    framework: str, block: dict[str, Any], rate: float
) -> None:
    """Targets that the model can meet exactly, so that gradients vanish at the optimum for each worker."""
    generator = torch.Generator().manual_seed(11)
    inputs = 48**0.5 * torch.linalg.qr(torch.randn(48, 4, generator=generator, dtype=torch.float64))[0]
    optimum = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    targets = inputs @ optimum

    def function(run: Run) -> Tensor:
        model = nn.Linear(4, 2, bias=False, dtype=torch.float64)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        loader = run.loader(TensorDataset(inputs, targets), batch_size=8)
        for x, y in run.steps(loader, 150):
            optimizer.zero_grad()
            (model(x) - y).square().sum(1).mean().backward()
            optimizer.step()
        run.evaluate(lambda: 0)
        return model.weight.detach().T.clone()

    report = run_cluster(function, config(**FRAMEWORKS[framework], **block))
    for found in report.results.values():
        torch.testing.assert_close(found, optimum, rtol=0, atol=1e-3)
