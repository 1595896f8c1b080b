"""torch.optim's optimizers with all their arguments, and every scheduler."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from cases import (
    ALONE,
    SANDBLASTER,
    Batch,
    Case,
    Values,
    close,
    fit,
    loss_of,
    mlp,
    notes,
    plain,
    regression,
    same,
    values_of,
)
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, check_asynchronous, check_joined, clustered, train
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from shoal import Run
from shoal.errors import OptimizerRefused, UsageError
from shoal.testing import run_cluster

Make = Callable[[nn.Module], Optimizer]
ALONE_ON_THREE = ALONE["one worker, three servers"]


def made(cls: type[Optimizer], **keywords: Any) -> Make:
    return lambda model: cls(model.parameters(), **keywords)


class Matrices(nn.Module):
    """Two weights, which is all that Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 4, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def muon(**keywords: Any) -> Case:
    return Case(Matrices, made(optim.Muon, lr=0.01, **keywords))


def case(cls: type[Optimizer], **keywords: Any) -> Case:
    return Case(optimizer=made(cls, **keywords))


CASES: dict[str, Case] = {
    "SGD, dampening, maximize": case(optim.SGD, lr=1e-3, momentum=0.9, dampening=0.3, maximize=True),
    "SGD, all on foreach": case(
        optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "SGD, one by one": case(optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "Adam, maximize": case(optim.Adam, lr=1e-3, maximize=True, weight_decay=0.1, amsgrad=True),
    "Adam, decoupled": case(optim.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW, amsgrad, one by one": case(optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
    "AdamW, foreach": case(optim.AdamW, lr=0.01, amsgrad=True, foreach=True, betas=(0.7, 0.9), eps=1e-6),
    "Adagrad, all": case(
        optim.Adagrad, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1, foreach=True
    ),
    "RMSprop, all": case(
        optim.RMSprop, lr=0.005, alpha=0.9, centered=True, momentum=0.5, weight_decay=0.1, foreach=True
    ),
    "Adadelta, all": case(optim.Adadelta, lr=0.5, rho=0.8, weight_decay=0.1, foreach=True),
    "Adamax, all": case(optim.Adamax, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, foreach=True),
    "NAdam, all": case(
        optim.NAdam, lr=0.01, momentum_decay=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "RAdam, decoupled": case(
        optim.RAdam, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "ASGD, all": case(optim.ASGD, lr=0.05, lambd=0.01, alpha=0.6, t0=2, weight_decay=0.1, foreach=True),
    "Rprop, all": case(optim.Rprop, lr=0.01, etas=(0.4, 1.3), step_sizes=(1e-5, 0.1), foreach=True),
    "Muon": muon(),
    "Muon, all": muon(
        weight_decay=0.2, momentum=0.8, nesterov=False, ns_steps=3, adjust_lr_fn="match_rms_adamw"
    ),
    "Adafactor": case(optim.Adafactor, lr=0.01),
    "Adafactor, all": case(optim.Adafactor, lr=0.05, beta2_decay=-0.7, d=1.5, weight_decay=0.1, foreach=True),
}


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    known = {
        name for name, cls in vars(optim).items() if isinstance(cls, type) and issubclass(cls, Optimizer)
    }
    assert known - {"Optimizer", "LBFGS", "SparseAdam"} == {name.partition(",")[0] for name in CASES}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_optimizer_with_all_its_arguments(case: Case, cluster: Mapping[str, Any]) -> None:
    check_joined(case, cluster)


GENTLE: dict[str, Case] = {
    "SGD": Case(optimizer=made(optim.SGD, lr=0.03, momentum=0.5), steps=20),
    "Adagrad": Case(optimizer=made(optim.Adagrad, lr=0.05), steps=20),
    "Rprop": Case(optimizer=made(optim.Rprop, lr=0.001, step_sizes=(1e-6, 0.01)), steps=20),
    "ASGD": Case(optimizer=made(optim.ASGD, lr=0.05), steps=20),
    "Adafactor": Case(optimizer=made(optim.Adafactor, lr=0.01), steps=20),
    "Muon": Case(Matrices, made(optim.Muon, lr=0.01), steps=20),
} | {
    cls.__name__: Case(optimizer=made(cls, lr=rate), steps=20)
    for cls, rate in [
        (optim.Adam, 0.01),
        (optim.AdamW, 0.01),
        (optim.RMSprop, 0.002),
        (optim.Adadelta, 1.0),
        (optim.Adamax, 0.01),
        (optim.NAdam, 0.01),
        (optim.RAdam, 0.02),
    ]
}  # type: ignore[operator]


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
@pytest.mark.parametrize("case", GENTLE.values(), ids=GENTLE)
def test_an_optimizer_learns_with_groups(case: Case, cluster: Mapping[str, Any]) -> None:
    check_asynchronous(case, cluster, 1.0 if case is GENTLE["Adadelta"] else 0.98)


# Arguments about how it is computed.

FUSED = [made(cls, lr=0.01, fused=True) for cls in (optim.Adam, optim.AdamW, optim.Adagrad)]


@pytest.mark.parametrize("cluster", [ALONE_ON_THREE, SANDBLASTER], ids=["alone", "sandblaster"])
@pytest.mark.parametrize("make", [*FUSED, made(optim.SGD, lr=0.05, momentum=0.9, fused=True)])
def test_fused_kernels_differ_in_the_last_bits(make: Make, cluster: Mapping[str, Any]) -> None:
    for values in train(Case(optimizer=make), cluster, torch.float32):
        close(values, plain(Case(optimizer=make), torch.float32), 1e-6)
    for values in train(Case(optimizer=make), cluster):
        close(values, plain(Case(optimizer=make)), 1e-7)


CAPTURABLE = [
    cls for name, cls in vars(optim).items() if isinstance(cls, type) and issubclass(cls, Optimizer)
]
CAPTURABLE = [cls for cls in CAPTURABLE if "capturable" in inspect.signature(cls).parameters]


@pytest.mark.parametrize("cls", CAPTURABLE)
def test_capturable_is_the_workers_own_business(cls: type[Optimizer]) -> None:
    """It is about CUDA graphs, which servers do not use; torch refuses it on the CPU."""
    captured, usual = made(cls, capturable=True), made(cls)
    with pytest.raises((AssertionError, RuntimeError), match="capturable"):
        plain(Case(optimizer=captured))
    for values in train(Case(optimizer=captured), SANDBLASTER):
        close(values, plain(Case(optimizer=usual)))


REFUSED: dict[str, tuple[Case, str]] = {
    "differentiable": (Case(optimizer=made(optim.SGD, lr=0.1, differentiable=True)), "differentiable=True"),
    "closure": (Case(optimizer=made(optim.LBFGS)), "LBFGS"),
}


@pytest.mark.parametrize(("case", "what"), REFUSED.values(), ids=REFUSED)
def test_what_servers_cannot_do_is_refused_at_prepare(case: Case, what: str) -> None:
    with pytest.raises(OptimizerRefused, match=what) as error:
        train(case, SANDBLASTER)
    assert error.value.remedy


class Plane(nn.Module):
    """One complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(self.weight.dtype) @ self.weight).abs()


@pytest.mark.parametrize(
    "cls", [c for n, c in vars(optim).items() if n in {x.partition(",")[0] for x in CASES}]
)
def test_complex_parameters_train_or_are_refused_as_torch_refuses_them(cls: type[Optimizer]) -> None:
    case = Case(Plane, made(cls, lr=0.01))
    try:
        oracle: Values | None = plain(case)
    except (RuntimeError, ValueError):
        oracle = None
    if oracle is None:
        with pytest.raises(OptimizerRefused, match=cls.__name__):
            train(case, SANDBLASTER)
    else:
        for values in train(case, SANDBLASTER):
            close(values, oracle)


# Settings that change on the way.


def momentum_later(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    for number, batch in enumerate(batches):
        optimizer.param_groups[0]["momentum"] = 0.9 if number >= 2 else 0
        optimizer.param_groups[0]["nesterov"] = number >= 3
        fit(model, optimizer, [batch])


def tensor_rates(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """A rate that is a tensor, halved in place."""
    for batch in batches:
        fit(model, optimizer, [batch])
        optimizer.param_groups[0]["lr"].mul_(0.5)
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_momentum_set_later(cluster: Mapping[str, Any]) -> None:
    check_joined(Case(optimizer=made(optim.SGD, lr=0.05), loop=momentum_later), cluster)


@pytest.mark.parametrize("cluster", [ALONE_ON_THREE, SANDBLASTER], ids=["alone", "sandblaster"])
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW])
def test_a_rate_that_is_a_tensor(cls: type[Optimizer], cluster: Mapping[str, Any]) -> None:
    def make(model: nn.Module) -> Optimizer:
        return cls(model.parameters(), lr=torch.tensor(0.0625, dtype=torch.float64), foreach=False)

    for values in train(Case(optimizer=make, loop=tensor_rates), cluster):
        close(values, plain(Case(optimizer=make, loop=tensor_rates)))


# What must not be asked of a prepared optimizer.


def asked(ask: Callable[[nn.Module, Optimizer], Any]) -> tuple[str, list[str]]:
    """The UsageError that a script gets for `ask` after a step, and its notes."""
    told: list[str] = []

    def work(run: Run) -> None:
        model = mlp()
        model, optimizer = run.prepare(model, optim.Adam(model.parameters()))
        fit(model, optimizer, regression(1, torch.float32))
        try:
            ask(model, optimizer)
        except UsageError as error:
            assert error.remedy
            told.append(str(error))

    report = run_cluster(work, {})
    return told[0] if told else "", notes(report, "worker 0.0")


def step_a_copy(model: nn.Module, optimizer: Optimizer) -> None:
    twin = copy.deepcopy(optimizer)
    twin.step()


def test_parameters_come_before_prepare() -> None:
    extra = nn.Linear(2, 2)
    error, _ = asked(lambda model, optimizer: optimizer.add_param_group({"params": extra.parameters()}))
    assert "before run.prepare()" in error and "requires_grad" in error
    error, _ = asked(lambda model, optimizer: _smuggle(model, optimizer, extra.weight))
    assert "before run.prepare()" in error


def _smuggle(model: nn.Module, optimizer: Optimizer, weight: nn.Parameter) -> None:
    optimizer.param_groups[0]["params"].append(weight)
    optimizer.step()


def test_state_comes_before_prepare() -> None:
    model = mlp()
    other = optim.Adam(model.parameters(), lr=0.5)
    fit(model, other, regression(1, torch.float32))
    error, _ = asked(lambda model, optimizer: optimizer.load_state_dict(other.state_dict()))
    assert "before run.prepare()" in error


def test_settings_may_be_loaded_and_the_state_is_said_to_be_elsewhere() -> None:
    found: list[dict[str, Any]] = []

    def ask(model: nn.Module, optimizer: Optimizer) -> None:
        found.append(optimizer.state_dict())
        found[0]["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(found[0])
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.step()

    error, told = asked(ask)
    assert not error and found[0]["state"] == {}
    assert any("state is the servers'" in note for note in told)


def test_a_copy_of_a_prepared_optimizer_does_not_step_for_it() -> None:
    error, _ = asked(step_a_copy)
    assert "copy" in error


def test_a_copy_of_a_prepared_model_is_the_users_own() -> None:
    """It may be trained by an optimizer of its own, and nobody hears of it."""

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        fit(model, optimizer, batches[:2])
        twin = copy.deepcopy(model)
        fit(twin, optim.SGD(twin.parameters(), lr=1.0), batches)
        fit(model, optimizer, batches[2:])

    case = Case(optimizer=made(optim.SGD, lr=0.1), steps=4)
    report = clustered(case, {}, torch.float32, body=body)
    same(report.results["worker 0.0"], plain(case, torch.float32))


# Schedulers.

Schedule = Callable[[Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.OneCycleLR(o, 0.1, total_steps=8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}
TRAINED: dict[str, Make] = {
    "SGD": made(optim.SGD, lr=0.05, momentum=0.9),
    "NAdam": made(optim.NAdam, lr=0.01),
}


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    assert set(SCHEDULES) - {"SWALR"} == set(lr_scheduler.__all__) - {"LRScheduler"}


def scheduled(
    schedule: Schedule, mean: Callable[[float], float] = float
) -> Callable[[nn.Module, Optimizer, Sequence[Batch]], None]:
    """A loop with a scheduler step after each, on the mean of the workers' losses where it takes a metric."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        scheduler = schedule(optimizer)
        for batch in batches:
            fit(model, optimizer, [batch])
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(mean(loss_of(model, *batch).item()))
            else:
                scheduler.step()

    return loop


@pytest.mark.parametrize("make", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_scheduler_equals_plain_pytorch(schedule: Schedule, make: Make) -> None:
    if schedule is not SCHEDULES["ReduceLROnPlateau"]:
        for cluster in (ALONE["single"], SANDBLASTER):
            check_joined(Case(optimizer=make, loop=scheduled(schedule), steps=6), cluster)


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_plateau_is_seen_by_the_whole_group(cluster: Mapping[str, Any]) -> None:
    """Losses of parts differ; run.mean makes one metric of them, so that all rates fall together."""
    make, schedule = TRAINED["SGD"], SCHEDULES["ReduceLROnPlateau"]
    rates, case = set(), Case(optimizer=make, steps=8)

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        scheduled(schedule, run.mean)(model, optimizer, batches)
        rates.add(optimizer.param_groups[0]["lr"])

    model = Case().model()
    optimizer = make(model)
    scheduled(schedule)(model, optimizer, regression(8))
    report = clustered(case, cluster, body=body)
    for name, values in report.results.items():
        close(values, values_of(model))
        assert not any("hyperparameters differed" in note for note in notes(report, name))
    assert rates == {optimizer.param_groups[0]["lr"]} and max(rates) < 0.05


# An average of the weights that the user keeps.


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("decay", [None, 0.9], ids=["swa", "ema"])
def test_an_average_kept_by_the_user(decay: float | None, cluster: Mapping[str, Any]) -> None:
    def averaging(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> nn.Module:
        multi = optim.swa_utils.get_ema_multi_avg_fn(decay) if decay else None
        average = optim.swa_utils.AveragedModel(model, multi_avg_fn=multi, use_buffers=True)
        for batch in batches:
            fit(model, optimizer, [batch])
            average.update_parameters(model)
        return average

    kept: dict[int, nn.Module] = {}

    def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        kept[id(model)] = averaging(model, optimizer, batches)

    model = Case().model()
    oracle = averaging(model, made(optim.SGD, lr=0.1)(model), regression())
    report = clustered(
        Case(optimizer=made(optim.SGD, lr=0.1), loop=loop),
        cluster,
        after=lambda run, model: values_of(kept[id(model)]),
    )
    for values in report.results.values():
        close(values, values_of(oracle))


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_an_average_kept_by_the_user_where_groups_do_not_wait(cluster: Mapping[str, Any]) -> None:
    """It is that of the values which this worker had after each of its steps, and can be evaluated."""

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        expected: dict[str, Tensor] = {}
        for batch in batches:
            fit(model, optimizer, [batch])
            average.update_parameters(model)
            for name, value in values_of(model).items():
                expected[name] = expected.get(name, value).lerp(value, 1 - 0.9)
            same(values_of(average.module), expected)
        (data,) = regression(1)
        assert run.evaluate(lambda: loss_of(average, *data).item()) == loss_of(average, *data).item()

    clustered(Case(optimizer=made(optim.SGD, lr=0.02)), cluster, body=body)
