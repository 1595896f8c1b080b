"""Members as processes: ZeroMQ over UNIX sockets or tcp.

A server binds one ROUTER per lane; whoever talks to it dials one DEALER per lane. There is no high-water
mark, because a ROUTER at its mark drops messages silently; the protocol bounds what can be queued.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import zmq
import zmq.utils.garbage  # before anybody asks to be called at exit: who comes later is called earlier

from shoal.errors import LaunchError, PeerFailed
from shoal.keys import Lock
from shoal.transport import LANES, Lane, Released, Token
from shoal.transport.memory import Memory
from shoal.wire import Frame

KNOCK = b""  # a peer's first message on a lane, without which a ROUTER cannot send to it
Addresses = Mapping[Lane, str]


class _Sent:
    def __init__(self, tracker: zmq.MessageTracker) -> None:
        self._tracker = tracker

    def wait(self, timeout: float) -> bool:
        try:
            self._tracker.wait(timeout)
        except zmq.NotDone:
            return False
        return True


def _sent(socket: zmq.Socket[bytes], frames: list[Frame], payload: int) -> Token:
    """Send frames; those with a payload without a copy, to be waited for."""
    tracker = socket.send_multipart(frames, copy=not payload, track=bool(payload))
    return Released() if tracker is None else _Sent(tracker)


class Sockets:
    """An endpoint on ZeroMQ sockets.

    Args:
        name: this member's name, which is also its address for replies.
        bind: addresses to listen at, for a server.
        dial: peer → its addresses, for those this member speaks to first.
        linger: seconds that closing waits for what is still queued.
        memory: what peers on this machine share with this member.
        lock: encrypts what is listened at and dialled.
    """

    def __init__(
        self,
        name: str,
        bind: Addresses | None,
        dial: Mapping[str, Addresses],
        linger: float,
        memory: Memory | None = None,
        lock: Lock | None = None,
    ) -> None:
        self.name = name
        self.memory = memory or Memory()
        self.traffic: Counter[str] = Counter()
        self._linger = linger
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._routers: dict[Lane, zmq.Socket[bytes]] = {}
        self._dealers: dict[tuple[str, Lane], zmq.Socket[bytes]] = {}
        self._early: dict[tuple[str, Lane], list[list[Frame]]] = defaultdict(list)
        self._heard: set[tuple[str, Lane]] = set()
        self._lock = lock
        self._gate = lock.gate(self._context) if lock is not None and bind is not None else None
        for lane, address in (bind or {}).items():
            self._routers[lane] = self._listen(lane, address)
        for peer, addresses in dial.items():
            self.dial(peer, addresses)

    def dial(self, peer: str, addresses: Addresses) -> None:
        """Connect to a peer that listens at these addresses, or soon will."""
        for lane in LANES:
            dealer = self._socket(zmq.DEALER)
            dealer.routing_id = self.name.encode()
            if self._lock is not None:
                self._lock.dial(dealer, peer)
            dealer.connect(addresses[lane])
            dealer.send(KNOCK)
            self._dealers[peer, lane] = dealer

    @property
    def bound(self) -> dict[Lane, str]:
        """The addresses that this member listens at, with the ports it was given."""
        return {lane: str(s.getsockopt_string(zmq.LAST_ENDPOINT)) for lane, s in self._routers.items()}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _listen(self, lane: Lane, address: str) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._lock is not None:
            self._lock.listen(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._end(0.0)
            raise LaunchError(
                f"cannot listen at {address} for its {lane} lane: {error.strerror or error}",
                member=self.name,
                remedy="choose another cluster.start_port (0 = any free port), or end what uses this one",
            ) from None
        return socket

    def send(self, peer: str, lane: Lane, frames: Sequence[Frame], turn: int = 0) -> Token:
        """See Endpoint.send."""
        payload = sum(memoryview(frame).nbytes for frame in frames[2:])
        self.traffic[peer] += payload
        dealer = self._dealers.get((peer, lane))
        if dealer is not None:
            return _sent(dealer, list(frames), payload)
        if (peer, lane) not in self._heard:  # its knock on this lane is still on its way
            self._early[peer, lane].append([bytes(frame) for frame in frames])
            return Released()
        try:
            return _sent(self._routers[lane], [peer.encode(), *frames], payload)
        except zmq.ZMQError as error:
            raise PeerFailed(f"{peer} cannot be reached any more ({error})", member=self.name) from None

    def recv(self, timeout: float) -> list[Frame] | None:
        """See Endpoint.recv."""
        ready = dict(self._poller.poll(max(0, round(timeout * 1000))))
        for lane in LANES if ready else ():
            router = self._routers.get(lane)
            if router is not None and router in ready:
                route, *frames = router.recv_multipart(copy=False)
                if len(frames) == 1 and frames[0].bytes == KNOCK:
                    self._hear(route.bytes.decode(errors="replace"), lane)
                    return None
                return [frame.buffer for frame in frames]
            for (_, side), dealer in self._dealers.items():
                if side == lane and dealer in ready:
                    return [frame.buffer for frame in dealer.recv_multipart(copy=False)]
        return None

    def _hear(self, peer: str, lane: Lane) -> None:
        """A peer can be reached on a lane: send what has waited for that."""
        self._heard.add((peer, lane))
        for frames in self._early.pop((peer, lane), ()):
            self._routers[lane].send_multipart([peer.encode(), *frames])

    def close(self) -> None:
        """See Endpoint.close."""
        self._end(self._linger)

    def _end(self, linger: float) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=round(linger * 1000))
