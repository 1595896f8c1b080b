"""Every optimizer equals plain PyTorch on pieces, or sees whole parameters, or is refused with a remedy."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALONE,
    GROUPS,
    SANDBLASTER,
    TOPOLOGIES,
    WIDTH,
    Batch,
    Case,
    Values,
    adamw,
    adds_up,
    close,
    clustered,
    counted,
    fit,
    loss_of,
    mlp,
    part,
    plain,
    regression,
    same,
    values_of,
)
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from shoal import Run
from shoal.config import Cluster, Config
from shoal.errors import OptimizerRefused
from shoal.testing import QUICK, run_cluster
from shoal.updater import ELEMENTWISE

Make = Callable[[nn.Module], Optimizer]
ALONE_ON_THREE = ALONE["one worker, three servers"]


def wide() -> nn.Module:
    """Several chunks on each of three servers, sizes that no vector length divides, and a scalar."""
    model = nn.Sequential(nn.Linear(WIDTH, 509), nn.Tanh(), nn.Linear(509, 401), nn.Tanh(), nn.Linear(401, 4))
    model.register_parameter("unused", nn.Parameter(torch.tensor(0.5)))
    return model


def matrices() -> nn.Module:
    """Weights only, as Muon wants them."""
    return nn.Sequential(
        nn.Linear(WIDTH, 48, bias=False),
        nn.Tanh(),
        nn.Linear(48, 40, bias=False),
        nn.Tanh(),
        nn.Linear(40, 4, bias=False),
    )


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.05),
    "SGD, momentum": lambda m: optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "SGD, nesterov": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "SGD, maximize": lambda m: optim.SGD(m.parameters(), lr=0.001, maximize=True, foreach=True),
    "Adam": lambda m: optim.Adam(m.parameters(), lr=0.01),
    "Adam, foreach": lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1, foreach=True),
    "Adam, amsgrad": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW": lambda m: optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), lr=0.005),
    "RMSprop, centered": lambda m: optim.RMSprop(m.parameters(), lr=0.005, centered=True, momentum=0.5),
    "Adadelta": lambda m: optim.Adadelta(m.parameters(), lr=0.5),
    "Adamax": lambda m: optim.Adamax(m.parameters(), lr=0.01),
    "NAdam": lambda m: optim.NAdam(m.parameters(), lr=0.01),
    "NAdam, decoupled": lambda m: optim.NAdam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda m: optim.RAdam(m.parameters(), lr=0.01),
    "ASGD": lambda m: optim.ASGD(m.parameters(), lr=0.05, t0=2, lambd=0.01),
    "Rprop": lambda m: optim.Rprop(m.parameters(), lr=0.01),
    "Adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.01),
}
MUON: Make = lambda m: optim.Muon(m.parameters(), lr=0.01)  # noqa: E731


def test_the_table_holds_every_optimizer_that_runs_on_pieces() -> None:
    assert {name.partition(",")[0] for name in OPTIMIZERS} - {"Adafactor"} == ELEMENTWISE


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_worker_equals_plain_pytorch_bit_for_bit(make: Make) -> None:
    case = Case(wide, make, steps=6)
    trained = clustered(case, ALONE_ON_THREE, torch.float32)
    assert counted(trained.report, "rounds") >= 3 * case.steps  # each server has a chunk or more
    same(trained.values[0], plain(case, torch.float32))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_group_equals_plain_pytorch_on_the_joined_batch(make: Make) -> None:
    case = Case(lambda: mlp(40), make, steps=6)
    oracle = plain(case)
    for values in clustered(case, SANDBLASTER).values:
        close(values, oracle)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_muon_sees_whole_matrices(cluster: Mapping[str, Any]) -> None:
    case = Case(matrices, MUON, steps=6)
    for values in clustered(case, cluster).values:
        close(values, plain(case))
    if cluster in ALONE.values():
        same(clustered(case, cluster, torch.float32).values[0], plain(case, torch.float32))


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_step_counts_of_used_and_unused_parameters(cluster: Mapping[str, Any]) -> None:
    """NAdam's and ASGD's state runs with the count of each parameter's own steps."""
    for make in (OPTIMIZERS["NAdam"], OPTIMIZERS["ASGD"]):

        def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
            for number, (inputs, targets) in enumerate(batches):
                optimizer.zero_grad()
                loss_of(
                    model[2] if number % 2 else model,
                    inputs if not number % 2 else inputs.tile(1, 2),
                    targets,
                ).backward()
                optimizer.step()

        case = Case(lambda: mlp(16), make, loop, steps=6)
        oracle = plain(case)
        for values in clustered(case, cluster).values:
            close(values, oracle)


