"""What a run amounted to, from what its members wrote.

``summarise`` is a pure function; a run that failed or was stopped has the same keys, filled from the
progress its members had reported.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.config import Config
from shoal.events import Event
from shoal.topology import Member, Topology

SCHEMA = 1

Summary = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``reason`` says why, unless it finished."""

    status: Literal["finished", "stopped", "failed"]
    reason: str | None = None


@dataclass(frozen=True)
class Times:
    """When the run was started (seconds since the epoch) and how long it took (seconds)."""

    started: float
    wall: float


def summarise(
    config: Config,
    topology: Topology,
    events: Mapping[Member, Sequence[Event]],
    outcome: Outcome,
    times: Times,
    version: str,
) -> Summary:
    """The content of ``summary.json``.

    Args:
        config: the run's configuration.
        topology: its members.
        events: what each member wrote, in order; a member may be missing.
        outcome: how it ended.
        times: when it was started, how long it took.
        version: Shoal's version.

    Returns:
        The summary, made of what JSON knows. ``samples_per_second``, the staleness's ``mean`` and ``max``,
        and counts that not every member has told are ``None``.
    """
    told = {member: _told(events.get(member, ())) for member in (*topology.workers, *topology.servers)}
    workers = [told[member] for member in topology.workers]
    servers = [told[member] for member in topology.servers]
    return {
        "schema": SCHEMA,
        "shoal": version,
        "status": outcome.status,
        "reason": outcome.reason,
        "framework": topology.framework,
        "cluster": config.cluster.model_dump(mode="json"),
        "started": datetime.fromtimestamp(times.started, UTC).isoformat(timespec="milliseconds"),
        "wall_seconds": round(times.wall, 3),
        "processes": topology.processes,
        "os_processes": topology.os_processes,
        "seed": config.seed,
        "samples_per_second": _speed(workers),
        "steps": {member.name: told[member].get("steps", 0) for member in topology.workers},
        "rounds": _count(servers, "rounds"),
        "shares": _shares(workers, servers),
        "staleness": _staleness(servers),
        "sync": _sync(servers),
        "traffic": _traffic(told),
        "shards": {member.name: _shard(told[member]) for member in topology.servers},
        "final": workers[0].get("final", {}),
    }


def write(path: Path, summary: Summary) -> None:
    """Writes the summary as a whole: a reader sees all of it or none."""
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _told(events: Sequence[Event]) -> Event:
    """A member's last word: its ``finished`` event, or what its progress says."""
    of_kind: dict[str, list[Event]] = {}
    for event in events:
        of_kind.setdefault(event["event"], []).append(event)
    if finished := of_kind.get("finished"):
        return finished[-1]
    if not (progress := of_kind.get("progress")):
        return {}
    first, last = progress[0], progress[-1]
    reached = {"steps": last["step"], "ended": last["time"]}
    if last.get("loss") is not None:
        reached["final"] = {"loss": last["loss"]}
    if first is last:
        return reached
    # The samples of the first event came before its time.
    return {**reached, "began": first["time"], "samples": last["samples"] - first["samples"]}


def _sum(told: Sequence[Event], key: str) -> int:
    return sum(event.get(key, 0) for event in told)


def _count(told: Sequence[Event], key: str) -> int | None:
    """The sum over all members; None where one of them has not told."""
    return _sum(told, key) if all(key in event for event in told) else None


def _merged(told: Iterable[Event], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for event in told:
        total.update(event.get(key, {}))
    return total


def _speed(workers: Sequence[Event]) -> float | None:
    """Samples of all workers per second, from the first one's beginning to the last one's end."""
    trained = [event for event in workers if event.get("began") is not None]
    if not trained:
        return None
    seconds = max(event["ended"] for event in trained) - min(event["began"] for event in trained)
    return round(_sum(trained, "samples") / seconds, 3) if seconds > 0 else None


def _shares(workers: Sequence[Event], servers: Sequence[Event]) -> Summary:
    return {
        "pushed": _count(workers, "pushed"),
        "applied": _count(servers, "applied"),
        "resent": _count(workers, "resent"),
        "duplicate": _count(servers, "duplicate"),
        "dropped": dict(sorted(_merged(servers, "dropped").items())),
    }


def _staleness(servers: Sequence[Event]) -> Summary:
    rounds = {int(value): count for value, count in _merged(servers, "staleness").items() if count}
    total = sum(rounds.values())
    mean = sum(value * count for value, count in rounds.items()) / total if total else None
    histogram = {str(value): rounds[value] for value in sorted(rounds)}
    return {"mean": mean, "max": max(rounds, default=None), "histogram": histogram}


def _sync(servers: Sequence[Event]) -> Summary:
    """``exchanges`` between server groups and the ``interval`` achieved, in rounds per exchange."""
    exchanges = _sum(servers, "exchanges")
    interval = _sum(servers, "exchanged_rounds") / exchanges if exchanges else None
    return {"exchanges": exchanges, "interval": interval}


def _traffic(told: Mapping[Member, Event]) -> list[Summary]:
    return [
        {"from": member.name, "to": peer, "bytes": count}
        for member, event in told.items()
        for peer, count in event.get("traffic", {}).items()
        if count > 0
    ]


def _shard(server: Event) -> Summary:
    return {key: server.get(key, 0) for key in ("parameters", "state_bytes")}
