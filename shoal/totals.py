"""What a server has counted by its end: the fields of its `finished` event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.beside import OwnRounds
from shoal.rounds import Rounds

Totals = dict[str, Any]


def totals_of(rounds: Rounds, traffic: Mapping[str, int]) -> Totals:
    """The counts of a server's own rounds.

    Args:
        traffic: receiver → bytes sent.
    """
    ledger, sync, shard = rounds.admission.ledger, rounds.sync, rounds.shard
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


def totals_of_own(rounds: OwnRounds, traffic: Mapping[str, int]) -> Totals:
    """The same counts where the worker has taken the steps itself: no share has travelled."""
    shard, sync = rounds.shard, rounds.sync
    return {
        "rounds": sum(shard.rounds(chunk.number) for chunk in shard.chunks),
        "pushed": shard.applied + shard.dropped,
        "applied": shard.applied,
        "duplicate": 0,
        "dropped": {"non-finite": shard.dropped} if shard.dropped else {},
        "staleness": {"0": shard.applied} if shard.applied else {},
        "parameters": shard.parameters,
        "state_bytes": shard.state_bytes,
        "traffic": dict(traffic),
        "exchanges": sync.exchanges,
        "exchanged_rounds": sync.exchanged_rounds,
    }
