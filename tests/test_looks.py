"""Scripts that are looked at: what `shoal validate` measures and what `shoal doctor` finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import budget, session
from shoal.config import Config, load
from shoal.doctor import Doctor
from shoal.errors import UsageError
from shoal.probe import Seen, look
from shoal.session import Run
from shoal.testing import run_cluster
from shoal.topology import Topology
from shoal.training import Prepared

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters()),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}


def net() -> nn.Module:
    """Some parameters, some buffers, one parameter that is frozen."""
    model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 3))
    model[3].bias.requires_grad_(False)
    return model


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is looked at changes this process; a test gives it back."""
    monkeypatch.setattr(session, "_run", None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, ema: float | None = None
) -> Prepared:
    """What a probe is shown."""
    seen: list[Prepared] = []

    def probe(what: Prepared) -> None:
        seen.append(what)
        raise Seen

    session.attach_probe(probe, config)
    with pytest.raises(SystemExit):
        session.init().prepare(model, optimizer, ema=ema)
    return seen[0]


def test_mixed_servers_are_told_their_parts() -> None:
    config = load("allreduce", ["cluster.nservers_per_group=4", "cluster.server_placement=mixed"])
    model = net()
    told = prepared(model, OPTIMIZERS["Adam"](model), config)
    held = [budget.of_server(told, config, server).elements for server in Topology.of(config.cluster).servers]
    for part, count in zip([1 / 5, 1 / 5, 1 / 5, 2 / 5], held, strict=True):
        assert abs(count - part * sum(held)) <= 65


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cluster", ["sandblaster", "downpour", "hogwild"])
def test_servers_hold_what_was_foretold(name: str, cluster: str) -> None:
    config = load(cluster)
    model = net()
    told = prepared(model, OPTIMIZERS[name](model), config)

    def train(run: Run) -> None:
        model = net()
        model, optimizer = run.prepare(model, OPTIMIZERS[name](model))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    report = run_cluster(train, cluster, messages=False)
    counters = 4 * len(list(model.parameters())) if cluster == "hogwild" else 0  # not one for each chunk
    for server in Topology.of(config.cluster).servers:
        need = budget.of_server(told, config, server)
        final = report.events[server.name].last("finished")
        assert need.elements == final["parameters"]
        assert need.optimizer <= final["state_bytes"] <= need.optimizer + 3 * counters
        assert need.together > need.parameters + need.optimizer
        assert (need.parameters == 0) is (cluster == "hogwild")


