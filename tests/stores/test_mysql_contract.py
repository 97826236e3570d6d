"""The shared contract, on MariaDB: for threads, for asyncio, on an application's connections.

Some run on a table whose name is a word of SQL.
"""

from __future__ import annotations

import contextlib

import pymysql
import pytest

from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.testing import StoreContract


@pytest.fixture(scope="module")
def url(mariadb_of_this_worker):
    """One database for all tests here: a new one each would cost more than the test."""
    return mariadb_of_this_worker.database()


@pytest.fixture
def empty(mariadb_of_this_worker, url):
    database = url.rpartition("/")[2]
    for table in ("idempotent_record", "order"):
        with contextlib.suppress(pymysql.err.ProgrammingError):  # the first test creates the table
            mariadb_of_this_worker.execute(f"DELETE FROM {database}.`{table}`")  # noqa: S608 - our own names
    return url


class OnMariaDB(StoreContract):
    table = "idempotent_record"

    @pytest.fixture
    def set_clock_back(self, mariadb_of_this_worker, empty):
        table = f"{empty.rpartition('/')[2]}.`{self.table}`"
        sql = f"UPDATE {table} SET fence = fence + 600000000"  # noqa: S608 - our own names
        return lambda: mariadb_of_this_worker.execute(sql)

    @pytest.fixture
    def make_unreadable(self, mariadb_of_this_worker, empty):
        table = f"{empty.rpartition('/')[2]}.`{self.table}`"
        sql = f"UPDATE {table} SET format = 9 WHERE idem_key = %s"  # noqa: S608 - our own names
        return lambda identity: mariadb_of_this_worker.execute(sql, identity.key)


class TestMySQL(OnMariaDB):
    @pytest.fixture
    def store(self, empty):
        return MySQLStore(empty)


class TestAsyncMySQL(OnMariaDB):
    table = "order"

    @pytest.fixture
    def store(self, empty):
        return AsyncMySQLStore(f"{empty}?table=order")


@pytest.mark.more(one_of=4)
class TestAsyncMySQLWithoutBatching(OnMariaDB):
    @pytest.fixture
    def store(self, empty):
        return AsyncMySQLStore(f"{empty}?batching=off")


@pytest.mark.more(one_of=4)
class TestMySQLOnGivenConnections(OnMariaDB):
    """They take one statement at a time and have defaults of their own."""

    table = "order"

    @pytest.fixture
    def store(self, empty, mariadb_of_this_worker):
        database = empty.rpartition("/")[2]

        def connect():
            return mariadb_of_this_worker.client(
                database=database,
                autocommit=False,
                cursorclass=pymysql.cursors.DictCursor,
                init_command="SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES', time_zone = '+05:00'",
            )

        return MySQLStore(connect=connect, table="order")
