"""The shared contract, on PostgreSQL: a pool of its own, the application's, partitions, a bouncer."""

from __future__ import annotations

import os

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from semel.testing import StoreContract
from servers.postgres import pgbouncer
from stores.postgres_given import always_in_batches, rows


@pytest.fixture(scope="module")
def database(postgres_of_this_worker):
    """One database for all: a prefix of its own is all that a store needs to be empty."""
    return postgres_of_this_worker.fresh_database()


@pytest.fixture(scope="module")
def bouncer(postgres_of_this_worker, database):
    with pgbouncer(postgres_of_this_worker) as url:
        yield f"{url}/{database.rpartition('/')[2]}"


@pytest.fixture
def prefix():
    return os.urandom(8).hex()


class OnPostgres(StoreContract):
    table = "idempotent_record"

    @pytest.fixture
    def set_clock_back(self, database, prefix):
        sql = f"UPDATE {self.table} SET fence = fence + 600000000 WHERE prefix = %s"  # noqa: S608 - our own names
        return lambda: rows(database, sql, prefix)

    @pytest.fixture
    def make_unreadable(self, database, prefix):
        sql = f"UPDATE {self.table} SET format = 9 WHERE prefix = %s AND idem_key = %s"  # noqa: S608 - our own names
        return lambda identity: rows(database, sql, prefix, identity.key)


class TestPostgres(OnPostgres):
    @pytest.fixture
    def store(self, database, prefix):
        return PostgresStore(database, prefix=prefix)


class TestAsyncPostgres(OnPostgres):
    @pytest.fixture
    def store(self, database, prefix):
        return AsyncPostgresStore(database, prefix=prefix)


class TestAsyncPostgresInBatches(OnPostgres):
    @pytest.fixture
    def store(self, database, prefix):
        return always_in_batches(AsyncPostgresStore(database, prefix=prefix))


@pytest.mark.more(one_of=4)
class TestAsyncPostgresWithoutBatches(OnPostgres):
    """With psycopg: asyncpg has no keepalives."""

    @pytest.fixture
    def store(self, database, prefix):
        return AsyncPostgresStore(database, prefix=prefix, batching="off", keepalives="1")


@pytest.mark.more(one_of=4)
class TestAsyncPostgresBatchesInPartitions(OnPostgres):
    table = "in_partitions"

    @pytest.fixture
    def store(self, database, prefix):
        options = {"table": "in_partitions", "partitions": 4}
        return always_in_batches(AsyncPostgresStore(database, prefix=prefix, **options))


@pytest.mark.more(one_of=4)
class TestPostgresInPartitions(OnPostgres):
    table = "in_partitions"

    @pytest.fixture
    def store(self, database, prefix):
        return PostgresStore(database, prefix=prefix, table="in_partitions", partitions=4)


@pytest.mark.more(one_of=4)
class TestPostgresWithAGivenConnection(OnPostgres):
    @pytest.fixture
    def store(self, database, prefix):
        with psycopg.connect(database, row_factory=psycopg.rows.dict_row) as connection:
            yield PostgresStore(connection=connection, prefix=prefix)


@pytest.mark.more(one_of=4)
class TestPostgresWithAGivenPoolThatIsSerializable(OnPostgres):
    """The application's pool, not in autocommit, under the strictest isolation."""

    @pytest.fixture
    def store(self, database, prefix):
        strict = {"options": "-c default_transaction_isolation=serializable"}
        with ConnectionPool(database, kwargs=strict, min_size=0, max_size=4) as pool:
            yield PostgresStore(pool=pool, prefix=prefix)


@pytest.mark.more(one_of=4)
class TestAsyncPostgresBehindPgbouncer(OnPostgres):
    @pytest.fixture
    def store(self, bouncer, prefix):
        return AsyncPostgresStore(bouncer, prefix=prefix, prepare="off")
