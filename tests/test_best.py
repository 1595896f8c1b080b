"""The best model so far: when it is written, by whom, and what stays of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import ALLREDUCE, SANDBLASTER
from frameworks import ASYNCHRONOUS
from safetensors.torch import load_file
from torch import nn

from shoal import Run, files
from shoal.errors import UsageError
from shoal.testing import run_cluster

EVERY: dict[str, dict[str, Any]] = {"single": {}, "sandblaster": SANDBLASTER, "allreduce": ALLREDUCE}
NAN = float("nan")


def prepare(run: Run, ema: float | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ema=ema)


def down(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step from w to w − 1."""
    optimizer.zero_grad()
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("mode", "metrics", "expected"),
    [
        (
            "max",
            [NAN, 0.5, 0.4, 0.5, NAN, 0.6, float("-inf")],
            [False, True, False, False, False, True, False],
        ),
        ("min", [3, 4, 2, NAN, float("inf"), 1], [True, False, True, False, False, True]),
        ("max", [NAN, NAN], [False, False]),
        ("max", [torch.tensor(1.0), np.float32(2), torch.tensor(1.5)], [True, True, False]),
    ],
)
@pytest.mark.parametrize("cluster", EVERY.values(), ids=EVERY)
def test_the_best_is_on_disk_and_all_workers_know(
    cluster: Mapping[str, Any], mode: str, metrics: list[Any], expected: list[bool], tmp_path: Path
) -> None:
    path = tmp_path / "best.safetensors"

    def work(run: Run) -> list[bool]:
        model, optimizer = prepare(run)
        answers = []
        for number in run.epochs(len(metrics)):
            down(model, optimizer)
            answers.append(run.save_best(path, metrics[number], mode))
            if run.is_main and any(answers):
                steps = max(n for n, better in enumerate(answers, 1) if better)
                assert load_file(path)["weight"].item() == -steps
        return answers

    assert all(answers == expected for answers in run_cluster(work, cluster).results.values())
    assert [file.name for file in tmp_path.iterdir()] == (["best.safetensors"] if any(expected) else [])


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_groups_that_do_not_wait_and_the_common_end(cluster: Mapping[str, Any], tmp_path: Path) -> None:
    """Each group knows its own best, worker 0.0 writes; after the loop all have one metric."""

    def work(run: Run) -> bool:
        model, optimizer = prepare(run)
        for number in run.epochs(3):
            down(model, optimizer)
            loss = run.evaluate(model.weight.item)
            assert run.save_best(tmp_path / "inside.safetensors", loss, "min") or number
        result = run.evaluate(model.weight.item)
        return run.save_best(tmp_path / "after.safetensors", result, "min")

    assert set(run_cluster(work, cluster).results.values()) == {True}
    groups = 1 if cluster.get("nserver_groups") == 0 else cluster["nworker_groups"]
    assert load_file(tmp_path / "after.safetensors")["weight"].item() == -3 * groups
    assert -3 * groups <= load_file(tmp_path / "inside.safetensors")["weight"].item() <= -3


def test_paths_are_judged_apart_and_averages_can_be_the_best(tmp_path: Path) -> None:
    def work(run: Run) -> list[bool]:
        model, optimizer = prepare(run, ema=0.5)
        answers = []
        for _ in run.epochs(2):
            down(model, optimizer)
            answers += [
                run.save_best(tmp_path / "low", model.weight.item(), "min"),
                run.save_best(str(tmp_path / "high"), model.weight.item()),
                run.save_best(tmp_path / "average", model.weight.item(), "min", ema=True),
            ]
        return answers

    assert run_cluster(work, {}).results["worker 0.0"] == [True, True, True, True, False, True]
    found = {name: load_file(tmp_path / name)["weight"].item() for name in ("low", "high", "average")}
    assert found == {"low": -2, "high": -1, "average": -1.5}


def test_a_file_that_could_not_be_written_leaves_the_old_one_and_the_old_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best.safetensors"

    def full(*args: Any) -> None:
        raise OSError("no space left")

    def work(run: Run) -> None:
        model, optimizer = prepare(run)
        down(model, optimizer)
        assert run.save_best(path, 1.0)
        down(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(files, "save_file", full)
            with pytest.raises(OSError, match="no space"):
                run.save_best(path, 2.0)
        assert load_file(path)["weight"].item() == -1
        assert run.save_best(path, 1.5)

    run_cluster(work, {})
    assert load_file(path)["weight"].item() == -2


def test_mistakes_are_told(tmp_path: Path) -> None:
    def work(run: Run) -> None:
        prepare(run)
        for metric, mode, words in (
            (1.0, "best", 'give "max" or "min"'),
            (None, "max", "a NoneType"),
            ("0.5", "max", "a str"),
            (torch.ones(2), "max", "a Tensor"),
            (True, "max", "a bool"),
        ):
            with pytest.raises(UsageError, match=words):
                run.save_best(tmp_path / "best", metric, mode)
        with pytest.raises(UsageError, match="no folder"):
            run.save_best(tmp_path / "nowhere" / "best", 1.0)

    run_cluster(work, {})
    assert not list(tmp_path.iterdir())
