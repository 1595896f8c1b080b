"""What happens when within a step: the profile of a scenario's network."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.jobs.watch import FOLDER
from bench.lan import Lan
from bench.sides import Side

Row = tuple[float, bool, str, str, int]
"""As bench.jobs.watch writes it."""


class Mark(NamedTuple):
    """A moment of a step, at each worker or at each server of a group.

    Attributes:
        last: the last such message, else the first.
    """

    words: str
    role: str
    sent: bool
    kind: str
    last: bool
    later: int = 0  # steps


MARKS = (
    Mark("a worker's first share leaves", "worker", True, "SHARE", False),
    Mark("a worker's commit leaves", "worker", True, "COMMIT", True),
    Mark("the last commit arrives at a server", "server", False, "COMMIT", True),
    Mark("a server's first values leave", "server", True, "VALUES", False),
    Mark("the last share arrives at a server", "server", False, "SHARE", True),
    Mark("a server's last values leave", "server", True, "VALUES", True),
    Mark("the last values arrive at a worker", "worker", False, "VALUES", True),
    Mark("the next step's first share leaves", "worker", True, "SHARE", False, 1),
)


def profile(side: Side, lan: Lan | None) -> list[tuple[str, float, float, float]]:
    """Run a side of Shoal's once, as ranks of torchrun; see timeline for the rows."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        try:
            side.figures(lan)
        finally:
            del os.environ[FOLDER]
        return timeline({path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")})


def timeline(logs: Mapping[str, Sequence[Row]], skipped: int = 2) -> list[tuple[str, float, float, float]]:
    """Rows of words and seconds since the first share of a group's step: first, median and last member.

    Each is the median over groups and steps; ``skipped`` steps at the start, one at the end and those without
    a share do not count.

    Args:
        logs: of each member.
    """
    found = _moments(logs)
    counted = [(group, step) for group, step in found if step > skipped and (group, step + 1) in found]
    starts = {place: min(_at(found[place], MARKS[0]), default=None) for place in counted}
    rows = []
    for mark in MARKS:
        spreads = []
        for (group, step), start in starts.items():
            if start is None:
                continue
            seen = sorted(time - start for time in _at(found[group, step + mark.later], mark))
            if seen:
                spreads.append((seen[0], median(seen), seen[-1]))
        if spreads:
            first, middle, last = (median(column) for column in zip(*spreads, strict=True))
            rows.append((mark.words, first, middle, last))
    return rows


Moments = Mapping[tuple[str, bool, str], Sequence[float]]
"""(member, sent, kind) → the times of such messages."""


def _moments(logs: Mapping[str, Iterable[Row]]) -> dict[tuple[str, int], Moments]:
    """All that worker groups and servers told each other, by group and step."""
    found: dict[tuple[str, int], defaultdict[tuple[str, bool, str], list[float]]] = {}
    for member, rows in logs.items():
        for time, sent, kind, peer, step in rows:
            worker = next((name for name in (member, peer) if name.startswith("worker")), "")
            if worker and step:
                group = worker.partition(" ")[2].partition(".")[0]
                times = found.setdefault((group, step), defaultdict(list))
                times[member, sent, kind].append(time)
    return dict(found)


def _at(moments: Moments, mark: Mark) -> list[float]:
    """When a mark was reached, by each member that did."""
    pick = max if mark.last else min
    return [
        pick(times)
        for (member, sent, kind), times in moments.items()
        if member.startswith(mark.role) and (sent, kind) == (mark.sent, mark.kind)
    ]
