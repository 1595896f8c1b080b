"""The command ``shoal``. For a run it starts the fork server, whose imports take longest, before its own."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from shoal.launcher import environment
from shoal.launcher.process import ForkProcess


def main() -> None:
    """The command. Exit status: 0 finished, 1 failed, 2 configuration, 3 stopped in good order."""
    runs = sys.argv[1:2] == ["run"] and environment.job() is None
    with ForkProcess() if runs else nullcontext() as process:
        from shoal import commands  # takes a quarter of a second

        commands.main(process)
