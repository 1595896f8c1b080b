"""What members write while they run, and how the launcher reads it: one JSON object a line.

Every event has ``time`` (seconds since the epoch), ``member`` and ``event``; the kinds are ``started``,
``progress``, ``note``, ``failed``, ``stopped`` and ``finished``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]


class Events:
    """One member's events, appended to a file.

    Args:
        path: the file; ``None`` writes nothing.
        member: the member's name, such as ``worker 1.0``.
        tell: called with each event, by the thread that writes it.
    """

    def __init__(
        self, path: Path | None, member: str, tell: Callable[[Event], None] = lambda event: None
    ) -> None:
        self._member, self._tell = member, tell
        self._lock = threading.Lock()
        # Unbuffered: a line is one write, so a reader sees it at once and a fork copies no half line.
        self._file = path.open("ab", buffering=0) if path else None

    def write(self, event: str, **fields: object) -> None:
        """Appends one event; infinite and missing numbers become ``null``. Any thread may call it."""
        record = {"time": time.time(), "member": self._member, "event": event, **fields}
        self._tell(record)
        if self._file is None:
            return
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            self._file.write(line)


def read(path: Path) -> list[Event]:
    """All events of a file, in order; ``[]`` if there is none. A torn line is left out."""
    return Follower(path).poll()


class Tail:
    """The whole lines appended to a file since the last look; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self, *, ended: bool = False) -> list[bytes]:
        """The new lines, without their ends; an unfinished last line waits until the writer has ended."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        if not ended:
            text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return text.removesuffix(b"\n").split(b"\n") if text else []


class Follower:
    """Follows one member's events while they are written.

    ``kept`` holds all of them except the progress between the first and the latest, so that days of
    training need no more memory than minutes.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.kept: list[Event] = []

    def poll(self) -> list[Event]:
        """The events written since the last call."""
        fresh = [event for line in self._tail.lines() if (event := _parse(line)) is not None]
        for event in fresh:
            self._keep(event)
        return fresh

    def last(self, kind: str) -> Event | None:
        """The latest event of a kind so far."""
        return next((event for event in reversed(self.kept) if event["event"] == kind), None)

    def _keep(self, event: Event) -> None:
        if event["event"] == "progress":
            seen = [i for i, old in enumerate(self.kept) if old["event"] == "progress"]
            if len(seen) == 2:
                del self.kept[seen[1]]
        self.kept.append(event)


def _parse(line: bytes) -> Event | None:
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and {"time", "event"} <= event.keys() else None
