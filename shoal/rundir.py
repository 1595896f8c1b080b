"""Where the files of one run lie.

``summary.json``, ``events/w1.0.jsonl`` (what each member writes for the launcher) and ``logs/w1.0.log``
(what each process prints; a server beside a worker prints into the worker's log).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from shoal.topology import Member


@dataclass(frozen=True)
class RunDir:
    """The paths of one run below ``path``."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """Makes the directory and its parents.

        Raises:
            ConfigError: it exists already, or cannot be made.
        """
        try:
            path.mkdir(parents=True)
            run_dir = cls(path.resolve())
            run_dir.furnish()
        except FileExistsError:
            raise ConfigError([taken(path)]) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            expected = f"expected a directory that can be made ({reason})"
            raise ConfigError([Mistake("run directory", str(path), expected)]) from None
        return run_dir

    def furnish(self) -> None:
        """Makes the folders in it, where they are not there yet."""
        for folder in ("events", "logs"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)

    def events(self, member: Member) -> Path:
        """The member's events, one JSON object a line."""
        return self.path / "events" / f"{member.short}.jsonl"

    def log(self, member: Member) -> Path:
        """What the member's process prints, both streams."""
        return self.path / "logs" / f"{member.short}.log"

    @property
    def summary(self) -> Path:
        """The run in one JSON object, written at the end."""
        return self.path / "summary.json"


def fresh(workspace: str | None) -> Path:
    """A new run's directory in a workspace, or in the current folder."""
    return Path(workspace or ".") / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def taken(path: Path) -> Mistake:
    """The mistake of naming a run directory that exists."""
    return Mistake("run directory", str(path), "it exists; name one that does not, or remove it")
