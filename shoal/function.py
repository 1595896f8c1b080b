"""`shoal.launch`: a cluster for one function, from a notebook or a test."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.config import Cluster, Config, load
from shoal.errors import LaunchError, UsageError
from shoal.events import read
from shoal.launcher.local import Job
from shoal.launcher.local import launch as run_job
from shoal.rundir import RunDir
from shoal.topology import Topology


def launch(
    function: Callable[..., Any],
    cluster: str | Cluster | Config,
    args: Sequence[Any] = (),
    *,
    run_dir: str | Path | None = None,
) -> list[Any]:
    """Run `function(*args)` in every worker of a cluster; it calls `shoal.init()` itself.

    A function that other processes can import runs in processes. One that they cannot (of a notebook, or
    inside another function) runs in threads of this process, by the rules of `shoal.testing`, and says so.

    Args:
        cluster: a preset, a file, a block or a whole configuration.
        args: numbers, text, lists or dicts, where workers are processes.
        run_dir: where a run of processes writes; if not given, a temporary folder that is kept only when the
            run fails.

    Returns:
        what the function returned, by rank; numbers, text, lists or dicts, where workers are processes.

    Raises:
        LaunchError: a member failed; what it said is shown before.
    """
    config = cluster if isinstance(cluster, Config) else None
    config = config or (load(cluster) if isinstance(cluster, str) else Config(cluster=cluster))  # type: ignore[arg-type]
    if not _importable(function):
        return _in_threads(function, config, args)
    try:
        what = (f"{function.__module__}:{function.__qualname__}", msgspec.json.encode(list(args)).decode())
    except TypeError as error:
        raise UsageError(
            f"these arguments cannot be sent to other processes ({error})",
            remedy="pass numbers, text, lists or dicts, and build the rest inside the function",
        ) from None
    path = Path(run_dir) if run_dir is not None else Path(tempfile.mkdtemp(prefix="shoal-run-")) / "run"
    directory = RunDir.create(path)
    status = run_job(Job(config, __file__, (*what, json.dumps(sys.path)), directory))
    if status:
        summary = json.loads(directory.summary.read_text())
        raise LaunchError(f"the run {summary['status']}: {summary['reason']}", remedy=f"see {directory.path}")
    workers = Topology.of(config.cluster).workers
    results = [_result(directory.events(worker)) for worker in workers]
    if run_dir is None:
        shutil.rmtree(path.parent)
    return results


def _importable(function: Callable[..., Any]) -> bool:
    module, path = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<")
    return module != "__main__" and "<" not in path


def _in_threads(function: Callable[..., Any], config: Config, args: Sequence[Any]) -> list[Any]:
    from shoal.testing import run_cluster

    print("shoal: other processes cannot import this function, so workers are threads", file=sys.stderr)
    report = run_cluster(lambda run: function(*args), config, timeout=config.timeouts.finish)
    return [report.results[worker.name] for worker in Topology.of(config.cluster).workers]


def _result(events: Path) -> Any:
    return next(event["value"] for event in read(events) if event["event"] == "result")


def _call(name: str, arguments: str, path: str) -> None:
    """In a worker: import the function, call it, and leave what it returns where `launch` reads it."""
    from shoal import session

    sys.path[:] = json.loads(path)
    module, _, qualname = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    session.report(function(*json.loads(arguments)))


if __name__ == "__main__":
    _call(*sys.argv[1:])
