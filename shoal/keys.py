"""Keys for the wires between machines (CURVE): all follow from one secret that every machine has.

So no key travels: who knows the secret can make the pair of keys of every member of a run, and nobody else
any. They are new in every run, because a name that is drawn for the run goes into them.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from shoal.errors import LaunchError

SHORTEST = 32  # characters of a secret: 16 random bytes in hexadecimal
ZAP = "inproc://zeromq.zap.01"  # where libzmq asks who may come in (its RFC 27)
DOMAIN = b"shoal"


class Pair(NamedTuple):
    """A member's two keys, in z85."""

    public: bytes
    secret: bytes


class Keys:
    """The pairs of one run, by name.

    Args:
        secret: what every machine has.
        run: what tells this run from others; no secret.
    """

    def __init__(self, secret: bytes, run: str) -> None:
        self._secret, self._run = secret, run

    def pair(self, name: str) -> Pair:
        """The pair of keys of this name."""
        secret = z85.encode(hmac.digest(self._secret, f"shoal {self._run} {name}".encode(), "sha256"))
        return Pair(zmq.curve_public(secret), secret)

    def lock(self, name: str, allowed: Iterable[str]) -> Lock:
        """What the sockets of the member of this name need; those allowed may dial it."""
        return Lock(self, name, frozenset(self.pair(other).public for other in allowed))

    def fingerprint(self) -> str:
        """Tells two secrets apart, and nothing about either."""
        return hmac.digest(self._secret, f"fingerprint {self._run}".encode(), "sha256").hex()[:16]


class Lock:
    """Encrypts a member's sockets, and lets in only whom it allows."""

    def __init__(self, keys: Keys, name: str, allowed: frozenset[bytes]) -> None:
        self._keys, self._own, self._allowed = keys, keys.pair(name), allowed

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before the socket is bound; without a gate it then lets nobody in."""
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.zap_domain = DOMAIN
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._own

    def dial(self, socket: zmq.Socket[bytes], peer: str) -> None:
        """To be called before the socket is connected to this peer."""
        socket.curve_serverkey = self._keys.pair(peer).public
        socket.curve_publickey, socket.curve_secretkey = self._own

    def gate(self, context: zmq.Context[zmq.Socket[bytes]]) -> Gate:
        """Whoever asks to come in to a listening socket of this context is looked at from now on."""
        return Gate(context, self._allowed)


class Gate:
    """Answers libzmq's question who may come in: those whose key is in the list."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
        self._context, self._allowed = context, allowed
        self._asked = context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(ZAP)
        self._thread = threading.Thread(target=self._answer, name="shoal gate", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        with self._asked:
            while len(question := self._asked.recv_multipart()) > 1:
                version, request, *_, mechanism, key = question[:7]
                good = mechanism == b"CURVE" and z85.encode(key) in self._allowed
                code, text = (b"200", b"OK") if good else (b"400", b"no member of this run")
                self._asked.send_multipart([version, request, code, text, b"", b""])

    def close(self) -> None:
        """Answer no more; to be called before the context is closed."""
        with self._context.socket(zmq.REQ) as bell:
            bell.connect(ZAP)
            bell.send(b"")
            self._thread.join()


def read_secret(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        LaunchError: there is none, other users may read it, or it is too short to be one.
    """
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise LaunchError(
            f"members on several machines need a secret that all have, and {path}: {error.strerror}",
            remedy="make it once (shoal secret) and copy it to every machine, or name its file with "
            "SHOAL_SECRET_FILE; if everyone on the network is trusted, set cluster.security to trusted",
        ) from None
    if mode & 0o077:
        raise LaunchError(f"the secret in {path} is open to other users", remedy=f"chmod 600 {path}")
    if len(secret) < SHORTEST:
        raise LaunchError(
            f"the secret in {path} has {len(secret)} characters, and needs {SHORTEST}",
            remedy="make another one: shoal secret",
        )
    return secret