# State from before prepare().


@pytest.mark.parametrize("cluster", [ALONE_ON_THREE, SANDBLASTER], ids=["alone", "sandblaster"])
@pytest.mark.parametrize(
    ("build", "make"),
    [(wide, make) for make in OPTIMIZERS.values()] + [(matrices, MUON)],
    ids=[*OPTIMIZERS, "Muon"],
)
def test_state_from_before_prepare_is_taken_over(
    build: Callable[[], nn.Module], make: Make, cluster: Mapping[str, Any]
) -> None:
    """Three steps in plain PyTorch on worker 0.0 only; then three more together."""
    case, dtype = Case(build, make), torch.float32 if cluster is ALONE_ON_THREE else torch.float64
    if cluster is SANDBLASTER and build is wide:
        case = Case(lambda: mlp(40), make)
    start, batches = case.model(dtype), regression(6, dtype)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizer = make(model)
        if run.rank == 0:
            fit(model, optimizer, batches[:3])
        run.prepare(model, optimizer)
        fit(model, optimizer, part(batches[3:], run.rank, run.world_size))
        return values_of(model)

    model = deepcopy(start)
    fit(model, make(model), batches)
    for values in run_cluster(work, cluster).results.values():
        if cluster is ALONE_ON_THREE:
            same(values, values_of(model))
        else:
            close(values, values_of(model))


def test_a_scalars_state_is_taken_over() -> None:
    """The step count and the moments of a 0-dimensional parameter have the same shape."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs[:, :4] * self.scale + self.shift

    batches = regression(6, torch.float32)
    for make in OPTIMIZERS.values():
        start = Scalar()

        def work(run: Run, make: Make = make, start: nn.Module = start) -> Values:
            model = deepcopy(start)
            optimizer = make(model)
            fit(model, optimizer, batches[:3])
            run.prepare(model, optimizer)
            fit(model, optimizer, batches[3:])
            return values_of(model)

        model = deepcopy(start)
        fit(model, make(model), batches)
        same(run_cluster(work, {}).results["worker 0.0"], values_of(model))


# Several optimizers.


def adversaries(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], batches: Sequence[Batch]
) -> None:
    """A GAN's loop: two steps of the critic for each of the generator's, whose backward reaches both."""
    (generator, critic), (ours, theirs) = models, optimizers
    for inputs, real in batches:
        for _ in range(2):
            theirs.zero_grad()
            (critic(generator(inputs).detach()).mean() - critic(real).square().mean()).backward()
            theirs.step()
        ours.zero_grad()
        (-critic(generator(inputs)).mean()).backward()
        ours.step()


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_two_optimizers_for_two_models(cluster: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    start = [mlp().double(), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()]
    batches = regression()

    def made(models: Sequence[nn.Module]) -> list[Optimizer]:
        return [optim.Adam(models[0].parameters(), lr=0.01), optim.AdamW(models[1].parameters(), lr=0.002)]

    def work(run: Run) -> list[Any]:
        models = deepcopy(start)
        optimizers = made(models)
        run.prepare(*models, *optimizers)
        adversaries(models, optimizers, part(batches, run.rank, run.world_size))
        return [*map(values_of, models), run._training.step_of(0), run._training.step_of(1)]

    models = deepcopy(start)
    adversaries(models, made(models), batches)
    report = run_cluster(work, cluster)
    adds_up(report)
    for generator, critic, *steps in report.results.values():
        close(generator, values_of(models[0]))
        close(critic, values_of(models[1]))
        assert steps == [5, 10]  # counted for each optimizer


def test_two_optimizers_share_one_model() -> None:
    def made(model: nn.Module) -> list[Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return [optim.Muon(matrices, lr=0.01), optim.AdamW(others, lr=0.01)]

    def train(model: nn.Module, optimizers: Sequence[Optimizer], batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            for optimizer in optimizers:
                optimizer.step()

    start, batches = Case(mlp).model(), regression()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizers = made(model)
        run.prepare(model, *optimizers)
        train(model, optimizers, part(batches, run.rank, run.world_size))
        return values_of(model)

    model = deepcopy(start)
    train(model, made(model), batches)
    for cluster in (SANDBLASTER, ALONE_ON_THREE):
        for values in run_cluster(work, cluster).results.values():
            close(values, values_of(model))


# Which classes.


class Signs(Optimizer):
    """A user's optimizer; by default it may look at whole parameters, and this one does."""

    def __init__(self, params: Any, lr: float = 0.01, scale: tuple[float, float] = (1.0, 0.5)) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["scale"], tuple)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.sub_(
                        p.grad.sign() * p.grad.norm(), alpha=group["lr"] * group["scale"][0] / state["count"]
                    )


