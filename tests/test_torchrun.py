"""torchrun as it is, on one machine: the same training as under `shoal run`, restarts, and the wrong size."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.config import load
from shoal.topology import Topology

SCRIPT = Path(__file__).parent / "data" / "ranks.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
WAYS = {"sandblaster": "variable", "allreduce": "option", "downpour": "argument", "hogwild": "variable"}


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary folder with a short name, for processes to meet in."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path)


def torchrun(
    count: int, *words: str, place: Path, options: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Start so many processes on this machine."""
    command = [TORCHRUN, "--standalone", f"--nproc-per-node={count}", *options, *words]
    env = os.environ | {"TMPDIR": str(place), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=env, check=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What `shoal run` makes of the script in a group of three."""
    folder = tmp_path_factory.mktemp("shoal")
    shoal = [sys.executable, "-m", "shoal", "run", "--cluster", "allreduce", "--run-dir", str(folder / "run")]
    subprocess.run([*shoal, str(SCRIPT), f"model={folder / 'model'}"], check=True, capture_output=True)
    return load_file(folder / "model")


@pytest.mark.parametrize("name", WAYS)
def test_it_trains_what_shoal_run_trains(
    name: str, place: Path, tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    topology = Topology.of(load(name).cluster)
    words, environment = (
        [str(SCRIPT), f"model={tmp_path / 'model'}"],
        {"SHOAL_RUN_DIR": str(tmp_path / "run")},
    )
    if WAYS[name] == "variable":
        environment["SHOAL_CLUSTER"] = name
    elif WAYS[name] == "argument":
        words.append(f"cluster={name}")
    else:
        words = ["-m", "shoal", "run", "--cluster", name, *words]
    done = torchrun(topology.os_processes, *words, place=place, **environment)
    assert done.returncode == 0, done.stderr
    workers = len(topology.workers)
    told = sorted(re.findall(r"rank \d of \d, \d here", done.stdout))
    assert told == [f"rank {rank} of {workers}, {rank} here" for rank in range(workers)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["framework"]) == ("finished", name)
    assert summary["shares"]["pushed"] == summary["shares"]["applied"] > 0
    assert len(summary["steps"]) == workers and set(summary["steps"].values()) == {6}
    assert not list(place.glob("shoal-*"))
    if topology.worker_groups == 1:
        model = load_file(tmp_path / "model")
        assert all(torch.equal(model[key], expected[key]) for key in expected)


def test_another_number_of_processes_is_told_once_with_the_right_one(place: Path) -> None:
    done = torchrun(2, str(SCRIPT), place=place, SHOAL_CLUSTER="sandblaster")
    assert done.returncode != 0
    said = "torchrun has started 2 processes, and this cluster block has 5: 3 workers and 2 separate servers"
    assert done.stderr.count(said) == 1
    assert "--nproc-per-node=5" in done.stderr
    assert "shoal/launcher" not in done.stderr  # no traceback of ours


def test_torchrun_starts_a_run_again_when_a_rank_is_killed(
    place: Path, tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    done = torchrun(
        3,
        str(SCRIPT),
        f"model={tmp_path / 'model'}",
        "kill=2",
        place=place,
        options=("--max-restarts=1",),
        SHOAL_CLUSTER="allreduce",
        SHOAL_RUN_DIR=str(tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    model = load_file(tmp_path / "model")
    assert all(torch.equal(model[key], expected[key]) for key in expected)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not list(place.glob("shoal-*"))
    assert json.loads((tmp_path / "run.1" / "summary.json").read_text())["status"] == "finished"


def test_a_script_that_fails_is_shown_with_its_own_traceback(place: Path) -> None:
    words: tuple[Any, ...] = ("-m", "shoal", "run", "--cluster", "allreduce", str(SCRIPT), "fail=1")
    done = torchrun(3, *words, place=place, SHOAL_RUN_DIR=str(place / "run"))
    assert done.returncode != 0
    assert 'raise ValueError("mine")' in done.stderr and "shoal/launcher/torchrun.py" not in done.stderr
