"""The sides of a scenario: how each is started, and what its run came to."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import rate_together
from bench.jobs.models import shape_of
from bench.lan import Lan
from bench.stage import JOBS, LESSON, ROOT, Course, Look, Stage
from shoal.config import Cluster
from shoal.topology import Topology

# In the command and name of a process that serves, unless it said itself that it trains.
SERVER = re.compile(r"\(shoal s\d|\.py serve |^\S*python\S* \S*/train\.py ")
PORT = 29500

Block = Mapping[str, int | bool | str]
"""Fields of a cluster block."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how long; fields as train.py's options.

    Attributes:
        wait: seconds per step in place of computing; None = layers compute.
    """

    model: str
    optimizer: str = "adam"
    batch: int = 1
    warmup: int = 3
    steps: int = 10
    wait: float | None = None
    slow_rank: int = -1
    given: bool = False
    overlap: bool = False
    hold: bool = False
    listed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return shape_of(self.model).nbytes

    def words(self, engine: str, bell: str) -> list[str]:
        """train.py's arguments."""
        options = {
            "model": self.model,
            "optimizer": self.optimizer,
            "batch": self.batch,
            "warmup": self.warmup,
            "steps": self.steps,
            "wait": self.wait,
            "slow-rank": self.slow_rank,
        }
        words = ["--engine", engine, "--bell", bell]
        for name, value in options.items():
            words += [f"--{name}", str(value)] if value is not None else []
        flags = ("given", "overlap", "hold", "listed")
        return [*words, *(f"--{flag}" for flag in flags if getattr(self, flag))]


@dataclass(frozen=True)
class Side:
    """One of those that are compared.

    Attributes:
        start: starts its processes on a stage.
        parties: processes that train and ring the bell; 0 = it is run to its end, and its summary read.
        limit: the least seconds per step that its traffic allows, where there is such a limit.
        threads: that each process may compute with; None = as its program likes.
    """

    name: str
    start: Callable[[Stage], None]
    parties: int
    limit: float | None = None
    threads: int | None = 1

    def figures(self, lan: Lan | None) -> dict[str, float]:
        """Run it once."""
        with Stage(lan, self.threads) as stage:
            self.start(stage)
            if self.parties:
                found = figures_of(stage.watch(self.parties))
            else:
                stage.wait(LESSON)
                found = {}
            found |= _summarised(stage.folder / "run" / "summary.json")
        if self.limit:
            found |= {"limit_s": self.limit, "of_limit": found["step_s"] / self.limit}
        return found


def figures_of(course: Course) -> dict[str, float]:
    """What a run came to; the names are explained in ``figures.MEANING``."""
    told = course.told
    steps = max(len(each.ends) for each in told) - 1
    found = {
        "step_s": max(median(b - a for a, b in zip(t.ends, t.ends[1:], strict=False)) for t in told),
        "rate": rate_together([each.ends for each in told]),
        "start_s": max(each.first for each in told) - course.started,
    }
    for name in told[0].figures:
        found[name] = max(each.figures[name] for each in told)
    workers = {each.pid for each in told}
    servers = {pid for pid, use in course.after.processes.items() if SERVER.search(use.command)} - workers
    for role, pids in (("worker", workers), ("server", servers)):
        found |= _used(role, pids, course, steps)
    found["others"] = _others(course.before, course.after)
    return found | _carried(course.before, course.after, steps)


def _others(before: Look, after: Look) -> float:
    known = after.processes.keys() & before.processes.keys()
    ours = sum(after.processes[pid].cpu - before.processes[pid].cpu for pid in known)
    cores = os.cpu_count() or 1
    return max(0.0, (after.busy - before.busy - ours) / (after.time - before.time) / cores)


def _used(role: str, pids: set[int], course: Course, steps: int) -> dict[str, float]:
    before, after = course.before.processes, course.after.processes
    if not pids:
        return {}
    loop = max(after[pid].loop - before[pid].loop for pid in pids)
    return {
        f"{role}_cpu_s": sum(after[pid].cpu - before[pid].cpu for pid in pids) / steps,
        f"{role}_loop_s": loop / steps,
        f"{role}_peak": max(after[pid].peak for pid in pids),
        f"{role}_pss": max(after[pid].pss for pid in pids),
    }


def _carried(before: Look, after: Look, steps: int) -> dict[str, float]:
    if not after.traffic:
        return {}
    hosts = after.traffic
    return {
        "host_in": max(hosts[h].received - before.traffic[h].received for h in hosts) / steps,
        "host_out": max(hosts[h].sent - before.traffic[h].sent for h in hosts) / steps,
    }


def _summarised(path: Path) -> dict[str, float]:
    """What Shoal's own summary adds."""
    if not path.exists():
        return {}
    summary = json.loads(path.read_text())
    found = {"state_bytes": float(max(shard["state_bytes"] for shard in summary["shards"].values()))}
    if (resent := summary["shares"]["resent"]) is not None:
        found["resent"] = float(resent)
    if (interval := summary["sync"]["interval"]) is not None:
        found["interval"] = interval
    if "test_accuracy" in summary["final"]:
        found |= {"accuracy": summary["final"]["test_accuracy"], "loss": summary["final"]["test_loss"]}
        found["whole_s"] = summary["wall_seconds"]
    found["sent_bytes"] = float(sum(link["bytes"] for link in summary["traffic"]))
    return found


