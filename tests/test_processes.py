"""Real processes, real sockets: every framework on digits, and what cannot be faked about it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.config import load
from shoal.events import read
from shoal.topology import Topology

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.py"
SHOAL = [sys.executable, "-m", "shoal", "run"]

TCP = "cluster.transport=tcp"
RUNS: dict[str, list[str]] = {
    "sandblaster": ["--cluster", "sandblaster"],
    "allreduce": ["--cluster", "allreduce"],
    "downpour": ["--cluster", "downpour"],
    "hogwild": ["--cluster", "hogwild"],
    "hogwild over tcp": ["--cluster", "hogwild", "--set", TCP],
    "hybrid": ["--cluster", "downpour", "--set", "cluster.nserver_groups=2", "--set", TCP],
    "families": [
        *("--cluster", "allreduce", "--set", "cluster.nworkers_per_group=4"),
        *("--set", "cluster.nservers_per_group=2", "--set", "cluster.nworkers_per_procs=2"),
    ],
    "hybrid mixed": [
        *("--cluster", "allreduce", "--set", "cluster.nworkers_per_group=2"),
        *("--set", "cluster.server_placement=mixed"),
    ],
    "independent": [
        *("--cluster", "hogwild", "--set", "cluster.nserver_groups=0", "--set", "cluster.nworker_groups=2"),
    ],
}


@dataclass
class Finished:
    """A finished run: its exit status, what it printed, and its directory."""

    status: int
    printed: str
    path: Path
    topology: Topology

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())  # type: ignore[no-any-return]

    def events(self, kind: str) -> dict[str, dict[str, Any]]:
        """The last event of a kind, by member."""
        files = (self.path / "events").glob("*.jsonl")
        return {e["member"]: e for file in files for e in read(file) if e["event"] == kind}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Finished]]:
    """Runs digits once for each name of RUNS that a test asks for."""
    done: dict[str, Finished] = {}

    def get(name: str) -> Finished:
        if name not in done:
            path = tmp_path_factory.mktemp("runs") / "run"
            options = RUNS[name]
            overrides = [b for a, b in itertools.pairwise(options) if a == "--set"]
            command = [*SHOAL, *options, "--run-dir", str(path), str(DIGITS), "--save", f"{path}.safetensors"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=100)
            topology = Topology.of(load(options[1], overrides).cluster)
            done[name] = Finished(result.returncode, result.stdout + result.stderr, path, topology)
        return done[name]

    yield get


@pytest.mark.parametrize("name", RUNS)
def test_digits_are_learnt(name: str, run_of: Callable[[str], Finished]) -> None:
    run = run_of(name)
    assert run.status == 0, run.printed
    summary = run.summary
    assert summary["status"] == "finished"
    assert summary["framework"] == name.split()[0].replace("families", "hybrid")
    assert summary["final"]["test_accuracy"] >= (0.93 if name.startswith("hogwild") else 0.95)
    assert summary["wall_seconds"] <= 20


@pytest.mark.parametrize("name", RUNS)
def test_every_member_is_a_process_of_its_own(name: str, run_of: Callable[[str], Finished]) -> None:
    run, topology = run_of(name), run_of(name).topology
    started = run.events("started")
    assert set(started) == {member.name for member in (*topology.workers, *topology.servers)}
    alone = [*topology.workers, *(s for s in topology.servers if topology.host_of(s) is None)]
    processes = {started[member.name]["pid"] for member in alone}
    assert len(processes) == len(alone) == run.summary["os_processes"]
    for server in topology.servers:
        if host := topology.host_of(server):
            assert started[server.name]["pid"] == started[host.name]["pid"]


@pytest.mark.parametrize("name", RUNS)
def test_bytes_flow_between_those_who_talk_and_nobody_else(
    name: str, run_of: Callable[[str], Finished]
) -> None:
    run, topology = run_of(name), run_of(name).topology
    expected = set()
    for worker in () if topology.paired(topology.workers[0]) else topology.workers:  # or steps by itself
        for server in topology.servers_of(worker):
            expected |= {(worker.name, server.name), (server.name, worker.name)}
    sent = {(row["from"], row["to"]): row["bytes"] for row in run.summary["traffic"]}
    between = {pair for pair in sent if pair[0].startswith("server") and pair[1].startswith("server")}
    assert set(sent) - between == expected
    assert all(count > 0 for count in sent.values())
    groups = {(pair[0].split()[1].split(".")[0], pair[1].split()[1].split(".")[0]) for pair in between}
    if topology.synchronised:
        every = {str(group) for group in range(topology.server_groups)}
        assert {g for pair in groups for g in pair} == every
    else:  # the common start is all that server groups ever exchange
        assert all(a == "0" for a, _ in groups)


@pytest.mark.parametrize("name", RUNS)
def test_the_ledger_adds_up(name: str, run_of: Callable[[str], Finished]) -> None:
    shares = run_of(name).summary["shares"]
    assert shares["pushed"] == shares["applied"] + sum(shares["dropped"].values()) > 0
    assert shares["resent"] == shares["duplicate"] == 0


def test_each_member_of_an_allreduce_holds_its_part_of_the_state(run_of: Callable[[str], Finished]) -> None:
    shards = run_of("allreduce").summary["shards"]
    parameters = 64 * 128 + 128 + 128 * 10 + 10
    assert sum(shard["parameters"] for shard in shards.values()) == parameters
    total = sum(shard["state_bytes"] for shard in shards.values())
    assert total >= 2 * 4 * parameters
    for shard in shards.values():
        assert abs(shard["state_bytes"] / total - 1 / 3) < 0.02


def test_mixed_servers_hold_their_parts(run_of: Callable[[str], Finished]) -> None:
    held = [shard["parameters"] for shard in run_of("hybrid mixed").summary["shards"].values()]
    for part, count in zip([1 / 4, 1 / 4, 1 / 2], held, strict=True):
        assert abs(count - part * sum(held)) <= 65


def test_frameworks_of_one_size_agree_bit_for_bit(run_of: Callable[[str], Finished]) -> None:
    models = [load_file(f"{run_of(name).path}.safetensors") for name in ("sandblaster", "allreduce")]
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_asynchronous_groups_are_stale_synchronous_are_not(
    run_of: Callable[[str], Finished], tmp_path: Path
) -> None:
    assert run_of("sandblaster").summary["staleness"]["max"] == 0
    path = tmp_path / "run"
    # Long enough for groups to meet, however late.
    command = [*SHOAL, "--cluster", "downpour", "--run-dir", str(path), str(DIGITS), "--epochs", "60"]
    subprocess.run(command, capture_output=True, timeout=100, check=True)
    assert json.loads((path / "summary.json").read_text())["staleness"]["max"] > 0


def test_a_stopped_server_stops_training(tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = [*SHOAL, "--cluster", "sandblaster", "--run-dir", str(path), str(DIGITS), "--epochs", "100000"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    events = path / "events"
    try:
        _until(lambda: _step(events / "w0.0.jsonl") > 3, "a worker to step")
        server = next(e for e in read(events / "s0.1.jsonl") if e["event"] == "started")["pid"]
        os.kill(server, signal.SIGSTOP)
        _until(lambda: _is_still(events / "w0.0.jsonl"), "training to stop")
        before = _step(events / "w0.0.jsonl")
        os.kill(server, signal.SIGCONT)
        _until(lambda: _step(events / "w0.0.jsonl") > before + 3, "training to go on")
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=30)
    assert launcher.returncode == 3


def _step(path: Path) -> int:
    return max((e["step"] for e in read(path) if e["event"] == "progress"), default=0)


def _is_still(path: Path) -> bool:
    before = _step(path)
    time.sleep(2)  # eight times the interval at which a worker that moves reports
    return _step(path) == before


def _until(true: Callable[[], bool], what: str, timeout: float = 40) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.05)
