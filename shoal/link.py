"""A process's link to the coordinator: questions from any thread, and word of who has failed."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as Late
from contextlib import suppress

import msgspec
import zmq

from shoal.coordinator import NAME, PROBE, Answer, Request, connected
from shoal.errors import PeerFailed
from shoal.keys import Lock

LAST = 15.0  # seconds that a process has to notice that another has failed, before it is ended
MARGIN = 2.0  # seconds that an answer may be later than the coordinator was allowed to take

_answers = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


class Link:
    """A process's link to the coordinator.

    Args:
        name: of the process's member, or its first one.
        lock: encrypts the link, as the coordinator does.
        silence: seconds without a sign of life after which the coordinator counts as gone.

    Attributes:
        failure: who has failed and ended the run, in words; "" as long as nobody has.
    """

    def __init__(self, name: str, address: str, lock: Lock | None, silence: float) -> None:
        self.name, self.failure = name, ""
        self._silence, self._heard = silence, time.monotonic()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Answer]] = {}
        self._letters: deque[Request] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._context = zmq.Context()
        self._socket = connected(self._context, zmq.DEALER, silence)
        self._socket.routing_id = f"{name}/{secrets.token_hex(4)}".encode()
        if lock is not None:
            lock.dial(self._socket, NAME)
        self._socket.connect(address)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def ask(
        self, verb: str, keys: Sequence[str] = (), values: Sequence[bytes] = (), limit: float = 0.0
    ) -> Answer:
        """Ask the coordinator; blocks until the answer is there.

        Args:
            limit: seconds that the coordinator may take, beyond the way there and back.

        Raises:
            TimeoutError: no answer has come.
        """
        if self._ending:
            raise TimeoutError("the link to the coordinator is closed")
        request = Request(next(self._numbers), verb, tuple(keys), tuple(values), limit)
        future = self._asked[request.number] = Future()
        self._letters.append(request)
        self._wake_write.send(b"x")
        try:
            return future.result(limit + MARGIN)
        except Late:
            raise TimeoutError(f"the coordinator has not answered within {limit + MARGIN:g} s") from None
        finally:
            self._asked.pop(request.number, None)

    def check(self, waited: float = 0.0) -> None:
        """Raises PeerFailed when this process has no reason to wait any longer.

        Args:
            waited: for how many seconds it has heard nothing from anybody.
        """
        if self.failure:
            raise PeerFailed(self.failure, member=self.name, remedy="see what that member printed")
        if waited >= self._silence and time.monotonic() - self._heard >= self._silence:
            raise PeerFailed(
                f"nothing has come for {waited:.0f} s, and worker 0.0 cannot be reached any more",
                member=self.name,
                remedy="see what worker 0.0 printed; its process is also the one that knows of the others",
            )

    def close(self) -> None:
        """Let go of the link; a second time nothing happens."""
        if self._ending:
            return
        self._ending = True
        self._wake_write.send(b"x")
        self._thread.join()
        self._context.destroy(linger=1000)
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        last: float | None = None
        while not self._ending or self._letters:
            ready = dict(poller.poll(round(PROBE * 1000)))
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
            while self._letters:
                self._socket.send(_encoder.encode(self._letters.popleft()))
            if self._socket in ready:
                self._take(self._socket.recv())
            if self.failure:
                last = last or time.monotonic() + LAST
                if time.monotonic() > last:
                    print(f"{self.name}: {self.failure}", file=sys.stderr, flush=True)
                    os._exit(1)  # a collective, or the script itself, waits for what never comes

    def _take(self, content: bytes) -> None:
        self._heard = time.monotonic()
        try:
            answer = _answers.decode(content)
        except msgspec.MsgspecError:
            return
        self.failure = self.failure or answer.failed
        if future := self._asked.get(answer.number):
            with suppress(InvalidStateError):  # whoever asked has given up meanwhile
                future.set_result(answer)
