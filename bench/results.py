"""What scenarios came to, as JSON: ``recorded.json`` has the results that the documents show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.errors import BenchError
from bench.figures import Ratio, Spread

RECORDED = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True)
class Result:
    """One scenario, measured.

    Attributes:
        machine, date, command: where, when and how.
        rounds: how often every side was run, in turns.
        sides: side → figure → what it came to.
    """

    scenario: str
    about: str
    machine: str
    date: str
    command: str
    rounds: int
    sides: dict[str, dict[str, Spread]]
    ratios: list[Ratio]


def load(path: Path = RECORDED) -> dict[str, Result]:
    """Recorded results, by scenario; none where there is no such file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Result])
    except msgspec.MsgspecError as error:
        raise BenchError(f"{path} is not what this bench writes ({error}): record it again") from None


def record(results: list[Result], path: Path = RECORDED) -> None:
    """Put results in the place of older ones of the same scenarios."""
    known = load(path) | {result.scenario: result for result in results}
    ordered = {name: known[name] for name in sorted(known)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
