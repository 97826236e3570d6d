"""An exception raised by a signal handler, at every step of a transactional block.

A trace function stands for the handler, as in `engines/test_signals.py`. After each of them the
application rolls back and goes on with its connection: the exception has reached it as it is, the
session waits for locks as before, no attempt runs, and the next call with that key takes effect.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from typing import Any, NamedTuple

import psycopg
import pymysql
import pytest

from interrupting import TimeLimit, Trace
from semel import Idempotency, current_attempt
from transactions.kinds import PATIENCE, mysql_login, path_of

pytestmark = pytest.mark.usefixtures("not_measured")

keys = (f"k{number}" for number in count())


class Database(NamedTuple):
    """How an application connects, begins, and asks how long its session waits for locks."""

    url: str
    connect: Callable[[str], Any]
    begin: str
    bound: str


DATABASES = {
    "sqlite3": Database(
        "sqlite_url",
        lambda url: sqlite3.connect(path_of(url), timeout=PATIENCE, isolation_level=None),
        "BEGIN IMMEDIATE",
        "PRAGMA busy_timeout",
    ),
    "psycopg": Database("postgres_url", psycopg.connect, "BEGIN", "SHOW lock_timeout"),
    "pymysql": Database(
        "mysql_url",
        lambda url: pymysql.connect(**mysql_login(url)),
        "START TRANSACTION",
        "SELECT @@SESSION.innodb_lock_wait_timeout",
    ),
}


class Application:
    """Units of work of one connection, each with one block."""

    def __init__(self, idem: Idempotency, connection: Any, database: Database) -> None:
        self._idem = idem
        self._connection = connection
        self._database = database
        self.on_server = database.url != "sqlite_url"
        self._run("CREATE TABLE ledger (entry VARCHAR(20) NOT NULL)")
        connection.commit()

    def _run(self, sql: str) -> list[Any]:
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def pay(self, key: str, **options: Any) -> bool:
        """Insert one row for a key; returns whether that was done before."""
        self._run(self._database.begin)
        try:
            with self._idem.transaction(self._connection, key, **options) as attempt:
                if not attempt.replayed:
                    self._run(f"INSERT INTO ledger VALUES ('{key}')")
                    attempt.result = "paid"
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        return attempt.replayed

    def bound(self) -> object:
        (answer,) = self._run(self._database.bound)
        self._connection.rollback()
        return answer

    def paid(self, key: str) -> int:
        (answer,) = self._run(f"SELECT COUNT(*) FROM ledger WHERE entry = '{key}'")
        self._connection.rollback()
        return answer[0]


@pytest.fixture
def application(request) -> Iterator[Application]:
    database = DATABASES[request.param]
    url = request.getfixturevalue(database.url)
    # With max_waiting a claim bounds its wait twice: first to none at all.
    with Idempotency(url, max_waiting=5) as idem, closing(database.connect(url)) as connection:
        idem.peek("any")
        yield Application(idem, connection, database)


def first(application: Application) -> str:
    return next(keys)


def done(application: Application) -> str:
    key = next(keys)
    application.pay(key)
    return key


@pytest.mark.fault(55)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("application", "prepared", "error"),
    [
        ("sqlite3", first, KeyboardInterrupt),
        ("sqlite3", first, TimeLimit),
        ("sqlite3", done, TimeLimit),
        ("psycopg", first, TimeLimit),
        ("pymysql", first, TimeLimit),
        pytest.param("psycopg", done, KeyboardInterrupt, marks=pytest.mark.more),
        pytest.param("pymysql", done, KeyboardInterrupt, marks=pytest.mark.more),
    ],
    indirect=["application"],
)
def test_struck_at_any_step_of_a_block_the_application_goes_on(application, prepared, error):
    before = application.bound()
    application.pay(next(keys))
    key = prepared(application)
    listed = Trace()
    listed.run(lambda: application.pay(key))
    on_server = application.on_server
    steps = [step for step in listed.steps if step[1] == "line" or not on_server]  # many, and slow
    assert len(steps) > 100
    fired = 0
    for step in steps:
        where = f"{step[0].co_qualname}:{step[1]}:{step[2]}"
        key = prepared(application)
        trace = Trace(step, error())
        with suppress(error):  # and no other
            trace.run(lambda key=key: application.pay(key))
        fired += trace.struck.is_set()
        assert current_attempt() is None, where
        assert application.bound() == before, where
        application.pay(key)
        assert application.paid(key) == 1, where
    assert fired > 0.8 * len(steps)
