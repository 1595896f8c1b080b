"""On a GPU, with members as real processes. Everything here skips where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    SANDBLASTER,
    Batch,
    Case,
    averaged,
    large,
    loss_of,
    part,
    plain,
    regression,
)
from torch import distributed, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal import Run
from shoal.config import Cluster
from shoal.staging import Stage
from shoal.transport.memory import Memory

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]

STEPS = 6
SHAPES: dict[str, dict[str, Any]] = {
    "single": {},
    "sandblaster": SANDBLASTER,
    "allreduce": ALLREDUCE,
}
DOWNPOUR = {"nworker_groups": 2, "nworkers_per_group": 2, "server_worker_separate": True}

Told = dict[str, Any]


def fit(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The loop of every tutorial, on the devices of the first and the last parameter."""
    first, *_, last = (parameter.device for parameter in model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model, inputs.to(first), targets.to(last)).backward()
        optimizer.step()


def gentle(model: nn.Module) -> Optimizer:
    """SGD that two groups at a time can use, and that does not enlarge what rounding does."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, weight_decay=0.01)


class Halved(nn.Module):
    """Two layers, the first on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 300), nn.Linear(300, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).tanh().to(self.last.weight.device))  # type: ignore[no-any-return]


def normed() -> nn.Module:
    """Buffers that each forward changes."""
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


BUILDS = {"large": large, "halved": Halved, "normed": normed}


def build(name: str, device: torch.device) -> nn.Module:
    """A model on its device; of `halved` the last layer only."""
    model = BUILDS[name]()
    (model.last if isinstance(model, Halved) else model).to(device)
    return model


def case(name: str, device: torch.device) -> Case:
    return Case(lambda: build(name, device), gentle, fit, STEPS)


def told(run: Run, model: nn.Module, **more: Any) -> Told:
    """What a worker tells of its end."""
    values = {key: value.double().cpu().tolist() for key, value in model.state_dict().items()}
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return {"values": values, "devices": devices, **more}


def train(name: str, overlap: bool = False) -> Told:
    """In a worker: the case on its part of the batches."""
    run = shoal.init()
    mine = case(name, run.device)
    model = mine.model(torch.float32)
    model, optimizer = run.prepare(model, gentle(model), overlap=overlap)
    for _ in run.epochs(1):
        fit(model, optimizer, part(regression(STEPS, torch.float32), run.rank, run.world_size))
    run.wait()
    loss = run.evaluate(lambda: float(_loss(model)))
    return told(run, model, loss=loss)


@torch.no_grad()
def _loss(model: nn.Module) -> torch.Tensor:
    first, *_, last = (parameter.device for parameter in model.parameters())
    return torch.stack(
        [loss_of(model, x.to(first), y.to(last)).cpu() for x, y in regression(STEPS, torch.float32)]
    ).mean()


