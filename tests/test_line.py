"""The line between machines is tried in little time, and found about as fast as it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Cluster
from shoal.launcher.line import LEAST, TURN, chunk_bytes, line_rate, suited
from shoal.partition import SMALLEST
from shoal.topology import Topology


class Line:
    """A shaped line: what `burst` allows passes at once, the rest at the rate.

    Args:
        rate: bytes per second.
        delay: seconds there and back.
        burst: bytes; they come again as time goes by.
    """

    def __init__(self, rate: float, delay: float, burst: float) -> None:
        self.rate, self.delay, self.burst = rate, delay, burst
        self.now, self.tokens = 0.0, burst

    def clock(self) -> float:
        return self.now

    def exchange(self, content: bytes) -> None:
        late = max(0.0, len(content) - self.tokens) / self.rate
        self.tokens = max(0.0, self.tokens - len(content))
        self.now += self.delay + late
        self.tokens = min(self.burst, self.tokens + self.delay * self.rate)


@given(st.floats(2e5, 2e9), st.floats(1e-5, 2e-2))
def test_the_rate_is_right_within_a_fifth(rate: float, delay: float) -> None:
    line = Line(rate, delay, burst=0)
    assert line_rate(line.exchange, line.clock) == pytest.approx(rate, rel=0.2)
    assert line.now < 1.0


@pytest.mark.parametrize("rate", [1.25e6, 6.25e6, 12.5e6, 125e6])
def test_what_a_shaper_lets_pass_at_once_misleads_but_little(rate: float) -> None:
    line = Line(rate, 2e-4, burst=131_072)
    # Chunks are then at their least anyway, or at most twice as large.
    assert rate <= line_rate(line.exchange, line.clock) < 2.1 * rate
    assert line.now < 0.5


def test_an_endless_line_is_not_tried_for_ever() -> None:
    line = Line(1e15, 0.0, burst=0)
    assert chunk_bytes(line_rate(line.exchange, line.clock)) == 0


@given(st.floats(1.0, 1e11))
def test_a_chunk_takes_a_turn_of_the_line(rate: float) -> None:
    size = chunk_bytes(rate)
    assert size == 0 or LEAST <= size < SMALLEST
    if size > LEAST:
        assert 0.75 * TURN < size / rate <= TURN
    assert (size == 0) == (rate * TURN >= SMALLEST)


@pytest.mark.parametrize(
    ("block", "rate", "expected"),
    [
        ({"nworkers_per_group": 2}, 1.25e7, chunk_bytes(1.25e7)),
        ({"nworkers_per_group": 2}, 0.0, 0),
        ({"nworkers_per_group": 2, "chunk_bytes": 4096}, 1.25e7, 4096),
        ({"nworker_groups": 3, "nserver_groups": 3}, 1.25e7, 0),  # only servers exchange over the line
    ],
)
def test_chunks_suit_a_line_that_steps_wait_for(block: dict[str, Any], rate: float, expected: int) -> None:
    cluster = Cluster(**block)
    assert suited(cluster, Topology.of(cluster), rate).chunk_bytes == expected


class Shaky(Line):
    """A line whose delay is by turns less and more than it was at first."""

    turns = 0

    def exchange(self, content: bytes) -> None:
        self.turns += 1
        usual = self.delay
        self.delay = usual * (1.0, 1.25, 0.75)[self.turns % 3]
        super().exchange(content)
        self.delay = usual


@pytest.mark.parametrize("rate", [1e7, 3e7, 1e8])
def test_the_rate_of_a_far_line_whose_delay_varies_is_about_right(rate: float) -> None:
    line = Shaky(rate, 0.04, burst=0)
    assert line_rate(line.exchange, line.clock) == pytest.approx(rate, rel=0.25)


@given(st.floats(7e6, 1e8))
def test_the_size_of_a_chunk_is_a_whole_number_of_pages(rate: float) -> None:
    assert chunk_bytes(rate) % (1 << 14) == 0


@pytest.mark.parametrize(("rate", "size"), [(1e5, 32_768), (6.25e6, 49_152), (12.5e6, 114_688), (125e6, 0)])
def test_chunks_that_suit_a_line(rate: float, size: int) -> None:
    """What it carries in 10 ms, in steps of 16 KiB, 32 KiB at least; from 1 MiB on as the plan makes them."""
    assert chunk_bytes(rate) == size
