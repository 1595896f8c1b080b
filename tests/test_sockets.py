"""ZeroMQ between members: two lanes, nothing lost, and a port in use is said plainly."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from wires import MANY, burst, check_a_burst, take

from shoal.errors import LaunchError
from shoal.transport import LANES, Lane
from shoal.transport.sockets import Sockets

Addresses = dict[Lane, str]


@pytest.fixture(params=["ipc", "tcp"])
def addresses(request: pytest.FixtureRequest) -> Iterator[Addresses]:
    with tempfile.TemporaryDirectory() as private:
        places = {"ipc": f"ipc://{private}/s", "tcp": "tcp://127.0.0.1:*"}
        place = places[request.param]
        yield {lane: place if place.endswith("*") else f"{place}.{lane[0]}" for lane in LANES}


@pytest.fixture
def pair(addresses: Addresses) -> Iterator[tuple[Sockets, Sockets]]:
    server = Sockets("server 0.0", addresses, {}, 1.0)
    worker = Sockets("worker 0.0", None, {"server 0.0": server.bound}, 1.0)
    yield server, worker
    worker.close()
    server.close()


def test_nothing_is_lost_and_each_lane_keeps_its_order(pair: tuple[Sockets, Sockets]) -> None:
    server, worker = pair
    check_a_burst(worker, server)
    check_a_burst(server, worker)


def test_only_payload_counts_as_traffic(pair: tuple[Sockets, Sockets]) -> None:
    server, worker = pair
    worker.send(server.name, "control", [b"header", b"body"])
    worker.send(server.name, "bulk", [b"header", b"body", b"x" * 1000, bytearray(24)])
    assert dict(worker.traffic) == {server.name: 1024}
    take(server, 2)
    server.send(worker.name, "bulk", [b"header", b"", b"y" * 7])
    take(worker, 1)
    assert dict(server.traffic) == {worker.name: 7}


def test_control_overtakes_bulk(pair: tuple[Sockets, Sockets]) -> None:
    server, worker = pair
    burst(worker, server.name)()
    first = take(server, 1)  # then everything that follows it is on its way
    order = [int.from_bytes(f[0], "big") % 2 for f in first + take(server, MANY - 1)]
    assert order != sorted(order, reverse=True)
    assert sum(order[: MANY // 2]) < MANY // 4, "bulk came no sooner than control"


def test_a_token_waits_until_the_wire_has_the_frames() -> None:
    with tempfile.TemporaryDirectory() as private:
        places: Addresses = {lane: f"ipc://{private}/s.{lane[0]}" for lane in LANES}
        worker = Sockets("worker 0.0", None, {"server 0.0": places}, 1.0)
        payload = bytearray(b"a" * 300_000)
        token = worker.send("server 0.0", "bulk", [b"header", b"", payload])
        assert not token.wait(0.05), "nobody listens yet"
        server = Sockets("server 0.0", places, {}, 1.0)
        (frames,) = take(server, 1)
        assert token.wait(5)
        payload[:] = b"b" * len(payload)
        assert frames[2] == b"a" * 300_000
        worker.close()
        server.close()


def test_what_a_server_sends_before_it_was_dialled_arrives(addresses: Addresses) -> None:
    server = Sockets("server 0.0", addresses, {}, 1.0)
    for lane in LANES:
        server.send("worker 0.0", lane, [lane.encode(), b"", b"early"])
    worker = Sockets("worker 0.0", None, {"server 0.0": server.bound}, 1.0)
    found: list[bytes] = []
    for _ in range(200):
        assert server.recv(0.02) is None
        frames = worker.recv(0.02)
        found += [bytes(frames[0])] if frames else []
        if len(found) == 2:
            break
    assert sorted(found) == [b"bulk", b"control"]
    worker.close()
    server.close()


def test_a_port_in_use_names_member_address_and_remedy() -> None:
    first = Sockets("server 0.0", {lane: "tcp://127.0.0.1:*" for lane in LANES}, {}, 0.0)
    with pytest.raises(LaunchError) as caught:
        Sockets("server 0.1", first.bound, {}, 0.0)
    text = str(caught.value)
    assert text.startswith("server 0.1: cannot listen at tcp://127.0.0.1:")
    assert first.bound["control"] in text or first.bound["bulk"] in text
    assert "cluster.start_port" in text
    first.close()


def test_an_address_that_is_too_long_is_said_plainly(tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}/{'x' * 120}"
    with pytest.raises(LaunchError, match=r"server 0\.0: cannot listen at ipc://"):
        Sockets("server 0.0", dict.fromkeys(LANES, place), {}, 0.0)


AT_EXIT = """
import atexit
from shoal.transport.sockets import Sockets

places = {lane: "tcp://127.0.0.1:*" for lane in ("control", "bulk")}
server = Sockets("server 0.0", places, {}, 1.0)
worker = Sockets("worker 0.0", None, {"server 0.0": server.bound}, 1.0)

def exchange():
    worker.send("server 0.0", "bulk", [b"header", b"body", bytes(100_000)])
    frames = next(frames for frames in (server.recv(5.0) for _ in range(9)) if frames)
    print(len(frames[2]))

atexit.register(exchange)
exchange()
"""


def test_a_process_sends_until_its_end() -> None:
    """Servers beside workers go on after the last line, while Python calls what is to be called then."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("100000\n100000\n", 0), ended.stderr
