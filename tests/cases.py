"""Models, loops, clusters and plain-PyTorch oracles that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import Run
from shoal.config import Config
from shoal.testing import Report, run_cluster
from shoal.transport.faulty import Judge

Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, Optimizer, Sequence[Batch]], None]
Values = dict[str, Tensor]

SAMPLES = 12  # per joined batch: 1, 2, 3 or 4 workers take equal parts
WIDTH = 8

SANDBLASTER = {"nworkers_per_group": 3, "nservers_per_group": 2, "server_worker_separate": True}
ALLREDUCE = {"nworkers_per_group": 3, "nservers_per_group": 3}
ALONE: dict[str, dict[str, Any]] = {
    "single": {},
    "one worker, three servers": {"nservers_per_group": 3, "server_worker_separate": True},
}
GROUPS: dict[str, dict[str, Any]] = {
    "sandblaster": SANDBLASTER,
    "allreduce": ALLREDUCE,
    "two workers beside three servers": {"nworkers_per_group": 2, "nservers_per_group": 3},
    "four workers, one server": {"nworkers_per_group": 4, "server_worker_separate": True},
    "singa's slices": {**SANDBLASTER, "slicer": "singa"},
}
TOPOLOGIES = ALONE | GROUPS


def fit(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The loop of every tutorial."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def looking(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """A forward in eval() without a graph in the middle of each step, and model.zero_grad()."""
    for inputs, targets in batches:
        model.zero_grad()
        loss = loss_of(model, inputs, targets)
        with torch.no_grad():
            model.eval()
            loss_of(model, inputs, targets)
            model.train()
        loss.backward()
        optimizer.step()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over samples."""
    return (model(inputs) - targets).square().mean()


def regression(steps: int = 5, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Joined batches (SAMPLES × WIDTH, SAMPLES × 4)."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype),
            torch.randn(SAMPLES, 4, generator=generator, dtype=dtype),
        )
        for _ in range(steps)
    ]


def mlp(hidden: int = 16) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 4))


def large() -> nn.Module:
    """Several chunks on each server."""
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 320), nn.Tanh(), nn.Linear(320, 4))


def sgd(model: nn.Module) -> Optimizer:
    """SGD for which a step without a gradient would still move: momentum and decay."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    """AdamW, which counts steps."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A model, its optimizer and its loop."""

    build: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    loop: Loop = fit
    steps: int = 5

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model at its start; the same at each call."""
        torch.manual_seed(3)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self.build()
        finally:
            torch.set_default_dtype(before)


@dataclass
class Trained:
    """What a cluster made of a case: each worker's model, and the report."""

    values: list[Values]
    report: Report


def values_of(model: nn.Module) -> Values:
    """Copies of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def part(batches: Sequence[Batch], rank: int, workers: int) -> list[Batch]:
    """Each batch's contiguous part of one worker."""
    return [tuple(t.tensor_split(workers)[rank] for t in batch) for batch in batches]  # type: ignore[misc]


def plain(case: Case, dtype: torch.dtype = torch.float64) -> Values:
    """Plain PyTorch on the joined batches."""
    model = case.model(dtype)
    case.loop(model, case.optimizer(model), regression(case.steps, dtype))
    return values_of(model)


def clustered(
    case: Case,
    cluster: Mapping[str, Any] | Config,
    dtype: torch.dtype = torch.float64,
    judge: Judge | None = None,
) -> Trained:
    """The same case on a cluster, each worker with its part of the batches."""
    start, batches = case.model(dtype), regression(case.steps, dtype)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        optimizer = case.optimizer(model)
        run.prepare(model, optimizer)
        case.loop(model, optimizer, part(batches, run.rank, run.world_size))
        return values_of(model)

    report = run_cluster(work, cluster, judge=judge)
    return Trained([report.results[name] for name in sorted(report.results)], report)


def averaged(
    case: Case, workers: int, dtype: torch.dtype = torch.float64, weights: Sequence[int] | None = None
) -> Values:
    """Plain PyTorch on each part, then the average of gradients and buffers: the oracle where parts matter.

    Gradients are summed in the order of ranks, in float32 or wider, and divided once.
    """
    model = case.model(dtype)
    copies = [deepcopy(model) for _ in range(workers)]
    for rank, copy in enumerate(copies):
        seeded(copy, rank)
    optimizer = case.optimizer(model)
    batches = regression(case.steps, dtype)
    parts = [part(batches, rank, workers) for rank in range(workers)]
    for step in range(case.steps):
        for copy, mine in zip(copies, parts, strict=True):
            copy.load_state_dict(model.state_dict())
            copy.zero_grad()
            loss_of(copy, *mine[step]).backward()
        for parameter, *shares in zip(
            model.parameters(), *(copy.parameters() for copy in copies), strict=True
        ):
            gradients = [share.grad for share in shares if share.grad is not None]
            parameter.grad = mean(gradients, workers).to(parameter.dtype) if gradients else None
        for buffer, *shares in zip(model.buffers(), *(copy.buffers() for copy in copies), strict=True):
            whole = not buffer.is_floating_point()
            buffer.copy_(torch.stack(shares).amax(0) if whole else mean(shares, workers))
        optimizer.step()
    return values_of(model)


def mean(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Summed in order, in float32 or wider, divided once."""
    total = torch.zeros_like(tensors[0], dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    for tensor in tensors:
        total += tensor
    return total / count


def seeded(model: nn.Module, rank: int) -> None:
    """Give every `Drop` of the model its worker's seed."""
    for module in model.modules():
        if isinstance(module, Drop):
            module.seed = rank


class Drop(nn.Module):
    """Dropout with a generator of its own, because workers that are threads share torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop half; the mask depends on the worker's seed and the number of the call."""
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + self.calls)
        return inputs * 2 * (torch.rand(inputs.shape, generator=generator) < 0.5)


def close(ours: Values, theirs: Values, tolerance: float = 1e-9) -> None:
    """Every value within the tolerance, absolute and relative."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def same(ours: Values, theirs: Values) -> None:
    """Every bit."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), f"{name} differs by {(ours[name] - value).abs().max()}"


def check(case: Case, cluster: Mapping[str, Any]) -> Report:
    """Equality (rule 3.1) with plain PyTorch on the joined batch, on every worker; and the ledger adds up."""
    trained = clustered(case, cluster)
    oracle = plain(case)
    for values in trained.values:
        close(values, oracle)
        same(values, trained.values[0])
    adds_up(trained.report)
    if len(trained.values) == 1:
        same(clustered(case, cluster, torch.float32).values[0], plain(case, torch.float32))
    return trained.report


def adds_up(report: Report) -> None:
    """pushed = applied + dropped on each server, and workers say the same."""
    finals = [recorded.last("finished") for recorded in report.events.values()]
    servers = [final for final in finals if "applied" in final]
    for final in servers:
        assert final["pushed"] == final["applied"] + sum(final["dropped"].values())
    assert sum(final["pushed"] for final in servers) == sum(
        final["pushed"] for final in finals if "applied" not in final
    )


def counted(report: Report, name: str) -> int:
    """A number that servers report, summed over them."""
    finals = [report.events[server].last("finished") for server in report.servers]
    return sum(final[name] for final in finals)


def dropped(report: Report, reason: str) -> int:
    """Shares dropped for a reason, over all servers."""
    return sum(r.last("finished").get("dropped", {}).get(reason, 0) for r in report.events.values())


def notes(report: Report, member: str) -> list[str]:
    """What a member told the user."""
    return [event["message"] for event in report.events[member].written if event["event"] == "note"]
