"""The coordinator, and torch's store on it: what HashStore answers, who may join, who is missed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from shoal import coordinator
from shoal.coordinator import NAME, OVER, VISITOR, Coordinator
from shoal.errors import LaunchError, PeerFailed
from shoal.keys import Keys
from shoal.link import Link
from shoal.store import LinkStore
from shoal.wire import VERSION

KEYS = Keys(b"a secret of the test's, long enough", "test")
NAMES = [f"worker 0.{n}" for n in range(4)]
TERMS = json.dumps({"cluster": {"sync_freq": 1}, "seed": 0}).encode()
SILENCE = 5.0

Dial = Callable[..., Link]


@pytest.fixture(scope="module", params=["curve", "trusted"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return KEYS if request.param == "curve" else None


@pytest.fixture
def host(keys: Keys | None) -> Iterator[Coordinator]:
    lock = keys.lock(NAME, [VISITOR]) if keys else None
    made = Coordinator("tcp://127.0.0.1:*", lock, NAMES, TERMS, b"record", SILENCE)
    yield made
    made.close(0.0)


@pytest.fixture
def dial(host: Coordinator, keys: Keys | None) -> Iterator[Dial]:
    links: list[Link] = []

    def call(name: str = NAMES[0], *, join: bool = True) -> Link:
        links.append(Link(name, host.address, keys.lock(VISITOR, []) if keys else None, SILENCE))
        if join:
            answer = links[-1].ask("join", [name], [VERSION.encode(), TERMS])
            assert answer.values == (b"record",), answer
        return links[-1]

    yield call
    for link in links:
        link.close()


# The store.

KEY = st.sampled_from(["a", "b"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEY, st.sampled_from(["1", "2", "x"])),
    st.tuples(st.just("compare_set"), KEY, st.sampled_from(["", "1", "x"]), st.sampled_from(["3", "y"])),
    st.tuples(st.just("check"), st.lists(KEY, min_size=1, max_size=2)),
    st.tuples(st.just("delete_key"), KEY),
    st.tuples(st.just("num_keys")),
)


@given(st.lists(CALLS, max_size=12))
def test_it_answers_as_torchs_own_store_does(calls: list[tuple[object, ...]]) -> None:
    ours, theirs = _Direct(), dist.HashStore()
    for name, *arguments in calls:
        assert getattr(ours, str(name))(*arguments) == getattr(theirs, str(name))(*arguments)
        assert [ours.check([key]) for key in "ab"] == [theirs.check([key]) for key in "ab"]
        for key in "ab":
            if theirs.check([key]):
                assert ours.get(key) == theirs.get(key)


class _Direct(LinkStore):
    """The store on a coordinator's rules alone, without a wire."""

    def __init__(self) -> None:
        super().__init__(self, 1.0)  # type: ignore[arg-type]
        self._values: dict[str, bytes] = {}
        self._waiting: list[object] = []

    def ask(
        self, verb: str, keys: tuple[str, ...], values: tuple[bytes, ...], limit: float
    ) -> coordinator.Answer | None:
        request = coordinator.Request(1, verb, tuple(keys), tuple(values), limit)
        return getattr(Coordinator, f"_{verb}")(self, b"", request)  # type: ignore[no-any-return]

    _found = Coordinator._found


def test_values_sums_and_waits_over_the_wire(dial: Dial) -> None:
    kept = [LinkStore(dial(name), 5.0) for name in NAMES[:2]]
    one, two = (dist.PrefixStore("run/1", store) for store in kept)
    one.set("key", b"\x00\xffvalue")
    assert two.get("key") == b"\x00\xffvalue"
    assert [store.add("sum", amount) for store, amount in ((one, 2), (two, 5), (one, -3))] == [2, 7, 4]
    assert two.compare_set("key", "", "other") == b"\x00\xffvalue"
    assert (two.check(["key", "sum"]), two.check(["key", "none"])) == (True, False)
    assert (one.delete_key("sum"), one.delete_key("sum"), one.num_keys()) == (True, False, 1)
    one.multi_set(["m", "n"], ["1", "2"])
    assert two.multi_get(["n", "m"]) == [b"2", b"1"]


def test_who_waits_is_answered_when_the_last_key_is_there(dial: Dial) -> None:
    one, two = (LinkStore(dial(name), 20.0) for name in NAMES[:2])
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda key=key: found.append(one.get(key))) for key in ("a", "b")]
    for thread in threads:
        thread.start()
    one.set("mine", "1")  # the waiting threads do not keep others from asking
    two.set("a", "A")
    two.set("b", "B")
    for thread in threads:
        thread.join(10)
    assert sorted(found) == [b"A", b"B"]


