"""Starting members as processes and watching over them.

Three kinds of process: the launcher (``local``, the user's command), the fork server (``forkserver``,
which has imported torch and run none of it) and the members (``member``), which it forks. Launcher and
fork server talk in ``messages``.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

# Exit statuses, of a member as of the whole run.
FINISHED, FAILED, CONFIGURATION, STOPPED = 0, 1, 2, 3

# The line in a member's log after which its traceback follows.
FAILED_HERE = "shoal: failed:"


def kill_group(leader: int) -> None:
    """Kills a member's process with all that it has started; nothing happens if they are gone."""
    for kill in (os.kill, os.killpg):  # first the process alone: it may not lead its group yet
        with suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
