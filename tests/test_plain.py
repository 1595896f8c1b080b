"""Plain sockets between members: nothing lost, control first, strangers and nonsense shut out."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from wires import check_a_burst, no_files_left, take

from shoal.errors import LaunchError, PeerFailed, UsageError
from shoal.transport.links import LIMIT, Inbox
from shoal.transport.plain import ROOM, UNSENT, PlainSockets, _tune

SECRET = "the run's"
Pair = tuple[PlainSockets, PlainSockets]


def member(name: str, listen: str | None = None, secret: str = SECRET) -> PlainSockets:
    return PlainSockets(name, secret, listen, 5.0)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as private:
        yield f"ipc://{private}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def pair(address: str) -> Iterator[Pair]:
    server, worker = member("server 0.0", address), member("worker 0.0")
    worker.dial("server 0.0", server.bound, 5.0)
    yield server, worker
    close(server, worker)


def close(*members: PlainSockets) -> None:
    """Both ends at once, for each waits until the other has read everything."""
    threads = [threading.Thread(target=endpoint.close) for endpoint in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def greet(server: PlainSockets, worker: PlainSockets) -> None:
    """Until the server knows the worker by name."""
    worker.send(server.name, "control", [b"hello", b""])
    take(server, 1)


def test_nothing_is_lost_and_each_lane_keeps_its_order(pair: Pair) -> None:
    server, worker = pair
    check_a_burst(worker, server)
    check_a_burst(server, worker)


def test_only_payload_counts_as_traffic(pair: Pair) -> None:
    server, worker = pair
    worker.send(server.name, "control", [b"header", b"body"])
    worker.send(server.name, "bulk", [b"header", b"body", b"x" * 1000, bytearray(24)])
    assert dict(worker.traffic) == {server.name: 1024}
    take(server, 2)
    server.send(worker.name, "bulk", [b"header", b"", b"y" * 7])
    take(worker, 1)
    assert dict(server.traffic) == {worker.name: 7}


def test_control_overtakes_what_the_kernel_has_not_taken(pair: Pair) -> None:
    server, worker = pair
    greet(server, worker)
    for _ in range(20):
        worker.send(server.name, "bulk", [b"bulk", b"", bytes(10_000_000)])
    worker.send(server.name, "control", [b"control", b""])
    kinds = [frames[0] for frames in take(server, 21)]
    assert b"control" in kinds[:3]


def test_large_messages_pass_in_both_directions_at_once(pair: Pair) -> None:
    server, worker = pair
    greet(server, worker)
    sizes = [1, 65_535, 65_536, 65_537, 30_000_000, 0, 131_072]
    for near, far in ((worker, server), (server, worker)):
        for number, size in enumerate(sizes):
            near.send(far.name, "bulk", [bytes([number]), b"b" * number, bytes([number]) * size, b"end"])
    for endpoint in (server, worker):
        found = take(endpoint, len(sizes))
        wanted = [[bytes([n]), b"b" * n, bytes([n]) * size, b"end"] for n, size in enumerate(sizes)]
        assert found == wanted


def test_a_token_waits_until_the_kernel_has_the_frames(pair: Pair) -> None:
    server, worker = pair
    greet(server, worker)
    payload = bytearray(b"a" * 50_000_000)
    token = worker.send("server 0.0", "bulk", [b"header", b"", payload])
    assert not token.wait(0.05), "nobody reads yet"
    (frames,) = take(server, 1)
    assert token.wait(5)
    payload[:] = b"b" * len(payload)
    assert frames[2] == b"a" * len(payload)


@pytest.mark.parametrize("early", [False, True])
def test_what_is_needed_first_overtakes_what_waits(address: str, early: bool) -> None:
    server, worker = member("server 0.0", address), member("worker 0.0")
    if not early:
        worker.dial("server 0.0", server.bound, 5.0)
        greet(server, worker)
    for turn, size in ((7, 50_000_000), (3, 1), (9, 2), (3, 3), (0, 4)):
        server.send("worker 0.0", "bulk", [bytes([turn]), b"", bytes(size)], turn)
    if early:
        worker.dial("server 0.0", server.bound, 5.0)
        for _ in range(2):
            assert server.recv(5.0) is None
    found = [(frames[0][0], len(frames[2])) for frames in take(worker, 5)]
    assert found == [(7, 50_000_000), (0, 4), (3, 1), (3, 3), (9, 2)]
    close(server, worker)


def test_what_a_server_sends_before_it_was_dialled_arrives(address: str) -> None:
    server, worker = member("server 0.0", address), member("worker 0.0")
    for lane in ("control", "bulk"):
        server.send("worker 0.0", lane, [lane.encode(), b"", b"early"])  # type: ignore[arg-type]
    worker.dial("server 0.0", server.bound, 5.0)
    for _ in range(2):  # somebody has come; it is the worker
        assert server.recv(5.0) is None
    assert sorted(frames[0] for frames in take(worker, 2)) == [b"bulk", b"control"]
    close(server, worker)


def test_what_was_sent_last_arrives_after_closing(address: str) -> None:
    server, worker = member("server 0.0", address), member("worker 0.0")
    worker.dial("server 0.0", server.bound, 5.0)
    greet(server, worker)
    server.send("worker 0.0", "bulk", [b"unread", b"", bytes(1000)])  # it must not cost the server the last
    worker.send("server 0.0", "bulk", [b"last", b"", bytes(20_000_000)])
    closing = threading.Thread(target=worker.close)
    closing.start()
    (frames,) = take(server, 1)
    assert (frames[0], len(frames[2])) == (b"last", 20_000_000)
    close(server)
    closing.join(10)
    assert not closing.is_alive()


def test_a_server_hears_that_a_worker_is_gone_and_a_worker_goes_on(pair: Pair) -> None:
    server, worker = pair
    greet(server, worker)
    close(worker)
    assert server.recv(0.2) is None
    with pytest.raises(PeerFailed, match=r"server 0\.0: worker 0\.0 cannot be reached any more"):
        server.send("worker 0.0", "control", [b"header", b""])


def test_a_stranger_who_hangs_up_at_once_is_nothing() -> None:
    server = member("server 0.0", "tcp://127.0.0.1:0")
    host, _, port = server.bound.removeprefix("tcp://").rpartition(":")
    for _ in range(20):
        stranger = socket.create_connection((host, int(port)))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
        assert server.recv(0.0) is None
    assert server.recv(0.1) is None
    close(server)


@pytest.mark.parametrize(
    "nonsense",
    [
        struct.pack("<Q", 0),
        struct.pack("<Q", 1 << 31),
        struct.pack("<QQ", 1, 1 << 60),
        struct.pack("<QQ", 1, 2000),  # more than anybody needs to say who he is
        struct.pack("<QQ", 1, 20_000) + bytes(20_000),
        struct.pack("<QQ", 1, 4) + b"name",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_nonsense_ends_its_own_link_only(pair: Pair, nonsense: bytes) -> None:
    server, worker = pair
    greet(server, worker)
    at = server.bound.partition("://")[2]
    tcp = server.bound.startswith("tcp")
    stranger = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
    host, _, port = at.rpartition(":")
    stranger.connect((host, int(port)) if tcp else at)
    stranger.sendall(nonsense)
    assert server.recv(0.2) is None
    assert server.recv(0.2) is None
    stranger.settimeout(5)
    assert stranger.recv(1) == b"", "the link is still open"
    stranger.close()
    greet(server, worker)


def test_who_has_not_said_who_he_is_keeps_nobody_from_closing() -> None:
    server = PlainSockets("server 0.0", SECRET, "tcp://127.0.0.1:0", 60.0)
    host, _, port = server.bound.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))):
        assert server.recv(0.2) is None
        close(server)


def test_a_process_that_may_open_no_more_files_says_so() -> None:
    server, worker = member("server 0.0", "tcp://127.0.0.1:0"), member("worker 0.0")
    host, _, port = server.bound.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))), no_files_left():
        for use in (
            lambda: server.recv(1.0),
            lambda: worker.dial(server.name, server.bound, 1.0),
            lambda: member("server 0.1", "tcp://127.0.0.1:0"),
            lambda: worker.memory.allocate(100),
        ):
            with pytest.raises(LaunchError, match="ulimit -n"):
                use()
    close(server, worker)


def test_a_port_in_use_names_member_address_and_remedy() -> None:
    first = member("server 0.0", "tcp://127.0.0.1:0")
    with pytest.raises(LaunchError) as caught:
        member("server 0.1", first.bound)
    text = str(caught.value)
    assert text.startswith(f"server 0.1: cannot listen at {first.bound}")
    assert "cluster.start_port" in text
    close(first)


def test_an_address_that_is_too_long_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"server 0\.0: cannot listen at ipc://"):
        member("server 0.0", f"ipc://{tmp_path}/{'x' * 120}")


@pytest.mark.parametrize("secret", ["another run's", "", f"{SECRET} "])
def test_who_does_not_know_the_secret_is_not_heard(pair: Pair, secret: str) -> None:
    server, worker = pair
    greet(server, worker)
    stranger = member("worker 0.0", secret=secret)
    stranger.dial("server 0.0", server.bound, 5.0)
    stranger.send("server 0.0", "control", [b"forged", b""])
    for _ in range(10):  # it comes, says its name on both lanes, and is shut out
        assert server.recv(0.05) is None
    server.send("worker 0.0", "control", [b"for the real one", b""])
    assert take(worker, 1)[0][0] == b"for the real one"
    assert stranger.recv(0.2) is None
    close(stranger)


def test_any_number_of_frames_arrives_wherever_their_sizes_begin(pair: Pair) -> None:
    """More than the kernel takes at once, and a prefix that the reader gets in two parts."""
    server, worker = pair
    greet(server, worker)
    parts = [bytes([n % 251]) * (n % 3) for n in range(20_000)]
    sent = [[b"x" * 2999], [b"", *parts[:8000]], [b"y"] * 1500, [b"z", *parts]]
    for frames in sent:
        worker.send(server.name, "bulk", frames)
    assert take(server, len(sent)) == sent


def test_control_is_handed_out_before_what_came_earlier(pair: Pair) -> None:
    server, worker = pair
    greet(server, worker)
    worker.send(server.name, "bulk", [b"bulk", b""])
    take(server, 1)
    for lane in ("bulk", "bulk", "control"):
        worker.send(server.name, lane, [lane.encode(), b""])  # type: ignore[arg-type]
    assert [frames[0] for frames in take(server, 3)] == [b"control", b"bulk", b"bulk"]


def test_what_a_server_sends_before_it_was_dialled_is_what_it_was_then(address: str) -> None:
    server, worker = member("server 0.0", address), member("worker 0.0")
    frame = bytearray(b"then")
    assert server.send("worker 0.0", "control", [b"header", b"", frame]).wait(0)
    frame[:] = b"now!"
    worker.dial("server 0.0", server.bound, 5.0)
    for _ in range(2):  # somebody has come; it is the worker
        assert server.recv(5.0) is None
    assert take(worker, 1) == [[b"header", b"", b"then"]]
    close(server, worker)


def test_nobody_waits_for_what_a_lost_peer_will_never_take(pair: Pair) -> None:
    """Neither for what was on its way nor for what is sent later."""
    server, worker = pair
    greet(server, worker)
    token = worker.send(server.name, "control", [b"h", b"", bytes(50_000_000)])
    waiting = threading.Thread(target=token.wait, args=(30.0,))
    waiting.start()
    for link in list(server._by_file.values()):
        link.end()  # without a word
    while worker._links[server.name, "control"].waiting:
        worker.recv(0.1)
    waiting.join(5)
    assert not waiting.is_alive()
    assert worker.send(server.name, "control", [b"h", b"", b"later"]).wait(0.0)
    server._by_file.clear()


@pytest.fixture
def loopback() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener's end of a connection, one from its own address and one from another of this machine."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as same,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0)) as other,
        listener.accept()[0] as end,
    ):
        yield same, other, end


def test_the_kernel_holds_little_of_what_leaves_for_another_machine_only(
    loopback: tuple[socket.socket, ...],
) -> None:
    same, other, _ = loopback

    def room(connection: socket.socket) -> int:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    before = room(same)
    for connection, rate in ((same, 1e6), (same, 0.0), (other, 0.0), (other, 1e12)):
        _tune(connection, rate)
        assert room(connection) == before
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    _tune(other, 1e6)
    assert room(other) == 2 * ROOM < before


def test_within_a_large_frame_the_kernel_wakes_for_large_parts_only(
    loopback: tuple[socket.socket, ...],
) -> None:
    sender, _, end = loopback
    end.setblocking(False)
    inbox = Inbox(end)
    inbox.limit = LIMIT

    def least() -> int:
        return end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    def arrives(part: bytes) -> int:
        sender.sendall(part)
        return sum(len(list(inbox.read())) for _ in range(5))

    assert arrives((1).to_bytes(8, "little") + (100_000).to_bytes(8, "little")) == 0
    assert least() == 1 << 16
    assert arrives(bytes(50_000)) == 0
    assert least() == 50_000
    assert arrives(bytes(45_000)) == 0
    assert least() == 1
    assert arrives(bytes(5_000)) == 1
    assert least() == 1


def test_connections_are_tuned_on_both_sides() -> None:
    server, worker = member("server 0.0", "tcp://127.0.0.1:0"), member("worker 0.0")
    worker.dial(server.name, server.bound, 5.0)
    greet(server, worker)
    for endpoint in (server, worker):
        for link in endpoint._by_file.values():
            assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT
    close(server, worker)


def test_who_closes_waits_until_all_has_been_read(address: str) -> None:
    """Beside what was_sent_last_arrives_after_closing says: the kernel alone would hold this much."""
    server, worker = member("server 0.0", address), member("worker 0.0")
    worker.dial("server 0.0", server.bound, 5.0)
    greet(server, worker)
    server.send("worker 0.0", "control", [b"unread", b""])
    worker.send("server 0.0", "control", [b"last", b"", bytes(1000)])
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert take(server, 1)[0][0] == b"last"
    close(server)
    closing.join(10)
    assert not closing.is_alive()


def test_a_server_that_closes_leaves_no_file(tmp_path: Path) -> None:
    server = member("server 0.0", f"ipc://{tmp_path}/s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    close(server)
    assert not list(tmp_path.iterdir())


def test_a_forked_process_can_neither_send_nor_receive(pair: Pair) -> None:
    server, worker = pair
    greet(server, worker)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: worker.send(server.name, "control", [b"h", b""]), lambda: worker.recv(0.0)):
            try:
                use()
            except UsageError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
