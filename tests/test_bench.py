"""The pure parts of the bench: spreads, ratios, rates, what counts as worse, and the page made of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import report, results
from bench.__main__ import draw, tried
from bench.errors import BenchError
from bench.figures import MEANING, Claim, Ratio, Spread, judged, rate_together, together, worse
from bench.jobs.models import SHAPES, make_model
from bench.jobs.roles import play
from bench.jobs.watch import FOLDER, watch
from bench.lan import speed
from bench.results import Result
from bench.scenarios import scenarios
from bench.scenarios.kinds import over, told
from bench.sides import figures_of
from bench.stage import Course, Look, Told
from bench.timeline import MARKS, Row, profile, timeline
from bench.usage import Usage
from shoal.limits import all_reduce, mixed
from shoal.transport import Post
from shoal.transport.inprocess import Hub, InProcess
from shoal.wire import Kind


def of(low: float, median: float, high: float) -> Spread:
    return Spread(median, low, high)


def test_a_ratio_is_taken_within_each_round() -> None:
    """The machine is slower in the second round, for both."""
    rounds = [{"a": {"step_s": 1.0}, "b": {"step_s": 2.0}}, {"a": {"step_s": 3.0}, "b": {"step_s": 4.0}}]
    found = judged(over("a over b", ("a", "step_s"), ("b", "step_s"), 0.7), rounds)
    assert found.spread == of(0.5, 0.625, 0.75) and found.reached
    assert together(rounds)["a"]["step_s"] == of(1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("bound", "better", "reached"), [(2.0, "less", True), (2.0, "more", False), (None, "less", None)]
)
def test_reach(bound: float | None, better: str, reached: bool | None) -> None:
    claim = Claim("x", lambda sides: sides["a"]["x"], ("a",), bound, better)  # type: ignore[arg-type]
    assert judged(claim, [{"a": {"x": 1.9}}]).reached is reached


@pytest.mark.parametrize(
    ("now", "then", "better", "expected"),
    [
        (of(1.0, 1.0, 1.0), of(0.9, 0.95, 1.0), "less", False),  # within the recorded spread
        (of(1.1, 1.1, 1.1), of(0.9, 0.95, 1.0), "less", True),
        (of(0.8, 1.1, 1.3), of(0.9, 0.95, 1.0), "less", False),  # today's is wide itself
        (of(1.1, 1.1, 1.1), of(0.9, 0.95, 1.0), "more", False),  # better
        (of(0.7, 0.7, 0.7), of(0.9, 0.95, 1.0), "more", True),
        (of(1.131, 1.131, 1.131), of(1.128, 1.128, 1.128), "less", False),  # one turn each
        (of(1.17, 1.17, 1.17), of(1.128, 1.128, 1.128), "less", True),
        (of(1.029, 1.029, 1.029), of(1.0, 1.0, 1.0), "less", False),  # as much as two quiet turns differ by
        (of(1.031, 1.031, 1.031), of(1.0, 1.0, 1.0), "less", True),
    ],
)
def test_worse(now: Spread, then: Spread, better: str, expected: bool) -> None:
    ratios = [Ratio("x", spread, None, better) for spread in (now, then)]  # type: ignore[arg-type]
    assert worse(*ratios) is expected


def test_rates_are_those_of_the_time_when_all_are_at_it() -> None:
    quick, slow = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 4.0, 8.0]
    assert rate_together([quick]) == 1.0
    assert rate_together([quick, slow]) == pytest.approx(1.25)  # 4 steps and 1 in 4 seconds
    assert rate_together([[0.0, 1.0], [2.0, 3.0]]) == 0.0


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.integers(1, 4))
def test_the_rate_of_workers_in_step(seconds: list[float], workers: int) -> None:
    times = [sum(seconds[:count]) for count in range(len(seconds) + 1)]
    assert isclose(rate_together([times] * workers), workers * len(seconds) / sum(seconds), rel_tol=1e-6)


def test_rates_as_tc_writes_them() -> None:
    assert (speed("100mbit"), speed("1gbit"), speed("1.5kbit")) == (12.5e6, 125e6, 187.5)
    with pytest.raises(BenchError, match="write 10mbit"):
        speed("100 Mbps")


def use(command: str, cpu: float, loop: float = 0.0, peak: int = 0) -> Usage:
    return Usage(command, cpu, loop, peak, peak // 2)


def test_figures_of_a_run() -> None:
    """Two workers and a server, two steps; the launcher counts as neither."""
    launcher = {1: use("python shoal run train.py (shoal)", 5)}
    before = Look(10.0, 100.0, launcher | {2: use("", 1), 3: use("", 1), 4: use("", 2, 2)}, {})
    server = use("python -m forkserver (shoal s0.0)", 6, 4, 400)
    after = Look(20.0, 113.0, launcher | {2: use("", 2, peak=50), 3: use("", 4, peak=60), 4: server}, {})
    said = [
        Told(2, 9.0, [10.0, 12.0, 16.0], {"model_bytes": 8.0}),
        Told(3, 9.5, [10.0, 13.0, 16.0], {"model_bytes": 8.0}),
    ]
    found = figures_of(Course(4.0, before, after, said))
    assert (found["step_s"], found["start_s"], found["model_bytes"]) == (3.0, 5.5, 8.0)
    assert isclose(found["rate"], 4 / 6)
    assert (found["worker_cpu_s"], found["server_cpu_s"], found["server_loop_s"]) == (2.0, 2.0, 1.0)
    assert (found["worker_peak"], found["server_peak"], found["server_pss"]) == (60, 400, 200)
    assert found.keys() <= MEANING.keys()


def test_models_have_the_sizes_that_are_told() -> None:
    assert SHAPES["mnist"].parameters == 203_530
    assert round(SHAPES["lan"].nbytes / 1e6, 1) == 10.5
    assert round(SHAPES["ten"].parameters / 1e6) == 10
    assert round(SHAPES["giga"].nbytes / 1e9, 1) == 1.0
    assert sum(p.numel() for p in make_model(SHAPES["mnist"], 0.001).parameters()) == 203_530


def test_scenarios_claim_things_of_their_sides() -> None:
    for scenario in scenarios().values():
        assert len(set(scenario.names)) == len(scenario.names)
        assert all(set(claim.sides) <= set(scenario.names) for claim in scenario.claims)
        assert scenario.only(scenario.names) == scenario
        assert scenario.only([]).claims == ()


def test_limits_of_scenarios_are_the_closed_forms() -> None:
    found = {(n, side.name): side.limit for n, scenario in scenarios().items() for side in scenario.sides}
    size = SHAPES["lan"].nbytes
    for side in ("shoal", "ddp"):
        limit = found["allreduce-lan", side]
        assert limit is not None and isclose(limit, all_reduce(4, size, 12.5e6))
    assert found["sandblaster-lan", "shoal"] == pytest.approx(size / 12.5e6)
    assert found["wide-lan", "shoal"] == pytest.approx(size / 6.25e6)
    for further in (1, 2, 3):
        assert found["mixed-lan", f"{further} further"] == pytest.approx(mixed(4, further, size, 12.5e6))


def result(name: str, ratio: float) -> Result:
    sides: Mapping[str, Mapping[str, float]] = {
        "a": {"step_s": 0.012, "worker_peak": 3e6},
        "b": {"rate": 2.0},
    }
    spread = Spread(ratio, ratio - 0.1, ratio + 0.1)
    return Result(
        scenario=name,
        about="A beside B",
        machine="a machine",
        date="2026-01-01",
        command=f"python -m bench {name}",
        rounds=3,
        sides=together([sides]),
        ratios=[Ratio("a over b", spread, 1.0, "less")],
    )


def test_results_are_kept_by_scenario(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    assert results.load(path) == {}
    results.record([result("b", 0.9), result("a", 0.9)], path)
    results.record([result("b", 1.5)], path)
    assert results.load(path) == {"a": result("a", 0.9), "b": result("b", 1.5)}
    path.write_text("{}}")
    with pytest.raises(BenchError, match="record it again"):
        results.load(path)


def test_what_got_worse_is_marked() -> None:
    (row,) = report.ratios(result("a", 1.5), result("a", 0.9))
    assert row == ("a over b", "1.5 [1.4 … 1.6]", "≤ 1: no", "0.9 [0.8 … 1]", "WORSE")
    (row,) = report.ratios(result("a", 0.9), result("a", 0.9))
    assert row[2:] == ("≤ 1: yes", "0.9 [0.8 … 1]", "")


def mark(logs: Mapping[str, Sequence[Row]], words: str) -> list[float]:
    (times,) = (times for found, *times in timeline(logs) if found == words)
    return times


COMMIT = "a worker's commit leaves"


def steps(begun: Sequence[float], commit: Sequence[float]) -> list[Row]:
    """A worker's log: when its steps begin with a share, and how many seconds later it commits."""
    rows: list[Row] = []
    for step, (begin, after) in enumerate(zip(begun, commit, strict=True), 1):
        rows += [(begin, True, "SHARE", "server", step), (begin + after, True, "COMMIT", "server", step)]
    return rows


