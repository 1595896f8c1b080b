"""Members on several machines, network namespaces here: one run whatever fails, and no stranger in it."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import CLONE_NEWNET, Forker, Ranks, ranks_of
from safetensors.torch import load_file

from bench.errors import BenchError
from bench.lan import Lan, usable

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SCRIPT = Path(__file__).parent / "data" / "ranks.py"
FOUR = {"nworkers_per_group": 4, "nservers_per_group": 4}
APART = {"nworkers_per_group": 2, "nservers_per_group": 2, "server_worker_separate": True}
GROUPS = {"nworker_groups": 4, "nserver_groups": 4}
PATTERN = b"SHOA" * 16

_ports = itertools.count(29600)


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    try:
        usable()
        with Lan(2, None) as made:
            yield made
    except BenchError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_secret(tmp_path_factory.mktemp("secret") / "secret")


def a_secret(path: Path) -> Path:
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker() as made:
        yield made


class Job:
    """Two ranks on each of two machines, or four on this one."""

    def __init__(self, forker: Forker, lan: Lan | None, folder: Path, secret: Path) -> None:
        self.forker, self.lan, self.folder, self.secret = forker, lan, folder, secret

    def ranks(
        self,
        block: Mapping[str, Any],
        *words: str,
        timeouts: Mapping[str, float] | None = None,
        secrets: Mapping[int, Path] | None = None,
    ) -> Ranks:
        conf = self.folder / "cluster.yaml"
        conf.write_text(json.dumps({"cluster": dict(block), "timeouts": dict(timeouts or {})}))
        hosts = [(self.lan.namespace(host), 2) for host in range(2)] if self.lan else []
        orders = ranks_of(4, SCRIPT, *words, folder=self.folder, port=next(_ports), hosts=hosts)
        for rank, order in enumerate(orders):
            order["env"]["SHOAL_CLUSTER"] = str(conf)
            order["env"]["SHOAL_RUN_DIR"] = str(self.folder / "run")
            order["env"]["SHOAL_SECRET_FILE"] = str((secrets or {}).get(rank, self.secret))
        return self.forker.start(orders)

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()

    def steps(self, rank: int) -> int:
        path = self.folder / str(rank)
        return path.stat().st_size if path.exists() else 0

    def until(self, true: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, [self.log(rank) for rank in range(4)]
            time.sleep(0.02)


@pytest.fixture
def job(forker: Forker, lan: Lan, tmp_path: Path, secret: Path) -> Job:
    return Job(forker, lan, tmp_path, secret)


# Training.


@pytest.mark.parametrize("security", ["curve", "trusted"])
@pytest.mark.parametrize("block", [FOUR, APART], ids=["allreduce", "sandblaster"])
def test_several_machines_train_as_one_does(
    block: dict[str, Any], security: str, job: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workers = block["nworkers_per_group"]
    models = []
    for where in (job, Job(job.forker, None, tmp_path_factory.mktemp("one"), job.secret)):
        model = where.folder / "model.safetensors"
        with where.ranks(block | {"security": security}, f"model={model}", "gather") as ranks:
            assert ranks.statuses() == [0] * 4, [where.log(rank) for rank in range(4)]
        models.append(load_file(model))
        for rank in range(workers):
            local = rank % 2 if where is job else rank
            assert where.log(rank).splitlines()[-1].startswith(f"rank {rank} of {workers}, {local} here")
        summary = json.loads((where.folder / "run" / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["shares"]["pushed"] == summary["shares"]["applied"] > 0
        assert set(summary["steps"].values()) == {6}
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[1])


def test_what_hosts_says_is_near_shares_memory_and_the_rest_does_not(job: Job) -> None:
    apart = [f"worker 0.{n}, server 0.{n}" for n in range(4)]
    job.lan = None
    with job.ranks(FOUR | {"hosts": apart, "interface": "127.0.0.0/8"}) as ranks:
        assert ranks.statuses() == [0] * 4, [job.log(rank) for rank in range(4)]
    wrong = [*apart[:3], "worker 0.3, worker 0.0, server 7.0"]
    with job.ranks(FOUR | {"hosts": wrong, "interface": "lo"}) as ranks:
        assert set(ranks.statuses()) == {2}
    assert "worker 0.0: is on two machines" in job.log(0) and "server 7.0: is no member" in job.log(0)


# What fails.


def test_a_killed_member_ends_the_others_by_name(job: Job) -> None:
    with job.ranks(FOUR, "steps=100000", f"steps_file={job.folder}") as ranks:
        job.until(lambda: job.steps(3) > 2)
        os.kill(ranks.pids[3], signal.SIGKILL)
        killed = time.monotonic()
        assert ranks.statuses() == [1, 1, 1, -signal.SIGKILL]
        assert time.monotonic() - killed < 15
    for rank in range(3):
        assert "worker 0.3 has ended without a word, or cannot be reached any more" in job.log(rank)


def test_a_failing_script_is_named_with_its_reason(job: Job) -> None:
    with job.ranks(APART, "steps=100000", "fail=1") as ranks:
        assert ranks.statuses() == [1] * 4
    for rank in (0, 2, 3):  # the other worker, and both servers
        assert "worker 0.1 failed at step 3: ValueError: mine" in job.log(rank)


def test_groups_go_on_without_the_first_machine_until_they_need_it(job: Job) -> None:
    words = ("steps=60", f"steps_file={job.folder}")
    with job.ranks(GROUPS, *words, timeouts={"heartbeat": 1.5}) as ranks:
        job.until(lambda: min(map(job.steps, range(4))) > 2)
        os.kill(ranks.pids[0], signal.SIGKILL)
        before = job.steps(3)
        assert ranks.statuses() == [-signal.SIGKILL, 1, 1, 1]
    assert job.steps(3) == 60 > before
    for rank in range(1, 4):
        assert "worker 0.0 cannot be reached any more" in job.log(rank)


@pytest.mark.timeout(240)
def test_torchrun_starts_both_machines_again_when_a_rank_is_killed(job: Job) -> None:
    assert job.lan is not None
    conf = job.folder / "cluster.yaml"
    conf.write_text(json.dumps({"cluster": FOUR}))
    found = {"SHOAL_CLUSTER": conf, "SHOAL_SECRET_FILE": job.secret, "SHOAL_RUN_DIR": job.folder / "run"}
    env = os.environ | {name: str(path) for name, path in found.items()} | {"OMP_NUM_THREADS": "1"}
    agents, port = [], next(_ports)
    for host in range(2):
        where = [f"--node-rank={host}", "--master-addr=10.99.0.1", f"--master-port={port}"]
        command = [TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", *where]
        with (job.folder / f"rank{host}.log").open("wb") as log:
            agents.append(job.lan.run(host, [*command, str(SCRIPT), "kill=3", "steps=6"], env, log))
    assert [agent.wait(200) for agent in agents] == [0, 0], [job.log(host) for host in range(2)]
    assert not (job.folder / "run" / "summary.json").exists()
    assert json.loads((job.folder / "run.1" / "summary.json").read_text())["status"] == "finished"


# Who may come in.


def test_without_a_secret_both_remedies_are_told(job: Job) -> None:
    nowhere = dict.fromkeys(range(4), job.folder / "none")
    with job.ranks(FOUR, secrets=nowhere) as ranks:
        assert set(ranks.statuses()) == {2}
    for word in ("shoal secret", "SHOAL_SECRET_FILE", "cluster.security", "trusted"):
        assert word in job.log(0)


def test_another_secret_is_told_at_once(job: Job) -> None:
    other = dict.fromkeys((2, 3), a_secret(job.folder / "other"))
    with job.ranks(FOUR, secrets=other) as ranks:
        found = dict(itertools.islice(ranks.ended(), 2))
    assert found == {2: 1, 3: 1}
    assert "the secret that worker 0.2 has is not that of worker 0.0" in job.log(2)


@pytest.mark.parametrize("security", ["curve", "trusted"])
def test_a_listener_on_the_wire_sees_values_only_where_everyone_is_trusted(job: Job, security: str) -> None:
    assert job.lan is not None
    with Listener(job.lan.namespace(1)) as listener, job.ranks(FOUR | {"security": security}) as ranks:
        assert ranks.statuses() == [0] * 4
    assert len(listener.heard) > 10_000
    assert (PATTERN in listener.heard) == (security == "trusted")


class Listener:
    """Keeps all bytes that pass the interfaces of a namespace."""

    def __init__(self, namespace: str) -> None:
        self.heard = bytearray()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(namespace,))

    def _listen(self, namespace: str) -> None:
        with open(f"/run/netns/{namespace}") as network:  # of this thread alone
            assert ctypes.CDLL(None).setns(network.fileno(), CLONE_NEWNET) == 0
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)) as wire:
            wire.settimeout(0.2)
            while not self._ending.is_set():
                try:
                    self.heard += wire.recv(1 << 17)
                except TimeoutError:
                    continue

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
