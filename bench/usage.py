"""What processes have used, as the kernel tells it (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TICK = os.sysconf("SC_CLK_TCK")  # of CPU time per second


@dataclass(frozen=True)
class Usage:
    """One process so far.

    Attributes:
        command: its command line and the name it has given itself.
        cpu: seconds, of all threads; `loop`: of its main thread.
        peak: bytes, the most that was resident; `pss`: bytes, pages shared with others counted in part.
    """

    command: str
    cpu: float
    loop: float
    peak: int
    pss: int


def usage(roots: Iterable[int]) -> dict[int, Usage]:
    """All processes that descend from these, and these, by process id."""
    found = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    found[each.pid] = _of(Path(f"/proc/{each.pid}"))
    return found


def _of(folder: Path) -> Usage:
    command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return Usage(
        command=f"{command}({folder.joinpath('comm').read_text().strip()})",
        cpu=_cpu(folder / "stat"),
        loop=_cpu(folder / "task" / folder.name / "stat"),
        peak=_kilobytes(folder / "status", "VmHWM"),
        pss=_kilobytes(folder / "smaps_rollup", "Pss"),
    )


def _cpu(path: Path) -> float:
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK  # utime and stime, fields 14 and 15 of proc(5)


def _kilobytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0
