"""The pages on porting: what they show are files, and these train the model that plain PyTorch trains."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from shoal.session import Run
from shoal.testing import run_cluster

FOLDER = Path(__file__).parents[1] / "docs" / "porting"
NAMES = ["single", "ddp", "accelerate", "fabric"]


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts find `task`, and write into a folder of their own."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)


def oracle() -> dict[str, Tensor]:
    """An epoch is one step over all samples, so no order of samples matters."""
    from task import Net, train

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    inputs, classes = train.tensors
    clipped = 0
    for epoch in range(20):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * epoch / 20)) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        clipped += float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)) > 0.2
        optimizer.step()
    assert 0 < clipped < 20, "clipping must matter in some steps"
    return model.state_dict()


def check(path: Path) -> None:
    """A saved model is the oracle's."""
    found, wanted = load_file(path), oracle()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def script(name: str) -> dict[str, object]:
    """Runs a file as a script; its names."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile((FOLDER / name).read_text(), name, "exec"), names)
    return names


@pytest.mark.parametrize("name", NAMES)
def test_after_trains_the_same_model(name: str, tmp_path: Path) -> None:
    def train(run: Run) -> float:
        names = script(f"{name}_after.py")
        assert names["run"] is run
        return names["result"]  # type: ignore[return-value]

    results = set(run_cluster(train, "allreduce").results.values())
    assert len(results) == 1 and results.pop() > 0.8
    check(tmp_path / "model.safetensors")


def test_before_trains_the_same_model(tmp_path: Path) -> None:
    script("single_before.py")
    check(tmp_path / "model.safetensors")


def test_ddp_before_trains_the_same_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    done = subprocess.run(
        [*command, str(FOLDER / "ddp_before.py")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch") == 20
    check(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_show_the_files(name: str) -> None:
    page = (FOLDER / f"from-{name}.md").read_text()
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown == [(FOLDER / f"{name}_{side}.py").read_text() for side in ("before", "after")]


def test_every_file_is_on_a_page() -> None:
    files = {path.name for path in FOLDER.glob("*.py")} - {"task.py"}
    assert files == {f"{name}_{side}.py" for name in NAMES for side in ("before", "after")}
