"""The pace of links: none far ahead of the slowest, none held for ever, none waiting for who stands still."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event, current_thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wires import take

from shoal.transport import LANES, plain
from shoal.transport import links as module
from shoal.transport.links import LEAD, STANDSTILL, Link, Pace, Writer
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


def test_a_link_counts_what_it_is_given() -> None:
    here, there = socket.socketpair()
    with here, there:
        link = Link(here)
        before = link.given
        link.send([b"header", bytes(1000)])
        assert link.given == before + 1006


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


class Seen(Pace):
    """Knows whether the writer is at rest."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Event()

    def lets(self, link: Link) -> bool:
        found = super().lets(link)
        if current_thread().name == "shoal writer":
            self.asked.set()
        return found

    def rest(self) -> None:
        """Until the writer has asked, and asks no more."""
        assert self.asked.wait(5.0)
        while self.asked.wait(0.1):
            self.asked.clear()


Wires = tuple[Seen, list[Link], list[socket.socket]]


def test_who_has_sent_all_is_not_waited_for(clock: Clock) -> None:
    pace = Pace(clock)
    here, there = socket.socketpair()
    with here, there:
        (fast,), small = links(1), Link(here)
        small.pace = pace
        assert pace.lets(fast)
        small.send([b"all of it"])
        pace.moved(fast, 10 * LEAD)
        assert pace.lets(fast)


def test_who_is_given_up_is_not_waited_for_and_waits_for_nobody(clock: Clock) -> None:
    pace, (fast, slow) = Pace(clock), links(2)
    for link in (fast, slow):
        link.pace = pace
        assert pace.lets(link)
    pace.moved(fast, LEAD)
    assert not pace.lets(fast) and fast.held and pace.holding
    with slow.lock:
        slow.give_up()
    assert pace.lets(fast)
    assert pace.lets(slow)
    pace.moved(fast, LEAD)
    assert not pace.lets(fast) and fast.held
    with fast.lock:
        fast.give_up()
    assert not fast.held and not pace.holding


def test_who_leaves_while_it_is_held_holds_nobody_up(clock: Clock) -> None:
    pace, (fast, slow) = Pace(clock), links(2)
    assert pace.lets(fast) and pace.lets(slow)
    pace.moved(fast, LEAD)
    assert not pace.lets(fast) and pace.holding
    pace.leave(fast)
    assert not pace.holding and not pace.holds(fast)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    """A pace that nobody is too slow for, two links that keep it, and their other ends."""
    monkeypatch.setattr(module, "STANDSTILL", 60.0)
    with ExitStack() as ends:
        pairs = [socket.socketpair() for _ in range(2)]
        pace, team = Seen(), [Link(here) for here, _ in pairs]
        for link, (here, there) in zip(team, pairs, strict=True):
            link.pace = pace
            there.settimeout(5.0)
            ends.enter_context(here)
            ends.enter_context(there)
        yield pace, team, [there for _, there in pairs]


def test_one_that_goes_on_frees_another_at_once(wires: Wires) -> None:
    """The first waits for the second, which waits for a third; that leaves, and no socket says anything."""
    pace, (first, second), (hears, _) = wires
    (third,), writer = links(1), Writer()
    for link, ahead in ((third, 0), (first, 3 * LEAD), (second, 2 * LEAD)):
        assert pace.lets(link)
        pace.moved(link, ahead)
    first.send([b"at last"])
    second.send([bytes(10_000_000)])  # it will move, and soon be full: nobody reads it
    for link in (first, second):  # the one that waits for the other first
        assert link.held
        writer.watch(link)
    pace.rest()
    pace.leave(third)
    writer.forget(third)  # which wakes the writer, once
    assert hears.recv(100).endswith(b"at last")
    close(writer, second)


def close(writer: Writer, *full: Link) -> None:
    for link in full:
        with link.lock:
            link.give_up()
        writer.forget(link)
    writer.close(time.monotonic() + 5.0)


