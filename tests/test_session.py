"""`shoal.init()` under plain python: one worker and one server in this process, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLAIN = """
import threading, torch, shoal
from torch import nn

def train(prepare):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 300), nn.Dropout(0.5), nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model, optimizer = prepare(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return model.state_dict()

plain = train(lambda *objects: objects)
run = shoal.init(cluster=shoal.config.Cluster(), seed=7)
assert shoal.init() is run
assert (run.rank, run.world_size, run.group, run.num_groups, run.rank_in_group) == (0, 1, 0, 1, 0)
assert run.is_main and str(run.device) in ("cpu", "cuda:0") and run.global_step == 0
ours = train(run.prepare)
assert run.global_step == 5
assert all(torch.equal(ours[name], plain[name]) for name in plain)
assert run.evaluate(lambda: 3) == 3
run.save("model.safetensors")
saved = run.state_dict()
assert all(torch.equal(saved[name], plain[name]) for name in plain)
print("well")
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a script of its own, in a folder of its own."""
    script = folder / "train.py"
    script.write_text("import shoal.config\n" + code)
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_plain_python_is_plain_pytorch_bit_for_bit_and_ends(tmp_path: Path) -> None:
    result = python(PLAIN, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "well\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "model.safetensors"}


def test_a_cluster_under_plain_python_is_an_error_that_says_shoal_run(tmp_path: Path) -> None:
    result = python('shoal.init(cluster="downpour")', tmp_path)
    assert result.returncode == 1
    assert "UsageError" in result.stderr and "shoal run --cluster" in result.stderr


def test_a_script_that_fails_under_plain_python_ends(tmp_path: Path) -> None:
    result = python(PLAIN.replace('print("well")', 'raise KeyError("mine")'), tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "KeyError: 'mine'"
