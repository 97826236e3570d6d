"""The machine's clock, which is SQLite's, is set back while leases run.

A lease then ends when its own length has passed since the first claim that noticed, and not when
the clock is where it was. A clock that is set right again finds the leases as it left them.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
import redis

from semel import Idempotency, open_async_store, open_store
from semel.core.records import Abandoned, Busy, Claimed, State
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.testing import FakeClock, StoreDriver
from stores.sqlite_helpers import RESULT, ask, identity

HOUR = 3600.0
LEASE = 30.0
ANNA, BERT, CARL = b"anna--------", b"bert--------", b"carl--------"
KEY = identity("k")


class Asking(StoreDriver):
    """Tiers in which SQL is always asked: the front's short hint of a running attempt is removed."""

    def __init__(self, store, front):
        super().__init__(store)
        self._front = front

    def claim(self, ask):
        self._front.flushdb()
        return super().claim(ask)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture(params=["threads", "asyncio", "given", "tiers", "asyncio tiers"])
def store(request, path, clock):
    """Each kind of store whose records SQLite keeps."""
    opened = []
    if request.param == "given":
        opened.append(sqlite3.connect(path, check_same_thread=False))
        sql = SQLiteStore(connection=opened[0], clock=clock)
    elif "asyncio" in request.param:
        sql = AsyncSQLiteStore(path, clock=clock)
    else:
        sql = SQLiteStore(path, clock=clock)
    if "tiers" in request.param:
        opener = open_store if request.param == "tiers" else open_async_store
        front = redis.Redis.from_url(request.getfixturevalue("redis_url"))
        opened.append(front)
        driver = Asking(opener(request.getfixturevalue("redis_url"), behind=sql), front)
    else:
        driver = StoreDriver(sql)
    yield driver
    driver.close()
    if "tiers" in request.param:
        StoreDriver(sql).close()
    for connection in opened:
        connection.close()


def test_a_lease_from_before_the_clock_was_set_back_ends_after_its_own_length(store, clock):
    assert isinstance(store.claim(ask("k", ANNA)), Claimed)
    clock.set_back(HOUR)
    answer = store.claim(ask("k", BERT))
    assert isinstance(answer, Busy)
    assert answer.retry_after == pytest.approx(LEASE)
    clock.advance(LEASE - 1)
    assert store.claim(ask("k", CARL)).retry_after == pytest.approx(1.0)
    clock.advance(1)
    taken = store.claim(ask("k", BERT))
    assert taken.takeover
    assert not store.complete(KEY, ANNA, RESULT, 60.0)
    assert store.complete(KEY, BERT, RESULT, 60.0)


def test_it_is_counted_from_the_first_claim_that_noticed_in_whichever_process(path, clock):
    with closing(SQLiteStore(path, clock=clock)) as store:
        assert isinstance(store.claim(ask("k", ANNA)), Claimed)
    clock.set_back(HOUR)
    for _ in range(3):  # a job that runs every ten seconds, each time in a new process
        with closing(SQLiteStore(path, clock=clock)) as store:
            assert isinstance(store.claim(ask("k", BERT)), Busy)
        clock.advance(10)
    with closing(SQLiteStore(path, clock=clock)) as store:
        assert isinstance(store.claim(ask("k", BERT)), Claimed)


def test_an_owner_that_renews_keeps_its_lease_when_the_clock_is_set_back(store, clock):
    assert isinstance(store.claim(ask("k", ANNA)), Claimed)
    clock.set_back(HOUR)
    for _ in range(4):
        assert isinstance(store.claim(ask("k", BERT)), Busy)
        clock.advance(10)
        assert store.renew(KEY, ANNA, LEASE)
    assert isinstance(store.claim(ask("k", BERT)), Busy)
    assert store.complete(KEY, ANNA, RESULT, 60.0)


