"""An exception of a signal handler in the middle of a read must not keep the store from writing.

A read that is not finished keeps the database as it was when it began. Once anybody else has
written, nothing can be written beside it (SQLITE_BUSY_SNAPSHOT), for as long as its cursor lives:
and that is as long as somebody keeps the exception, whose traceback has the cursor.
"""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from semel import Idempotency
from semel.errors import StoreUnavailable
from semel.stores.sql.sqlite import SQLiteStore
from stores.sqlite_helpers import finish, identity


class TimeLimit(Exception):
    """What the handler of a worker's soft time limit raises."""


class Strikes:
    """Where the signal comes; a method of a cursor is struck as often as it is named here."""

    def __init__(self) -> None:
        self.at: list[str] = []
        self.connections: list[sqlite3.Connection] = []

    def strike(self, method: str) -> None:
        if method in self.at:
            self.at.remove(method)
            raise TimeLimit

    def connect(self) -> Callable[..., sqlite3.Connection]:
        """Give a `sqlite3.connect` whose cursors can be struck."""
        strikes = self

        class Cursor(sqlite3.Cursor):
            def fetchall(self):
                strikes.strike("fetchall")
                return super().fetchall()

            def close(self):
                strikes.strike("close")
                super().close()

        class Connection(sqlite3.Connection):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                strikes.connections.append(self)

            def cursor(self):
                return super().cursor(Cursor)

        return partial(sqlite3.connect, factory=Connection)


@pytest.fixture
def strikes() -> Strikes:
    return Strikes()


@pytest.fixture
def others(tmp_path) -> Iterator[SQLiteStore]:
    """The store of another process."""
    with contextlib.closing(SQLiteStore(tmp_path / "semel.db")) as store:
        finish(store, "old")
        yield store


def check_works(store: SQLiteStore, others: SQLiteStore) -> None:
    """Write beside it, then read and write with it."""
    finish(others, "from others")
    assert store.get(identity("from others")) is not None
    finish(store, "new")
    assert others.get(identity("new")) is not None


@pytest.mark.parametrize("at", [["fetchall"], ["fetchall", "close"]], ids=",".join)
def test_a_read_that_was_interrupted_does_not_keep_the_store_from_writing(
    at, strikes, others, tmp_path, monkeypatch
):
    monkeypatch.setattr(sqlite3, "connect", strikes.connect())
    with contextlib.closing(SQLiteStore(tmp_path / "semel.db")) as store:
        assert store.get(identity("old")) is not None
        strikes.at = list(at)
        with pytest.raises(TimeLimit) as kept:
            store.get(identity("old"))
        assert strikes.at == []
        check_works(store, others)
        del kept


def test_nor_does_one_on_a_connection_of_the_application(strikes, others, tmp_path):
    connection = strikes.connect()(tmp_path / "semel.db", isolation_level=None)
    store = SQLiteStore(connection=connection)
    assert store.get(identity("old")) is not None
    strikes.at = ["fetchall"]
    with pytest.raises(TimeLimit) as kept:
        store.get(identity("old"))
    assert strikes.at == []
    check_works(store, others)
    del kept
    connection.close()


def test_a_read_that_is_left_open_all_the_same_costs_the_connection_and_nothing_else(
    strikes, others, tmp_path, monkeypatch
):
    monkeypatch.setattr(sqlite3, "connect", strikes.connect())
    with contextlib.closing(SQLiteStore(tmp_path / "semel.db")) as store:
        assert store.get(identity("old")) is not None
        cursor = strikes.connections[-1].execute("SELECT * FROM semel_schema")
        finish(others, "from others")
        finish(store, "new")
        assert others.get(identity("new")) is not None
        assert len(strikes.connections) == 2
        del cursor


def test_an_open_cursor_of_the_application_is_named_at_once(others, tmp_path):
    with contextlib.closing(
        sqlite3.connect(tmp_path / "semel.db", isolation_level=None)
    ) as connection:
        store = SQLiteStore(connection=connection)
        assert store.get(identity("old")) is not None
        cursor = connection.execute("SELECT * FROM semel_schema")
        finish(others, "from others")
        with pytest.raises(StoreUnavailable, match="has not read all of its rows"):
            finish(store, "new")
        cursor.close()
        finish(store, "new")


def test_an_interruption_leaves_no_reference_cycle(strikes, others, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "connect", strikes.connect())
    with Idempotency(f"sqlite:///{tmp_path}/semel.db") as idem:
        idem.execute("k", lambda: 1)
        strikes.at = ["fetchall"]
        gc.collect()
        gc.disable()
        try:
            freed = interrupted(idem)
            assert freed() is None
        finally:
            gc.enable()
        assert idem.execute("k", lambda: 2) == 1


def interrupted(idem: Idempotency) -> weakref.ref[TimeLimit]:
    try:
        idem.execute("k", lambda: 2)
    except TimeLimit as error:
        return weakref.ref(error)
    raise AssertionError("nothing was interrupted")