def test_the_first_steps_and_the_last_do_not_count_and_one_late_step_shows_nothing() -> None:
    begun = [10.0 * step for step in range(8)]
    assert mark({"worker 0.0": steps(begun, [9, 9, 2, 2, 7, 2, 2, 9])}, COMMIT) == [2, 2, 2]


def test_each_group_has_its_own_steps() -> None:
    """The second group begins each step later; both commit two seconds after their own first share."""
    logs = {
        f"worker {group}.0": steps([10.0 * step + 5 * group for step in range(6)], [2] * 6)
        for group in range(2)
    }
    assert mark(logs, COMMIT) == [2, 2, 2]


def test_a_step_without_a_share_does_not_count() -> None:
    rows = steps([10.0 * step for step in range(6)], [2] * 6)
    assert mark({"worker 0.0": [row for row in rows if row[2:] != ("SHARE", "server", 4)]}, COMMIT) == [2] * 3


def test_what_is_watched_becomes_a_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("send", "receive", "close"):
        monkeypatch.setattr(Post, name, getattr(Post, name))  # as it was, after the test
    watch(tmp_path)
    hub = Hub()
    worker, server = (Post(InProcess(hub, name), "run") for name in ("worker 0.0", "server 0.0"))
    for step in range(1, 5):
        worker.send("server 0.0", Kind.SHARE, step=step)
        worker.send("server 0.0", Kind.COMMIT, step=step)
        for _ in range(2):
            assert server.receive(1.0) is not None
        server.send("worker 0.0", Kind.VALUES, step=step)
        assert worker.receive(1.0) is not None
    for post in (worker, server, server):  # closed twice, it has written once
        post.close()
    logs = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert [row[2:] for row in logs["worker 0.0"][:3]] == [
        ["SHARE", "server 0.0", 1],
        ["COMMIT", "server 0.0", 1],
        ["VALUES", "server 0.0", 1],
    ]
    words = [found for found, *_ in timeline(logs)]
    assert words == [found.words for found in MARKS]


