"""Functions that other processes can import, for tests of `shoal.launch`."""

from __future__ import annotations

import torch
from torch import nn

import shoal


def train(steps: int, fail: bool = False) -> dict[str, float]:
    """Train a tiny model; returns this worker's rank and one of its weights."""
    run = shoal.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4) * (run.rank + 1)).sum().backward()
        optimizer.step()
        if fail and run.rank == 1:
            raise ValueError("this worker fails")
    return {"rank": run.rank, "weight": model.weight[0, 0].item()}