def test_masters_are_foretold() -> None:
    config = load("sandblaster", ["cluster.server_dtype=float32"])
    make = OPTIMIZERS["Adam"]

    def train(run: Run) -> None:
        model = net().bfloat16()
        model, optimizer = run.prepare(model, make(model))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    model = net().bfloat16()
    told = prepared(model, make(model), config)
    report = run_cluster(train, config)
    for server in Topology.of(config.cluster).servers:
        need = budget.of_server(told, config, server)
        assert need.optimizer == report.events[server.name].last("finished")["state_bytes"]
        assert need.parameters == need.elements * (2 + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_moving_averages_are_foretold(dtype: torch.dtype) -> None:
    config = load("sandblaster")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)).to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(run: Run) -> None:
        run.prepare(*make(), ema=0.9)

    told = {ema: prepared(*make(), config, ema) for ema in (None, 0.9)}
    report = run_cluster(train, config)
    together = 0
    for server in Topology.of(config.cluster).servers:
        needs = {ema: budget.of_server(told[ema], config, server) for ema in told}
        more = needs[0.9].parameters - needs[None].parameters
        assert more == report.servers[server.name]._shard.ema_bytes > 0
        together += more
    assert together == (50 * 4 + 4 * 3 + 3) * (8 if dtype == torch.float64 else 4) + 50 * 8


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.SparseAdam([*m.parameters()]),
        lambda m: torch.optim.Adagrad(m.parameters()),
    ],
)
def test_a_table_of_which_all_rows_were_touched(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    config, model = load("sandblaster"), nn.Embedding(50, 4, sparse=True)
    told = prepared(model, optimizer(model), config)

    def train(run: Run) -> None:
        model = nn.Embedding(50, 4, sparse=True)
        model, stepper = run.prepare(model, optimizer(model))
        model(torch.arange(50)).sum().backward()
        stepper.step()

    report = run_cluster(train, "sandblaster")
    for server in Topology.of(config.cluster).servers:
        found = report.events[server.name].last("finished")["state_bytes"]
        assert budget.of_server(told, config, server).optimizer == found > 0


def test_the_parts_make_the_model() -> None:
    config = load("downpour")
    model = net()
    told = prepared(model, OPTIMIZERS["Adam"](model), config)
    servers = [budget.of_server(told, config, server) for server in Topology.of(config.cluster).servers]
    worker = budget.of_worker(told, config)
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert sum(need.parameters for need in servers) == worker.parameters == parameters
    assert sum(need.buffers for need in servers) == worker.buffers == buffers
    assert worker.gradients == parameters - model[3].bias.nbytes  # type: ignore[union-attr, operator]
    assert worker.copies == parameters + buffers  # the slots
    assert sum(need.gradients for need in servers) == 4 * (parameters + buffers)  # a share of each worker
    assert sum(need.copies for need in servers) == 2 * (parameters + buffers)  # what each group was last sent


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_what_encoding_keeps_is_foretold(name: str) -> None:
    config = load("sandblaster", [f"cluster.wire_dtype={name}"])
    model = net()
    told = prepared(model, OPTIMIZERS["SGD"](model), config)
    parameters = sum(p.nbytes for p in model.parameters())
    slots = parameters + sum(b.nbytes for b in model.buffers())
    kept = {"float32": 0, "bfloat16": parameters, "int8": 3 * parameters}[name]
    assert budget.of_worker(told, config).copies == slots + kept
    servers = Topology.of(config.cluster).servers
    known = sum(budget.of_server(told, config, server).copies for server in servers)
    assert known == (0 if name == "float32" else parameters)


def test_many_parameters_are_counted() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    told = prepared(model, OPTIMIZERS["SGD"](model), load("allreduce"))
    lines = budget.report(told, load("allreduce")).splitlines()
    assert lines[-1] == "and 40 more"
    assert lines[-2].split()[0] == "9.bias"


def shoal(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line."""
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def test_validate_with_a_script(tmp_path: Path) -> None:
    done = shoal("validate", "downpour", "--set", "seed=3", str(DIGITS), "--epochs", "7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines() if "KiB" in line}
    assert list(rows) == ["server 0.0", "server 0.1", *(f"worker {g}.{i}" for g in (0, 1) for i in (0, 1))]
    assert int(rows["server 0.0"][2].replace(",", "")) + int(rows["server 0.1"][2].replace(",", "")) == 9610
    assert "0.weight  128 × 64  float32  4,800 on server 0, 3,392 on server 1" in done.stdout
    assert "test accuracy" not in done.stdout and list(tmp_path.iterdir()) == []


def script(tmp_path: Path, text: str) -> str:
    """A file with a script."""
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def test_a_script_that_never_prepares(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "import sys\nsys.exit(0)\n")
    assert not look(path, [], lambda _: None, load("allreduce"))
    assert "ended without run.prepare" in capfd.readouterr().err


def test_a_script_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "def train():\n    raise KeyError('mine')\n\ntrain()\n")
    assert budget.inspect(load("allreduce"), path, []) == 1
    told = capfd.readouterr().err
    assert told.startswith("Traceback") and "in train" in told and "KeyError: 'mine'" in told
    assert "shoal" not in told.replace(str(tmp_path), "")


def test_before_prepare_nobody_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
import shoal, torch
run = shoal.init()
assert run.world_size == 3
run.barrier()
loader = run.loader(list(range(9)), batch_size={0: 1, 1: 2, 2: 3})
model = torch.nn.Linear(2, 2)
run.prepare(model, torch.optim.Adam(model.parameters()))
raise AssertionError("nobody comes here")
"""
    assert budget.inspect(load("allreduce"), script(tmp_path, text), []) == 0
    assert "server 0.2" in capfd.readouterr().out


# The doctor.

HEALTHY: dict[str, str] = {
    "model": "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Dropout())",
    "parameters": "model.parameters()",
    "optimizer": "torch.optim.Adam(parameters)",
    "batches": "run.loader(data, batch_size=8)",
    "forward": "F.cross_entropy(model(inputs), targets)",
    "backward": "loss.backward()",
    "clip": "run.clip_grad_norm_(1.0)",
}

TEMPLATE = """
import torch, shoal
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)
data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
run = shoal.init()
model = {model}
parameters = {parameters}
model, optimizer = run.prepare(model, {optimizer})
batches = {batches}
steps = 0
for epoch in run.epochs(100):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = {forward}
        {backward}
        {clip}
        optimizer.step()
        steps += 1
        assert steps < 3, "the doctor is slow to stop"
"""

SURPRISES: dict[str, tuple[dict[str, str], str]] = {
    "unused": (
        {"model": "nn.ModuleList([nn.Linear(4, 3), nn.Linear(2, 2)])", "forward": "model[0](inputs).sum()"},
        "1.weight, 1.bias without a gradient in 3 steps",
    ),
    "idle": (
        {"parameters": "model[0].parameters()"},
        "1.weight, 1.bias, 2.weight and 1 more in no optimizer",
    ),
    "tiny": ({"batches": "run.loader(data, batch_size=4)"}, "Batch norm saw a batch of 4"),
    "whole": (
        {
            "model": "nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))",
            "optimizer": "torch.optim.Muon(parameters)",
        },
        "Muon must see whole parameters, so none is divided between servers: 0.weight alone is 57%",
    ),
    "own loader": ({"batches": "DataLoader(data, batch_size=8)"}, "iterates over a DataLoader of its own"),
    "no loader": ({"batches": "[(data.tensors[0], data.tensors[1])]"}, "No batch came from run.loader"),
    "stream": ({"batches": "run.loader(Stream(), batch_size=8)"}, "Stream has no state_dict"),
    "clip": (
        {"clip": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
        "torch.nn.utils.clip_grad_norm_ was called",
    ),
    "clip value": (
        {"clip": "nn.utils.clip_grad_value_(model.parameters(), 1.0)"},
        "torch.nn.utils.clip_grad_value_ was called",
    ),
    "two": (
        {"backward": "loss.backward(retain_graph=True); loss.backward()"},
        "2 backward passes in one step",
    ),
}


def diagnosed(tmp_path: Path, changes: dict[str, str]) -> tuple[bool, list[str]]:
    """Whether the script came through, and what the doctor found."""
    doctor = Doctor()
    with doctor.listening():
        well = look(script(tmp_path, TEMPLATE.format(**HEALTHY | changes)), [], doctor.examine)
    return well, doctor.conclude()


def test_a_healthy_script(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, {}) == (True, [])


@pytest.mark.parametrize("name", SURPRISES)
def test_each_surprise_alone(name: str, tmp_path: Path) -> None:
    changes, words = SURPRISES[name]
    well, findings = diagnosed(tmp_path, changes)
    assert well and len(findings) == 1 and words in findings[0]


def test_accumulation_is_no_surprise(tmp_path: Path) -> None:
    backward = "with run.accumulate(): loss.backward(retain_graph=True)\n        loss.backward()"
    assert diagnosed(tmp_path, {"backward": backward}) == (True, [])


def test_torch_is_left_as_it_was() -> None:
    before = nn.utils.clip_grad_norm_
    with Doctor().listening():
        assert nn.utils.clip_grad_norm_ is not before
    assert nn.utils.clip_grad_norm_ is before


def test_doctor_command(tmp_path: Path) -> None:
    done = shoal("doctor", str(DIGITS), "--epochs", "7", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{DIGITS}, 3 steps: nothing found\n"), done.stderr
    assert shoal("doctor", "nowhere.py", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_wrapped_models_are_refused(where: str) -> None:
    inner = nn.DataParallel(nn.Linear(2, 2))
    model: Any = inner if where == "outside" else nn.Sequential(inner)
    run = session.init()
    with pytest.raises(UsageError, match=r"contains a DataParallel") as caught:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "pass model.module" in str(caught.value)
