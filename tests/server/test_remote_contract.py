"""The shared contract through a service: real sockets, both kinds of store, three databases.

Nothing is skipped: what a store behind can do, it can do through the service.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3

import psycopg
import pytest

from semel.stores.redis import open_async_store as open_async_redis
from semel.stores.redis.commands import KeyLayout
from semel.stores.sql.postgres import AsyncPostgresStore
from semel.stores.sql.sqlite import AsyncSQLiteStore
from semel.stores.urls import DEFAULT_PREFIX, open_async_store, open_store
from semel.testing import FakeClock, StoreContract
from semel.testing.contract.given import KEY
from server.remote_given import served


@pytest.fixture(scope="module", name="served")
def _served():
    with served() as running:
        yield running


class ThroughTheService(StoreContract):
    """`behind` makes the store of the service."""

    opens = staticmethod(open_store)

    @pytest.fixture
    def store(self, served, behind):
        served.use(behind)
        yield self.opens(served.url)
        served.leave()

    @pytest.fixture
    def rejects_texts(self):
        return True

    @pytest.fixture(autouse=True)
    def nothing_is_skipped(self, store, monkeypatch):
        def fail(reason):
            raise AssertionError(f"the contract through the service skips nothing: {reason}")

        monkeypatch.setattr(pytest, "skip", fail)


class OnSQLite(ThroughTheService):
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
    def behind(self, path, clock):
        return lambda: AsyncSQLiteStore(path, clock=clock)

    @pytest.fixture
    def make_unreadable(self, path):
        def damage(identity):
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                sql = "UPDATE idempotent_record SET format = 9 WHERE idem_key = ?"
                connection.execute(sql, (identity.key,))

        return damage


class TestSQLiteThroughTheService(OnSQLite):
    pass


class TestAsyncSQLiteThroughTheService(OnSQLite):
    opens = staticmethod(open_async_store)


class OnRedis(ThroughTheService):
    keys = KeyLayout(DEFAULT_PREFIX)

    @pytest.fixture
    def server(self, redis_of_this_worker):
        return redis_of_this_worker

    @pytest.fixture
    def behind(self, redis_url):
        return lambda: open_async_redis(redis_url)

    @pytest.fixture
    def set_clock_back(self, server):
        def raise_the_fence():
            # Where the fence stands in a record: see lua/record.lua.
            name, first, last = self.keys.record(KEY), 7, 13
            with contextlib.closing(server.client()) as client:
                fence = int.from_bytes(client.getrange(name, first, last)) + 600_000_000
                client.setrange(name, first, fence.to_bytes(7))

        return raise_the_fence

    @pytest.fixture
    def make_unreadable(self, server):
        def damage(identity):
            with contextlib.closing(server.client()) as client:
                client.setrange(self.keys.record(identity), 0, b"\xff")  # its version

        return damage


class TestRedisThroughTheService(OnRedis):
    pass


class TestAsyncRedisThroughTheService(OnRedis):
    opens = staticmethod(open_async_store)


@pytest.fixture(scope="module")
def database(postgres_of_this_worker):
    """One database for all: a prefix of its own is all that a store needs to be empty."""
    return postgres_of_this_worker.fresh_database()


class OnPostgres(ThroughTheService):
    @pytest.fixture
    def prefix(self):
        return os.urandom(8).hex()

    @pytest.fixture
    def behind(self, database, prefix):
        return lambda: AsyncPostgresStore(database, prefix=prefix)

    @pytest.fixture
    def change(self, database, prefix):
        def change(what, *values):
            sql = f"UPDATE idempotent_record SET {what} AND prefix = %s"  # noqa: S608 - our own
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute(sql, (*values, prefix))

        return change

    @pytest.fixture
    def set_clock_back(self, change):
        return lambda: change("fence = fence + 600000000 WHERE true")

    @pytest.fixture
    def make_unreadable(self, change):
        return lambda identity: change("format = 9 WHERE idem_key = %s", identity.key)


class TestPostgresThroughTheService(OnPostgres):
    pass


class TestAsyncPostgresThroughTheService(OnPostgres):
    opens = staticmethod(open_async_store)
