"""The shared contract, on SQLite: for threads, for asyncio, on an application's connection."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.testing import FakeClock, StoreContract


class WithFakeClock(StoreContract):
    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    def sleep(self, clock):
        return clock.advance

    @pytest.fixture
    def set_clock_back(self, clock):
        return lambda: clock.set_back(600)

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "semel.db"

    @pytest.fixture
    def make_unreadable(self, path):
        def damage(identity):
            with closing(sqlite3.connect(path)) as connection, connection:
                sql = "UPDATE idempotent_record SET format = 9 WHERE idem_key = ?"
                connection.execute(sql, (identity.key,))

        return damage


class TestSQLite(WithFakeClock):
    @pytest.fixture
    def store(self, path, clock):
        return SQLiteStore(path, clock=clock)


@pytest.mark.more(one_of=4)
class TestSQLiteByTheHostsClock(StoreContract):
    """On a table whose name is a word of SQL."""

    @pytest.fixture
    def set_clock_back(self, tmp_path):
        def raise_the_fences():
            with closing(sqlite3.connect(tmp_path / "semel.db")) as connection, connection:
                connection.execute('UPDATE "order" SET fence = fence + 600000000')

        return raise_the_fences

    @pytest.fixture
    def store(self, tmp_path):
        return SQLiteStore(tmp_path / "semel.db", table="order")


class TestAsyncSQLite(WithFakeClock):
    @pytest.fixture
    def store(self, path, clock):
        return AsyncSQLiteStore(path, clock=clock)


@pytest.mark.more(one_of=4)
class TestSQLiteOnAGivenConnection(WithFakeClock):
    @pytest.fixture
    def store(self, path, clock):
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        yield SQLiteStore(connection=connection, clock=clock)
        connection.close()
