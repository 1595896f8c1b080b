"""Small trainings whose results are known: integers in float64, so that sums are exact in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal import Run
from shoal.config import Cluster, Config, Timeouts

SIZE = 2000
STEPS = 4

PATIENT = Timeouts(start=30, values=30, flush=30, ask=15, evaluate=30, finish=30)
"""Nobody asks after a missing reply: for links that lose nothing."""

ASKING = PATIENT.model_copy(update={"ask": 0.25})
"""For links that lose something."""


class Line(nn.Module):
    """Two parameters at 0; the gradient of `(model() * g).sum()` is g."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.short = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return torch.cat([self.long, self.short])


def pull_of(rank: int, step: int, size: int = SIZE) -> Tensor:
    """The integer gradient of a worker in a step; 12 divides it, so that averages are integers too."""
    place = torch.arange(size + 3, dtype=torch.float64)
    return 12 * ((place * (rank + 2) + 7 * step) % 11 - 5)


def config(timeouts: Timeouts = PATIENT, **block: Any) -> Config:
    """A configuration with this cluster block."""
    return Config(cluster=Cluster(**block), timeouts=timeouts)


def walk(
    run: Run,
    steps: int = STEPS,
    *,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> list[Tensor]:
    """SGD on integers: the values after each step, then the common end.

    Args:
        before: called between a step's forward and its backward.
        after: called when a step is over.
    """
    model = Line()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    for step in run.epochs(steps):
        optimizer.zero_grad()
        loss = (model() * pull_of(run.rank, step + 1)).sum()
        before(step + 1)
        loss.backward()
        optimizer.step()
        seen.append(model().detach().clone())
        after(step + 1)
    run.evaluate(lambda: 0)
    return [*seen, model().detach().clone()]


def movement(steps: Mapping[int, int], workers: int) -> Tensor:
    """Where all groups together (group → steps) end: each adds its average, `workers` per group."""
    total = torch.zeros(SIZE + 3, dtype=torch.float64)
    for group, count in steps.items():
        for step in range(1, count + 1):
            ranks = range(group * workers, (group + 1) * workers)
            total -= torch.stack([pull_of(rank, step) for rank in ranks]).mean(0)
    return total


class Net(nn.Module):
    """Something to train with clipping, momentum and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(16, 24, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(24, dtype=torch.float64)
        self.last = nn.Linear(24, 4, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))  # type: ignore[no-any-return]


def learn(run: Run, steps: int = STEPS, *, after: Callable[[int], None] = lambda step: None) -> bytes:
    """Adam with clipping on fixed data; the bytes of the model at the common end."""
    model = Net()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(run.rank)
    for step in run.epochs(steps):
        inputs = torch.randn(8, 16, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        run.clip_grad_norm_(0.5)
        optimizer.step()
        after(step + 1)
    run.evaluate(lambda: 0)
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())
