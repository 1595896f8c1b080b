"""A case under any framework: synchronous ones against plain PyTorch, asynchronous ones by what must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cases import (
    ALLREDUCE,
    ALONE,
    GROUPS,
    SANDBLASTER,
    Batch,
    Case,
    Values,
    adds_up,
    averaged,
    close,
    loss_of,
    part,
    plain,
    regression,
    same,
    seeded,
    values_of,
)
from torch import nn
from torch.optim import Optimizer

from shoal import Run
from shoal.config import Cluster
from shoal.testing import Report, run_cluster
from shoal.topology import Topology

SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "single": ALONE["single"],
    "one worker, three servers": ALONE["one worker, three servers"],
    "sandblaster": SANDBLASTER,
    "allreduce": ALLREDUCE,
    "two workers beside three servers": GROUPS["two workers beside three servers"],
}
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "downpour": {"nworker_groups": 2, "nworkers_per_group": 2, "server_worker_separate": True},
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3},
    "hybrid": {"nworker_groups": 4, "nserver_groups": 2, "server_worker_separate": True},
    "independent": {"nworker_groups": 2, "nserver_groups": 0, "nworkers_per_group": 2},
}
"""Under hogwild workers step on the model themselves here, as in a real run; elsewhere they have messages."""


Body = Callable[[Run, nn.Module, Optimizer, Sequence[Batch]], None]


def workers_of(cluster: Mapping[str, Any]) -> int:
    """Workers over all groups."""
    return len(Topology.of(Cluster(**cluster)).workers)


def train(case: Case, cluster: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> list[Values]:
    """Each worker's model after the case, trained on its part of the joined batches."""
    results = clustered(case, cluster, dtype).results
    return [results[name] for name in sorted(results)]


def clustered(
    case: Case,
    cluster: Mapping[str, Any],
    dtype: torch.dtype = torch.float64,
    after: Callable[[Run, nn.Module], Any] = lambda run, model: values_of(model),
    batches: Sequence[Batch] | None = None,
    body: Body | None = None,
    overlap: bool = False,
) -> Report:
    """The case, or `body` on its model, on a cluster; each worker's result is `after`'s.

    Models are built anew, for some have no copy.
    """
    models = [case.model(dtype) for _ in range(workers_of(cluster))]
    batches = batches or regression(case.steps, dtype)

    def work(run: Run) -> Any:
        torch.set_num_threads(1)  # convolutions ask for their own thread's number
        model = models[run.rank]
        seeded(model, run.rank)
        model, optimizer = run.prepare(model, case.optimizer(model), overlap=overlap)
        mine = part(batches, run.rank, run.world_size)
        for _ in run.epochs(1):
            case.loop(model, optimizer, mine) if body is None else body(run, model, optimizer, mine)
        return after(run, model)

    report = run_cluster(work, cluster, messages=cluster is not ASYNCHRONOUS["hogwild"])
    adds_up(report)
    return report


def check_joined(case: Case, cluster: Mapping[str, Any], tolerance: float = 1e-9) -> None:
    """Plain PyTorch on the joined batch, to 1e-9; one worker bit for bit, in float32 too."""
    trained = train(case, cluster)
    oracle = plain(case)
    for values in trained:
        close(values, oracle, tolerance)
        same(values, trained[0])
    if len(trained) == 1:
        same(train(case, cluster, torch.float32)[0], plain(case, torch.float32))


def check_parts(case: Case, cluster: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> None:
    """Plain PyTorch on each worker's part, then the average; every bit."""
    oracle = averaged(case, workers_of(cluster), dtype)
    for values in train(case, cluster, dtype):
        same(values, oracle)


def check_asynchronous(case: Case, cluster: Mapping[str, Any], bound: float) -> None:
    """The ledger adds up, all end equal within their server group, all is finite, the loss has fallen.

    Args:
        bound: the loss at the common end, as a part of what it was at the start.
    """
    start = case.model()
    batches = [(inputs, inputs[:, :4] - inputs[:, 4:]) for inputs, _ in regression(case.steps)]

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return sum(float(loss_of(model.eval(), *batch)) for batch in batches)

    before = loss(start)
    report = clustered(
        case, cluster, after=lambda run, m: (run.evaluate(loss, m), values_of(m)), batches=batches
    )
    for name, (reached, values) in report.results.items():
        assert reached < bound * before, f"{name}: from {before} to {reached}"
        for key, value in values.items():
            assert not value.is_floating_point() or value.isfinite().all(), key
        if cluster.get("nserver_groups") != 0:
            same(values, report.results["worker 0.0"][1])