def near(ours: Told, theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Equal to plain PyTorch, by a relative and an absolute tolerance."""
    assert ours["values"].keys() == theirs.keys()
    for key, value in theirs.items():
        found = torch.tensor(ours["values"][key], dtype=torch.float64)
        torch.testing.assert_close(found, value.double().cpu(), rtol=tolerance, atol=tolerance)


# Values.


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("name", "devices"), [("large", ["cuda"]), ("halved", ["cpu", "cuda"])])
def test_one_group_equals_plain_pytorch_on_the_gpu(
    name: str, devices: list[str], shape: dict[str, Any]
) -> None:
    oracle = plain(case(name, torch.device("cuda", 0)), torch.float32)
    for result in shoal.launch(train, Cluster(**shape), (name,)):
        near(result, oracle, 1e-4)
        assert result["devices"] == devices


def test_a_run_repeats_bit_for_bit_with_overlap_too() -> None:
    runs = [
        shoal.launch(train, Cluster(**SANDBLASTER), ("large", overlap)) for overlap in (False, False, True)
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    "shape", [DOWNPOUR, {"nworker_groups": 2, "nserver_groups": 2}], ids=["downpour", "hogwild"]
)
def test_groups_beside_each_other_learn(shape: dict[str, Any]) -> None:
    results = shoal.launch(train, Cluster(**shape), ("large",))
    start = float(_loss(case("large", torch.device("cpu")).model(torch.float32)))
    assert all(result["loss"] < start for result in results)


def test_buffers_are_averaged() -> None:
    oracle = averaged(Case(normed, gentle, steps=STEPS), 3, torch.float32)
    for result in shoal.launch(train, Cluster(**SANDBLASTER), ("normed",)):
        near(result, oracle, 1e-3)


# Mixed precision.


def amp(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch], device: torch.device) -> float:
    """Half precision, with a scale that is far too large at first; returns the last scale."""
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = loss_of(model, inputs.to(device), targets.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return float(scaler.get_scale())


def train_amp() -> Told:
    """In a worker: the case in mixed precision."""
    run = shoal.init()
    model = case("large", run.device).model(torch.float32)
    model, optimizer = run.prepare(model, gentle(model))
    scale = 0.0
    for _ in run.epochs(1):
        mine = part(regression(40, torch.float32), run.rank, run.world_size)
        scale = amp(model, optimizer, mine, run.device)
    return told(run, model, scale=scale)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_mixed_precision_skips_and_scales_as_plain_pytorch_does(shape: dict[str, Any]) -> None:
    device = torch.device("cuda", 0)
    model = case("large", device).model(torch.float32)
    optimizer = gentle(model)
    scale = amp(model, optimizer, regression(40, torch.float32), device)
    results = shoal.launch(train_amp, Cluster(**shape))
    assert len({result["scale"] for result in results}) == 1
    assert 0.25 <= results[0]["scale"] / scale <= 4  # a part of a batch overflows a little earlier or later
    for result in results:
        near(result, model.state_dict(), 0.05)


# Copies run beside the computing.


def trace() -> Told:
    """In a worker: what the GPU did during one backward of a model of 12 large layers."""
    run = shoal.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).to(run.device)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    inputs = torch.randn(8192, 2048, device=run.device)
    spans: list[tuple[str, float, float]] = []
    for _ in run.epochs(1):
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            torch.cuda.synchronize()
            if step < 5:  # the first ones compare bytes as well
                loss.backward()
            else:
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
                    loss.backward()
                    torch.cuda.synchronize()
                spans = [
                    (event.name, event.time_range.start, event.time_range.end)
                    for event in recorded.events()
                    if event.device_type == torch.autograd.DeviceType.CUDA
                ]
            optimizer.step()
    copies = [span for span in spans if "DtoH" in span[0]]
    kernels = [span for span in spans if not span[0].startswith("Mem")]
    beside = [c for c in copies if any(k[1] < c[2] and c[1] < k[2] for k in kernels)]
    pinned = [span for span in copies if "Pinned" in span[0]]
    return {"copies": len(copies), "beside": len(beside), "pinned": len(pinned)}


def test_gradients_are_copied_while_backward_computes() -> None:
    for seen in shoal.launch(trace, Cluster(server_worker_separate=True)):
        assert seen["copies"] == seen["pinned"] >= 12, seen
        assert seen["beside"] >= seen["copies"] // 2, seen


def test_memory_that_is_page_locked_already_is_said_and_breaks_nothing() -> None:
    said: list[str] = []
    device = torch.device("cuda", 0)
    stage, room = Stage([device], said.append), Memory().allocate(1 << 20)
    stage.pin(room)
    assert said == [] and room.is_pinned()
    stage.pin(room)
    assert len(said) == 1
    assert float(torch.ones(3, device=device).sum()) == 3  # the failure is not told a second time
    stage.close()
    assert not room.is_pinned()


# Collectives.


def reduce() -> Told:
    """In a worker: an all-reduce on its GPU and one on the CPU."""
    run = shoal.init()
    group = run.process_group
    here = torch.full((5,), run.rank + 1.0, device=run.device)
    there = torch.full((5,), run.rank + 1.0)
    for tensor in (here, there):
        distributed.all_reduce(tensor, group=group)
    backend = group._get_backend(run.device).name()
    sums = {"sums": [here.tolist(), there.tolist()], "backend": backend, "mean": run.mean(here).tolist()}
    model = build("large", run.device)
    model, optimizer = run.prepare(model, gentle(model))
    for _ in run.epochs(1):
        fit(model, optimizer, regression(1, torch.float32))
    return sums


def test_the_process_group_reduces_tensors_on_gpus() -> None:
    results = shoal.launch(reduce, Cluster(nworkers_per_group=2, nservers_per_group=2))
    for result in results:
        assert result["sums"] == [[3.0] * 5] * 2 and result["mean"] == [3.0] * 5
        assert result["backend"] == ("nccl" if torch.cuda.device_count() >= 2 else "gloo")
