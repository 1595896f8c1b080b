"""What launcher and fork server tell each other: one JSON object a line, over a socket pair."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from shoal.schedule import UNSCHEDULED, Schedules


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Launcher to fork server: fork this member.

    ``config`` is the whole configuration as JSON knows it; ``private`` the directory of the run's
    sockets; ``threads`` how many threads torch may use, ``None`` where the user has said so already.
    """

    member: str
    incarnation: int
    config: dict[str, Any]
    run_id: str
    run_dir: str
    private: str
    script: str
    args: list[str]
    threads: int | None
    schedules: Schedules = UNSCHEDULED


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Launcher to fork server: ask every member to end."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Launcher to fork server: kill every member with all that it has started."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Fork server to launcher: everything is imported."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Fork server to launcher: the member runs, as this process."""

    member: str
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """Fork server to launcher: the member is gone, and all processes it had started.

    ``code`` is its exit status, or minus the signal that killed it; ``time`` in seconds since the epoch.
    """

    member: str
    code: int
    time: float


Message = Spawn | Stop | Kill | Ready | Forked | Exited


class Channel:
    """Messages of both directions over one end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._rest = end, b""
        self._decoder = msgspec.json.Decoder(Message)

    def fileno(self) -> int:
        """For selectors."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            OSError: the other end is gone.
        """
        self._end.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> list[Message] | None:
        """The whole messages that are here, after waiting for some bytes; ``None`` at the end."""
        try:
            data = self._end.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]

    def close(self) -> None:
        """Closes this end; the other one reads the end."""
        self._end.close()
