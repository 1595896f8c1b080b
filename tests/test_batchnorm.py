"""SyncBatchNorm: a group of any shape normalises by the statistics of its joined batch."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import WIDTH, Batch, Case, adamw, close, fit, regression, sgd, values_of
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, check_asynchronous, check_joined, clustered
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from shoal import Run
from shoal.testing import run_cluster

GROUPS: dict[str, dict[str, Any]] = {
    "sandblaster": SYNCHRONOUS["sandblaster"],
    "four workers, one server": {"nworkers_per_group": 4, "server_worker_separate": True},
}


def normed(**keywords: Any) -> nn.Module:
    sync = nn.SyncBatchNorm(16, **keywords)
    return nn.Sequential(nn.Linear(WIDTH, 16), sync, nn.Tanh(), nn.Linear(16, 4), nn.SyncBatchNorm(4))


class Pictures(nn.Module):
    """As people get them: converted."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(2, 8, 2), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4)
        self.layers = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs.view(-1, 2, 2, 2))


def far() -> nn.Module:
    """Means far from zero beside a small variance."""
    model = normed()
    nn.init.constant_(model[0].bias, 1e6)
    return model


CASES = {
    "1d": Case(normed, sgd),
    "2d, converted": Case(Pictures, adamw),
    "cumulative": Case(lambda: normed(momentum=None), sgd),
    "not affine": Case(lambda: normed(affine=False), sgd),
    "untracked": Case(lambda: normed(track_running_stats=False), sgd),
    "in eval()": Case(lambda: normed().eval(), sgd),
    "compiled": Case(lambda: torch.compile(normed(), backend="eager"), adamw),
}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_equals_plain_pytorch_on_the_joined_batch(case: Case, cluster: Mapping[str, Any]) -> None:
    check_joined(case, cluster)


def test_digits_are_not_lost_where_means_are_far_from_zero() -> None:
    check_joined(Case(far, sgd), SYNCHRONOUS["sandblaster"], 1e-6)


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
def test_parts_of_different_sizes_are_weighed(cluster: Mapping[str, Any]) -> None:
    """The last batch of an epoch too, where a worker has no sample of its own."""
    workers = cluster["nworkers_per_group"]
    samples = [torch.cat(tensors)[: 5 * workers + 2] for tensors in zip(*regression(3), strict=True)]
    joined = list(DataLoader(TensorDataset(*samples), 5 * workers))
    start = Case(normed).model()
    model = copy.deepcopy(start)
    fit(model, sgd(model), [*joined, *joined])

    def work(run: Run) -> dict[str, Tensor]:
        ours = copy.deepcopy(start)
        ours, optimizer = run.prepare(ours, sgd(ours))
        loader = run.loader(TensorDataset(*samples), batch_size=5, shuffle=False)
        for _ in run.epochs(2):
            fit(ours, optimizer, loader)  # type: ignore[arg-type]
        return values_of(ours)

    for values in run_cluster(work, cluster).results.values():
        close(values, values_of(model))


def test_a_step_that_weighs_nothing_leaves_all_as_it_was() -> None:
    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        run.weight(0)
        fit(model, optimizer, batches)

    report = clustered(Case(normed, sgd, steps=1), GROUPS["sandblaster"], body=body)
    for values in report.results.values():
        close(values, values_of(Case(normed).model()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept(dtype: torch.dtype) -> None:
    def after(run: Run, model: nn.Module) -> list[torch.dtype]:
        outputs = model.train()(regression(1, dtype)[0][0])
        assert outputs.isfinite().all()
        return [outputs.dtype, model[1].running_mean.dtype]

    report = clustered(Case(normed, sgd), GROUPS["sandblaster"], dtype, after)
    assert all(found == [dtype, dtype] for found in report.results.values())


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
@pytest.mark.parametrize("build", [normed, Pictures])
def test_it_learns_with_groups(build: Callable[[], nn.Module], cluster: Mapping[str, Any]) -> None:
    gentle = Case(build, lambda model: torch.optim.SGD(model.parameters(), lr=0.05), steps=20)
    check_asynchronous(gentle, cluster, 0.95)


def test_copies_and_files_hold_torchs_own_layer() -> None:
    def after(run: Run, model: nn.Module) -> list[type]:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        models = copy.deepcopy(model), torch.load(file, weights_only=False)
        for other in models:
            close(values_of(other), values_of(model))
        return [type(other[1]) for other in models]

    report = clustered(Case(normed), GROUPS["sandblaster"], after=after)
    assert all(found == [nn.SyncBatchNorm] * 2 for found in report.results.values())


SCRIPT = """
import torch, shoal
run = shoal.init()
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SyncBatchNorm(16), torch.nn.Linear(16, 8))
data = torch.utils.data.TensorDataset(*torch.randn(2, 48, 8))
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
assert run.process_group.size() == 3  # torch's own layer would refuse the CPU now
for _ in run.epochs(2):
    for inputs, targets in run.loader(data, batch_size=4, shuffle=False):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
run.save("model.safetensors")
"""


def test_processes_equal_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--cluster", "sandblaster", "--run-dir", "run"]
    command = [sys.executable, "-m", "shoal", "run", *options, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    model = Case(small).model()
    data = TensorDataset(*torch.randn(2, 48, 8, dtype=torch.float64))
    fit(model, torch.optim.Adam(model.parameters(), lr=0.01), [*DataLoader(data, 12), *DataLoader(data, 12)])
    close(load_file(tmp_path / "model.safetensors"), values_of(model))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.SyncBatchNorm(16), nn.Linear(16, 8))
