"""What the user sees of a run: a line per worker group, worker 0.0's prints, notes, a table at the end.

On a terminal the lines stand below the prints and change in place; elsewhere prints go to standard
output and the lines, every few seconds, to standard error.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.events import Event, Follower, Tail
from shoal.launcher import FAILED_HERE
from shoal.rundir import RunDir
from shoal.summary import Summary
from shoal.topology import Member, Topology

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN_EVERY = 5.0  # seconds between lines where they cannot change in place
WINDOW = 20  # progress events over which a speed is taken: five seconds or more

Row = tuple[str, ...]


class Board:
    """Follows what the members write, shows it, and remembers what the end of the run needs."""

    def __init__(self, topology: Topology, run_dir: RunDir, view: View) -> None:
        members = (*topology.workers, *topology.servers)
        self._view = view
        self._followers = {member: Follower(run_dir.events(member)) for member in members}
        self._groups = [_Group(number) for number in range(topology.worker_groups)]
        self._prints = Tail(run_dir.log(topology.workers[0]))
        self._silent = False
        self.failures: list[Event] = []

    @property
    def events(self) -> dict[Member, list[Event]]:
        """What each member has written, less the progress between its first and its latest."""
        return {member: follower.kept for member, follower in self._followers.items()}

    def has_said(self, member: Member, kind: str) -> bool:
        """Whether the member has written an event of this kind, such as ``finished``."""
        return self._followers[member].last(kind) is not None

    def poll(self, *, ended: bool = False) -> None:
        """Reads what is new and shows it. ``ended``: all members are gone."""
        for member, follower in self._followers.items():
            for event in follower.poll():
                self._take(member, event)
        for line in self._prints.lines(ended=ended):
            self._print(line.decode(errors="replace"))
        rows = [row for group in self._groups if (row := group.row())]
        self._view.groups(rows, now=ended)

    def _take(self, member: Member, event: Event) -> None:
        match event["event"]:
            case "progress" | "finished" if member.role == "worker":
                self._groups[member.group].take(member, event)
            case "note":
                self._view.say(f"{member}: {event['message']}")
            case "failed":
                self.failures.append(event)

    def _print(self, line: str) -> None:
        # The traceback that follows is shown once, as the last thing of all.
        self._silent = self._silent or line.startswith(FAILED_HERE)
        if not self._silent:
            self._view.print(line.rstrip("\r").rpartition("\r")[2])


class _Group:
    """The progress of one worker group."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._events: dict[Member, deque[Event]] = {}

    def take(self, member: Member, event: Event) -> None:
        if event["event"] == "progress":
            self._events.setdefault(member, deque(maxlen=WINDOW)).append(event)
        elif events := self._events.get(member):
            reached = {"step": event["steps"], "samples": event["samples"], "time": event["ended"]}
            events.append(events[-1] | reached | {"loss": event["final"].get("loss")})

    def row(self) -> Row | None:
        """Group, step, samples per second, loss, staleness; None before the first step."""
        if not self._events:
            return None
        latest = [events[-1] for events in self._events.values()]
        speed = sum(_speed(events) for events in self._events.values())
        return (
            f"group {self._number}",
            f"step {min(event['step'] for event in latest)}",
            f"{speed:.0f} samples/s",
            f"loss {_mean((event.get('loss') for event in latest), '.4g')}",
            f"staleness {_mean((event.get('staleness') for event in latest), '.2f')}",
        )


def _speed(events: Sequence[Event]) -> float:
    seconds = float(events[-1]["time"] - events[0]["time"])
    return (events[-1]["samples"] - events[0]["samples"]) / seconds if seconds > 0 else 0.0


def _mean(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if isinstance(value, (int, float))]
    return format(sum(known) / len(known), form) if known else "-"


class View:
    """Where it is shown: a terminal, or two streams."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if sys.stdout.isatty() else None
        if self._live:
            self._live.start()
        self._shown: list[Row] = []
        self._shown_at = time.monotonic()

    def print(self, line: str) -> None:
        """Shows a line that the script has printed."""
        if self._live:
            from rich.text import Text

            self._console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            print(line, flush=True)

    def say(self, line: str) -> None:
        """Shows a line of Shoal's own."""
        if self._live:
            self._console.print(line, style="dim", markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def groups(self, rows: Sequence[Row], *, now: bool) -> None:
        """Shows the lines of the worker groups, when they differ and it is time. ``now``: it is."""
        if rows == self._shown:
            return
        if self._live:
            self._live.update(_grid(rows), refresh=True)
        elif now or time.monotonic() - self._shown_at >= PLAIN_EVERY:
            for row in rows:
                self.say("  ".join(row))
        else:
            return
        self._shown, self._shown_at = list(rows), time.monotonic()

    def close(self) -> None:
        """Leaves the last lines standing; what comes later appears below."""
        if self._live:
            self._live.stop()

    def report(self, summary: Summary, run_dir: Path) -> None:
        """Shows the table that ends a run."""
        self._console.print(_table(_report(summary), title=f"run {summary['status']}"))
        print(f"run directory: {run_dir}", flush=True)


def _grid(rows: Iterable[Row]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


def _table(rows: Iterable[Row], title: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*map(Text, row))  # what a script has logged is no markup
    return table


def _report(summary: Summary) -> Iterable[Row]:
    shares, staleness, steps = summary["shares"], summary["staleness"], summary["steps"].values()
    least, most = min(steps), max(steps)
    yield "framework", summary["framework"]
    yield "processes", str(summary["processes"])
    yield "steps", f"{least}" if least == most else f"{least} to {most}"
    if summary["rounds"] is not None:
        yield "rounds", str(summary["rounds"])
    if None not in (shares["pushed"], shares["applied"]):
        yield "shares", f"{shares['pushed']} pushed, {shares['applied']} applied{_dropped(shares['dropped'])}"
    if staleness["mean"] is not None:
        yield "staleness", f"mean {staleness['mean']:.2f}, at most {staleness['max']}"
    if summary["sync"]["exchanges"]:
        yield "sync", f"every {summary['sync']['interval']:.2f} rounds"
    if summary["samples_per_second"] is not None:
        yield "samples/s", f"{summary['samples_per_second']:.0f}"
    yield "seconds", f"{summary['wall_seconds']:.1f}"
    for name, value in summary["final"].items():
        yield name, f"{value:.4g}" if isinstance(value, float) else str(value)


def _dropped(reasons: dict[str, int]) -> str:
    return "".join(f", {count} {reason}" for reason, count in reasons.items())