def test_what_the_scripts_thread_sends_frees_who_waits_for_it(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`send` wakes the writer though nothing of its own has to wait."""
    pace, (held, _), (hears, _) = wires
    monkeypatch.setattr(plain, "Pace", lambda: pace)
    server = PlainSockets("server 0.0", "secret", "tcp://127.0.0.1:0", 1.0)
    worker = PlainSockets("worker 0.0", "secret", None, 1.0)
    worker.dial(server.name, server.bound, 5.0)
    (slow,) = links(1)
    assert pace.lets(slow) and pace.lets(held)
    pace.moved(held, LEAD)
    held.send([b"at last"])
    worker._writer.watch(held)
    pace.rest()
    assert held.held
    pace.leave(slow)
    worker.send(server.name, "bulk", [b"share", b"", b""])
    assert hears.recv(100).endswith(b"at last")
    worker.close()
    server.close()


def test_what_waits_behind_others_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    wake = Writer._wake
    monkeypatch.setattr(Writer, "_wake", lambda writer: woken.append(1) or wake(writer))
    server = PlainSockets("server 0.0", "secret", "tcp://127.0.0.1:0", 5.0)
    worker = PlainSockets("worker 0.0", "secret", None, 5.0)
    worker.dial(server.name, server.bound, 5.0)
    big = [b"header", b"body", bytes(10_000_000)]
    for _ in range(20):
        worker.send(server.name, "bulk", big)
    assert len(woken) == 1
    assert [len(frames[2]) for frames in take(server, 20)] == [10_000_000] * 20
    worker.send(server.name, "bulk", big)  # the writer has gone to sleep, or is about to
    assert len(take(server, 1)[0][2]) == 10_000_000
    worker.close()
    server.close()


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many entries as the writer (and who is made from now on) has polled."""
    made: list[int] = []
    poll = select.poll
    monkeypatch.setattr(select, "poll", lambda: made.append(1) or poll())
    return made


def test_a_link_that_has_been_closed_is_not_looked_at(polls: list[int]) -> None:
    here, there = socket.socketpair()
    link, writer = Link(here), Writer()
    link.send([bytes(10_000_000)])
    assert link.waiting
    writer.watch(link)
    with link.lock:
        link.give_up()
    writer.forget(link)
    link.end()
    there.close()
    before = len(polls)
    assert not Event().wait(0.2) and len(polls) - before < 20
    writer.close(time.monotonic() + 5.0)


def test_a_peer_that_has_gone_while_its_link_was_held_is_not_looked_at(polls: list[int]) -> None:
    servers = [PlainSockets(f"server 0.{n}", "secret", "tcp://127.0.0.1:0", 0.2) for n in range(2)]
    worker, (ending, slow) = PlainSockets("worker 0.0", "secret", None, 0.2), servers
    for server in servers:
        worker.dial(server.name, server.bound, 5.0)
        worker.send(server.name, "control", [b"hello", b""])
        assert len(take(server, 1)) == 1
    for server in servers:
        worker.send(server.name, "bulk", [b"share", b"", bytes(20_000_000)])
    ending.close()
    while worker.recv(0.2) is not None:
        pass
    before = len(polls)
    assert worker.recv(0.3) is None and len(polls) - before < 20
    slow.close()
    worker.close()


def test_closing_with_a_peer_that_does_not_read_leaves_nothing_running(polls: list[int]) -> None:
    server = PlainSockets("server 0.0", "secret", "tcp://127.0.0.1:0", 0.2)
    worker = PlainSockets("worker 0.0", "secret", None, 0.2)
    worker.dial(server.name, server.bound, 5.0)
    worker.send(server.name, "bulk", [b"share", b"", bytes(20_000_000)])
    worker.close()
    before = len(polls)
    assert not Event().wait(0.2) and len(polls) - before < 20
    server.close()


def test_who_comes_later_is_level_with_the_slowest_not_with_the_fastest(clock: Clock) -> None:
    pace, (fast, slow, late) = Pace(clock), links(3)
    assert pace.lets(fast) and pace.lets(slow)
    pace.moved(fast, LEAD)
    assert pace.lets(late)
    pace.moved(late, LEAD - 1)
    assert pace.lets(late)


def test_a_link_that_is_held_costs_nothing(wires: Wires, polls: list[int]) -> None:
    """Its socket would take more all the time."""
    pace, (held, _), _ = wires
    (slow,), writer = links(1), Writer()
    assert pace.lets(slow) and pace.lets(held)
    pace.moved(held, LEAD)
    held.send([b"later"])
    writer.watch(held)
    assert not Event().wait(0.2) and len(polls) < 20
    close(writer, held)


def test_what_is_sent_after_giving_up_is_the_senders_at_once() -> None:
    (link,) = links(1)
    with link.lock:
        link.give_up()
    assert link.send([b"late"]).wait(0.0)
    assert not link.waiting


def test_what_an_interrupted_send_left_behind_leaves_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before the writer was told, a message waits; the next one tells the writer."""
    watch = Writer.watch

    def interrupted(writer: Writer, link: Link) -> None:
        monkeypatch.setattr(Writer, "watch", watch)
        raise KeyboardInterrupt

    server = PlainSockets("server 0.0", "secret", "tcp://127.0.0.1:0", 0.5)
    worker = PlainSockets("worker 0.0", "secret", None, 0.5)
    worker.dial(server.name, server.bound, 5.0)
    monkeypatch.setattr(Writer, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.send(server.name, "bulk", [b"header", b"body", bytes(10_000_000)])
    worker.send(server.name, "bulk", [b"header", b"body", b"last"])
    assert [len(frames[2]) for frames in take(server, 2)] == [10_000_000, 4]
    worker.close()
    server.close()


def test_who_dials_again_is_not_sent_what_has_waited_for_him_once_more() -> None:
    server = PlainSockets("server 0.0", "secret", "tcp://127.0.0.1:0", 0.5)
    server.send("worker 0.0", "control", [b"header", b"once"])
    for expected in (1, 0):
        worker = PlainSockets("worker 0.0", "secret", None, 0.5)
        worker.dial(server.name, server.bound, 5.0)
        worker.send(server.name, "control", [b"header", b"here"])
        assert take(server, 1) == [[b"header", b"here"]]
        server.send("worker 0.0", "control", [b"header", b"now"])
        assert [body for _, body in take(worker, expected + 1)] == [b"once"] * expected + [b"now"]
        worker.close()
    server.close()
