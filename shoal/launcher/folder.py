"""A private folder that processes of one machine share, none of which is there to the end for certain.

Everyone holds a shared lock on it, which the kernel lets go when a process ends, however it ends. Who can
have the lock alone is the last, and removes the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launcher.process import temporary_folder

PREFIX = "shoal-ranks-"


class Folder:
    """This process's hold on a folder that exists.

    Raises:
        LaunchError: others than this user may use the folder, or it is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            state = os.fstat(self._file)
        except OSError as error:
            raise LaunchError(f"{path}, where the processes of this machine meet: {error.strerror}") from None
        if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
            os.close(self._file)
            raise LaunchError(
                f"{path}, where the processes of this machine are to meet, is open to other users",
                remedy="end whoever has made it: it is none of Shoal's",
            )
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @classmethod
    def make(cls) -> Folder:
        """A new folder; those that nobody holds any more are removed."""
        parent = Path(temporary_folder())
        for old in parent.glob(f"{PREFIX}*"):
            _remove(old)
        while True:
            folder = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
            if folder.path.exists():  # nobody took it for an old one before the lock was on it
                return folder

    def leave(self) -> None:
        """Let go of the folder; the last one removes it."""
        os.close(self._file)
        _remove(self.path)


def _remove(path: Path) -> None:
    """Removes a folder of this user's, if nobody holds it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(file).st_uid == os.geteuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(file)
