"""The table, not one record, is locked: ALTER TABLE, VACUUM FULL, a migration that takes long.

That is an outage. A new key is not "running elsewhere": nobody would ever end it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import asyncpg
import psycopg
import pytest

from engines.facade import PATIENCE, Effect, World, never, wait_until
from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    Idempotency,
    Policy,
    StoreUnavailable,
    open_async_store,
)
from semel.core.records import Identity
from semel.stores.sql.schema import LOCK
from servers.mariadb import MariaDBServer
from stores.mysql_given import database_of

TIMEOUT = 4.0
"""Four fifths of it are the wait for the lock; in the rest the store looks what is locked."""
POLICIES = {
    "waits": Policy(),
    "waits a while": Policy(wait_timeout=3600),
    "rejects": Policy(concurrent="reject"),
}


@pytest.fixture
def postgres(kind: str, postgres_url: str) -> Iterator[World]:
    with World(kind, postgres_url, timeout=TIMEOUT) as world:
        yield world


@pytest.fixture
def mysql(kind: str, mysql_url: str) -> Iterator[World]:
    with World(kind, mysql_url, timeout=TIMEOUT) as world:
        yield world


@contextlib.contextmanager
def locked_table(url: str, mode: str) -> Iterator[None]:
    with psycopg.connect(url) as other:
        other.execute(f"LOCK TABLE idempotent_record IN {mode} MODE")
        yield
        other.rollback()


@pytest.mark.parametrize("mode", ["ACCESS EXCLUSIVE", "SHARE"])  # VACUUM FULL; CREATE INDEX
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_new_key_of_a_locked_table_is_told_of_an_outage(postgres, policy, mode):
    engine = postgres.engine()
    engine.peek("k")  # the table exists
    with locked_table(postgres.url, mode):
        call = engine.start("new", never, policy=policy)
        with pytest.raises(StoreUnavailable, match="locked as a whole"):
            call.result(PATIENCE)
    assert engine.execute("new", Effect("ran")) == "ran"


def test_who_may_only_read_is_told_of_a_lock(kind, postgres_url):
    with Idempotency(postgres_url) as engine:
        engine.peek("k")
    with psycopg.connect(postgres_url, autocommit=True) as administrator:
        administrator.execute("DROP ROLE IF EXISTS only_reader")
        administrator.execute("CREATE ROLE only_reader LOGIN")
        administrator.execute("GRANT SELECT ON idempotent_record, semel_schema TO only_reader")
        url = postgres_url.replace("://semel@", "://only_reader@")
        with World(kind, url, timeout=TIMEOUT) as world:
            reader = world.engine()
            reader.peek("k")
            with (
                locked_table(postgres_url, "ACCESS EXCLUSIVE"),
                pytest.raises(StoreUnavailable, match="locked"),
            ):
                reader.peek("k")
        administrator.execute("DROP OWNED BY only_reader")
        administrator.execute("DROP ROLE only_reader")


def test_every_member_of_a_batch_is_told_of_a_locked_table(postgres):
    engine = postgres.engine()
    engine.peek("k")
    with locked_table(postgres.url, "ACCESS EXCLUSIVE"):
        calls = [engine.start(f"k{number}", never) for number in range(20)]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                call.result(PATIENCE)
    assert engine.execute("k0", Effect("ran")) == "ran"


def test_a_locked_record_is_still_running_elsewhere(postgres):
    with Idempotency(postgres.url) as other, psycopg.connect(postgres.url) as connection:
        other.peek("k")
        connection.execute("SELECT 1")
        with other.transaction(connection, "k") as attempt:
            attempt.result = "from the transaction"
        with pytest.raises(ConcurrentRequest):
            postgres.engine().execute("k", never, policy=Policy(concurrent="reject"))
        waiting = [postgres.engine().start("k", never) for _ in range(3)]
        connection.commit()
        assert [each.result(PATIENCE) for each in waiting] == ["from the transaction"] * 3


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_first_call_does_not_wait_for_ever_for_the_migration_of_another(postgres, policy):
    engine = postgres.engine()
    with psycopg.connect(postgres.url) as other:
        other.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
        call = engine.start("k", never, policy=policy)
        with pytest.raises(StoreUnavailable, match="another program is migrating"):
            call.result(PATIENCE)
        with pytest.raises(StoreUnavailable, match="another program is migrating"):
            postgres.kind.finish(engine.store.store.migrate)
        other.rollback()
    assert engine.execute("k", Effect("ran")) == "ran"


@pytest.mark.parametrize("options", ["", "?prepare=false"], ids=["asyncpg", "psycopg"])
async def test_a_first_call_that_is_cancelled_during_its_migration_ends_as_cancelled(
    postgres_url, options
):
    # Of the store itself: an engine would notice the cancellation later, by its own means.
    store = open_async_store(f"{postgres_url}{options}")
    with psycopg.connect(postgres_url) as other:
        other.execute(f"SELECT pg_advisory_xact_lock({LOCK})")

        def waiting() -> bool:
            sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            return other.execute(sql).fetchone() == (1,)

        call = asyncio.ensure_future(store.get(Identity("s", "k")))
        await asyncio.to_thread(wait_until, waiting)
        call.cancel()
        await asyncio.wait([call], timeout=PATIENCE)
        assert call.cancelled()
        other.rollback()
    assert await store.get(Identity("s", "k")) is None
    await store.close()


def test_a_transaction_is_told_of_a_locked_table_too(postgres_url):
    with Idempotency(postgres_url) as engine, psycopg.connect(postgres_url) as connection:
        engine.peek("k")
        connection.execute("SELECT 1")
        with (
            locked_table(postgres_url, "ACCESS EXCLUSIVE"),
            pytest.raises(StoreUnavailable, match="locked as a whole"),
            engine.transaction(connection, "k", policy=Policy(wait_timeout=1)),
        ):
            never()
        with engine.transaction(connection, "k") as attempt:
            attempt.result = 1
        connection.commit()
        assert engine.execute("k", never) == 1


async def test_an_asynchronous_transaction_is_told_of_a_locked_table_too(postgres_url):
    async with AsyncIdempotency(postgres_url) as engine:
        await engine.peek("k")
        connection = await asyncpg.connect(postgres_url)
        try:
            async with connection.transaction():
                once = engine.transaction(connection, "k", policy=Policy(wait_timeout=1))
                with (
                    locked_table(postgres_url, "ACCESS EXCLUSIVE"),
                    pytest.raises(StoreUnavailable, match="locked as a whole"),
                ):
                    async with once:
                        never()
        finally:
            await connection.close()


def test_a_call_that_an_administrator_cancels_is_not_said_to_be_slow(postgres):
    engine = postgres.engine()
    engine.peek("k")
    with (
        locked_table(postgres.url, "ACCESS EXCLUSIVE"),
        psycopg.connect(postgres.url, autocommit=True) as administrator,
    ):
        call = engine.start("k", never)

        def cancelled() -> bool:
            administrator.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event_type = "
                "'Lock' AND datname = current_database()"
            )
            return call.done()  # a batch is cancelled first, then its member

        wait_until(cancelled)
        with pytest.raises(StoreUnavailable, match="due to user request"):
            call.result(PATIENCE)


def test_a_locked_table_of_mysql_is_an_outage(mysql, mariadb_of_this_worker: MariaDBServer):
    engine = mysql.engine()
    engine.peek("k")
    with contextlib.closing(
        mariadb_of_this_worker.client(database=database_of(mysql.url))
    ) as other:
        other.cursor().execute("LOCK TABLES idempotent_record WRITE")
        for policy in POLICIES.values():
            with pytest.raises(StoreUnavailable):
                engine.start("new", never, policy=policy).result(PATIENCE)
    wait_until(lambda: _ran(engine))


def _ran(engine) -> bool:
    """What still waits at the server for the locked table may have the key for a moment."""
    return engine.execute("other", Effect("ran")) == "ran"


def test_a_migration_of_mysql_that_takes_long_is_an_outage(
    mysql, mariadb_of_this_worker: MariaDBServer
):
    engine, database = mysql.engine(), database_of(mysql.url)
    with contextlib.closing(mariadb_of_this_worker.client(database=database)) as other:
        name = "CONCAT('semel_schema:', SHA1(CONCAT(DATABASE(), '.', 'idempotent_record')))"
        other.cursor().execute(f"SELECT GET_LOCK({name}, 0)")
        with pytest.raises(StoreUnavailable, match="is migrating"):
            engine.start("k", never).result(PATIENCE)
    assert engine.execute("k", Effect("ran")) == "ran"
