"""The examples on small data: under plain python and as processes of a cluster."""

from __future__ import annotations

import gzip
import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(
    script: str, *arguments: str, cluster: str | None = None, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, or in a cluster of them whose run directory is cwd/run."""
    shoal = ["-m", "shoal", "run", "--cluster", cluster, "--run-dir", "run"] if cluster else []
    command = [sys.executable, *shoal, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd)


def final(cwd: Path) -> dict[str, Any]:
    """What the summary of a run tells."""
    return json.loads((cwd / "run" / "summary.json").read_text())  # type: ignore[no-any-return]


def idx(values: torch.Tensor) -> bytes:
    """Bytes as an IDX file."""
    sizes = struct.pack(f">{values.dim()}i", *values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + values.to(torch.uint8).numpy().tobytes()


@pytest.fixture(params=["plain", "gzipped"])
def clothes(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Pictures of ten classes that differ in which rows are bright; both layouts."""
    folder = tmp_path / "clothes"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 640), ("t10k", 100)):
        classes = torch.randint(10, (count,), generator=generator)
        pictures = torch.randint(60, (count, 28, 28), generator=generator)
        for picture, number in zip(pictures, classes.tolist(), strict=True):
            picture[2 * number : 2 * number + 8] += 180
        for kind, values in (("images-idx3", pictures), ("labels-idx1", classes)):
            content, name = idx(values), f"{part}-{kind}-ubyte"
            if request.param == "gzipped":
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return folder


def test_fashion(clothes: Path, tmp_path: Path) -> None:
    cluster = "allreduce" if any(clothes.glob("*.gz")) else None
    options = ["--data", str(clothes), "--epochs", "4", "--batch", "16", "--save", "model.safetensors"]
    done = run("fashion.py", *options, cluster=cluster, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split("test accuracy ")[1].split()[0]) > 0.9
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (16, 1, 5, 5)
    if cluster:
        assert final(tmp_path)["final"]["test_accuracy"] > 0.9


def test_fashion_says_where_data_comes_from(tmp_path: Path) -> None:
    done = run("fashion.py", "--data", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "dataset-fashion-mnist" in done.stderr and "torchvision" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("cluster", [None, "downpour"])
def test_charlm(cluster: str | None, tmp_path: Path) -> None:
    words = random.Random(0).choices(["shoal ", "school ", "fish ", "swims. "], k=800)
    (tmp_path / "text.txt").write_text("".join(words))
    options = ["--text", "text.txt", "--steps", "80", "--context", "16", "--width", "32"]
    done = run("charlm.py", *options, cluster=cluster, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    loss = float(done.stdout.split("test loss ")[1].split()[0])
    assert loss < 2.2  # guessing costs 2.7, the words' own chance 0.4
    if cluster:
        assert final(tmp_path)["final"]["test_loss"] == pytest.approx(loss, abs=1e-4)


def test_charlm_needs_some_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    done = run("charlm.py", "--text", "text.txt", cwd=tmp_path)
    assert done.returncode == 2 and "too short" in done.stderr
