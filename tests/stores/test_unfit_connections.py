"""Connections and databases that semel cannot use as they are: it works, or one clear error says why.

psycopg in pipeline mode, a pooler that loses prepared statements, encodings that give bytes.
"""

from __future__ import annotations

import contextlib
import sqlite3

import asyncmy
import psycopg
import pymysql
import pytest

from engines.facade import KINDS, Effect, World, never
from semel import AsyncIdempotency, ConfigError, Idempotency
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.mysql.addresses import parse
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from semel.stores.sql.postgres.threads import PreparedSession
from semel.stores.sql.verbs import Statement
from servers.postgres import pgbouncer

GERMAN = "K\u00e4ufer"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- psycopg in pipeline mode ---------------------------------------------------------------


def test_a_connection_in_pipeline_mode_is_refused_by_a_transaction(postgres_url):
    with Idempotency(postgres_url) as idem, psycopg.connect(postgres_url) as connection:
        idem.peek("any")
        with (
            connection.pipeline(),
            connection.transaction(),
            pytest.raises(ConfigError, match="pipeline mode"),
            idem.transaction(connection, "k"),
        ):
            pytest.fail("the block ran")
        with connection.transaction(), idem.transaction(connection, "k") as attempt:
            attempt.result = "outside"
        assert idem.execute("k", never) == "outside"


async def test_an_async_connection_in_pipeline_mode_is_refused_by_a_transaction(postgres_url):
    async with (
        AsyncIdempotency(postgres_url) as idem,
        await psycopg.AsyncConnection.connect(postgres_url) as connection,
    ):
        await idem.peek("any")
        async with connection.transaction(), connection.pipeline():
            with pytest.raises(ConfigError, match="pipeline mode"):
                await idem.transaction(connection, "k").__aenter__()
        async with connection.transaction(), idem.transaction(connection, "k") as attempt:
            attempt.result = "outside"
        assert (await idem.peek("k")).outcome is not None


def test_a_given_connection_in_pipeline_mode_is_refused(postgres_url):
    with (
        psycopg.connect(postgres_url) as connection,
        Idempotency(PostgresStore(connection=connection)) as idem,
    ):
        with connection.pipeline(), pytest.raises(ConfigError, match="pipeline mode"):
            idem.execute("k", never)
        assert idem.execute("k", lambda: "outside") == "outside"


async def test_a_given_async_connection_in_pipeline_mode_is_refused(postgres_url):
    async def effect():
        return "outside"

    async with (
        await psycopg.AsyncConnection.connect(postgres_url) as connection,
        AsyncIdempotency(AsyncPostgresStore(connection=connection)) as idem,
    ):
        async with connection.pipeline():
            with pytest.raises(ConfigError, match="pipeline mode"):
                await idem.execute("k", effect)
        assert await idem.execute("k", effect) == "outside"


# --- pgbouncer without prepare=off ----------------------------------------------------------


@contextlib.contextmanager
def bouncer_with_two_servers(server, url):
    """Give the URL of a bouncer that has two connections open, which it gives out in turn."""
    with pgbouncer(server) as address:
        through = f"{address}/{url.rpartition('/')[2]}"
        with psycopg.connect(through) as one, psycopg.connect(through) as other:
            pids = {c.execute("SELECT pg_backend_pid()").fetchone() for c in (one, other)}
            assert len(pids) == 2
        yield through


def test_pgbouncer_without_prepare_off_is_an_error_that_names_the_option(
    kind, postgres_of_this_worker, postgres_url
):
    with (
        bouncer_with_two_servers(postgres_of_this_worker, postgres_url) as url,
        World(kind, url) as world,
    ):
        engine = world.engine()

        def calls():
            for number in range(10):  # one of the first meets a server that does not know it
                engine.execute(f"k{number}", Effect(number))

        with pytest.raises(ConfigError, match=r"pgbouncer.*add prepare=off to the URL"):
            calls()
        with World(kind, f"{url}?prepare=off") as right:
            for number in range(10):
                assert right.engine().execute(f"right{number}", Effect(number)) == number


def test_the_name_of_a_prepared_statement_tells_which_statement_it_is(postgres_url):
    # Behind a bouncer, the name of one program's statement may be known by another's.
    def prepared(*verbs):
        with psycopg.connect(postgres_url) as connection:
            session = PreparedSession(connection)
            session.begin(Deadline(float("inf")))
            for statement in verbs:
                session.execute(statement)
            rows = connection.execute("SELECT name, statement FROM pg_prepared_statements")
            return dict(rows.fetchall())

    one, two = (Statement(f"SELECT $1::int + {n}", (n,), writes=False) for n in (1, 2))
    there, elsewhere = prepared(one, two), prepared(two, one)
    assert len(there) == len(elsewhere) == 2
    assert not there.keys() & elsewhere.keys()


# --- SQL_ASCII ------------------------------------------------------------------------------


@pytest.fixture
def ascii_url(postgres_url):
    """A database in SQL_ASCII."""
    name = "without_encoding"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name}")
        admin.execute(
            f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 "
            "LC_COLLATE 'C' LC_CTYPE 'C'"
        )
    return f"{postgres_url.rpartition('/')[0]}/{name}"


