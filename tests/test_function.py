"""`shoal.launch`: a cluster for one function."""

from __future__ import annotations

import jobs
import pytest

import shoal
from shoal.config import Cluster
from shoal.errors import LaunchError, UsageError


def test_an_importable_function_becomes_processes(capfd: pytest.CaptureFixture[str]) -> None:
    processes = shoal.launch(jobs.train, "allreduce", (3,))
    assert "threads" not in capfd.readouterr().err
    assert [result["rank"] for result in processes] == [0, 1, 2]
    assert len({result["weight"] for result in processes}) == 1

    def local(steps: int) -> dict[str, float]:
        return jobs.train(steps)

    threads = shoal.launch(local, Cluster(nworkers_per_group=3, nservers_per_group=3), (3,))
    assert "threads" in capfd.readouterr().err
    assert threads == processes


def test_a_failing_function_is_an_error() -> None:
    with pytest.raises(LaunchError, match="this worker fails"):
        shoal.launch(jobs.train, "allreduce", (3, True))


def test_arguments_that_cannot_travel_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        shoal.launch(jobs.train, "allreduce", (object(),))
