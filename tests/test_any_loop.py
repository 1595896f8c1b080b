"""Loops of every kind, randomness, and sizes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ALONE,
    SANDBLASTER,
    WIDTH,
    Batch,
    Case,
    adamw,
    close,
    fit,
    looking,
    loss_of,
    mlp,
    part,
    plain,
    regression,
    same,
    sgd,
    values_of,
)
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, Body, check_joined, clustered, train
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.config import Cluster, Config
from shoal.errors import GradientEdited, WaitTimeout
from shoal.testing import QUICK, run_cluster

EVERY = {**SYNCHRONOUS, **ASYNCHRONOUS}
GROUP = {name: SYNCHRONOUS[name] for name in ("sandblaster", "allreduce")}

# Hooks that the user adds once the model is prepared.


def hooking(kind: str) -> Callable[[nn.Module, Optimizer, Sequence[Batch]], None]:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        if kind == "gradient":
            model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        elif kind == "module":
            model[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
        else:
            model[0].weight.register_post_accumulate_grad_hook(halve)
        fit(model, optimizer, batches)

    return loop


def halve(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(0.5)


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("kind", ["gradient", "module"])
def test_hooks_before_the_gradient_is_there(kind: str, cluster: Mapping[str, Any]) -> None:
    check_joined(Case(loop=hooking(kind)), cluster)


@pytest.mark.parametrize("cluster", ALONE.values(), ids=ALONE)
def test_alone_a_later_hook_may_edit_the_gradient(cluster: Mapping[str, Any]) -> None:
    check_joined(Case(loop=hooking("accumulated")), cluster)


@pytest.mark.parametrize("cluster", GROUP.values(), ids=GROUP)
def test_in_a_group_a_later_hooks_edit_is_an_error_and_hold_is_the_way(cluster: Mapping[str, Any]) -> None:
    """It runs after the one that pushes."""
    case = Case(loop=hooking("accumulated"))
    with pytest.raises(GradientEdited, match=r"0\.weight"):
        train(case, cluster)

    for values in clustered(case, cluster, body=held(case)).results.values():
        close(values, plain(case))


def held(case: Case) -> Body:
    """The case's loop with all gradients held until step()."""

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        run.hold()
        case.loop(model, optimizer, batches)

    return body


# Loops.


