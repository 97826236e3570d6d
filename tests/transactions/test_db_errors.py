"""Arguments that are rejected before a connection is touched, and what errors of databases mean."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys

import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest
from django.db.utils import OperationalError as DjangoError
from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session

from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    ConfigError,
    Idempotency,
    RetryTransaction,
    StoreError,
    StoreUnavailable,
    ValueRejected,
)
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
        with pytest.raises(ConfigError, match="it returned object"):
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


# --- whose error it is -----------------------------------------------------------------------


class Invented(psycopg.OperationalError):
    """An application's own class is not the driver's."""


LOST = [
    *(psycopg.errors.lookup(code)("no") for code in ("57P01", "57P02", "57P03", "25006", "08006")),
    asyncpg.ConnectionDoesNotExistError("no"),
    asyncpg.InterfaceError("connection is closed"),
    psycopg.OperationalError("the connection is closed"),
    *(
        kind(code, "no")
        for kind in (pymysql.err.OperationalError, asyncmy.errors.OperationalError)
        for code in (1047, 1053, 1180, 1792, 1836, 1927, 2006, 2013, 2055)
    ),
    pymysql.err.OperationalError(1290, "The MariaDB server is running with the --read-only option"),
    pymysql.err.InterfaceError(0, ""),
]
NOT_LOST = [
    *(psycopg.errors.lookup(code)("no") for code in ("23505", "40001", "25P02", "25P03", "53100")),
    asyncpg.InterfaceError("the query has 1 argument, 2 were given"),
    Invented("no"),
    psycopg.InterfaceError("the cursor is closed"),
    *(pymysql.err.OperationalError(code, "no") for code in (1153, 1062, 1213, 2014)),
    pymysql.err.OperationalError(1290, "is running with the --secure-file-priv option"),
    KeyError(2006),
    ConnectionResetError("by another server"),
]


RETRIED = [
    *(psycopg.errors.lookup(code)("no") for code in ("40001", "40P01")),
    asyncpg.SerializationError("no"),
    asyncpg.DeadlockDetectedError("no"),
    *(
        kind(code, "no")
        for kind in (pymysql.err.OperationalError, asyncmy.errors.OperationalError)
        for code in (1020, 1205, 1213, 3101)
    ),
    RetryTransaction("no"),
]
NOT_RETRIED = [
    *(psycopg.errors.lookup(code)("no") for code in ("23505", "25P02", "57P01")),
    pymysql.err.IntegrityError(1062, "no"),
    KeyError(1213),
]


class OwnError(Exception):
    """What an application makes of errors of its database."""


def raised_by(wrapper, error):
    """The error as a framework, or an application, raises it."""
    match wrapper:
        case "application":
            wrapped = OwnError("no")
            wrapped.__cause__ = error
            return wrapped
        case "while it was handled":
            return handled(error)
        case "sqlalchemy":
            return DBAPIError("SELECT 1", None, error)
        case "django":
            wrapped = DjangoError("no")
            wrapped.__cause__ = error
            return wrapped
        case "group":  # as of several tasks
            return ExceptionGroup("no", [OwnError("another task's"), error])
        case "all of them":
            for each in ("sqlalchemy", "while it was handled", "group", "application"):
                error = raised_by(each, error)
    return error


def handled(error, own=OwnError):
    """What is raised, without `from`, where an error is caught."""
    try:
        try:
            raise error  # noqa: TRY301 - the case
        except Exception:
            raise own("no")  # noqa: B904 - the case
    except own as found:
        return found


WRAPPERS = ["", "sqlalchemy", "django", "application", "while it was handled", "group"]


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "all of them"])
def test_the_class_of_an_error_says_whether_its_connection_was_lost(wrapper):
    for error in LOST:
        assert db_errors.is_lost(raised_by(wrapper, error)), repr(error)
    for error in NOT_LOST:
        assert not db_errors.is_lost(raised_by(wrapper, error)), repr(error)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "all of them"])
def test_the_class_of_an_error_says_whether_its_transaction_is_to_be_repeated(wrapper):
    for error in RETRIED:
        assert db_errors.must_retry(raised_by(wrapper, error)), repr(error)
    for error in NOT_RETRIED:
        assert not db_errors.must_retry(raised_by(wrapper, error)), repr(error)


@pytest.mark.parametrize("error", [LOST[0], RETRIED[0]], ids=["lost", "retried"])
def test_an_error_that_was_raised_from_none_means_itself(error):
    own = handled(error)
    own.__cause__ = None  # which is what `from None` does
    assert not db_errors.must_retry(own)
    assert not db_errors.is_lost(own)


@pytest.mark.parametrize("error", [LOST[0], RETRIED[0]], ids=["lost", "retried"])
def test_what_was_handled_before_the_unit_of_work_began_says_nothing_about_it(error):
    own = handled(error)
    assert not db_errors.must_retry(own, around=error)
    assert not db_errors.is_lost(own, around=error)


@pytest.mark.parametrize("error", [LOST[0], RETRIED[0]], ids=["lost", "retried"])
def test_an_interruption_means_itself(error):
    for interruption in (asyncio.CancelledError, KeyboardInterrupt):
        assert not db_errors.must_retry(handled(error, interruption))
        assert not db_errors.is_lost(handled(error, interruption))
    both = BaseExceptionGroup("no", [error, KeyboardInterrupt()])
    assert not db_errors.must_retry(both)


def test_an_error_of_semel_means_itself_whatever_it_was_made_of():
    locked = raised_by("application", pymysql.err.OperationalError(1205, "Lock wait timeout"))
    with pytest.raises(ConcurrentRequest) as busy:
        db_errors.raise_claim_error(locked.__cause__)
    assert busy.value.__cause__ is locked.__cause__
    for wrapper in WRAPPERS:
        assert not db_errors.must_retry(raised_by(wrapper, busy.value))
        assert db_errors.is_lost(raised_by(wrapper, StoreUnavailable("no")))


def test_errors_that_are_the_cause_of_each_other_end():
    one, other = OwnError("one"), OwnError("other")
    one.__cause__, other.__cause__ = other, one
    assert not db_errors.is_lost(one)


def test_what_sqlalchemy_says_of_a_connection_counts():
    assert db_errors.is_lost(
        DBAPIError("SELECT 1", None, Invented("no"), connection_invalidated=True)
    )
    assert db_errors.is_lost(PendingRollbackError("Can't reconnect", code="8s2b"))
    assert not db_errors.is_lost(PendingRollbackError("a flush has failed", code="7s2a"))


def test_sqlite_that_cannot_write_its_file_is_lost_too():
    error = sqlite3.OperationalError("attempt to write a readonly database")
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_READONLY, "SQLITE_READONLY"
    assert db_errors.is_lost(error)


def test_a_lost_connection_is_an_outage_of_the_store():
    for error in (*LOST, ConnectionResetError("by this server")):
        with pytest.raises(StoreUnavailable):
            db_errors.raise_end_error(error)
