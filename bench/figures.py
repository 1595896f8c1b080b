"""Numbers that a run comes to, what several runs come to together, and what is held against them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Figures = Mapping[str, float]
"""What one run of one side came to, by name; what the names mean is in ``MEANING``."""

Better = Literal["less", "more"]

MEANING = {
    "step_s": "seconds per step: the median, of the slowest worker",
    "rate": "steps per second of all workers together",
    "start_s": "seconds from the command to the last worker's first step",
    "optimizer_s": "CPU seconds of the script's own optimizer.step()",
    "worker_cpu_s": "CPU seconds per step of all workers",
    "server_cpu_s": "CPU seconds per step of all servers",
    "worker_loop_s": "CPU seconds per step of the busiest worker's main thread",
    "server_loop_s": "CPU seconds per step of the busiest server's main thread",
    "others": "part of the processors that processes beside the bench used meanwhile; 0 on a quiet machine",
    "worker_peak": "bytes: the largest worker's peak resident set",
    "server_peak": "bytes: the largest server's peak resident set",
    "worker_pss": "bytes: the largest worker's proportional set, at the end",
    "server_pss": "bytes: the largest server's proportional set, at the end",
    "host_in": "bytes per step into the busiest host",
    "host_out": "bytes per step out of the busiest host",
    "accuracy": "of the trained model, on test data",
    "loss": "of the trained model, on test data: the mean cross-entropy, in nats",
    "whole_s": "seconds from the command to its end",
    "sent_bytes": "bytes of gradients and values that members sent each other, over the whole run",
    "interval": "rounds between two exchanges of a chunk between server groups",
    "resent": "shares that were sent again, over the whole run; 0 where nothing was lost or late",
    "state_bytes": "bytes: the largest part of the optimizer's state on one process",
    "model_bytes": "bytes of the model's parameters on one process",
    "limit_s": "the least seconds per step that the network allows",
    "of_limit": "seconds per step as a multiple of that",
}


@dataclass(frozen=True)
class Spread:
    """The median of several values, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        return cls(median(values), min(values), max(values))

    @property
    def width(self) -> float:
        """From the least to the greatest."""
        return self.high - self.low


@dataclass(frozen=True)
class Claim:
    """What a scenario is there to show: a ratio within one round, and how far it has to go.

    Attributes:
        ratio: of the figures of one round, by side.
        sides: those that it is about.
        bound: None where the ratio is only told.
    """

    what: str
    ratio: Callable[[Mapping[str, Figures]], float]
    sides: tuple[str, ...]
    bound: float | None
    better: Better = "less"


@dataclass(frozen=True)
class Ratio:
    """What became of a claim over all rounds."""

    what: str
    spread: Spread
    bound: float | None
    better: Better

    @property
    def reached(self) -> bool | None:
        """Whether the median is within the bound; None where there is none."""
        if self.bound is None:
            return None
        return self.spread.median <= self.bound if self.better == "less" else self.spread.median >= self.bound


def judged(claim: Claim, rounds: Sequence[Mapping[str, Figures]]) -> Ratio:
    """A claim's ratio over rounds, each of which ran every side once."""
    return Ratio(claim.what, Spread.of([claim.ratio(each) for each in rounds]), claim.bound, claim.better)


def together(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, dict[str, Spread]]:
    """The spread of every figure of every side."""
    return {
        side: {name: Spread.of([each[side][name] for each in rounds]) for name in figures}
        for side, figures in rounds[0].items()
    }


SPREAD = 0.03  # of a ratio, at least: what one turn and the next differ by on a quiet machine


def worse(now: Ratio, then: Ratio) -> bool:
    """Whether a ratio has got worse than the recorded one by more than both spreads' wider one.

    One turn has no spread: a small part of the ratio stands in for it.
    """
    lost = now.spread.median - then.spread.median
    allowed = max(now.spread.width, then.spread.width, SPREAD * then.spread.median)
    return (lost if now.better == "less" else -lost) > allowed


def rate_together(ends: Sequence[Sequence[float]]) -> float:
    """Steps per second of workers that do not wait for each other, while all of them are at it.

    Args:
        ends: for each worker the time at which it begins, then those at which its steps end, in seconds.
    """
    begin, end = max(times[0] for times in ends), min(times[-1] for times in ends)
    if end <= begin:
        return 0.0
    return sum(_steps_until(end, times) - _steps_until(begin, times) for times in ends) / (end - begin)


def _steps_until(moment: float, times: Sequence[float]) -> float:
    """How many steps are done at a moment; a step under way counts by its part."""
    done = bisect_right(times, moment) - 1
    if done < 0:
        return 0.0
    if done >= len(times) - 1:
        return len(times) - 1.0
    return done + (moment - times[done]) / (times[done + 1] - times[done])
