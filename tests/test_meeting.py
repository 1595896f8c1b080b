"""How ranks meet: what the environment says, private folders, addresses, hosts, secrets, locked sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shoal import machine
from shoal.config import load
from shoal.errors import ConfigError, LaunchError
from shoal.keys import Keys, read_secret
from shoal.launcher import environment
from shoal.launcher.environment import Place
from shoal.launcher.folder import PREFIX, Folder
from shoal.topology import Member, Topology, machines_of
from shoal.transport import LANES
from shoal.transport.sockets import Sockets

SECRET = b"0123456789abcdef0123456789abcdef"
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


# The environment.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_what_torchrun_says(bare: pytest.MonkeyPatch) -> None:
    assert environment.place() is None
    for name, value in TORCHRUN.items():
        bare.setenv(name, value)
    place = environment.place()
    assert place == Place(5, 6, 1, 2, "first", 29500, "job", 3, True)
    assert not place.together


def test_four_variables_are_enough(bare: pytest.MonkeyPatch) -> None:
    for name in environment.RANKS:
        bare.setenv(name, TORCHRUN[name])
    assert environment.place() == Place(5, 6, 5, 6, "first", 29500)
    bare.delenv("MASTER_PORT")
    assert environment.place() is None


# Folders.


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shoal.launcher.folder.temporary_folder", lambda: str(tmp_path))
    return tmp_path


def test_the_last_one_out_removes_the_folder(temporary: Path) -> None:
    first = Folder.make()
    (first.path / "run").write_text("word")
    second = Folder(first.path)
    first.leave()
    assert (second.path / "run").exists()
    second.leave()
    assert list(temporary.iterdir()) == []


def test_a_new_folder_sweeps_those_that_the_dead_have_left(temporary: Path) -> None:
    held = Folder.make()
    left = temporary / f"{PREFIX}left"
    left.mkdir(mode=0o700)
    other = temporary / "shoal-something"
    other.mkdir()
    made = Folder.make()
    assert not left.exists()
    assert other.exists() and held.path.exists() and made.path.exists()


def test_a_killed_holder_holds_no_longer(temporary: Path) -> None:
    folder = Folder.make()
    code = (
        "import sys, pathlib; from shoal.launcher.folder import Folder;"
        "Folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    folder.leave()
    assert folder.path.exists()
    child.kill()
    child.wait()
    Folder.make().leave()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("kind", ["open", "link", "none"])
def test_a_folder_that_others_could_have_made_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "folder"
    if kind == "open":
        path.mkdir(mode=0o755)
    elif kind == "link":
        (tmp_path / "target").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "target")
    with pytest.raises(LaunchError, match=str(path)):
        Folder(path)


# Addresses.


def test_an_interface_or_a_network_gives_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lo": ["127.0.0.1"], "a0": ["10.1.2.3"], "b0": ["192.168.7.8"]}
    monkeypatch.setattr(machine, "addresses", lambda: found)
    assert machine.address("b0", "first") == "192.168.7.8"
    assert machine.address("10.0.0.0/8", "first") == "10.1.2.3"
    assert machine.interface_of("10.1.2.3") == "a0"
    with pytest.raises(LaunchError, match=r"no address at 172\.16\.0\.0/12"):
        machine.address("172.16.0.0/12", "first")
    with pytest.raises(
        LaunchError, match=r"c0 is no network, and no interface of this machine \(a0, b0, lo\)"
    ):
        machine.address("c0", "first")
    with pytest.raises(LaunchError, match=r"has 2 addresses that others might reach"):
        machine.address(None, "127.0.0.1")  # the first machine, by a name that leads to itself
    del found["b0"]
    assert machine.address(None, "127.0.0.1") == "10.1.2.3"


def test_a_machine_has_one_identity() -> None:
    code = "from shoal.machine import identity; print(identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine.identity() != ""


def test_hosts_name_every_member_once() -> None:
    topology = Topology.of(load("sandblaster").cluster)
    hosts = ["worker 0.0, worker 0.1", "worker 0.2, server 0.0,server 0.1"]
    found = machines_of(hosts, topology)
    assert [found[m] for m in (*topology.workers, *topology.servers)] == [0, 0, 1, 1, 1]
    with pytest.raises(ConfigError) as caught:
        machines_of(["worker 0.0, worker 0.0, worker 9.0", "server 0.0"], topology)
    assert [m.value for m in caught.value.mistakes] == [
        "worker 0.0",
        "worker 9.0",
        "server 0.1, worker 0.1, worker 0.2",
    ]
    beside = Topology.of(load("allreduce").cluster)  # a server beside a worker is where that is
    assert machines_of([f"worker 0.{n}" for n in range(3)], beside)[Member("worker", 0, 2)] == 2


# Secrets and keys.


def test_everyone_with_the_secret_makes_the_same_keys_and_nobody_else() -> None:
    ours, theirs = Keys(SECRET, "run"), Keys(SECRET, "run")
    assert ours.pair("worker 0.0") == theirs.pair("worker 0.0")
    pairs = [
        Keys(secret, run).pair(name)
        for secret in (SECRET, SECRET[::-1])
        for run in ("run", "next")
        for name in ("worker 0.0", "worker 0.1")
    ]
    assert len({key for pair in pairs for key in pair}) == 16
    assert ours.fingerprint() != Keys(SECRET[::-1], "run").fingerprint()


def test_a_secret_is_made_once_and_read_only_where_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secret"
    command = [sys.executable, "-m", "shoal", "secret"]
    env = os.environ | {"SHOAL_SECRET_FILE": str(path)}
    made = subprocess.run(command, capture_output=True, text=True, env=env)
    assert made.returncode == 0 and str(path) in made.stdout
    assert path.stat().st_mode & 0o777 == 0o600
    secret = read_secret(path)
    again = subprocess.run(command, capture_output=True, text=True, env=env)
    assert again.returncode == 2 and "File exists" in again.stderr
    assert read_secret(path) == secret and len(secret) == 64
    path.chmod(0o640)
    with pytest.raises(LaunchError, match="open to other users"):
        read_secret(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(LaunchError, match="has 5 characters, and needs 32"):
        read_secret(path)


@pytest.fixture
def server() -> Iterator[Sockets]:
    lock = Keys(SECRET, "run").lock("server 0.0", ["worker 0.0"])
    made = Sockets("server 0.0", {lane: "tcp://127.0.0.1:*" for lane in LANES}, {}, 1.0, None, lock)
    yield made
    made.close()


def test_locked_sockets_speak_with_members_and_hear_nobody_else(server: Sockets) -> None:
    keys, context = Keys(SECRET, "run"), zmq.Context()
    strangers = []
    for lock in (
        None,
        Keys(SECRET[::-1], "run").lock("worker 0.0", []),
        Keys(SECRET, "last run").lock("worker 0.0", []),
        keys.lock("worker 0.1", []),  # a member, but none that talks to this server
    ):
        for address in server.bound.values():
            strangers.append(context.socket(zmq.DEALER))
            strangers[-1].routing_id = b"worker 0.0"
            if lock is not None:
                lock.dial(strangers[-1], "server 0.0")
            strangers[-1].connect(address)
            strangers[-1].send_multipart([b"stranger", b""])
    worker = Sockets("worker 0.0", None, {"server 0.0": server.bound}, 1.0, None, keys.lock("worker 0.0", []))
    for lane in LANES:
        worker.send("server 0.0", lane, [b"member", b"", b"x" * 100_000])
    heard = [bytes(frames[0]) for _ in range(30) if (frames := server.recv(0.05)) is not None]
    assert heard == [b"member"] * 2
    server.send("worker 0.0", "bulk", [b"reply", b""])
    assert [bytes(f) for f in worker.recv(5) or ()] == [b"reply", b""]
    assert not any(stranger.poll(0) for stranger in strangers)
    context.destroy(linger=0)
    worker.close()


def test_without_a_gate_a_lock_lets_nobody_in() -> None:
    keys, context = Keys(SECRET, "run"), zmq.Context()
    listening = context.socket(zmq.ROUTER)
    keys.lock("server 0.0", ["worker 0.0"]).listen(listening)
    listening.bind("tcp://127.0.0.1:*")
    dialling = context.socket(zmq.DEALER)
    keys.lock("worker 0.0", []).dial(dialling, "server 0.0")
    dialling.connect(listening.getsockopt_string(zmq.LAST_ENDPOINT))
    dialling.send(b"word")
    assert not listening.poll(500)
    context.destroy(linger=0)
