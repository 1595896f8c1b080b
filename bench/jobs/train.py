"""One loop for every side: the same model and data, trained by plain PyTorch, DDP and its kin, or Shoal."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import shoal
from bench.jobs.meter import Meter
from bench.jobs.models import give, make_model, shape_of
from bench.jobs.watch import FOLDER, watch

NOTHING = (torch.empty(0), torch.empty(0))  # a batch, where gradients are given
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@dataclass
class Loop:
    """A loop that is ready to run.

    Attributes:
        batches: without end.
        stop: called once enough steps are taken; None = the loop breaks off.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[tuple[Tensor, Tensor]]
    stop: Callable[[], None] | None = None


def endless(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from loader


def data(job: argparse.Namespace, batch: int) -> Any:
    """Random samples of the model's kind, for 64 batches."""
    shape, count = shape_of(job.model), 64 * batch
    found = TensorDataset(torch.randn(count, shape.inputs), torch.randint(shape.outputs, (count,)))
    return [found[index] for index in range(count)] if job.listed else found


def plain(job: argparse.Namespace, rank: int = 0) -> Loop:
    """PyTorch as it is."""
    shape = shape_of(job.model)
    torch.manual_seed(0)
    slower = job.slow if rank == job.slow_rank else 1.0
    model = make_model(shape, None if job.wait is None else job.wait * slower)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), lr=1e-3)
    if job.given:
        return Loop(model, optimizer, repeat(NOTHING))
    loader = DataLoader(data(job, job.batch), batch_size=job.batch, shuffle=True)
    return Loop(model, optimizer, endless(loader))


def ddp(job: argparse.Namespace) -> Loop:
    """DistributedDataParallel; with ``--engine zero`` the optimizer's state is divided among the ranks."""
    dist.init_process_group("gloo")
    loop = plain(job, dist.get_rank())
    loop.model = DistributedDataParallel(loop.model)
    if job.engine == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a fifth of a second

        cls = OPTIMIZERS[job.optimizer]
        loop.optimizer = ZeroRedundancyOptimizer(loop.model.parameters(), cls, lr=1e-3)
    return loop


def fsdp(job: argparse.Namespace) -> Loop:
    """FSDP2: parameters, gradients and state are divided among the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    loop = plain(job, dist.get_rank())
    fully_shard(loop.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loop.optimizer = OPTIMIZERS[job.optimizer](loop.model.parameters(), lr=1e-3)
    return loop


def with_shoal(job: argparse.Namespace) -> Loop:
    """Shoal, under whatever the cluster block says."""
    if folder := os.environ.get(FOLDER):
        watch(Path(folder))
    run = shoal.init()
    loop = plain(job, run.rank)
    model, optimizer = run.prepare(loop.model, loop.optimizer, **({"overlap": True} if job.overlap else {}))
    if job.hold:
        run.hold()
    if job.given:
        return Loop(model, optimizer, (NOTHING for _ in run.epochs(1 << 40)), run.stop)
    loader = run.loader(data(job, job.batch * run.world_size), batch_size=job.batch)
    return Loop(model, optimizer, run.steps(loader, 1 << 40), run.stop)


ENGINES: dict[str, Callable[[argparse.Namespace], Loop]] = {
    "plain": plain,
    "ddp": ddp,
    "zero": ddp,
    "fsdp": fsdp,
    "shoal": with_shoal,
}


def train(loop: Loop, job: argparse.Namespace, meter: Meter) -> dict[str, float]:
    """Train until enough steps count; returns this process's own figures."""
    optimizing = []
    if job.given:
        give(loop.model)
    for inputs, targets in loop.batches:
        if not job.given:
            loss = F.cross_entropy(loop.model(inputs), targets)
            loop.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        began = time.thread_time()
        loop.optimizer.step()
        optimizing.append(time.thread_time() - began)
        meter.tick()
        if meter.steps >= job.steps:
            if loop.stop is None:
                break
            loop.stop()
    return {
        "optimizer_s": median(optimizing[job.warmup :]),
        "state_bytes": float(state_bytes(loop.optimizer)),
        "model_bytes": float(sum(p.nbytes for p in loop.model.parameters())),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state on this process."""
    optimizer = getattr(optimizer, "optim", optimizer)  # ZeRO's own, of this rank
    state = (value for entry in optimizer.state.values() for value in entry.values())
    parts = (getattr(value, "_local_tensor", value) for value in state)  # of a DTensor what is here
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def main() -> None:
    """Run one process of one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--bell", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--wait", type=float, help="seconds of each step, in place of computing")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow", type=float, default=4.0, help="how many times as long the slow rank waits")
    parser.add_argument("--given", action="store_true", help="gradients are there without any computation")
    parser.add_argument("--overlap", action="store_true", help="Shoal's step() returns at once")
    parser.add_argument("--listed", action="store_true", help="samples one by one, not rows of a tensor")
    parser.add_argument("--hold", action="store_true", help="Shoal pushes at step()")
    job = parser.parse_args()
    meter = Meter(job.bell, job.warmup)
    loop = ENGINES[job.engine](job)
    meter.end(**train(loop, job, meter))
    if dist.is_initialized() and job.engine != "shoal":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
