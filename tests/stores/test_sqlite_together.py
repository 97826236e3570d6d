"""Many operations in one statement of SQLite: each has the answer that it would have alone."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from contextlib import closing
from types import TracebackType

import pytest

from semel.core import judge
from semel.core.records import Busy, Claimed, CompleteRequest, Encoded, Finished
from semel.errors import StoreError, StoreFull, ValueRejected
from semel.stores.sql import sqlite_statements as texts
from semel.stores.sql.rows import COLUMNS, to_row
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.stores.sql.sqlite_statements import LARGE, SIZES
from semel.testing import FakeClock
from stores.sqlite_helpers import RESULT, Statements, ask, finish, identity
from stores.test_sqlite_writer import HeldCommits

OTHER = b"other-------"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture
def statements():
    return Statements()


@pytest.fixture
def store(path, statements):
    with closing(SQLiteStore(path, trace=statements)) as store:
        store.counts()
        yield store


def success(key, owner=b"owner-------", result=RESULT):
    return CompleteRequest(identity(key), owner, result, 60.0)


def test_a_batch_of_first_executions_needs_few_statements(store, statements):
    answers = store.send([ask(number) for number in range(7)])
    assert all(isinstance(answer, Claimed) for answer in answers)
    assert statements.seen["INSERT"] == 3  # of 4, 2 and 1 rows: few texts have to be prepared
    assert store.send([success(number) for number in range(7)]) == [True] * 7
    assert statements.seen["UPDATE"] == 3
    assert store.counts().succeeded == 7


def test_a_crowd_is_cut_into_statements_of_a_bounded_size(store, statements):
    store.send([ask(number) for number in range(130)])
    assert statements.seen["INSERT"] == 3  # 64, 64 and 2
    assert store.counts().processing == 130


def test_claims_of_keys_that_exist_have_their_own_answers_among_first_ones(store):
    finish(store, "finished", OTHER)
    store.claim(ask("running", OTHER))
    mine = store.claim(ask("mine"))
    names = ["new", "finished", "running", "mine", "newer", "newest"]
    new, finished, running, again, newer, newest = store.send([ask(name) for name in names])
    assert isinstance(finished, Finished)
    assert isinstance(running, Busy)
    assert again == mine
    for name, answer in (("new", new), ("newer", newer), ("newest", newest)):
        assert answer == Claimed(1, store.get(identity(name)).fence)


def test_a_key_that_is_claimed_twice_in_a_batch_is_given_once(store):
    first, second, beside = store.send([ask(1), ask(1, OTHER), ask(2)])
    assert {type(first), type(second)} == {Claimed, Busy}
    assert isinstance(beside, Claimed)


def test_an_owner_that_was_replaced_is_refused_among_those_that_were_not(store):
    store.send([ask(1), ask(2, OTHER), ask(3)])
    stored = store.send([success(1), success(2), success(3), success("unknown")])
    assert stored == [True, False, True, False]
    assert store.send([success(1), success(3)]) == [True, True]  # sent twice
    assert store.counts().succeeded == 2


def test_a_bad_value_spoils_the_statement_for_nobody_else(store):
    asks = [ask(1), ask(2), ask("bad", lease=1e300), ask(3)]
    answers = store.send(asks)
    assert [type(answer) for answer in answers] == [Claimed, Claimed, ValueRejected, Claimed]
    assert store.counts().processing == 3


@pytest.mark.parametrize("rows", SIZES)
def test_completes_are_found_by_their_keys_whatever_the_statistics_say(store, path, rows):
    store.claim(ask(1))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ANALYZE")  # while next to nothing runs
        update = texts.complete_many("idempotent_record", rows)
        plan = str(connection.execute(f"EXPLAIN QUERY PLAN {update}", [None] * rows * 6).fetchall())
    assert "SEARCH idempotent_record USING INDEX sqlite_autoindex_idempotent_record_1" in plan


def test_a_large_result_has_a_statement_of_its_own(store, statements):
    store.send([ask(number) for number in range(4)])
    large = Encoded("json", b"x" * LARGE)
    asks = [success(number, result=RESULT if number else large) for number in range(4)]
    assert store.send(asks) == [True] * 4
    assert statements.seen["UPDATE"] >= 2
    assert store.get(identity(0)).outcome == large


def test_an_old_sqlite_is_asked_one_by_one(path, statements, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 32, 3))
    with closing(SQLiteStore(path, trace=statements)) as store:
        store.counts()
        before = statements.seen["INSERT"]
        store.send([ask(number) for number in range(4)])
        assert store.send([success(number) for number in range(4)]) == [True] * 4
        assert statements.seen["INSERT"] - before == statements.seen["UPDATE"] == 4


def test_a_first_claim_writes_the_row_that_its_record_asks_for(path):
    clock = FakeClock()
    asks = [ask(1, hold=True, fingerprint=b"f" * 16), ask(2, run_info=b"{}"), ask(3)]
    with closing(SQLiteStore(path, clock=clock)) as store:
        store.send(asks)
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(COLUMNS)} FROM idempotent_record ORDER BY idem_key"  # noqa: S608
        ).fetchall()
    assert rows == [to_row(judge.first_claim(one, clock())[1]) for one in asks]


async def test_what_is_asked_of_one_record_stays_in_its_order(path):
    commits = HeldCommits()
    store = AsyncSQLiteStore(path, trace=commits.trace)
    opening = asyncio.create_task(store.claim(ask("before")))
    await commits.reached()
    owner = ask(1).owner
    steps = [
        store.claim(ask(1)),
        store.claim(ask(2)),
        store.complete(identity(1), owner, RESULT, 60.0),
        store.forget(identity(2)),
        store.claim(ask(1, OTHER)),
        store.claim(ask(2, OTHER)),
        store.complete(identity(2), owner, RESULT, 60.0),
    ]
    tasks = [asyncio.create_task(step) for step in steps]
    await asyncio.sleep(0)  # they have asked
    await asyncio.sleep(0)  # and are handed over: one transaction takes them
    assert store._executor._queue.qsize() == 1
    commits.release()
    first, second, stored, forgotten, replayed, taken, refused = await asyncio.gather(*tasks)
    assert isinstance(await opening, Claimed)
    assert isinstance(first, Claimed)
    assert isinstance(second, Claimed)
    assert stored is True
    assert forgotten is True
    assert isinstance(replayed, Finished)
    assert isinstance(taken, Claimed)
    assert refused is False
    assert commits.count == 2
    await store.close()


def test_a_connection_that_takes_only_short_statements_is_asked_one_by_one(path):
    connection = sqlite3.connect(path)
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 250)
    with closing(SQLiteStore(connection=connection)) as store:
        answers = store.send([ask(number) for number in range(70)])
        assert all(isinstance(answer, Claimed) for answer in answers)
    connection.close()


def test_of_a_group_that_finds_the_disk_full_only_those_are_refused_who_do_not_fit(path):
    connection = sqlite3.connect(path)
    with closing(SQLiteStore(connection=connection)) as store:
        store.counts()
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        answers = store.send([ask(f"{number:0200}") for number in range(640)])
        assert {type(answer) for answer in answers} == {Claimed, StoreFull}
    connection.close()


def test_an_owner_whose_attempt_has_ended_is_no_owner_of_a_new_one(path):
    clock = FakeClock()  # it stands still: the repeated claim has the fence of the first
    with closing(SQLiteStore(path, clock=clock)) as store:
        finish(store, "ended")
        ended, new = store.send([ask("ended"), ask("new")])
        assert isinstance(ended, Finished)
        assert isinstance(new, Claimed)


def test_errors_take_no_memory_once_they_are_told(store, path):
    finish(store, "damaged")
    with closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE idempotent_record SET format = 99")
        other.commit()

    def fail():
        with pytest.raises(StoreError):
            store.claim(ask("damaged", OTHER))

    def kept():
        gc.collect()
        return sum(type(one) is TracebackType for one in gc.get_objects())

    fail()
    before = kept()
    for _ in range(20):
        fail()
    assert kept() <= before + 5