def test_a_clock_that_is_set_right_again_ends_no_lease_early(store, clock):
    assert isinstance(store.claim(ask("k", ANNA)), Claimed)
    clock.set_back(HOUR)
    assert isinstance(store.claim(ask("k", BERT)), Busy)
    clock.advance(HOUR + 2)  # right again, two seconds later
    answer = store.claim(ask("k", BERT))
    assert isinstance(answer, Busy)
    assert answer.retry_after == pytest.approx(LEASE - 2)
    clock.advance(LEASE - 2)
    assert isinstance(store.claim(ask("k", BERT)), Claimed)


def test_a_clock_that_is_set_back_twice_is_noticed_twice(store, clock):
    assert isinstance(store.claim(ask("k", ANNA)), Claimed)
    for _ in range(2):
        clock.set_back(HOUR)
        answer = store.claim(ask("k", BERT))
        assert isinstance(answer, Busy)
        assert answer.retry_after == pytest.approx(LEASE)
        clock.advance(LEASE - 1)
        assert isinstance(store.claim(ask("k", BERT)), Busy)
    clock.advance(1)
    assert isinstance(store.claim(ask("k", BERT)), Claimed)


def test_a_step_back_by_less_than_a_second_ends_no_lease(store, clock):
    assert isinstance(store.claim(ask("k", ANNA)), Claimed)
    clock.set_back(0.5)
    assert isinstance(store.claim(ask("k", BERT)), Busy)
    clock.advance(LEASE - 1)
    assert isinstance(store.claim(ask("k", BERT)), Busy)


def test_a_parked_attempt_stays_parked_when_the_clock_is_set_back(path, clock):
    with closing(SQLiteStore(path, clock=clock)) as store:
        store.claim(ask("k", ANNA, hold=True))
        assert store.renew(KEY, ANNA, 0.0)
        clock.set_back(HOUR)
        assert isinstance(store.claim(ask("k", BERT)), Abandoned)


def test_a_held_attempt_is_found_by_those_who_resolve_once_a_claim_saw_that_it_ended(path, clock):
    with closing(SQLiteStore(path, clock=clock)) as store:
        store.claim(ask("k", ANNA, hold=True))
        clock.set_back(HOUR)
        assert isinstance(store.claim(ask("k", BERT)), Busy)
        assert store.stuck() == []
        clock.advance(LEASE)
        assert isinstance(store.claim(ask("k", BERT)), Abandoned)
        (found,) = store.stuck()
        assert found.owner == ANNA
        assert store.adopt(KEY, CARL, LEASE).owner == CARL


def test_a_noted_attempt_reads_as_one_that_runs(path, clock):
    with closing(SQLiteStore(path, clock=clock)) as store:
        store.claim(ask("k", ANNA))
        clock.set_back(HOUR)
        store.claim(ask("k", BERT))
        clock.advance(1)
        record = store.get(KEY)
        assert (record.state, record.outcome, record.abandoned) == (State.PROCESSING, None, False)
        assert record.lease_until - record.now == pytest.approx(LEASE - 1)
        (listed,) = store.scan().records
        assert listed.outcome is None


def test_that_the_clock_was_set_back_is_logged_once_for_an_attempt(path, clock, caplog):
    with closing(SQLiteStore(path, clock=clock)) as store:
        store.claim(ask("k", ANNA))
        clock.set_back(HOUR)
        for _ in range(3):
            store.claim(ask("k", BERT))
    (logged,) = [record for record in caplog.records if "set back" in record.getMessage()]
    assert logged.levelname == "WARNING"
    assert "its lease ends in 30.0 s" in logged.getMessage()


def test_inside_a_transaction_the_lease_of_another_is_limited_too(path, clock):
    store = SQLiteStore(path, clock=clock)
    with closing(store), Idempotency(store) as idem, closing(sqlite3.connect(path)) as connection:
        store.claim(ask("k", ANNA))
        clock.set_back(HOUR)
        assert isinstance(store.claim(ask("k", BERT)), Busy)
        clock.advance(LEASE)
        connection.execute("BEGIN IMMEDIATE")
        with idem.transaction(connection, "k", scope="orders") as attempt:
            attempt.result = "taken over"
        connection.commit()
        assert store.get(KEY).state is State.SUCCEEDED
