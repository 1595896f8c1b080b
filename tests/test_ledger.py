"""Counts of shares that add up, whatever is told in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger import Ledger, Life

ONE, TWO = Life(0, 0, 1), Life(0, 1, 1)


def test_pushed_is_applied_plus_dropped_once_settled() -> None:
    ledger = Ledger()
    ledger.tell(ONE, 3)
    ledger.apply(ONE)
    ledger.drop(ONE, "superseded")
    assert (ledger.pushed, ledger.balance) == (3, 1)
    ledger.settle(ONE)
    assert (ledger.pushed, ledger.balance) == (3, 0)
    assert dict(ledger.dropped) == {"superseded": 2}


def test_totals_are_cumulative_and_an_older_word_changes_nothing() -> None:
    ledger = Ledger()
    for total in (4, 2, 4):
        ledger.tell(ONE, total)
    ledger.tell(TWO, 5)
    assert ledger.pushed == 9


def test_what_is_not_told_but_here_counts_as_pushed() -> None:
    ledger = Ledger()
    ledger.tell(ONE, 2)
    ledger.apply(ONE)
    ledger.apply(ONE)
    ledger.settle(ONE, "dead", unseen=3)
    assert (ledger.pushed, ledger.applied, dict(ledger.dropped)) == (5, 2, {"dead": 3})


def test_lives_have_accounts_of_their_own() -> None:
    ledger = Ledger()
    ledger.tell(ONE, 2)
    ledger.settle(ONE, "dead")
    ledger.tell(ONE._replace(incarnation=2), 2)
    ledger.apply(ONE._replace(incarnation=2))
    ledger.settle(ONE._replace(incarnation=2))
    assert (ledger.pushed, ledger.applied, dict(ledger.dropped)) == (4, 1, {"dead": 2, "superseded": 1})


def test_dropping_nothing_leaves_no_reason_behind() -> None:
    ledger = Ledger()
    ledger.drop(ONE, "torn", 0)
    ledger.settle(ONE)
    assert dict(ledger.dropped) == {}


Entry = st.tuples(st.sampled_from([ONE, TWO]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(Entry, max_size=20))
def test_settling_balances_every_history(history: list[tuple[Life, int, int, int]]) -> None:
    ledger, pushed = Ledger(), {ONE: 0, TWO: 0}
    for life, applied, dropped, lost in history:
        pushed[life] += applied + dropped + lost
        ledger.tell(life, pushed[life])
        for _ in range(applied):
            ledger.apply(life)
        ledger.drop(life, "non-finite", dropped)
    for life in pushed:
        ledger.settle(life)
        ledger.settle(life)
    assert ledger.pushed == sum(pushed.values())
    assert ledger.applied == sum(entry[1] for entry in history)
    assert ledger.dropped["non-finite"] == sum(entry[2] for entry in history)
    assert ledger.dropped["superseded"] == sum(entry[3] for entry in history)
    assert ledger.balance == 0
