"""Everything that can go wrong, as one tree.

Each error says what happened, where (member and step, where known) and what to do about it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class ShoalError(Exception):
    """The root of all of Shoal's errors.

    Args:
        what: what happened, one sentence.
        member: the member's name, such as ``worker 1.0``.
        step: the step of the optimizer, counted from 1.
        remedy: what the reader can do.
    """

    def __init__(
        self,
        what: str,
        *,
        member: str | None = None,
        step: int | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.member, self.step, self.remedy = what, member, step, remedy
        super().__init__(what)

    def __str__(self) -> str:
        place = ", ".join(
            part for part in (self.member, f"step {self.step}" if self.step is not None else None) if part
        )
        text = f"{place}: {self.what}" if place else self.what
        return f"{text}\n  {self.remedy}" if self.remedy else text


@dataclass(frozen=True)
class Mistake:
    """One mistake in a configuration: where it is, what stands there, what was expected."""

    place: str
    value: str
    expected: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        return f"{self.place}: {self.value}: {self.expected}{hint}"


class ConfigError(ShoalError):
    """A configuration that cannot be run; carries every mistake at once."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        lines = "\n".join(f"  {mistake}" for mistake in self.mistakes)
        super().__init__(f"{count} in the configuration:\n{lines}")


class UsageError(ShoalError):
    """The script asks for something that does not exist or comes in the wrong order."""


class OptimizerRefused(UsageError):
    """An optimizer that servers cannot run."""


class ModelMismatch(ShoalError):
    """Two workers prepared different models."""


class GradientEdited(ShoalError):
    """A gradient was changed after it had been pushed."""


class ParameterEdited(ShoalError):
    """A parameter was changed by someone else than its server."""


class MissedWait(ShoalError):
    """With overlap=True: a parameter or buffer was used before its new values were in place."""


class NonFiniteGradients(ShoalError):
    """Too many rounds in a row were skipped for infinite or missing numbers."""


class WaitTimeout(ShoalError):
    """A named wait took too long; says who waited for whom."""


class ScheduleMismatch(ShoalError):
    """A run that does not follow the schedule it is to repeat, or a folder that holds none."""


class ProtocolError(ShoalError):
    """A message that cannot be right: wrong version, run, size or order."""


class PeerFailed(ShoalError):
    """Another member failed and said so."""


class LaunchError(ShoalError):
    """Members could not be started, or one ended before its time."""


@contextmanager
def enough_files(member: str | None = None) -> Iterator[None]:
    """Raise LaunchError where a process may not open another file or socket."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise LaunchError(
            f"this process may not open another file or socket ({error.strerror})",
            member=member,
            remedy="raise the limit before the start, as in `ulimit -n 65536`; each peer takes two sockets",
        ) from None


class Stopped(SystemExit):
    """The run is being stopped in good order; not a failure."""

    def __init__(self) -> None:
        super().__init__(3)
