"""Ways to take a step, and optimizers to take it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.run import Run

Step = Callable[[Run, nn.Module, Any, torch.Tensor], None]


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 4))


def plain_step(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def clipped(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    run.log(norm=run.clip_grad_norm_(0.01))
    optimizer.step()


def accumulated(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    with run.accumulate():
        model(inputs).square().mean().backward()
    model(inputs * 2).square().mean().backward()
    optimizer.step()


def unused(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model[3](torch.tanh(model[0](inputs).detach())).square().mean().backward()
    optimizer.step()


def infinite(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    factor = float("inf") if run.global_step % 2 == 0 else 1.0
    (model(inputs).square().mean() * factor).backward()
    optimizer.step()


def weightless(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    if run.global_step % 2 == 0:
        run.weight(0)
    model(inputs).square().mean().backward()
    optimizer.step()


def scaled(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    scaler = optimizer.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**127))
    optimizer.zero_grad()
    scaler.scale(model(inputs).square().mean()).backward()
    run.log(norm=run.clip_grad_norm_(0.1, scaler=scaler))
    scaler.step(optimizer)
    scaler.update()


def by_hand(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    plain_step(run, model, optimizer, inputs)
    with run.edit(), torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def evaluated(run: Run, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    run.log(weight=run.evaluate(lambda: model[3].weight.sum().item()))
    optimizer.step()


WAYS = (plain_step, clipped, accumulated, unused, infinite, weightless, scaled, by_hand, evaluated)
STEPS: dict[str, Step] = {function.__name__: function for function in WAYS}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
