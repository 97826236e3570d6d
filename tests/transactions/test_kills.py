"""Processes that die in the middle of a transaction, on every database.

| # | fault | expected in transactional mode |
|---|---|---|
| 3 | crash after the claim, before the effect | rolled back, runs again |
| 4 | crash after the effect, before complete | rolled back, one effect in the end |
| 5 | crash inside the commit | both or none; a retry tells which |
"""

from __future__ import annotations

import contextlib

import pytest

from semel import Idempotency
from transactions.conftest import DATABASES
from transactions.kinds import BEGIN
from transactions.transfers import (
    BEGUN,
    CLAIMED,
    COMMITTING,
    DONE,
    WRITTEN,
    Bank,
    connect,
    transfer,
)

pytestmark = pytest.mark.usefixtures("not_measured")

fault = pytest.mark.fault

KILLS = 20


@pytest.fixture(params=DATABASES)
def bank(request, tmp_path):
    with contextlib.closing(
        Bank(request.getfixturevalue(DATABASES[request.param]), tmp_path)
    ) as bank:
        yield bank


def retry(bank, key):
    """The next process tries the same key."""
    begin = BEGIN["mysql" if bank.url.startswith("mysql") else bank.url.partition(":")[0]]
    with contextlib.closing(connect(bank.url)) as connection, Idempotency(bank.url) as idem:
        transfer(idem, connection, key, begin, lambda place: None)


@fault(3, 4)
def test_a_process_killed_before_its_commit_leaves_nothing_and_the_next_one_runs(bank):
    for place in (BEGUN, CLAIMED, DONE, WRITTEN):
        assert bank.kill_at(place, "k"), "it was not killed there"
        assert bank.check() == 0
    retry(bank, "k")
    retry(bank, "k")
    assert bank.check() == 1


@fault(5)
def test_a_process_killed_inside_its_commit_leaves_both_or_none(bank):
    fired = 0
    for number in range(60):
        if number >= 5 and fired:
            break  # On an idle machine most commits are answered before the kill comes.
        key = f"k-{number}"
        fired += bank.kill_at(COMMITTING, key)
        assert bank.check() in {number, number + 1}
        retry(bank, key)
        assert bank.check() == number + 1
    assert fired > 0, "no kill came before the commit was answered"


@fault(3, 4, 5)
def test_random_kills_during_concurrent_transfers_leave_effects_and_records_equal(bank):
    for _ in range(KILLS):
        bank.kill_at_random(within=0.05)
        bank.check()
    assert bank.kills == KILLS
    # SQLite has one writer: of its threads at most one is inside.
    inside = sum(count for place, count in bank.met.items() if place != "outside")
    assert inside >= KILLS / 2, f"the kills missed the transactions: {bank.met}"
