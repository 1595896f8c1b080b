"""Messages: every kind survives the way, and nothing that is not one does harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import Line, config, learn, pull_of

import shoal.server
import shoal.training
import shoal.wire as wire
from shoal import Run
from shoal.errors import ModelMismatch, PeerFailed, ProtocolError, UsageError
from shoal.leases import Ask, Block
from shoal.parameters import as_bytes, checked
from shoal.partition import Buffer, Parameter, make_plan
from shoal.testing import run_cluster
from shoal.transport import TOGETHER, Post
from shoal.transport.faulty import Faulty
from shoal.transport.inprocess import Hub, InProcess
from shoal.transport.memory import Memory
from shoal.wire import Body, Header, Kind, Message, State, decode, encode

RUN = "a secret"
SPEC = wire.OptimizerSpec("torch.optim:SGD", {"lr": 0.1, "foreach": None}, ({"lr": 0.1, "betas": [0.9, 1]},))
HELLO = wire.Hello(
    "0.1.0", (Parameter("a", (2, 3), "float32"),), (Buffer("b", (), "int64"),), (SPEC,), checksum=7
)
BODIES: dict[Kind, Body | None] = {
    Kind.HELLO: HELLO,
    Kind.WELCOME: wire.Welcome((3, 4), True, HELLO),
    Kind.INIT: wire.Init((State(0, "exp_avg", None, "float32", (2,)), State(1, "step", 3.0))),
    Kind.SHARE: None,
    Kind.COMMIT: wire.Commit(
        1, {0: 2}, (0,), {0: (1,)}, 64.0, True, 1024.0, 0.5, 9, ({"lr": 0.1},), (1, 128)
    ),
    Kind.NORM: wire.Norm(0, {0: 1}, {}, 32.0, False, 1.0, True),
    Kind.VALUES: wire.Values(True, 3, ({"lr": 0.1},)),
    Kind.PULL: None,
    Kind.LEAVE: wire.Leave(12),
    Kind.SYNC: None,
    Kind.SYNCED: None,
    Kind.REPLICATE: None,
    Kind.STORED: None,
    Kind.HEARTBEAT: wire.Missing(("worker 0.1",)),
    Kind.REFUSE: wire.Refuse("ModelMismatch", "missing: a"),
    Kind.STOP: None,
    Kind.LEASE: wire.Lease(Ask(0, 1, 20, 300, 64), Block(16, 40, 48)),
}


def header(kind: Kind = Kind.SHARE, **fields: Any) -> Header:
    return Header(**({"kind": kind, "run": RUN, "sender": "worker 0.0"} | fields))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_every_kind_makes_the_round_trip(kind: Kind) -> None:
    fields = {
        **{
            "life": 2,
            "sequence": 3,
            "plan": "ab",
            "epoch": 1,
            "group": 4,
            "step": 5,
            "number": 6,
            "chunk": 7,
        },
        **{"base": 8, "version": 9, "lsn": 10, "codec": "raw", "dtype": "float64", "place": "", "sent": 1.5},
    }
    assert set(fields) | {"protocol", "kind", "run", "sender"} == set(Header.__struct_fields__)
    sent, body = header(kind, **fields), BODIES[kind]
    message = decode(encode(sent, body, [b"raw", bytearray(3)]), RUN)
    assert message.header == sent
    assert [bytes(frame) for frame in message.frames] == [b"raw", bytes(3)]
    if body is None:
        assert message.content == b""
    else:
        assert message.body(type(body)) == body


def test_another_run_and_another_protocol_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"worker 0\.0 belongs to another run"):
        decode(encode(header(run="another"), None), RUN)
    with pytest.raises(ProtocolError, match=r"worker 0\.0 speaks protocol 99, this member 1") as caught:
        decode(encode(header(protocol=99), None), RUN)
    assert "the same version of Shoal" in str(caught.value)


def test_a_torn_message_is_refused() -> None:
    frames = encode(header(Kind.COMMIT), BODIES[Kind.COMMIT])
    for count in range(2):
        with pytest.raises(ProtocolError, match="frames arrived"):
            decode(frames[:count], RUN)
    for end in range(len(frames[0])):
        with pytest.raises(ProtocolError, match="unknown form"):
            decode([bytes(frames[0])[:end], frames[1]], RUN)
    for end in range(len(frames[1])):
        message = decode([frames[0], bytes(frames[1])[:end]], RUN)
        with pytest.raises(ProtocolError, match=r"worker 0\.0 sent a commit of an unknown form"):
            message.body(wire.Commit)


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_bytes_that_are_no_message_are_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames, RUN)


Anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(Anything, max_size=22), Anything, st.sampled_from([kind for kind in Kind if BODIES[kind]]))
def test_well_formed_nonsense_is_a_protocol_error(fields: list[Any], body: Any, kind: Kind) -> None:
    with pytest.raises(ProtocolError):
        decode([msgspec.msgpack.encode(fields), b""], RUN)
    message = Message(header(kind), msgspec.msgpack.encode(body), [])
    expected = type(BODIES[kind])
    try:
        found = message.body(expected)
    except ProtocolError:
        return
    assert isinstance(found, expected)


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_frames_of_another_size_are_refused_before_use(frames: list[bytes]) -> None:
    chunk = make_plan((Parameter("a", (5,), "float32"),), (), 1).chunks[0]
    if [len(frame) for frame in frames] == [20]:
        frames = []
    with pytest.raises(ProtocolError, match=r"worker 0\.0 sent frames of .* bytes for chunk 0, not 20"):
        checked(frames, chunk, "worker 0.0")


def test_a_post_says_who_sent_what_and_when() -> None:
    hub = Hub()
    post = Post(InProcess(hub, "worker 0.0"), RUN, life=3)
    post.plan = "digest"
    post.send("server 0.0", Kind.PULL, chunk=2)
    post.send("server 0.0", Kind.PULL, chunk=3)
    first, second = (Post(InProcess(hub, "server 0.0"), RUN).receive(1) for _ in range(2))
    assert first is not None and second is not None
    assert (first.header.sender, first.header.life, first.header.plan) == ("worker 0.0", 3, "digest")
    assert second.header.sequence == first.header.sequence + 1
    assert second.header.sent >= first.header.sent > 1.7e9


def test_values_leave_in_the_order_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, turns = InProcess(Hub(), "server 0.0"), []
    monkeypatch.setattr(endpoint, "send", lambda peer, lane, frames, turn: turns.append(turn))
    post = Post(endpoint, RUN)
    for kind in (Kind.VALUES, Kind.SHARE, Kind.SYNC):
        post.send("worker 0.0", kind, frames=[b"raw"], chunk=7)
    assert turns == [7, 0, 0]


def test_places_are_told_of_together_and_what_has_none_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, told = InProcess(Hub(), "server 0.0"), []
    endpoint.memory = Memory(lambda peer: peer != "worker 0.9")
    room = as_bytes(endpoint.memory.allocate(TOGETHER))

    def send(peer: str, lane: str, frames: Any, turn: int) -> None:
        if peer == "worker 0.1":
            raise PeerFailed(peer)
        assert lane == ("bulk" if peer == "worker 0.9" else "control")
        told.append((peer, turn))

    monkeypatch.setattr(endpoint, "send", send)
    post = Post(endpoint, RUN)

    def values(peer: str, chunk: int, nbytes: int = 8) -> None:
        post.send(peer, Kind.VALUES, frames=[room[:nbytes]], chunk=chunk)

    def new() -> list[tuple[str, int]]:
        found, told[:] = [*told], []
        return found

    values("worker 0.0", 1)
    assert new() == [("worker 0.0", 1)]
    post.keep()
    for chunk in (2, 3):
        for rank in range(3):
            values(f"worker 0.{rank}", chunk)
    assert not new()
    values("worker 0.9", 4)
    assert new() == [("worker 0.9", 4)]
    post.send("worker 0.1", Kind.LEAVE)  # no place, and no error either
    assert [str(error) for error in post.flush()] == ["worker 0.1"] * 3
    assert new() == [("worker 0.0", 2), ("worker 0.0", 3), ("worker 0.2", 2), ("worker 0.2", 3)]
    values("worker 0.0", 5)
    values("worker 0.1", 6, TOGETHER)
    values("worker 0.2", 6, TOGETHER)
    values("worker 0.2", 7)
    assert new() == [("worker 0.2", 6)]
    assert len(post.flush()) == 1 and not post.flush()
    assert new() == [("worker 0.0", 5), ("worker 0.2", 7)]
    for chunk in (8, 9):
        values("worker 0.0", chunk, TOGETHER // 2)
    assert new() == [("worker 0.0", 8), ("worker 0.0", 9)], "many bytes are told of at once"
    values("worker 0.0", 10)
    post.close()
    assert new() == [("worker 0.0", 10)]
    assert endpoint.traffic["worker 0.0"] == 5 * 8 + TOGETHER
    with pytest.raises(UsageError, match="the run is closed"):
        values("worker 0.0", 11)


# A server among strangers.

BLOCK = {"nworkers_per_group": 2, "nservers_per_group": 2}


def letter(kind: Kind, body: Body | None = None, frames: Any = (), **fields: Any) -> list[Any]:
    return encode(header(kind, **({"run": "test"} | fields)), body, frames)


STRANGERS: dict[str, list[Any]] = {
    "noise": [b"\xff\x00noise", b"\x80", b"payload"],
    "no frame": [],
    "one frame": [b"alone"],
    "another run": letter(Kind.SHARE, None, [bytes(16)], run="another", step=1, chunk=0),
    "another protocol": letter(Kind.STOP, protocol=2),
    "a stranger's stop": letter(Kind.STOP, sender="worker 7.0"),
    "a stranger's share": letter(
        Kind.SHARE, None, [bytes(16)], sender="worker 0.9", step=1, number=1, chunk=0
    ),
    "a nameless sender": letter(Kind.LEAVE, wire.Leave(1), sender="nobody"),
    "an unknown kind": [msgspec.msgpack.encode([1, 77, "test", "worker 0.0"]), b""],
}


def disturbed(message: list[Any]) -> tuple[Callable[[Run], bytes], dict[str, Faulty]]:
    """Training in which each worker also sends every server a message that it should not."""
    links: dict[str, Faulty] = {}

    def function(run: Run) -> bytes:
        def after(step: int) -> None:
            for server in ("server 0.0", "server 0.1"):
                links[f"worker 0.{run.rank}"]._inner.send(server, "control", message)

        return learn(run, 3, after=after)

    return function, links


@pytest.mark.parametrize("name", STRANGERS)
def test_a_server_survives_what_is_not_for_it(name: str) -> None:
    clean = run_cluster(lambda run: learn(run, 3), config(**BLOCK))
    function, links = disturbed(STRANGERS[name])
    report = run_cluster(function, config(**BLOCK), links=links.update)
    assert report.results == clean.results
    for server in report.servers:
        notes = [e["message"] for e in report.events[server].written if e["event"] == "note"]
        assert len(notes) == 6
        assert all(note.startswith("dropped a message: ") for note in notes)


def refused(kind: Kind, body: Body | None, frames: Any, **fields: Any) -> None:
    """One worker sends its server a message of the right run that cannot be right."""
    links: dict[str, Faulty] = {}

    def function(run: Run) -> None:
        model, optimizer = run.prepare(model := Line(), torch.optim.SGD(model.parameters(), lr=1.0))
        digest = run._training._exchange.plan.digest  # type: ignore[union-attr]
        message = letter(kind, body, frames, **({"plan": digest, "sender": "worker 0.0"} | fields))
        links["worker 0.0"]._inner.send("server 0.0", "control", message)
        for step in range(3):
            optimizer.zero_grad()
            (model() * pull_of(0, step)).sum().backward()
            optimizer.step()

    run_cluster(function, config(), links=links.update)


def commit(**changes: Any) -> wire.Commit:
    body = wire.Commit(0, {0: 1}, (0,), {}, 1.0, True, 1.0, 1.0, 1)
    return msgspec.structs.replace(body, **changes)


@pytest.mark.parametrize(
    ("kind", "body", "frames", "fields", "text"),
    [
        (Kind.SHARE, None, [bytes(8)], {"chunk": 0, "step": 1, "number": 1}, r"frames of \[8\] bytes"),
        (Kind.SHARE, None, [], {"chunk": 0, "step": 1, "number": 1}, r"frames of \[\] bytes"),
        (Kind.SHARE, None, [bytes(8)], {"chunk": 99, "step": 1}, "sent a share for chunk 99"),
        (Kind.SHARE, None, [bytes(8)], {"chunk": -1, "step": 1}, "sent a share for chunk -1"),
        (Kind.PULL, None, [], {"chunk": 99, "step": 1}, "sent a pull for chunk 99"),
        (Kind.SHARE, None, [bytes(8)], {"plan": "another"}, "follows another plan"),
        (Kind.COMMIT, wire.Leave(3), [], {"step": 1}, "a commit of an unknown form"),
        (Kind.COMMIT, commit(counts=(5,)), [], {"step": 1}, "chunk 5"),
        (Kind.COMMIT, commit(pushed={77: 1}), [], {"step": 1}, "chunk 77"),
        (Kind.COMMIT, commit(optimizer=3), [], {"step": 1}, "optimizer 3"),
        (Kind.WELCOME, wire.Welcome((1,)), [], {}, None),
        (Kind.HEARTBEAT, wire.Missing(()), [], {}, "which no server expects"),
        (Kind.INIT, wire.Init(), [bytes(8)], {"chunk": 0}, "wrong time or place"),
        (Kind.SYNC, None, [bytes(8)], {"chunk": 0, "sequence": 1}, "which no worker sends|frames of"),
    ],
)
def test_what_cannot_be_right_is_refused_with_its_reason(
    kind: Kind, body: Body | None, frames: Any, fields: dict[str, Any], text: str | None
) -> None:
    if text is None:
        refused(kind, body, frames, **fields)
        return
    with pytest.raises(ProtocolError, match=text):
        refused(kind, body, frames, **fields)


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.training, "VERSION", "0.0.9")
    with pytest.raises(ProtocolError, match=r"worker 0\.0 runs Shoal 0\.0\.9, server 0\.0 runs 0\.1\.0"):
        run_cluster(lambda run: learn(run, 1), config())


def test_another_model_is_refused_and_named() -> None:
    def function(run: Run) -> None:
        model = Line(2000 + run.rank_in_group)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    with pytest.raises((ModelMismatch, PeerFailed), match=r"worker 0\.1 differs.*long: shape"):
        run_cluster(function, config(nworkers_per_group=2))