def test_a_profile_leaves_no_trace_in_the_environment() -> None:
    class Broken:
        def figures(self, lan: object) -> None:
            assert Path(os.environ[FOLDER]).is_dir()
            raise BenchError("it fails")

    with pytest.raises(BenchError, match="it fails"):
        profile(Broken(), None)  # type: ignore[arg-type]
    assert FOLDER not in os.environ


def test_what_cannot_be_measured_is_told_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    local = scenarios()["local"]
    assert not tried(local, lambda scenario: draw(scenario, even=True))
    assert capsys.readouterr().err.startswith("local: it is on one machine")
    assert tried(local, lambda scenario: None)


def test_a_part_is_played_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[object, ...]] = []
    for words in ("serve at 2 100", "work at bell 100 5 10"):
        monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
        play(lambda *given: played.append(("serve", *given)), lambda *given: played.append(("work", *given)))
    assert played == [("serve", "at", 2, 100), ("work", "at", "bell", 100, 5, 10)]


def test_a_timeline_tells_when_members_were_where_in_a_step() -> None:
    logs: dict[str, list[Row]] = {f"worker 0.{rank}": [] for rank in (0, 1)} | {"server 0.0": []}
    for step in range(1, 7):
        for rank in (0, 1):
            begun, late = 10.0 * step, 0.5 * rank
            logs[f"worker 0.{rank}"] += [
                (begun + late, True, "SHARE", "server 0.0", step),
                (begun + late + 1, True, "SHARE", "server 0.0", step),
                (begun + late + 2, True, "COMMIT", "server 0.0", step),
                (begun + late + 6, False, "VALUES", "server 0.0", step),
            ]
            logs["server 0.0"] += [
                (begun + late + 4, False, "SHARE", f"worker 0.{rank}", step),
                (begun + late + 3, False, "COMMIT", f"worker 0.{rank}", step),
                (begun + late + 5, True, "VALUES", f"worker 0.{rank}", step),
                (begun + 9, True, "SYNC", "server 1.0", 0),
            ]
    found = {words: times for words, *times in timeline(logs)}
    assert found == {
        "a worker's first share leaves": [0, 0.25, 0.5],
        "a worker's commit leaves": [2, 2.25, 2.5],
        "the last commit arrives at a server": [3.5] * 3,
        "a server's first values leave": [5] * 3,
        "the last share arrives at a server": [4.5] * 3,
        "a server's last values leave": [5.5] * 3,
        "the last values arrive at a worker": [6, 6.25, 6.5],
        "the next step's first share leaves": [10, 10.25, 10.5],
    }


def test_numbers_have_units() -> None:
    assert report.number(0.0123, "step_s") == "12.3 ms"
    assert report.number(1.26, "limit_s") == "1.26 s"
    assert report.number(15.8e6, "host_in") == "15.8 MB"
    assert report.number(1.5, "of_limit") == "1.5"


def test_told_takes_a_figure_as_it_is() -> None:
    assert judged(told("x", ("a", "start_s"), 3.0), [{"a": {"start_s": 2.5}}]).reached


def test_the_page_is_made_of_what_is_recorded() -> None:
    assert report.page(results.load()) == report.PAGE.read_text()


def test_what_is_not_reached_is_explained_and_nothing_else() -> None:
    page = report.PAGE.with_name("limits.md").read_text()
    missed = {
        name.split()[0]
        for name, result in results.load().items()
        if any(ratio.reached is False for ratio in result.ratios)
    }
    assert set(re.findall(r"^## (\S+)$", page, re.MULTILINE)) == missed
