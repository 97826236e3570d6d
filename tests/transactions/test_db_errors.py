"""Arguments that are rejected before a connection is touched, and what errors of databases mean."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys

import psycopg
import pymysql
import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import Session

from semel import AsyncIdempotency, ConfigError, Idempotency, StoreError, ValueRejected
from semel.stores.sql.errors import REJECTED
from semel.stores.sql.mysql.errors import translate as of_mysql
from semel.stores.sql.postgres.errors import translate as of_postgres
from semel.stores.sql.sqlite_session import translate as of_sqlite
from semel.transactions import db_errors
from semel.transactions.drivers import MySQLdbLink
from transactions.kinds import KINDS, StandIn, mysql_login

BOTH = [kind for kind in KINDS if kind.name in {"sqlite3", "aiosqlite"}]


def on(kinds):
    return pytest.mark.parametrize("world", kinds, ids=lambda kind: kind.name, indirect=True)


# --- arguments -------------------------------------------------------------------------------


@on(BOTH)
@pytest.mark.parametrize("keys", ["abc", b"abc", None, 42], ids=repr)
async def test_what_is_no_collection_of_keys_is_refused(world, keys):
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(ConfigError, match="several keys are needed"):
            idem.transactions(work.connection, keys)


def connections(url):
    """Things that are often taken for what begins a transaction; some of them can be called."""
    yield create_engine("sqlite://", poolclass=NullPool)
    yield Session()
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        yield connection
    yield "default"
    yield None


@on(BOTH)
async def test_what_begins_nothing_is_refused(world):
    async with world.engine() as idem:
        for thing in connections(world.url):
            with pytest.raises(ConfigError, match=f"Session.begin, not {type(thing).__name__}"):
                await world.done(idem.run_transaction(thing, "k", lambda _: 1))


@on(BOTH)
async def test_what_cannot_be_entered_is_refused(world):
    async with world.engine() as idem:
        with pytest.raises(ConfigError, match="it gave object"):
            await world.done(idem.run_transaction(object, "k", lambda _: 1))


# --- Django ----------------------------------------------------------------------------------

UNCONFIGURED = """
from semel import ConfigError, Idempotency
with Idempotency("sqlite:///semel.db") as idem:
    try:
        idem.transaction("default", "k").__enter__()
    except ConfigError as error:
        print(error)