class Elementwise(Signs):
    """Its update of an element depends on that element alone, and it says so."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Careless(Elementwise):
    """Its step does not say that it needs no gradients."""

    step = Elementwise.step.__wrapped__  # type: ignore[attr-defined]


@pytest.fixture
def module() -> Iterator[str]:
    """A module of the user's with these classes."""
    name = "users_optimizers"
    made = types.ModuleType(name)
    classes = (Signs, Elementwise, Careless)
    home, sys.modules[name] = Signs.__module__, made
    for cls in classes:
        setattr(made, cls.__name__, cls)
        cls.__module__ = name
    yield name
    for cls in classes:
        cls.__module__ = home
    del sys.modules[name]


@pytest.mark.parametrize("cls", [Signs, Elementwise])
@pytest.mark.parametrize("cluster", [ALONE_ON_THREE, SANDBLASTER], ids=["alone", "sandblaster"])
def test_a_users_class_runs_where_it_is_allowed(
    module: str, cls: type[Signs], cluster: Mapping[str, Any]
) -> None:
    name = f"{module}:{cls.__name__}"
    config = Config(cluster=Cluster(**cluster), timeouts=QUICK, allow_optimizers=(name,))
    case = Case(lambda: mlp(200), lambda m: cls(m.parameters(), scale=(2.0, 0.1)))
    start, batches = case.model(), regression()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, case.optimizer(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))
        return values_of(model)

    report = run_cluster(work, config)
    for values in report.results.values():
        close(values, plain(case))
    plan = report.servers["server 0.0"].rounds._plan
    assert all(parameter.whole == (cls is Signs) for parameter in plan.parameters)


@pytest.mark.parametrize("messages", [True, False])
def test_a_step_that_does_not_switch_gradients_off_runs_all_the_same(module: str, messages: bool) -> None:
    config = Config(cluster=Cluster(), allow_optimizers=(f"{module}:Careless",))

    def work(run: Run) -> Values:
        model = deepcopy(start)
        fit(*run.prepare(model, Careless(model.parameters())), batches)
        return values_of(model)

    case = Case(mlp, lambda m: Elementwise(m.parameters()))
    start, batches = case.model(), regression()
    found = run_cluster(work, config, messages=messages).results["worker 0.0"]
    close(found, plain(case))


REFUSED: dict[str, tuple[Make, str, str]] = {
    "LBFGS": (lambda m: optim.LBFGS(m.parameters()), "LBFGS .*closure", "another optimizer"),
    "SparseAdam": (
        lambda m: optim.SparseAdam(list(m.parameters())),
        r"0\.weight.*dense: .*dense gradients",
        "another optimizer",
    ),
    "unknown": (lambda m: Signs(m.parameters()), "do not know .*:Signs", "--allow-optimizer .*:Signs"),
}


@pytest.mark.parametrize("cluster", [ALONE["single"], GROUPS["sandblaster"]], ids=["single", "sandblaster"])
@pytest.mark.parametrize(("make", "what", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_servers_cannot_run_is_refused(
    make: Make, what: str, remedy: str, cluster: Mapping[str, Any]
) -> None:
    with pytest.raises(OptimizerRefused, match=rf"{what}(.|\n)*{remedy}"):
        clustered(Case(optimizer=make), cluster)


def test_a_class_of_the_script_is_refused() -> None:
    local = type("Local", (optim.SGD,), {"__module__": "__main__"})
    with pytest.raises(OptimizerRefused, match=r"Local is defined in the script(.|\n)*a module of its own"):
        clustered(Case(optimizer=lambda m: local(m.parameters(), lr=0.1)), {})


def test_an_allowed_name_that_is_no_optimizer_is_refused(module: str) -> None:
    sys.modules[module].Signs = int  # type: ignore[attr-defined]
    config = Config(cluster=Cluster(), timeouts=QUICK, allow_optimizers=(f"{module}:Signs",))

    def work(run: Run) -> None:
        model = mlp()
        run.prepare(model, Signs(model.parameters()))

    with pytest.raises(OptimizerRefused, match="is no torch optimizer"):
        run_cluster(work, config)


def test_optimizer_settings_that_are_tensors() -> None:
    def make(model: nn.Module) -> Optimizer:
        return optim.SGD(model.parameters(), lr=torch.tensor(0.05), momentum=0.9)

    close(clustered(Case(optimizer=make), SANDBLASTER).values[0], plain(Case(optimizer=make)), 1e-7)
    same(
        clustered(Case(optimizer=adamw), {}, torch.float32).values[0],
        plain(Case(optimizer=adamw), torch.float32),
    )
