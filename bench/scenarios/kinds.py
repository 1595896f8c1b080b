"""What scenarios are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.figures import Better, Claim, Figures
from bench.lan import Lan
from bench.sides import Block, Side

Rounds = Mapping[str, Figures]


@dataclass(frozen=True)
class Scenario:
    """Sides that are run in turns.

    Attributes:
        network: makes the network that all of them run on, if they need one; given whether flows are even.
    """

    name: str
    about: str
    sides: tuple[Side, ...]
    claims: tuple[Claim, ...]
    rounds: int = 3
    network: Callable[[bool], Lan] | None = None

    @property
    def names(self) -> list[str]:
        """The sides' names."""
        return [side.name for side in self.sides]

    def only(self, names: Sequence[str]) -> Scenario:
        """Some of the sides, with what is claimed of these alone."""
        sides = tuple(side for side in self.sides if side.name in names)
        return replace(self, sides=sides, claims=tuple(c for c in self.claims if set(c.sides) <= set(names)))


def over(
    what: str,
    above: tuple[str, str],
    below: tuple[str, str],
    bound: float | None = None,
    better: Better = "less",
) -> Claim:
    """The claim that one side's figure is so much of another's; each is (side, figure)."""

    def ratio(sides: Rounds) -> float:
        return sides[above[0]][above[1]] / sides[below[0]][below[1]]

    return Claim(what, ratio, (above[0], below[0]), bound, better)


def told(what: str, which: tuple[str, str], bound: float | None = None) -> Claim:
    """The claim that a figure is at most so much; which is (side, figure)."""
    return Claim(what, lambda sides: sides[which[0]][which[1]], (which[0],), bound)


def one_group(workers: int, servers: int, *, separate: bool) -> Block:
    """The block of one worker group."""
    return {
        "nworkers_per_group": workers,
        "nservers_per_group": servers,
        "server_worker_separate": separate,
    }