def on_this_machine(name: str, job: Job, block: Block, *, threads: int | None = 1) -> Side:
    """Shoal, started by ``shoal run``."""

    def start(stage: Stage) -> None:
        _shoal_run(stage, block, JOBS / "train.py", *job.words("shoal", stage.bell))

    return Side(name, start, workers_of(block), threads=threads)


def example(name: str, script: str, block: Block, *args: str) -> Side:
    """A whole training of one of the examples, started by ``shoal run``."""

    def start(stage: Stage) -> None:
        _shoal_run(stage, block, ROOT / "examples" / script, *args)

    return Side(name, start, 0)


def _shoal_run(stage: Stage, block: Block, script: Path, *args: str) -> None:
    conf = stage.folder / "cluster.yaml"
    conf.write_text(json.dumps({"cluster": dict(block)}))  # which is YAML too
    shoal = Path(sys.executable).with_name("shoal")
    stage.spawn([shoal, "run", "--cluster", conf, "--run-dir", stage.folder / "run", script, *args])


def workers_of(block: Block) -> int:
    """Workers of a cluster block."""
    return int(block.get("nworker_groups", 1)) * int(block.get("nworkers_per_group", 1))


def peers(name: str, job: Job, ranks: int, *, engine: str | None = None, limit: float | None = None) -> Side:
    """DDP, or another engine of torch.distributed: one rank on each host, or all on this machine."""

    def start(stage: Stage) -> None:
        words = job.words(engine or name, stage.bell)
        _ranks(stage, words, range(ranks) if stage.lan else [None] * ranks)

    return Side(name, start, ranks, limit)


def on_hosts(
    name: str,
    job: Job,
    block: Block,
    *,
    hosts: Sequence[int] | None = None,
    limit: float | None = None,
    security: str = "trusted",
) -> Side:
    """Shoal on hosts of a network: one process on each, started as torchrun starts a node's only rank.

    Args:
        hosts: of each process, by its rank; the first ones where they are not named.
        security: of the wires: trusted or curve.
    """
    count = Topology.of(Cluster(**_known(block))).os_processes

    def start(stage: Stage) -> None:
        conf = stage.folder / "cluster.yaml"
        conf.write_text(json.dumps({"cluster": {**block, "security": security}}))
        secret = stage.folder / "secret"
        secret.touch(0o600)
        secret.write_text(os.urandom(32).hex())
        words = job.words("shoal", stage.bell)
        env = {
            "SHOAL_CLUSTER": str(conf),
            "SHOAL_RUN_DIR": str(stage.folder / "run"),
            "SHOAL_SECRET_FILE": str(secret),
        }
        _ranks(stage, words, hosts or range(count), env)

    return Side(name, start, workers_of(block), limit)


def _known(block: Block) -> dict[str, Any]:
    """The fields that decide who is there."""
    shape = ("nworker", "nserver", "server_worker")
    return {key: value for key, value in block.items() if key.startswith(shape)}


def _ranks(
    stage: Stage, words: Sequence[str], hosts: Sequence[int | None], env: Mapping[str, str] | None = None
) -> None:
    """Start a rank on each host, or on this machine for None, with torchrun's variables."""
    first = hosts[0]
    for rank, host in enumerate(hosts):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": rank if host is None else 0,
            "LOCAL_WORLD_SIZE": len(hosts) if host is None else 1,
            "GROUP_RANK": 0 if host is None else rank,
            "MASTER_ADDR": "127.0.0.1" if first is None else Lan.address(first),
            "MASTER_PORT": stage.port if first is None else PORT,
            "GLOO_SOCKET_IFNAME": "lo" if host is None else Lan.interface(host),
            "TORCHELASTIC_RUN_ID": stage.folder.name,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        text = {name: str(value) for name, value in variables.items()}
        stage.python("train.py", *words, env={**text, **(env or {})}, host=host)


def alone(name: str, job: Job, *, threads: int | None = 1) -> Side:
    """A plain PyTorch loop in one process."""

    def start(stage: Stage) -> None:
        stage.python("train.py", *job.words("plain", stage.bell))

    return Side(name, start, 1, threads=threads)


def page_server(name: str, script: str, model: str, workers: int, steps: int) -> Side:
    """A parameter server of a page and its workers, on this machine."""

    def start(stage: Stage) -> None:
        path, floats = stage.folder / "server", shape_of(model).parameters
        stage.python(script, "serve", path, workers, floats)
        for _ in range(workers):
            stage.python(script, "work", path, stage.bell, floats, max(1, steps // 10), steps)

    return Side(name, start, workers)


def echo(name: str, model: str, steps: int) -> Side:
    """As many bytes as the model has, sent over a bare socket and back."""

    def start(stage: Stage) -> None:
        path = stage.folder / "copy"
        stage.python("echo.py", "serve", path)
        stage.python("echo.py", "work", path, stage.bell, shape_of(model).nbytes, 3, steps)

    return Side(name, start, 1)


def limited(side: Side, seconds: float) -> Side:
    """The side with the least time that its traffic allows."""
    return replace(side, limit=seconds)
