"""Models that torch.compile has compiled, by the backends that make new code of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import WIDTH, Batch, Case, adamw, close, loss_of, plain
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, check_asynchronous, check_joined
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.timeout(300)]),  # its first start is slow
]
SOME = {name: SYNCHRONOUS[name] for name in ("single", "sandblaster", "allreduce")}
OTHERS = {name: ASYNCHRONOUS[name] for name in ("downpour", "hogwild")}
TURN = threading.Lock()


class Mixed(nn.Module):
    """What is fused and what is not; and, if wanted, a place where the graph breaks."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = (self.first(inputs) * self.scale).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        return self.last(hidden.sigmoid() + hidden)


def compiled(backend: str) -> nn.Module:
    """With inductor in one piece, for each costs seconds of a C++ compiler."""
    return torch.compile(Mixed(broken=backend != "inductor"), backend=backend)  # type: ignore[return-value]


def in_turn(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Workers that are threads compile one after the other, for the compiler keeps its state in globals."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        with TURN:
            loss_of(model, inputs, targets).backward()
        optimizer.step()


@pytest.mark.parametrize("cluster", SOME.values(), ids=SOME)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_by_a_backend_it_equals_plain_pytorch(backend: str, cluster: Mapping[str, Any]) -> None:
    check_joined(Case(lambda: compiled(backend), adamw, in_turn), cluster)


@pytest.mark.parametrize("cluster", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_by_a_backend_it_learns_with_groups(backend: str, cluster: Mapping[str, Any]) -> None:
    gentle = Case(
        lambda: compiled(backend), lambda m: torch.optim.SGD(m.parameters(), lr=0.05), in_turn, steps=20
    )
    check_asynchronous(gentle, cluster, 0.98)


SCRIPT = """
import torch, shoal
from cases import Case, part, regression
from test_any_compiled import compiled

run = shoal.init()
torch.set_num_threads(1)
model = Case(lambda: compiled("inductor")).model()
model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
for inputs, targets in part(regression(), run.rank, run.world_size):
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
run.save("model.safetensors")
"""


@NEEDS_COMPILER
@pytest.mark.timeout(300)
def test_each_process_compiles_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import sys; sys.path.append({str(Path(__file__).parent)!r}){SCRIPT}")
    options = ["--cluster", "sandblaster", "--run-dir", "run"]
    command = [sys.executable, "-m", "shoal", "run", *options, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    oracle = plain(Case(lambda: Mixed(broken=False), adamw))
    close(load_file(tmp_path / "model.safetensors"), oracle)
