"""Functions that other processes can import, for tests of `shoal.launch`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import FileStore

import shoal

LIMIT = timedelta(seconds=30)


def train(steps: int, fail: bool = False) -> dict[str, float]:
    """Train a tiny model; returns this worker's rank and one of its weights."""
    run = shoal.init()
    model = nn.Linear(4, 2)
    with torch.no_grad():  # not by seed, for threads share the generator
        model.weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
        model.bias.zero_()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4) * (run.rank + 1)).sum().backward()
        optimizer.step()
        if fail and run.rank == 1:
            raise ValueError("this worker fails")
    return {"rank": run.rank, "weight": model.weight[0, 0].item()}


def lease(path: str) -> list[list[int]]:
    """Train for two epochs, of which group 1 stands at its first batch; the samples that this worker saw."""
    run, store = shoal.init(), FileStore(path, -1)
    model = nn.Linear(1, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader(list(range(96)), batch_size=2)
    seen: list[list[int]] = []
    if run.group == 0:
        store.wait(["begun"], LIMIT)
    for _ in run.epochs(2):
        seen.append([])
        for batch in loader:
            optimizer.zero_grad()
            model(batch[:, None] / 100).sum().backward()
            optimizer.step()
            seen[-1] += batch.tolist()
            if run.group == 1:
                store.set("begun", "")
                store.wait(["ended"], LIMIT)
    if run.group == 0:
        store.set("ended", "")
    return seen


def judge(path: str, fails: bool = False) -> dict[str, Any]:
    """Train, evaluate by all workers with values and averages, save the best; what all of them know."""
    run = shoal.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.5)
    data = [torch.full((4,), number / 7) for number in range(7)]

    def test(batches: Any) -> dict[str, Any]:
        if fails and run.rank == 1:
            raise ValueError("this part fails")
        losses = torch.cat([model(batch).detach().square().mean(1) for batch in batches])
        return {"loss": losses.double().mean(), "samples": 1.0 * len(losses)}

    inside, best = [], []
    for _ in run.epochs(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        inside.append(run.evaluate(test, data=data, batch_size=2)["samples"])
        best.append(run.save_best(path, inside[-1]))
    after = run.evaluate(test, data=data, batch_size=2)
    whole = run.evaluate(lambda: test([torch.stack(data)])["loss"])
    ema = run.evaluate(test, data=data, batch_size=2, ema=True)
    average = run.evaluate(lambda: test([torch.stack(data)])["loss"], ema=True)
    return {"inside": inside, "best": best, "after": after, "whole": whole, "ema": ema, "average": average}