@pytest.mark.parametrize("options", ["", "?prepare=off", "?client_encoding=sql_ascii"])
def test_a_database_in_sql_ascii_works(kind, ascii_url, options):
    with World(kind, ascii_url + options) as world:
        assert world.engine().execute(GERMAN, Effect("\u00fcber")) == "\u00fcber"
        assert world.engine().execute(GERMAN, never) == "\u00fcber"
        assert world.engine().peek(GERMAN).key == GERMAN


def test_a_given_connection_in_sql_ascii_is_told_how_to_be_opened(ascii_url):
    with (
        psycopg.connect(ascii_url) as connection,
        Idempotency(PostgresStore(connection=connection)) as idem,
        pytest.raises(ConfigError, match="client_encoding=utf8"),
    ):
        idem.execute("k", never)
    with (
        psycopg.connect(ascii_url, client_encoding="utf8") as connection,
        Idempotency(PostgresStore(connection=connection)) as idem,
    ):
        assert idem.execute(GERMAN, lambda: 1) == 1
        assert idem.execute(GERMAN, never) == 1


def test_a_transaction_in_sql_ascii_is_told_how_to_be_opened(ascii_url):
    with Idempotency(ascii_url) as idem:
        idem.peek("any")
        with (
            psycopg.connect(ascii_url) as connection,
            connection.transaction(),
            pytest.raises(ConfigError, match="client_encoding=utf8"),
            idem.transaction(connection, "k"),
        ):
            pytest.fail("the block ran")
        assert idem.peek("k") is None


# --- use_unicode=False ----------------------------------------------------------------------


def arguments(url):
    address, _ = parse(url, {})
    return {
        "host": address.host,
        "port": address.port,
        "user": address.user,
        "password": address.password.decode(),
        "database": address.database,
    }


def test_a_connection_of_pymysql_without_unicode_is_told_how_to_be_opened(mysql_url):
    def connect(**more):
        return lambda: pymysql.connect(**arguments(mysql_url), **more)

    with (
        contextlib.closing(MySQLStore(connect=connect(use_unicode=False))) as store,
        Idempotency(store) as idem,
        pytest.raises(ConfigError, match="use_unicode=False"),
    ):
        idem.execute("k", never)
    with contextlib.closing(MySQLStore(connect=connect())) as store, Idempotency(store) as idem:
        assert idem.execute(GERMAN, lambda: 1) == 1
        assert idem.execute(GERMAN, never) == 1


async def test_a_connection_of_asyncmy_without_unicode_is_told_how_to_be_opened(mysql_url):
    async def effect():
        return 1

    def connect(**more):
        return lambda: asyncmy.connect(**arguments(mysql_url), **more)

    store = AsyncMySQLStore(connect=connect(use_unicode=False))
    async with AsyncIdempotency(store) as idem:
        with pytest.raises(ConfigError, match="use_unicode=False"):
            await idem.execute("k", effect)
    await store.close()
    store = AsyncMySQLStore(connect=connect())
    async with AsyncIdempotency(store) as idem:
        assert await idem.execute(GERMAN, effect) == 1
        assert await idem.execute(GERMAN, effect) == 1
    await store.close()


def test_a_connection_that_garbles_texts_is_told_how_to_be_opened(mysql_url):
    party = "\N{PARTY POPPER}"

    def store(charset):
        arguments_ = arguments(mysql_url)
        return contextlib.closing(
            MySQLStore(connect=lambda: pymysql.connect(**arguments_, charset=charset))
        )

    with store("utf8") as narrow, Idempotency(narrow) as idem:  # of three bytes, in the beginning
        assert idem.execute(party, lambda: 1) == 1
        assert idem.execute(party, never) == 1
    with (
        store("latin1") as narrower,
        Idempotency(narrower) as idem,
        pytest.raises(ConfigError, match="charset='utf8mb4'"),
    ):
        idem.execute(party, never)


def test_a_transaction_without_unicode_is_told_how_to_be_opened(mysql_url):
    with (
        Idempotency(mysql_url) as idem,
        contextlib.closing(
            pymysql.connect(**arguments(mysql_url), use_unicode=False)
        ) as connection,
    ):
        idem.peek("any")
        connection.begin()
        with (
            pytest.raises(ConfigError, match="use_unicode=False"),
            idem.transaction(connection, "k"),
        ):
            pytest.fail("the block ran")


async def test_an_async_transaction_without_unicode_is_told_how_to_be_opened(mysql_url):
    async with AsyncIdempotency(mysql_url) as idem:
        await idem.peek("any")
        connection = await asyncmy.connect(**arguments(mysql_url), use_unicode=False)
        await connection.begin()
        with pytest.raises(ConfigError, match="use_unicode=False"):
            await idem.transaction(connection, "k").__aenter__()
        connection.close()


# --- text_factory ---------------------------------------------------------------------------


def test_a_transaction_of_sqlite_whose_texts_are_bytes_is_told_what_to_set(tmp_path):
    path = tmp_path / "semel.db"
    with (
        Idempotency(f"sqlite:///{path}") as idem,
        contextlib.closing(sqlite3.connect(path)) as connection,
    ):
        idem.peek("any")
        connection.text_factory = bytes
        connection.execute("BEGIN IMMEDIATE")
        with (
            pytest.raises(ConfigError, match="text_factory must be str"),
            idem.transaction(connection, "k"),
        ):
            pytest.fail("the block ran")
