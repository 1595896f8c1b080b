"""The coordinator: what members on several machines know of each other, and who of them is still there.

It runs beside rank 0, as a thread, and keeps values that members leave for each other by key. Training goes
on when it is gone; whoever then needs something of it, or of rank 0, waits in vain and says for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from shoal.errors import LaunchError
from shoal.keys import Lock
from shoal.wire import VERSION

NAME, VISITOR = "coordinator", "visitor"  # whose keys the coordinator, and all who dial it, have
PROBE = 0.25  # seconds between two looks at who is still there
GRACE = 1.0  # seconds that a member may need to connect again
LARGEST = 1 << 26  # bytes of a message; who sends more is cut off
OVER = "over"  # the refusal of a coordinator whose run has all its members, or has failed
LATE = "late"  # the refusal after a question's limit


class Request(msgspec.Struct, array_like=True, frozen=True):
    """A member's question.

    Attributes:
        number: what the answer carries as well.
        verb: join, leave, failed; set, add, compare_set, delete, check, count; wait, for the keys' values.
        limit: seconds that the answer may take.
    """

    number: int
    verb: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    limit: float = 0.0


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The coordinator's answer; number 0 where nobody has asked.

    Attributes:
        values: as many as the question wants, none where it was in vain.
        failed: who has failed and ended the run, in words.
        refused: why the question has no answer.
    """

    number: int = 0
    values: tuple[bytes, ...] = ()
    failed: str = ""
    refused: str = ""


class _Waiting(NamedTuple):
    route: bytes
    request: Request
    until: float


class _Present(NamedTuple):
    name: str
    reached: float  # when it could be reached last


_requests = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()


