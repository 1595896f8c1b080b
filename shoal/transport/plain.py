"""Members as processes: plain stream sockets, UNIX or tcp.

A server listens; whoever talks to it dials once per lane, says its name and lane, and proves with the run's
secret that it belongs here. What the kernel does not take at once waits in the lane's queue; a thread empties
that. Whoever wants a message reads the sockets itself: no thread stands in between.

On a slow line the kernel holds little of what leaves: what it holds would stand in the way of a commit, and
flows with full queues lose packets and fall apart, so that one server waits for the last of its workers while
another has them all. For the same reason a worker pushes to all servers at one pace.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress

from shoal.errors import LaunchError, PeerFailed, UsageError, enough_files
from shoal.transport import LANES, Lane, Released, Token
from shoal.transport.links import LIMIT, Link, Pace, Writer
from shoal.transport.memory import Memory
from shoal.wire import Frame

UNSENT = 1 << 14  # bytes that the kernel takes beyond what it can send at once
ROOM = 3 << 12  # bytes (twice that with the kernel's own) that it holds at least, sent or not
AMPLE = 1 << 17  # bytes; where more has to be under way the kernel finds out by itself how much
_RTT = 8 + 15 * 4  # where Linux's struct tcp_info has the microseconds there and back


class PlainSockets:
    """An endpoint on stream sockets; addresses are `ipc://PATH` or `tcp://HOST:PORT`.

    Args:
        name: this member's name.
        secret: of the run; a peer that does not know it is not heard.
        listen: where it listens, for a server.
        linger: seconds that closing waits for what is still queued.
        memory: what peers on this machine share with this member.
        rate: bytes per second of the line to other machines; 0 = it is not known.
    """

    def __init__(
        self,
        name: str,
        secret: str,
        listen: str | None,
        linger: float,
        memory: Memory | None = None,
        rate: float = 0.0,
    ) -> None:
        self.name, self._secret = name, secret.encode()
        self._process = os.getpid()
        self.memory = memory or Memory()
        self.traffic: Counter[str] = Counter()
        self._linger, self._rate = linger, rate
        self._links: dict[tuple[str, Lane], Link] = {}
        self._dialled: set[str] = set()
        self._by_file: dict[int, Link] = {}
        self._early: defaultdict[tuple[str, Lane], list[tuple[list[Frame], int]]] = defaultdict(list)
        self._arrived: dict[Lane, deque[list[Frame]]] = {"control": deque(), "bulk": deque()}
        self._poll = select.poll()
        self._listener: socket.socket | None = None
        with enough_files(name):
            self._writer = Writer()
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        if listen is not None:
            self._listener = self._listen(listen)
            self._poll.register(self._listener, select.POLLIN)

    @property
    def bound(self) -> str:
        """The address that this member listens at, with the port it was given; "" if it does not."""
        if self._listener is None:
            return ""
        at = self._listener.getsockname()
        return f"ipc://{at}" if isinstance(at, str) else f"tcp://{at[0]}:{at[1]}"

    def _listen(self, address: str) -> socket.socket:
        family, where = _parse(address)
        with enough_files(self.name):
            listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise LaunchError(
                f"cannot listen at {address}: {error.strerror or error}",
                member=self.name,
                remedy="choose another cluster.start_port (0 = any free port), or end what uses this one",
            ) from None
        listener.setblocking(False)
        return listener

    def dial(self, peer: str, address: str, timeout: float) -> None:
        """Connect to a peer that listens; raises PeerFailed if it does not answer in `timeout` seconds."""
        self._dialled.add(peer)
        family, where = _parse(address)
        for lane in LANES:
            with enough_files(self.name):
                connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(timeout)
            try:
                connection.connect(where)
            except OSError as error:
                connection.close()
                raise PeerFailed(
                    f"{peer} cannot be reached at {address} ({error})", member=self.name
                ) from None
            link = self._add(connection)
            if lane == "bulk" and family == socket.AF_INET:
                link.pace = self._paces[peer.rpartition(".")[0]]  # that of all servers of one group
            self._known(link, peer, lane)
            self._hand(link, [self.name.encode(), self._secret, lane.encode()])

    def _add(self, connection: socket.socket) -> Link:
        if connection.family == socket.AF_INET:
            with suppress(OSError):  # it is gone already, as the first read will tell
                _tune(connection, self._rate)
        link = Link(connection)
        self._by_file[link.file] = link
        self._poll.register(connection, select.POLLIN)
        return link

    def _known(self, link: Link, peer: str, lane: Lane) -> None:
        link.peer, link.lane, link.inbox.limit = peer, lane, LIMIT
        self._links[peer, lane] = link

    def send(self, peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
        """See Endpoint.send."""
        self._check_process()
        self.traffic[peer] += sum([memoryview(frame).nbytes for frame in frames[2:]])
        link = self._links.get((peer, lane))
        if link is None:  # it has not dialled yet
            self._early[peer, lane].append(([bytes(frame) for frame in frames], turn))
            return Released()
        if link.broken:
            if peer in self._dialled:
                return Released()
            raise PeerFailed(f"{peer} cannot be reached any more", member=self.name)
        return self._hand(link, frames, turn)

    def _hand(self, link: Link, frames: Sequence[Frame], turn: int = 0) -> Token:
        letter = link.send(frames, turn)
        if link.needs_writer:
            self._writer.watch(link)
        return letter

    def _check_process(self) -> None:
        """A process that the script has forked holds copies of the sockets, and must not use them."""
        if os.getpid() != self._process:
            raise UsageError(
                "a process that the script has forked uses the run",
                member=self.name,
                remedy="train in the process that called shoal.init()",
            )

    def recv(self, timeout: float) -> list[Frame] | None:
        """See Endpoint.recv."""
        self._check_process()
        if not any(self._arrived.values()):
            self._read(timeout)
        queue = self._arrived["control"] or self._arrived["bulk"]
        return queue.popleft() if queue else None

    def _read(self, timeout: float) -> None:
        for file, _ in self._poll.poll(max(0, timeout * 1000)):
            link = self._by_file.get(file)
            if link is None:
                self._accept()
                continue
            try:
                for frames in link.inbox.read():
                    if link.peer:
                        self._arrived[link.lane].append(frames)
                    else:
                        self._greeted(link, frames)
            except OSError:
                self._drop(link)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(BlockingIOError, ConnectionError), enough_files(self.name):
            while True:
                self._add(self._listener.accept()[0])

    def _greeted(self, link: Link, greeting: Sequence[Frame]) -> None:
        """A peer has said its name: send what has waited for that. Raises OSError for a stranger."""
        if len(greeting) != 3 or not hmac.compare_digest(greeting[1], self._secret):
            raise PermissionError("a stranger")
        peer = bytes(greeting[0]).decode(errors="replace")
        lane: Lane = "bulk" if greeting[2] == b"bulk" else "control"
        self._known(link, peer, lane)
        for frames, turn in self._early.pop((peer, lane), ()):
            self._hand(link, frames, turn)

    def _drop(self, link: Link) -> None:
        """The peer has closed its end, or is not to be heard any more."""
        self._poll.unregister(link.file)
        del self._by_file[link.file]
        with link.lock:
            link.give_up()
        self._writer.forget(link)
        link.end()

    def close(self) -> None:
        """Send what is still queued, then wait until each peer has read it, `linger` seconds at most."""
        until = time.monotonic() + self._linger
        self._writer.close(until)
        for link in list(self._by_file.values()):
            if link.peer:
                with suppress(OSError):
                    link.socket.shutdown(socket.SHUT_WR)
            else:  # who has not said who he is has nothing to read
                self._drop(link)
        while self._by_file and time.monotonic() < until:
            self._read(until - time.monotonic())
        for link in list(self._by_file.values()):
            self._drop(link)
        if self._listener is not None:
            at = self._listener.getsockname()
            self._listener.close()
            if isinstance(at, str):
                with suppress(OSError):
                    os.unlink(at)


def _tune(connection: socket.socket, rate: float) -> None:
    """Have a connection pass on small messages at once, and hold little of large ones.

    Args:
        rate: see PlainSockets.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    if not rate or here == there or not hasattr(socket, "TCP_INFO"):
        return  # one machine's packets would not fit into so little
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
    there_and_back = struct.unpack_from("I", info, _RTT)[0] / 1e6
    under_way = 2 * rate * there_and_back
    if 0 < under_way < AMPLE:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(ROOM, int(under_way)))


def _parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    scheme, _, where = address.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, where
    host, _, port = where.rpartition(":")
    return socket.AF_INET, (host.replace("*", ""), int(port.replace("*", "0")))