def test_a_wait_ends_at_its_timeout(dial: Dial) -> None:
    store = LinkStore(dial(), 5.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"waited 0\.3 s for never"):
        store.wait(["never"], timedelta(seconds=0.3))
    assert 0.3 <= time.monotonic() - began < 2


def test_gloo_finds_its_ranks_through_it(dial: Dial) -> None:
    stores = [LinkStore(dial(name), 20.0) for name in NAMES]
    results: dict[int, float] = {}

    def reduce(rank: int) -> None:
        store = dist.PrefixStore("gloo/1", stores[rank])
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, len(NAMES), options)
        tensor = torch.full((3,), float(rank))
        group.allreduce([tensor]).wait()
        results[rank] = float(tensor[0])

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(len(NAMES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(range(len(NAMES)), 6.0)


# Who may join.


def test_each_member_joins_once_and_a_life_that_is_over_takes_nobody(dial: Dial) -> None:
    dial()
    again = dial(join=False)
    assert again.ask("join", [NAMES[0]], [VERSION.encode(), TERMS]).refused == OVER
    assert again.ask("join", ["worker 7.0"], [VERSION.encode(), TERMS]).refused == OVER


def test_another_version_or_configuration_is_refused_by_name(dial: Dial) -> None:
    link = dial(NAMES[1], join=False)
    refused = link.ask("join", [NAMES[1]], [b"0.0.9", TERMS]).refused
    assert refused == f"worker 0.1 runs Shoal 0.0.9, worker 0.0 runs {VERSION}"
    other = json.dumps({"cluster": {"sync_freq": 4}, "seed": 0}).encode()
    refused = link.ask("join", [NAMES[1]], [VERSION.encode(), other]).refused
    assert refused == (
        "worker 0.1 has another configuration than worker 0.0: cluster.sync_freq is 4, there it is 1"
    )


def test_a_port_in_use_is_said_plainly(host: Coordinator) -> None:
    with pytest.raises(LaunchError, match="the coordinator cannot listen at tcp"):
        Coordinator(host.address, None, NAMES, TERMS, b"", SILENCE)


# Who is missed.


def test_who_goes_without_a_word_is_named_to_the_others(dial: Dial) -> None:
    left, lost, stays = (dial(name) for name in NAMES[:3])
    left.ask("leave")
    left.close()
    assert not _told(stays, 2.0)
    lost.close()
    assert _told(stays, 10.0)
    with pytest.raises(PeerFailed, match=r"worker 0\.1 has ended without a word"):
        stays.check()


def test_the_first_failure_is_the_one_that_all_are_told(dial: Dial) -> None:
    one, two, three = (dial(name) for name in NAMES[:3])
    one.ask("failed", values=[b"worker 0.0 failed at step 3: ValueError: mine"])
    two.ask("failed", values=[b"worker 0.1 failed at step 4: PeerFailed: worker 0.0"])
    assert _told(three, 5.0)
    assert three.failure.startswith("worker 0.0 failed at step 3")


def _told(link: Link, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not link.failure and time.monotonic() < until:
        time.sleep(0.02)
    return bool(link.failure)


def test_a_coordinator_that_is_gone_matters_only_to_who_hears_nothing_at_all(keys: Keys | None) -> None:
    lock = keys.lock(NAME, [VISITOR]) if keys else None
    host = Coordinator("tcp://127.0.0.1:*", lock, NAMES, TERMS, b"record", SILENCE)
    link = Link(NAMES[1], host.address, keys.lock(VISITOR, []) if keys else None, 0.5)
    link.ask("join", [NAMES[1]], [VERSION.encode(), TERMS])
    host.close(0.0)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        link.check(0.2)  # values come as before
        time.sleep(0.05)
    with pytest.raises(PeerFailed, match=r"nothing has come for 9 s, and worker 0\.0 cannot be reached"):
        link.check(9.0)
    link.close()


# Strangers.


def test_a_stranger_learns_nothing_and_disturbs_nobody(
    host: Coordinator, dial: Dial, keys: Keys | None
) -> None:
    store = LinkStore(dial(), 5.0)
    store.set("value", "ours")
    other = Keys(b"some other secret, as long as ours", "test")
    context = zmq.Context()
    sockets = []
    for lock in (None, other.lock(VISITOR, []), KEYS.lock("worker 0.0", [])):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        if lock is not None:
            lock.dial(socket, NAME)
        socket.connect(host.address)
        for content in (b"", b"\xc1\xc1", b"x" * 1000):
            socket.send(content)
        request = coordinator.Request(1, "wait", ("value",))
        socket.send(coordinator._encoder.encode(request))
        sockets.append(socket)
    heard = [socket.poll(300) for socket in sockets]
    context.destroy(linger=0)
    assert store.get("value") == b"ours"
    assert any(heard) == (keys is None)