"""


def test_an_alias_without_djangos_settings_is_refused(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", UNCONFIGURED], capture_output=True, text=True, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert "Django has no settings here" in answer.stdout


def test_a_text_without_django_is_refused_and_not_shown(monkeypatch, sqlite_url):
    monkeypatch.setitem(sys.modules, "django.core.exceptions", None)
    with Idempotency(sqlite_url) as idem:
        with pytest.raises(ConfigError, match=r"alias of a Django database, and django") as refused:
            idem.transaction("postgresql://me:secret@host/db", "k").__enter__()
        assert "secret" not in str(refused.value)


async def test_a_connection_whose_driver_is_not_whole_is_refused(monkeypatch, postgres_url):
    async with (
        AsyncIdempotency(postgres_url) as idem,
        await psycopg.AsyncConnection.connect(postgres_url) as connection,
    ):
        monkeypatch.setitem(sys.modules, "psycopg.pq", None)
        with pytest.raises(ConfigError, match=r"psycopg\.pq is not installed"):
            await idem.transaction(connection, "k").__aenter__()


# --- mysqlclient, which does not tell whether a transaction is open ----------------------------


def test_mysqlclient_without_autocommit_is_always_in_a_transaction(mysql_url):
    with (
        Idempotency(mysql_url) as idem,
        contextlib.closing(StandIn(**mysql_login(mysql_url))) as connection,
    ):
        idem.peek("any")
        with idem.transaction(connection, "k") as attempt:
            attempt.result = 1
        assert idem.peek("k") is None
        connection.commit()
        assert idem.peek("k") is not None


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "READ COMMITTED"])
def test_under_sqlalchemy_it_is_told_by_its_autocommit(mysql_url, level):
    engine = create_engine(
        "mysql+pymysql://",
        creator=lambda: StandIn(**mysql_login(mysql_url)),
        poolclass=NullPool,
        isolation_level=level,
    )
    with Idempotency(mysql_url) as idem, engine.connect() as connection, connection.begin():
        idem.peek("any")
        if level == "AUTOCOMMIT":
            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                idem.transaction(connection, "k").__enter__()
        else:
            with idem.transaction(connection, "k") as attempt:
                attempt.result = 1
            assert idem.peek("k") is None


def test_a_lost_connection_of_mysqlclient_is_not_taken_for_one_without_a_transaction(
    mysql_url, monkeypatch
):
    execute = MySQLdbLink.execute

    def losing(self, statement):
        if statement.sql.startswith("RELEASE"):
            with contextlib.closing(StandIn(**mysql_login(mysql_url))) as other:
                other.kill(connection.thread_id())
        return execute(self, statement)

    monkeypatch.setattr(MySQLdbLink, "execute", losing)
    with (
        Idempotency(mysql_url) as idem,
        contextlib.closing(StandIn(**mysql_login(mysql_url), autocommit=True)) as connection,
        pytest.raises(StoreError, match="could not be written in this transaction"),
    ):
        idem.transaction(connection, "k").__enter__()


# --- what the database never takes -----------------------------------------------------------

TRIGGERS = {
    "sqlite": "CREATE TRIGGER refusing BEFORE INSERT ON idempotent_record "
    "BEGIN SELECT RAISE(ABORT, 'not here'); END",
    "postgresql": "CREATE FUNCTION refusing() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'not here'; END $$; "
    "CREATE TRIGGER refusing BEFORE INSERT ON idempotent_record "
    "FOR EACH ROW EXECUTE FUNCTION refusing()",
    "mysql": "CREATE TRIGGER refusing BEFORE INSERT ON idempotent_record FOR EACH ROW "
    "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not here'",
}


@on(KINDS)
async def test_what_a_trigger_refuses_is_the_same_error_in_a_transaction_and_through_the_store(
    world,
):
    async with world.engine() as idem:
        world.query(TRIGGERS[world.kind.dialect])
        with pytest.raises(ValueRejected, match="not here"):
            await world.pay(idem)
        with pytest.raises(ValueRejected, match="not here"):
            await world.done(idem.execute("order-1", lambda: pytest.fail("it ran")))
        assert world.entries() == []


def driver_errors():
    """One error of a driver for each answer that means: never."""
    for code in sorted(REJECTED, key=str):
        if isinstance(code, int):
            yield str(code), pymysql.err.OperationalError(code, "no"), of_mysql
        elif code.startswith("SQLITE_"):
            kind = sqlite3.DataError if code == "SQLITE_TOOBIG" else sqlite3.IntegrityError
            error = kind("no")
            error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, code), code
            yield code, error, of_sqlite
        else:
            yield code, psycopg.errors.lookup(code)("no"), of_postgres
    for code in ("22001", "22P05", "22003", "23503", "23514", "23P01"):
        yield code, psycopg.errors.lookup(code)("no"), of_postgres
    too_large = psycopg.errors.InternalError_("invalid memory alloc request size 1073741824")
    yield "too large", too_large, of_postgres


@pytest.mark.parametrize(
    ("error", "translate"), [pytest.param(*rest, id=name) for name, *rest in driver_errors()]
)
def test_what_can_never_be_stored_is_the_same_for_stores_and_transactions(error, translate):
    assert isinstance(translate(error, "the database"), ValueRejected)
    with pytest.raises(ValueRejected):
        db_errors.raise_end_error(error)


@pytest.mark.parametrize("code", ["23502", "23505"])
def test_a_column_or_a_row_of_somebody_else_is_no_fault_of_the_value(code):
    error = psycopg.errors.lookup(code)("no")
    assert not isinstance(of_postgres(error, "the database"), ValueRejected)
    with pytest.raises(StoreError) as raised:
        db_errors.raise_end_error(error)
    assert not isinstance(raised.value, ValueRejected)