class Coordinator:
    """A thread that answers until `close()`.

    Args:
        address: where it listens, such as tcp://10.0.0.1:*.
        lock: encrypts it; None = whoever reaches it is trusted.
        members: who may join, each once.
        terms: what all members must agree on, as JSON.
        record: what a member that joins is told.
        silence: seconds without a sign of life after which a member counts as gone.

    Raises:
        LaunchError: it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        lock: Lock | None,
        members: Sequence[str],
        terms: bytes,
        record: bytes,
        silence: float,
    ) -> None:
        self._context = zmq.Context()
        self._gate = lock.gate(self._context) if lock is not None else None
        self._socket = connected(self._context, zmq.ROUTER, silence)
        self._socket.router_mandatory = True
        if lock is not None:
            lock.listen(self._socket)
        self._absent, self._terms, self._record = set(members), terms, record
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._present: dict[bytes, _Present] = {}
        self._failure, self._until = "", 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._verbs: dict[str, Callable[[bytes, Request], Answer | None]] = {
            "join": self._join,
            "leave": self._leave,
            "failed": self._failed,
            "wait": self._wait,
            "set": self._set,
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "check": self._check,
            "count": self._count,
        }
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._let_go()
            raise LaunchError(
                f"the coordinator cannot listen at {address}: {error.strerror or error}",
                remedy="choose another cluster.start_port (0 = any free port), or end what uses this one",
            ) from None
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._thread.start()

    def close(self, patience: float = GRACE) -> None:
        """Answer until all have left, or for `patience` seconds, then let go of the address."""
        self._until = time.monotonic() + patience
        self._ending.set()
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=round(GRACE * 1000))

    def _run(self) -> None:
        probed = 0.0
        while not self._ending.is_set() or (self._present and time.monotonic() < self._until):
            if self._socket.poll(round(PROBE * 1000)):
                self._take(self._socket.recv_multipart())
            now = time.monotonic()
            if now - probed >= PROBE:
                probed = now
                self._probe(now)
                self._expire(now)

    def _take(self, frames: list[bytes]) -> None:
        try:
            route, content = frames
            request = _requests.decode(content)
            answer = self._verbs[request.verb](route, request)
        except (ValueError, LookupError, msgspec.MsgspecError):
            return  # no member of this version asks that
        if answer is not None:
            self._send(route, answer)
        if request.verb in ("set", "add", "compare_set"):
            self._serve_waiting()

    def _send(self, route: bytes, answer: Answer) -> bool:
        """Whether it could be sent: its receiver is connected."""
        try:
            self._socket.send_multipart([route, _encoder.encode(answer)])
        except zmq.ZMQError:
            return False
        return True

    # Who is there.

    def _join(self, route: bytes, request: Request) -> Answer:
        (name,), (version, terms) = request.keys, request.values
        refused = ""
        if version != VERSION.encode():
            refused = f"{name} runs Shoal {version.decode(errors='replace')}, worker 0.0 runs {VERSION}"
        elif found := _difference(self._terms, terms):
            refused = f"{name} has another configuration than worker 0.0: {found}"
        elif name not in self._absent or self._failure:
            return Answer(request.number, refused=OVER)
        if refused:
            return Answer(request.number, refused=refused)
        self._absent.discard(name)
        self._present[route] = _Present(name, time.monotonic())
        return Answer(request.number, (self._record,))

    def _leave(self, route: bytes, request: Request) -> Answer:
        self._present.pop(route, None)
        return Answer(request.number)

    def _failed(self, route: bytes, request: Request) -> Answer:
        self._present.pop(route, None)
        self._fail(request.values[0].decode())
        return Answer(request.number)

    def _fail(self, what: str) -> None:
        """Tell all members the first failure, which ends the run."""
        if not self._failure:
            self._failure = what
            for route in list(self._present):
                self._send(route, Answer(failed=what))

    def _probe(self, now: float) -> None:
        """Look who can be reached; the system notices at once when a process ends, but not a dead network."""
        lost = []
        for route, member in list(self._present.items()):
            if self._send(route, Answer()):
                self._present[route] = member._replace(reached=now)
            else:
                lost.append(route)
        if any(now - self._present[route].reached > GRACE for route in lost):
            # All that are lost: whoever starts them ends some when others have ended.
            names = [self._present.pop(route).name for route in lost]
            has = "has" if len(names) == 1 else "have"
            self._fail(f"{', '.join(names)} {has} ended without a word, or cannot be reached any more")

    # Keys and values.

    def _wait(self, route: bytes, request: Request) -> Answer | None:
        if all(key in self._values for key in request.keys):
            return self._found(request)
        self._waiting.append(_Waiting(route, request, time.monotonic() + request.limit))
        return None

    def _found(self, request: Request) -> Answer:
        return Answer(request.number, tuple(self._values[key] for key in request.keys))

    def _serve_waiting(self) -> None:
        ready = [w for w in self._waiting if all(key in self._values for key in w.request.keys)]
        self._waiting = [w for w in self._waiting if w not in ready]
        for waiting in ready:
            self._send(waiting.route, self._found(waiting.request))

    def _expire(self, now: float) -> None:
        late = [w for w in self._waiting if w.until <= now]
        self._waiting = [w for w in self._waiting if w.until > now]
        for waiting in late:
            self._send(waiting.route, Answer(waiting.request.number, refused=LATE))

    def _set(self, route: bytes, request: Request) -> Answer:
        self._values |= zip(request.keys, request.values, strict=True)
        return Answer(request.number)

    def _add(self, route: bytes, request: Request) -> Answer:
        (key,), (amount,) = request.keys, request.values
        self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        return self._found(request)

    def _compare_set(self, route: bytes, request: Request) -> Answer:
        """As torch's stores do: a key that is not there is equal to nothing, b""."""
        (key,), (expected, desired) = request.keys, request.values
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return Answer(request.number, (self._values.get(key, expected),))

    def _delete(self, route: bytes, request: Request) -> Answer:
        return Answer(request.number, (b"%d" % (self._values.pop(request.keys[0], None) is not None),))

    def _check(self, route: bytes, request: Request) -> Answer:
        return Answer(request.number, (b"%d" % all(key in self._values for key in request.keys),))

    def _count(self, route: bytes, request: Request) -> Answer:
        return Answer(request.number, (b"%d" % len(self._values),))


def _difference(ours: bytes, theirs: bytes) -> str:
    """The first setting that two configurations (JSON) disagree on, in words; "" if there is none."""
    pairs = zip(_flat("", msgspec.json.decode(ours)), _flat("", msgspec.json.decode(theirs)), strict=False)
    return next((f"{b[0]} is {b[1]}, there it is {a[1]}" for a, b in pairs if a != b), "")


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, each in sorted(value.items()):
        yield from _flat(f"{prefix}.{name}" if prefix else name, each)


def connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, silence: float) -> zmq.Socket[bytes]:
    """A socket whose connections end when nothing is heard from the other side for so many seconds."""
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = 0
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
        socket.setsockopt(option, round(silence * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(silence * 250))
    return socket
