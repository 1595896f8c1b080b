"""What is compared, on what network, and what is held against it."""

from __future__ import annotations

from bench.scenarios import machine, network
from bench.scenarios.kinds import Scenario

__all__ = ["Scenario", "scenarios"]


def scenarios() -> dict[str, Scenario]:
    """All scenarios by name."""
    made = [make() for make in (*machine.SCENARIOS, *network.SCENARIOS)]
    return {scenario.name: scenario for scenario in made}
