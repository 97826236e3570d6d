"""What no retry helps against is no outage: under store_error="open" nothing runs unprotected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from engines.facade import Effect, World, never
from semel import ConfigError, IdempotencyError, Policy, StoreError, StoreUnavailable, ValueRejected
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from semel.testing import Refuse
from servers.mariadb import mariadb_server
from stores.mysql_given import database_of

OPEN = Policy(store_error="open")
STORES = {
    ("postgres", "threads"): PostgresStore,
    ("postgres", "asyncio"): AsyncPostgresStore,
    ("mysql", "threads"): MySQLStore,
    ("mysql", "asyncio"): AsyncMySQLStore,
}


def no_tenant(claim: Any) -> int:
    raise LookupError(f"no tenant in {claim.identity.key}")


@pytest.fixture(params=["postgres", "mysql"])
def world_with_columns(request, kind: str) -> Any:
    """Make a world whose store fills a column by a given function."""
    url = request.getfixturevalue(f"{request.param}_url")
    with contextlib.ExitStack() as opened:

        def make(function: Callable[[Any], object]) -> Any:
            world = opened.enter_context(World(kind, url))
            store = STORES[request.param, kind](url, columns={"tenant_id": function})
            world._stores.append(store)  # which the world closes
            world.kind.finish(store.migrate, columns={"tenant_id": "bigint"})
            return world.engine_on(world.kind.steered(store), policy=OPEN)

        yield make


def test_a_column_function_that_raises_is_no_outage(world_with_columns):
    engine = world_with_columns(no_tenant)
    for _ in range(2):
        with pytest.raises(ConfigError, match="tenant_id raised LookupError") as wrong:
            engine.execute("k", never)
    assert isinstance(wrong.value.__cause__, LookupError)
    assert engine.peek("k") is None


@pytest.mark.parametrize("value", ["no number", object(), 2**80], ids=["text", "object", "large"])
def test_a_column_function_that_returns_nonsense_is_no_outage(world_with_columns, value):
    engine = world_with_columns(lambda _: value)
    with pytest.raises((ConfigError, ValueRejected)):
        engine.execute("k", never)
    assert engine.peek("k") is None


OF_MYSQL = {
    "no default": "ALTER TABLE idempotent_record ADD COLUMN tenant_id BIGINT NOT NULL",  # 1364
    "trigger": "CREATE TRIGGER no BEFORE INSERT ON idempotent_record FOR EACH ROW "
    "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not here'",  # 1644
}
OF_POSTGRES = {
    "no default": "ALTER TABLE idempotent_record ADD COLUMN tenant_id bigint NOT NULL",
    "trigger": "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'not here'; END $$; "
    "CREATE TRIGGER no BEFORE INSERT ON idempotent_record FOR EACH ROW EXECUTE FUNCTION no()",
}


@pytest.mark.parametrize("sql", OF_MYSQL.values(), ids=OF_MYSQL)
def test_a_mysql_table_that_takes_no_claims_is_no_outage(
    kind, mysql_url, mariadb_of_this_worker, sql
):
    with World(kind, mysql_url) as world:
        engine = world.engine(policy=OPEN)
        engine.peek("k")
        mariadb_of_this_worker.execute(sql, database=database_of(mysql_url))
        with pytest.raises((ConfigError, ValueRejected)):
            engine.execute("k", never)


def test_a_mysql_that_cannot_log_a_change_is_no_outage(kind):
    with mariadb_server("--log-bin", "--server-id=1", "--binlog-format=STATEMENT") as server:
        url = server.database()
        server.execute("SET GLOBAL tx_isolation = 'READ-COMMITTED'")
        with World(kind, url) as world, pytest.raises(ConfigError, match="binlog_format"):  # 1665
            world.engine(policy=OPEN).execute("k", never)


@pytest.mark.parametrize("sql", OF_POSTGRES.values(), ids=OF_POSTGRES)
def test_a_postgres_table_that_takes_no_claims_is_no_outage(kind, postgres_url, sql):
    with World(kind, postgres_url) as world:
        world.engine().peek("k")
        with psycopg.connect(postgres_url, autocommit=True) as administrator:
            administrator.execute(sql)
        with pytest.raises((ConfigError, ValueRejected)):
            world.engine(policy=OPEN).execute("k", never)


@pytest.mark.parametrize("error", [StoreError("made by a newer version"), ValueRejected("no")])
def test_only_an_outage_is_run_through(kind, error: IdempotencyError):
    with World(kind, "memory://") as world:
        engine = world.engine(policy=OPEN)
        engine.store.inject("claim", Refuse(error))
        with pytest.raises(type(error)):
            engine.execute("k", never)
        engine.store.inject("claim", Refuse(StoreUnavailable("away")))
        assert engine.execute("k", Effect("ran")) == "ran"
