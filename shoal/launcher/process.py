"""The fork server's process, which a command starts before it imports anything else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

LONGEST = 50  # characters of the temporary folder's path; with a socket's name it must stay below 108


class ForkProcess:
    """A process that imports torch, to fork members later. Leaving the context ends it.

    Attributes:
        private: a directory for the run's sockets, which only this user may enter.
        log: what the process prints.
        channel: our end of the socket pair.
    """

    def __init__(self) -> None:
        self.private = private_directory()
        self.log = self.private / "forkserver.log"
        self.channel, theirs = socket.socketpair()
        ending, self._lifeline = os.pipe()
        with theirs, self.log.open("wb") as log:
            given = (theirs.fileno(), ending)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.launcher.forkserver", *map(str, given), str(self.private)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=given,
                start_new_session=True,  # Ctrl-C is for the launcher alone, which tells the others
            )
        os.close(ending)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.channel.close()
        os.close(self._lifeline)
        shutil.rmtree(self.private, ignore_errors=True)

    def kill(self) -> None:
        """End it at once; members that it has forked end with it."""
        self._process.kill()
        self._process.wait()


def private_directory() -> Path:
    """A directory for sockets that only this user may enter."""
    return Path(tempfile.mkdtemp(prefix="shoal-", dir=temporary_folder()))


def temporary_folder() -> str:
    """The temporary folder, or /tmp where that one's name is too long for a socket in it."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= LONGEST else "/tmp"
