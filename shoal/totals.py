"""What a server has counted by its end: the fields of its `finished` event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.rounds import Rounds
from shoal.shard import Shard
from shoal.wire import Kept

Totals = dict[str, Any]


def totals_of(rounds: Rounds, shard: Shard, traffic: Mapping[str, int]) -> Totals:
    """The counts of a server's own rounds.

    Args:
        traffic: receiver → bytes sent.
    """
    ledger, sync = rounds.admission.ledger, rounds.sync
    return {
        "rounds": rounds.admission.rounds,
        "pushed": ledger.pushed,
        "applied": ledger.applied,
        "duplicate": ledger.duplicate,
        "dropped": dict(ledger.dropped),
        "staleness": {str(value): count for value, count in sorted(rounds.staleness.items())},
        "parameters": shard.parameters,
        "state_bytes": shard.state_bytes,
        "traffic": dict(traffic),
        "exchanges": sync.exchanges,
        "exchanged_rounds": sync.exchanged_rounds,
    }


def totals_kept(kept: Kept) -> Totals:
    """The same counts where the worker kept the parameters itself, and nothing travelled."""
    return {
        "rounds": kept.rounds,
        "pushed": kept.applied + kept.dropped,
        "applied": kept.applied,
        "duplicate": 0,
        "dropped": {"non-finite": kept.dropped} if kept.dropped else {},
        "staleness": {"0": kept.applied} if kept.applied else {},
        "parameters": kept.parameters,
        "state_bytes": kept.state_bytes,
        "traffic": {},
        "exchanges": 0,
        "exchanged_rounds": 0,
    }