def by_hand(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """torch.autograd.grad calls no hook; gradients are there at step() only."""
    parameters = list(model.parameters())
    for inputs, targets in batches:
        gradients = torch.autograd.grad(loss_of(model, inputs, targets), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def penalised(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """A second backward through the first one's graph, and two losses one after the other."""
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=False)
        inputs = inputs.clone().requires_grad_()
        loss = loss_of(model, inputs, targets)
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        (slope.square().sum(1).mean() + loss).backward()
        optimizer.step()


def breaking(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The third backward is for nothing."""
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        if number == 2:
            break
        optimizer.step()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


LOOPS = {
    "torch.autograd.grad": Case(loop=by_hand),
    "several backwards": Case(loop=penalised, optimizer=adamw),
    "a forward without a graph": Case(loop=looking, optimizer=adamw),
    "an early break": Case(loop=breaking),
}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("case", LOOPS.values(), ids=LOOPS)
def test_a_loop_equals_plain_pytorch(case: Case, cluster: Mapping[str, Any]) -> None:
    check_joined(case, cluster)


def cloning(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Gradients are kept beside the model and put back."""
    for inputs, targets in batches:
        loss_of(model, inputs, targets).backward()
        kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_gradients_put_back_as_they_were_are_no_edits(cluster: Mapping[str, Any]) -> None:
    """Other tensors, but the same bytes: what has left is what counts."""
    check_joined(Case(loop=cloning, optimizer=adamw), cluster)


def test_an_eval_in_the_middle_leaves_batch_statistics_alone() -> None:
    for cluster in SYNCHRONOUS.values():
        check_joined(Case(lambda: normed().eval(), loop=fit), cluster)
    same(
        train(Case(normed, loop=looking), {}, torch.float32)[0],
        plain(Case(normed, loop=looking), torch.float32),
    )


@pytest.mark.parametrize("cluster", GROUP.values(), ids=GROUP)
@pytest.mark.parametrize("weigh", [False, True], ids=["counts as zero", "left out"])
def test_a_loss_on_some_workers_only(weigh: bool, cluster: Mapping[str, Any]) -> None:
    """Worker 1 has nothing to say: it counts as zero, or is left out where it weighs nothing."""

    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            if run.rank != 1:
                loss_of(model, inputs, targets).backward()
            elif weigh:
                run.weight(0)
            optimizer.step()

    model = Case().model()
    optimizer = sgd(model)
    for batch in regression():
        optimizer.zero_grad()
        parts = [part([batch], rank, 3)[0] for rank in (0, 2)]
        losses = [loss_of(model, *mine) for mine in parts]
        (sum(losses) / (2 if weigh else 3)).backward()  # type: ignore[union-attr]
        optimizer.step()
    for values in clustered(Case(), cluster, body=body).results.values():
        close(values, values_of(model))


@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
def test_a_break_out_of_a_loop_and_another_loop(cluster: Mapping[str, Any]) -> None:
    data = TensorDataset(torch.ones(120, WIDTH), torch.ones(120, 4))

    def work(run: Run) -> tuple[int, float]:
        model = mlp()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = run.loader(data, batch_size=2)
        for _ in run.epochs(2):
            for _ in run.epochs(3):
                for number, batch in enumerate(loader):
                    if number == 3:
                        break
                    fit(model, optimizer, [batch])
                break
        return run._training.step_of(), run.evaluate(lambda: 1.0)

    report = run_cluster(work, cluster)
    assert set(report.results.values()) == {(6, 1.0)}


def test_who_breaks_alone_is_named() -> None:
    config = Config(
        cluster=Cluster(**SANDBLASTER), timeouts=QUICK.model_copy(update={"values": 1.0, "finish": 5.0})
    )

    def work(run: Run) -> None:
        model = mlp()
        model, optimizer = run.prepare(model, sgd(model))
        for number in run.epochs(3):
            if run.rank == 1 and number == 1:
                break
            fit(model, optimizer, regression(1, torch.float32))

    with pytest.raises(WaitTimeout, match=r"worker 0\.1"):
        run_cluster(work, config)


@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("when", ["before backward", "during backward", "before step"])
def test_an_exception_ends_the_cluster(when: str, cluster: Mapping[str, Any]) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError(when)

    def work(run: Run) -> None:
        model = mlp()
        model, optimizer = run.prepare(model, sgd(model))
        for number in run.epochs(10**6):
            ours = number == 2 and run.rank == run.world_size - 1
            for inputs, targets in regression(1, torch.float32):
                optimizer.zero_grad()
                if ours and when == "before backward":
                    fail()
                if ours and when == "during backward":
                    model[0].bias.register_hook(fail)
                loss_of(model, inputs, targets).backward()
                if ours and when == "before step":
                    fail()
                optimizer.step()

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match=when):
        run_cluster(work, cluster)
    assert time.monotonic() - began < 10


# Randomness: as processes, for threads share torch's generator.

DROPOUT = """
import sys
import torch, shoal
from safetensors.torch import save_file

run = shoal.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4))
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 4))
masks = []
model[1].register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
for _ in run.epochs(2):
    for inputs, targets in run.loader(data, batch_size=4):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
run.save(sys.argv[1] + "/model.safetensors")
save_file({"masks": torch.cat(masks)}, f"{sys.argv[1]}/masks{run.rank}.safetensors")
"""


def test_one_seed_is_one_run_and_dropout_is_each_workers_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DROPOUT)
    found = []
    for number, seed in enumerate((7, 7, 8)):
        out = tmp_path / str(number)
        out.mkdir()
        command = [sys.executable, "-m", "shoal", "run", "--cluster", "sandblaster"]
        command += ["--set", f"seed={seed}", "--set", f"cluster.workspace={out}/run"]
        done = subprocess.run([*command, str(script), str(out)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        found.append({file.name: load_file(file) for file in out.glob("*.safetensors")})
    first, second, other = found
    for name, values in first.items():
        same(second[name], values)
    masks = [first[f"masks{rank}.safetensors"]["masks"] for rank in range(3)]
    assert len({mask.numpy().tobytes() for mask in masks}) == 3
    assert not torch.equal(other["model.safetensors"]["0.weight"], first["model.safetensors"]["0.weight"])


# Sizes.


class Many(nn.Module):
    """10,000 parameters of seven elements."""

    def __init__(self, count: int = 10_000) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((7,), 0.1)) for _ in range(count)])

    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.cat(list(self.weights)).view(-1, 7).mean(0)
        return inputs[:, :4] * total[:4] + total[3:]


def timed(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> float:
    """The fastest of some steps, in seconds of this thread's share and of those it waits for."""
    inputs, targets = regression(1, torch.float32)[0]
    best = float("inf")
    for _ in range(steps):
        began = time.perf_counter()
        fit(model, optimizer, [(inputs, targets)])
        best = min(best, time.perf_counter() - began)
    return best


def test_ten_thousand_parameters_take_reasonable_time() -> None:
    def work(run: Run) -> float:
        model = Many()
        model, optimizer = run.prepare(model, adamw(model))
        return timed(model, optimizer)

    model = Many()
    bound = 12 * timed(model, adamw(model))
    assert run_cluster(work, {}).results["worker 0.0"] < bound


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_many_parameters_equal_plain_pytorch(cluster: Mapping[str, Any]) -> None:
    check_joined(Case(lambda: Many(500), adamw, steps=3), cluster)


LARGE = """
import resource, torch, shoal
from shoal.testing import run_cluster

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def work(run):
    model = torch.nn.Linear(102_400, 1024, bias=False, device="meta")
    model.weight = torch.nn.Parameter(torch.zeros(1024, 102_400))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = run.prepare(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 102_400)).sum().backward()
        optimizer.step()
        assert (model.weight[::100, ::10_000] == -1 - step).all()
        peaks.append(peak())

base, peaks = peak(), []
run_cluster(work, {})
size = 102_400 * 1024 * 4
print((peaks[0] - base) / size, (peaks[2] - base) / size)
"""


def test_one_parameter_of_400_mb_trains_in_bounded_memory() -> None:
    """Worker and server in one process: the model, its gradient, slot and shard, and passing copies."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.split())
    assert last < 9 and last - first < 0.5
