"""``python -m bench NAME…`` measures scenarios, without a name lists them; ``report`` writes the document.

``timeline NAME`` shows what happens when within a step of a scenario's first side, or of another ``--side``.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from bench import report, results
from bench.errors import BenchError
from bench.figures import Figures, judged, together
from bench.results import Result
from bench.scenarios import Scenario, scenarios
from bench.timeline import profile

# What bench/quick runs: scenario, sides, rounds; under three minutes on a quiet machine.
QUICK = (
    ("naive", ("naive", "one group", "two groups"), 2),
    ("local", ("plain, digits", "shoal, digits"), 2),
    ("loopback", ("shoal", "ddp"), 2),
    ("server-update", ("bare", "shoal"), 1),
    ("sandblaster-lan", ("shoal", "ddp"), 1),
)
COMMANDS = ("quick", "report", "timeline")
QUIET = 0.1  # of the processors may be used by others while a figure is taken


def main() -> int:
    """The command; the exit status is 1 where a measurement could not be made."""
    signal.signal(signal.SIGTERM, _interrupted)  # so that networks and processes are cleaned up then too
    known = scenarios()
    parser = _parser()
    arguments = parser.parse_args()
    command = next((name for name in arguments.names[:1] if name in COMMANDS), "")
    names = arguments.names[bool(command) :]
    if unknown := set(names) - known.keys():
        parser.error(f"there is no scenario {min(unknown)}; there are: {', '.join(known)}")
    if command in ("quick", "report") and names:
        parser.error(f"{command} takes no scenario")
    even, record = not arguments.uneven, arguments.record
    if command == "report":
        report.PAGE.write_text(report.page(results.load()))
        return 0
    if command == "timeline":
        drawn = [known[name].only(arguments.side or known[name].names[:1]) for name in names]
        return int(not all([tried(scenario, lambda each: draw(each, even=even)) for scenario in drawn]))
    if command == "quick":
        wanted = [replace(known[name].only(sides), rounds=rounds) for name, sides, rounds in QUICK]
    else:
        wanted = [known[name].only(arguments.side or known[name].names) for name in names]
    if not wanted:
        print(report.plain((name, scenario.about) for name, scenario in known.items()))

    def perform(scenario: Scenario) -> None:
        result = measure(scenario, arguments.rounds, even=even)
        show(result)
        if record:
            results.record([result])

    return int(not all([tried(scenario, perform) for scenario in wanted]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios; or quick, report, timeline NAME")
    parser.add_argument("--rounds", type=int, help="how often every side is run")
    parser.add_argument("--side", action="append", help="run only this side; may be given again")
    parser.add_argument("--uneven", action="store_true", help="TCP as the system has it, not reno")
    parser.add_argument("--record", action="store_true", help="put the results into bench/recorded.json")
    return parser


def tried(scenario: Scenario, what: Callable[[Scenario], None]) -> bool:
    """Do something with a scenario; False, with the reason told, if that cannot be done."""
    try:
        what(scenario)
    except BenchError as error:
        print(f"{scenario.name}: {error}", file=sys.stderr)
        return False
    return True


def measure(scenario: Scenario, rounds: int | None = None, *, even: bool = True) -> Result:
    """Run every side of a scenario in turns."""
    count = rounds or scenario.rounds
    turns: list[dict[str, Figures]] = []
    with scenario.network(even) if scenario.network else nullcontext() as lan:
        for turn in range(count):
            turns.append({})
            for side in scenario.sides:
                print(f"{scenario.name} {turn + 1}/{count}: {side.name}", file=sys.stderr, flush=True)
                turns[-1][side.name] = side.figures(lan)
    uneven = () if even else ("--uneven",)
    return Result(
        scenario=" ".join((scenario.name, *uneven)),
        about=scenario.about if even else f"{scenario.about}; TCP as the system has it",
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
        command=shlex.join(["python", "-m", "bench", scenario.name, *uneven]),
        rounds=count,
        sides=together(turns),
        ratios=[judged(claim, turns) for claim in scenario.claims],
    )


def show(result: Result) -> None:
    """Print what a scenario came to, beside what is recorded."""
    then = results.load().get(result.scenario)
    head = ("ratio", "median", "reach") + (("recorded", "") if then else ())
    print(f"\n{result.scenario}: {result.about}")
    print(report.plain([head, *report.ratios(result, then)]))
    print(report.plain(report.figures(result)), flush=True)
    busy = max((side["others"].median for side in result.sides.values() if "others" in side), default=0.0)
    if busy > QUIET:
        print(f"  others used up to {busy:.0%} of the processors meanwhile: measure again on a quiet machine")


def draw(scenario: Scenario, *, even: bool) -> None:
    """Show the timeline of each side of a scenario between hosts."""
    if scenario.network is None:
        raise BenchError("it is on one machine: only what goes between hosts has a timeline")
    with scenario.network(even) as lan:
        for side in scenario.sides:
            rows = [(words, *(f"{t:.4f}" for t in times)) for words, *times in profile(side, lan)]
            head = ("seconds since a step's first share left", "first", "median", "last member")
            print(f"\n{scenario.name}, {side.name}")
            print(report.plain([head, *rows]), flush=True)


def machine() -> str:
    """This machine in a few words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{len(os.sched_getaffinity(0))} cores of {model or platform.machine()}"
    kernel = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{cores}, {gigabytes:.0f} GiB, {kernel}, PyTorch {torch.__version__}"


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
