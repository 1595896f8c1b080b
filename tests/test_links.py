"""The pace of links: none far ahead of the slowest, none held for ever, none waiting for who stands still."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wires import take

from shoal.transport import LANES, plain
from shoal.transport.links import LEAD, STANDSTILL, Link, Pace
from shoal.transport.plain import PlainSockets


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def links(count: int) -> list[Link]:
    return [Link(socket.socket()) for _ in range(count)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_link_waits_for_a_slower_one(clock: Clock) -> None:
    pace, (fast, slow) = Pace(clock), links(2)
    assert pace.lets(fast) and pace.lets(slow)
    pace.moved(fast, LEAD - 1)
    assert pace.lets(fast)
    pace.moved(fast, 1)
    assert not pace.lets(fast) and pace.lets(slow)
    pace.moved(slow, 1)
    assert pace.lets(fast)


def test_who_was_given_more_goes_faster(clock: Clock) -> None:
    pace, (small, large) = Pace(clock), links(2)
    small.given, large.given = 8 * LEAD, 32 * LEAD
    assert pace.lets(small) and pace.lets(large)
    pace.moved(small, 8 * LEAD)
    pace.moved(large, 28 * LEAD)
    assert not pace.lets(small) and pace.lets(large)
    pace.moved(large, 1)
    assert pace.lets(small)
    pace.moved(large, 5 * LEAD)
    assert not pace.lets(large)


def test_one_alone_and_one_whose_neighbour_has_nothing_to_send_go_on(clock: Clock) -> None:
    pace, (fast, slow) = Pace(clock), links(2)
    assert pace.lets(slow) and pace.lets(fast)
    pace.moved(fast, 10 * LEAD)
    assert not pace.lets(fast)
    pace.leave(slow)
    assert pace.lets(fast)


def test_who_comes_later_begins_level_with_the_slowest(clock: Clock) -> None:
    pace, (early, late) = Pace(clock), links(2)
    assert pace.lets(early)
    pace.moved(early, 10 * LEAD)
    assert pace.lets(late) and pace.lets(early)
    pace.moved(early, LEAD)
    assert not pace.lets(early)


def test_who_stands_still_is_not_waited_for_and_comes_back_level(clock: Clock) -> None:
    pace, (fast, slow, still) = Pace(clock), links(3)
    for link in (fast, slow, still):
        assert pace.lets(link)
    clock.now += STANDSTILL
    pace.moved(fast, 5 * LEAD)
    pace.moved(slow, 5 * LEAD)
    assert pace.lets(fast)
    pace.moved(still, 1)
    assert pace.lets(fast) and pace.lets(still)
    pace.moved(fast, LEAD + 1)
    assert not pace.lets(fast)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * LEAD), st.floats(0, STANDSTILL)), max_size=40)
)
def test_somebody_may_always_go_on(moves: list[tuple[int, int, float]]) -> None:
    clock, team = Clock(), links(4)
    pace = Pace(clock)
    for link in team:
        assert pace.lets(link)
    for number, count, later in moves:
        clock.now += later
        if pace.lets(team[number]):
            pace.moved(team[number], count)
        assert any(pace.lets(link) for link in team)


@pytest.fixture
def servers() -> Iterator[list[PlainSockets]]:
    made = [PlainSockets(f"server 0.{index}", "secret", "tcp://127.0.0.1:0", 1.0) for index in range(3)]
    yield made
    for server in made:
        server.close()


def test_a_server_that_does_not_read_costs_the_others_a_moment_only(servers: list[PlainSockets]) -> None:
    worker, (frozen, *others) = PlainSockets("worker 0.0", "secret", None, 1.0), servers
    for server in servers:
        worker.dial(server.name, server.bound, 5.0)
    for _ in range(200):
        for server in servers:
            worker.send(server.name, "bulk", [b"share", b"", bytes(1 << 17)])
    found: dict[str, int] = {}
    readers = [
        threading.Thread(target=lambda s=server: found.update({s.name: len(take(s, 200))}))
        for server in others
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert found == {server.name: 200 for server in others}
    assert len(take(frozen, 200)) == 200
    worker.close()


def test_a_server_that_ends_while_its_link_is_held_costs_the_others_nothing(
    servers: list[PlainSockets],
) -> None:
    worker, (ending, slow, _) = PlainSockets("worker 0.0", "secret", None, 1.0), servers
    for server in (slow, ending):
        worker.dial(server.name, server.bound, 5.0)
        worker.send(server.name, "control", [b"hello", b""])
        assert len(take(server, 1)) == 1
    for _ in range(100):
        for server in (ending, slow):
            worker.send(server.name, "bulk", [b"share", b"", bytes(1 << 20)])
    servers.remove(ending)
    ending.close()
    while worker.recv(0.2) is not None:
        pass  # it reads that the peer has gone
    assert len(take(slow, 100)) == 100
    worker.send(ending.name, "bulk", [b"share", b"", b""]).wait(1.0)
    began = time.thread_time()
    assert worker.recv(0.3) is None and time.thread_time() - began < 0.2
    worker.close()


def test_shares_for_the_servers_of_one_group_keep_one_pace(
    servers: list[PlainSockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Pace, str, str]] = []

    class Seen(Pace):
        def lets(self, link: Link) -> bool:
            asked.append((self, link.peer, link.lane))
            return super().lets(link)

    monkeypatch.setattr(plain, "Pace", Seen)
    worker = PlainSockets("worker 0.0", "secret", None, 1.0)
    for server, name in zip(servers, ("server 0.0", "server 0.1", "server 1.0"), strict=True):
        worker.dial(name, server.bound, 5.0)
        for lane in LANES:
            worker.send(name, lane, [b"share", b"", bytes(10)])
        assert len(take(server, 2)) == 2
    paces = {peer: pace for pace, peer, lane in asked}
    assert paces["server 0.0"] is paces["server 0.1"] is not paces["server 1.0"]
    assert {lane for _, _, lane in asked} == {"bulk"}
    worker.close()
