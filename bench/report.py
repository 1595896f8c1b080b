"""Results as text: tables for the screen, pages for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.figures import MEANING, Ratio, Spread, worse
from bench.results import Result

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

HEAD = """\
# Measured

Each scenario runs Shoal and what it is compared with in turns, in one go on one machine: A, B, A, B. A ratio
is taken within each turn; what is shown is the median of the turns, with the least and the greatest in
brackets. `python -m bench NAME` runs a scenario, `python -m bench` lists them, `python -m bench report`
writes this page from `bench/recorded.json`. `bench/quick` runs some of them in under three minutes and marks
what has got worse.

Where a network is named, hosts are network namespaces of one machine, joined by a switch, every interface
shaped in both directions; flows are even (reno, no slow start after a pause) unless it is said otherwise.
*Limit* is what the calculator in `shoal/limits.py` says: the model's bytes over the speed of the busiest
interface. What is not reached is explained [beside its profile](limits.md).
"""

UNITS = (("_bytes", "bytes"), ("_peak", "bytes"), ("_pss", "bytes"), ("host_", "bytes"), ("_s", "seconds"))


def number(value: float, name: str) -> str:
    """A figure with its unit."""
    unit = next((unit for part, unit in UNITS if part in name), "")
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    if unit == "seconds":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
    return f"{value:,.4g}"


def spread(value: Spread, name: str = "") -> str:
    """Median, least and greatest; only one number where there was one turn."""
    if value.low == value.high:
        return number(value.median, name)
    return f"{number(value.median, name)} [{number(value.low, name)} … {number(value.high, name)}]"


def verdict(ratio: Ratio) -> str:
    """The bound, and whether it is reached."""
    if ratio.bound is None:
        return ""
    return f"{'≤' if ratio.better == 'less' else '≥'} {ratio.bound:g}: {'yes' if ratio.reached else 'no'}"


def ratios(result: Result, then: Result | None = None) -> list[tuple[str, ...]]:
    """Rows of ratio and bound, and beside a recorded result what it was and whether it has got worse."""
    known = {ratio.what: ratio for ratio in then.ratios} if then else {}
    rows = []
    for ratio in result.ratios:
        row = [ratio.what, spread(ratio.spread), verdict(ratio)]
        if then:
            old = known.get(ratio.what)
            row += [spread(old.spread) if old else "new", "WORSE" if old and worse(ratio, old) else ""]
        rows.append(tuple(row))
    return rows


def figures(result: Result) -> list[tuple[str, ...]]:
    """Rows of figure and the sides' values; the first is the head."""
    names = [name for name in MEANING if any(name in side for side in result.sides.values())]
    rows = [("", *result.sides)]
    for name in names:
        values = [side.get(name) for side in result.sides.values()]
        rows.append((name, *(spread(value, name) if value else "–" for value in values)))
    return rows


def page(results: Mapping[str, Result]) -> str:
    """docs/performance.md."""
    parts = [HEAD]
    for result in results.values():
        parts += [f"## {result.scenario}", f"{result.about}."]
        parts.append(markdown([("ratio", "median", "reach"), *ratios(result)]))
        parts.append(markdown(figures(result)))
        turns = f"{result.rounds} turns" if result.rounds > 1 else "1 turn"
        parts.append(f"`{result.command}`, {turns}; {result.machine}; {result.date}.")
    used = {name for result in results.values() for side in result.sides.values() for name in side}
    meaning = [f"* `{name}`: {words}." for name, words in MEANING.items() if name in used]
    return "\n\n".join(part.rstrip() for part in [*parts, "## The figures", "\n".join(meaning)]) + "\n"


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """A table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body])


def plain(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows as aligned lines."""
    lines = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )
