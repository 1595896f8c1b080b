"""What a run's summary says, from what its members wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import load
from shoal.errors import ConfigError
from shoal.events import Event, Events, Follower, Tail, read
from shoal.rundir import RunDir
from shoal.summary import Outcome, Summary, Times, summarise, write
from shoal.topology import Member, Topology

KEYS = [
    *("schema", "shoal", "status", "reason", "framework", "cluster", "started", "wall_seconds", "processes"),
    *("os_processes", "seed", "samples_per_second", "steps", "rounds", "shares", "staleness", "sync"),
    *("traffic", "shards", "final"),
]
CONFIG = load("downpour")
TOPOLOGY = Topology.of(CONFIG.cluster)


def summary(
    events: dict[Member, list[Event]], outcome: Outcome | None = None, source: str = "downpour"
) -> Summary:
    config = load(source)
    topology = Topology.of(config.cluster)
    return summarise(config, topology, events, outcome or Outcome("finished"), Times(1000.0, 9.5), "1.2.3")


def worker(**fields: object) -> list[Event]:
    told = {"steps": 10, "samples": 80, "pushed": 20, "resent": 1, "traffic": {}, "final": {}}
    return [{"time": 0, "event": "finished", "began": 100.0, "ended": 110.0, **told, **fields}]


def server(**fields: object) -> list[Event]:
    told = {"rounds": 5, "applied": 18, "duplicate": 2, "dropped": {}, "pushed": 20, "staleness": {}}
    sizes = {"parameters": 7, "state_bytes": 28, "traffic": {}, "exchanges": 0, "exchanged_rounds": 0}
    return [{"time": 0, "event": "finished", **told, **sizes, **fields}]


def test_counts_of_a_finished_run() -> None:
    w, s = TOPOLOGY.workers, TOPOLOGY.servers
    made = summary(
        {
            w[0]: worker(final={"accuracy": 0.9}, traffic={"server 0.0": 5, "server 0.1": 0}),
            w[1]: worker(began=99.0, samples=40, steps=5),
            w[2]: worker(ended=119.0, final={"accuracy": 0.1}),
            w[3]: worker(pushed=0),
            s[0]: server(dropped={"superseded": 1}, staleness={"0": 3, "2": 1}, traffic={"worker 0.0": 6}),
            s[1]: server(dropped={"superseded": 2, "dead": 1}, staleness={"10": 1, "2": 2}, rounds=4),
        }
    )
    assert list(made) == KEYS
    assert (made["schema"], made["shoal"], made["status"], made["reason"]) == (1, "1.2.3", "finished", None)
    assert (made["framework"], made["processes"], made["os_processes"]) == ("downpour", 6, 6)
    assert made["cluster"]["nworker_groups"] == 2
    assert (made["started"], made["wall_seconds"]) == ("1970-01-01T00:16:40.000+00:00", 9.5)
    assert made["samples_per_second"] == (80 + 40 + 80 + 80) / (119.0 - 99.0)
    assert made["steps"] == {"worker 0.0": 10, "worker 0.1": 5, "worker 1.0": 10, "worker 1.1": 10}
    assert made["rounds"] == 9
    dropped = {"dead": 1, "superseded": 3}
    assert made["shares"] == {"pushed": 60, "applied": 36, "resent": 4, "duplicate": 4, "dropped": dropped}
    histogram = {"0": 3, "2": 3, "10": 1}
    assert made["staleness"] == {"mean": 16 / 7, "max": 10, "histogram": histogram}
    assert list(made["staleness"]["histogram"]) == ["0", "2", "10"]
    assert made["traffic"] == [
        {"from": "worker 0.0", "to": "server 0.0", "bytes": 5},
        {"from": "server 0.0", "to": "worker 0.0", "bytes": 6},
    ]
    assert made["shards"] == {
        server.name: {"parameters": 7, "state_bytes": 28} for server in TOPOLOGY.servers
    }
    assert made["final"] == {"accuracy": 0.9}


def test_sync_interval_is_rounds_per_exchange_over_all_servers() -> None:
    servers = Topology.of(load("hogwild").cluster).servers
    told = [server(exchanges=3, exchanged_rounds=6), server(exchanges=1, exchanged_rounds=4)]
    made = summary(dict(zip(servers, told, strict=False)), source="hogwild")
    assert made["sync"] == {"exchanges": 4, "interval": 2.5}


def test_a_run_that_failed_tells_what_its_progress_said() -> None:
    progress: list[Event] = [
        {"time": 50.0, "event": "progress", "step": 1, "samples": 8, "loss": 2.0, "staleness": None},
        {"time": 54.0, "event": "progress", "step": 9, "samples": 72, "loss": 0.5, "staleness": 1.0},
    ]
    made = summary({TOPOLOGY.workers[0]: progress}, Outcome("failed", "worker 0.0 was killed by SIGKILL"))
    assert list(made) == KEYS
    assert (made["status"], made["reason"]) == ("failed", "worker 0.0 was killed by SIGKILL")
    assert made["steps"] == {"worker 0.0": 9, "worker 0.1": 0, "worker 1.0": 0, "worker 1.1": 0}
    assert made["samples_per_second"] == (72 - 8) / 4
    assert (made["rounds"], made["shares"]["pushed"], made["shares"]["applied"]) == (None, None, None)
    assert made["final"] == {"loss": 0.5}


def test_a_run_without_any_event_keeps_every_key() -> None:
    made = summary({}, Outcome("stopped", "the launcher received SIGINT"))
    assert list(made) == KEYS
    assert made["samples_per_second"] is None
    assert made["staleness"] == {"mean": None, "max": None, "histogram": {}}
    assert made["sync"] == {"exchanges": 0, "interval": None}
    assert made["traffic"] == []


@given(st.lists(st.dictionaries(st.integers(0, 30), st.integers(1, 9), max_size=5), min_size=2, max_size=2))
def test_staleness_is_that_of_all_rounds_listed_one_by_one(parts: list[dict[int, int]]) -> None:
    told = [server(staleness={str(value): count for value, count in part.items()}) for part in parts]
    made = summary(dict(zip(TOPOLOGY.servers, told, strict=True)))["staleness"]
    rounds = [value for part in parts for value, count in part.items() for _ in range(count)]
    assert made["max"] == max(rounds, default=None)
    assert made["mean"] == (pytest.approx(sum(rounds) / len(rounds)) if rounds else None)
    assert {int(value): count for value, count in made["histogram"].items()} == {
        value: rounds.count(value) for value in rounds
    }


def test_the_file_is_whole_and_not_a_number_is_null(tmp_path: Path) -> None:
    target = RunDir(tmp_path).summary
    write(target, summary({TOPOLOGY.workers[0]: worker(final={"loss": float("nan")})}))
    assert json.loads(target.read_text())["final"] == {"loss": None}
    assert list(tmp_path.iterdir()) == [target]


def test_events_are_read_back_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "w0.0.jsonl"
    follower = Follower(path)
    assert (follower.poll(), read(path)) == ([], [])
    Events(path, "worker 0.0").write("note", message="ä\nb")
    (event,) = follower.poll()
    assert (event["member"], event["event"], event["message"]) == ("worker 0.0", "note", "ä\nb")
    with path.open("ab") as file:
        file.write(b'{"time":1,"event":"no')
        file.flush()
        assert follower.poll() == []
        assert len(read(path)) == 1
        file.write(b'te"}\n')
    assert [event["time"] for event in follower.poll()] == [1]
    with path.open("ab") as file:
        file.write(b'{"time":2,"ev\n')
    assert follower.poll() == []
    assert len(follower.kept) == 2


def test_no_path_writes_nothing() -> None:
    Events(None, "worker 0.0").write("note", message="nobody reads this")


def test_of_progress_the_first_and_the_latest_are_kept(tmp_path: Path) -> None:
    events, follower = Events(tmp_path / "e", "worker 0.0"), Follower(tmp_path / "e")
    events.write("started", pid=1, incarnation=1)
    for step in range(1, 6):
        events.write("progress", step=step)
        events.write("note", message=str(step))
        assert len(follower.poll()) == (3 if step == 1 else 2)
    kept = [event.get("step", event["event"]) for event in follower.kept]
    assert kept == ["started", 1, "note", "note", "note", "note", 5, "note"]
    assert follower.last("progress") is not None and follower.last("finished") is None


def test_the_last_line_of_a_log_is_read_when_its_writer_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    path.write_bytes(b"one\n\ntwo")
    assert tail.lines() == [b"one", b""]
    assert tail.lines() == []
    assert tail.lines(ended=True) == [b"two"]
    assert tail.lines(ended=True) == []


def test_a_run_directory_is_made_once(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "a" / "b")
    member = Member("worker", 1, 0)
    assert run_dir.events(member) == tmp_path / "a" / "b" / "events" / "w1.0.jsonl"
    assert run_dir.log(member).parent.is_dir()
    with pytest.raises(ConfigError, match="exists"):
        RunDir.create(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can be made"):
        RunDir.create(tmp_path / "file" / "below")
