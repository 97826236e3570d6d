"""Every kind of connection that transactional mode takes, behind one way to use it.

All of them are written as coroutines; those for threads simply never wait. A test that needs two of
them at once gives each its own thread.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

try:
    import MySQLdb
except ModuleNotFoundError:
    MySQLdb = pymysql
MYSQLCLIENT = MySQLdb is not pymysql
"""Whether mysqlclient is installed, which needs a compiler and the headers of the client library."""

Run = Callable[[str], Awaitable[list[Any]]]

PATIENCE = 30.0


class Work(NamedTuple):
    """An open connection of some kind."""

    connection: Any
    """What `idem.transaction()` is given."""
    run: Run
    """Runs a statement of the application, and gives its rows."""


class Kind(NamedTuple):
    """A kind of connection."""

    name: str
    dialect: str
    asynchronous: bool
    idle: Callable[[str], AbstractAsyncContextManager[Work]]
    """Opens one without a transaction."""
    working: Callable[[str], AbstractAsyncContextManager[Work]]
    """Opens one with a transaction, which is committed in the end, or rolled back by an error."""


def path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def mysql_login(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": unquote(parts.password or ""),
        "database": parts.path[1:],
        "connect_timeout": int(PATIENCE),
    }


# --- drivers ---------------------------------------------------------------------------------


@asynccontextmanager
async def idle_sqlite3(url: str) -> AsyncIterator[Work]:
    with closing(sqlite3.connect(path_of(url), timeout=PATIENCE, isolation_level=None)) as raw:

        async def run(sql: str) -> list[Any]:
            return raw.execute(sql).fetchall()

        yield Work(raw, run)


@asynccontextmanager
async def idle_aiosqlite(url: str) -> AsyncIterator[Work]:
    async with aiosqlite.connect(path_of(url), timeout=PATIENCE, isolation_level=None) as raw:

        async def run(sql: str) -> list[Any]:
            async with raw.execute(sql) as cursor:
                return list(await cursor.fetchall())

        yield Work(raw, run)


@asynccontextmanager
async def idle_psycopg(url: str) -> AsyncIterator[Work]:
    with psycopg.connect(url) as raw:

        async def run(sql: str) -> list[Any]:
            cursor = raw.execute(sql)
            return cursor.fetchall() if cursor.description else []

        yield Work(raw, run)


@asynccontextmanager
async def idle_async_psycopg(url: str) -> AsyncIterator[Work]:
    async with await psycopg.AsyncConnection.connect(url) as raw:

        async def run(sql: str) -> list[Any]:
            cursor = await raw.execute(sql)
            return await cursor.fetchall() if cursor.description else []

        yield Work(raw, run)


@asynccontextmanager
async def idle_asyncpg(url: str) -> AsyncIterator[Work]:
    raw = await asyncpg.connect(url)
    try:

        async def run(sql: str) -> list[Any]:
            return [tuple(row) for row in await raw.fetch(sql)]

        yield Work(raw, run)
    finally:
        await raw.close()


@asynccontextmanager
async def idle_pymysql(url: str) -> AsyncIterator[Work]:
    with closing(pymysql.connect(**mysql_login(url))) as raw:

        async def run(sql: str) -> list[Any]:
            with raw.cursor() as cursor:
                cursor.execute(sql)
                return list(cursor.fetchall())

        yield Work(raw, run)


class StandIn(pymysql.connections.Connection):
    """What mysqlclient's connection has in common with PyMySQL's, where it is not installed."""

    default_cursor = pymysql.cursors.Cursor


StandIn.__name__, StandIn.__module__ = "Connection", "MySQLdb.connections"


@asynccontextmanager
async def idle_mysqlclient(url: str) -> AsyncIterator[Work]:
    connect: Any = MySQLdb.connect if MYSQLCLIENT else StandIn
    with closing(connect(**mysql_login(url), autocommit=True)) as raw:

        async def run(sql: str) -> list[Any]:
            with closing(raw.cursor()) as cursor:
                cursor.execute(sql)
                return list(cursor.fetchall())

        yield Work(raw, run)


@asynccontextmanager
async def idle_asyncmy(url: str) -> AsyncIterator[Work]:
    async with asyncmy.connect(**mysql_login(url)) as raw:

        async def run(sql: str) -> list[Any]:
            async with raw.cursor() as cursor:
                await cursor.execute(sql)
                return list(await cursor.fetchall())

        yield Work(raw, run)


def by_hand(
    idle: Callable[[str], AbstractAsyncContextManager[Work]], begin: str
) -> Callable[[str], AbstractAsyncContextManager[Work]]:
    """Work between a BEGIN and a COMMIT that are sent as they are."""

    @asynccontextmanager
    async def working(url: str) -> AsyncIterator[Work]:
        async with idle(url) as work:
            await work.run(begin)
            try:
                yield work
            except BaseException:
                await work.run("ROLLBACK")
                raise
            await work.run("COMMIT")

    return working


# --- SQLAlchemy ------------------------------------------------------------------------------


def sqlalchemy_url(url: str, driver: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}+{driver}://{rest}"


def plain(name: str, driver: str, *, session: bool) -> Kind:
    """SQLAlchemy for threads, on a driver."""

    @asynccontextmanager
    async def idle(url: str) -> AsyncIterator[Work]:
        engine = create_engine(sqlalchemy_url(url, driver), poolclass=NullPool)
        with Session(engine) if session else engine.connect() as given:

            async def run(sql: str) -> list[Any]:
                result = given.execute(text(sql))
                return [tuple(row) for row in result] if result.returns_rows else []

            yield Work(given, run)

    @asynccontextmanager
    async def working(url: str) -> AsyncIterator[Work]:
        async with idle(url) as work:
            with work.connection.begin():
                yield work

    return Kind(name, dialect_of(driver), False, idle, working)


def awaited(name: str, driver: str, *, session: bool) -> Kind:
    """SQLAlchemy for asyncio, on a driver."""

    @asynccontextmanager
    async def idle(url: str) -> AsyncIterator[Work]:
        engine = create_async_engine(sqlalchemy_url(url, driver), poolclass=NullPool)
        async with AsyncSession(engine) if session else engine.connect() as given:

            async def run(sql: str) -> list[Any]:
                result = await given.execute(text(sql))
                return [tuple(row) for row in result] if result.returns_rows else []

            yield Work(given, run)

    @asynccontextmanager
    async def working(url: str) -> AsyncIterator[Work]:
        async with idle(url) as work, work.connection.begin():
            yield work

    return Kind(name, dialect_of(driver), True, idle, working)


def dialect_of(driver: str) -> str:
    return {
        "pysqlite": "sqlite",
        "aiosqlite": "sqlite",
        "psycopg": "postgresql",
        "asyncpg": "postgresql",
    }.get(driver, "mysql")


# --- Django ----------------------------------------------------------------------------------

os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # the tests are coroutines, the work is not


def django_settings(dialect: str, url: str) -> dict[str, Any]:
    if dialect == "sqlite":
        import django

        mode = {"transaction_mode": "IMMEDIATE"} if django.VERSION >= (5, 1) else {}
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": path_of(url),
            "OPTIONS": {"timeout": PATIENCE, **mode},
        }
    parts = urlsplit(url)
    return {
        "ENGINE": f"django.db.backends.{dialect}",
        "NAME": parts.path[1:],
        "HOST": parts.hostname,
        "PORT": parts.port,
        "USER": parts.username,
        "PASSWORD": unquote(parts.password or ""),
    }


def django_alias(dialect: str, url: str) -> str:
    """Tell Django of a database; gives its alias."""
    import django
    from django.conf import settings
    from django.db import connections

    if not MYSQLCLIENT:
        pymysql.install_as_MySQLdb()
    if not settings.configured:
        settings.configure(
            DATABASES={"default": {}}, INSTALLED_APPS=["semel.contrib.django"], USE_TZ=True
        )
        django.setup()
    alias = url
    known = connections.configure_settings({"default": {}, alias: django_settings(dialect, url)})
    connections.databases[alias] = known[alias]
    return alias


def of_django(dialect: str, *, by_alias: bool) -> Kind:
    @asynccontextmanager
    async def idle(url: str) -> AsyncIterator[Work]:
        from django.db import connections

        alias = django_alias(dialect, url)
        wrapper = connections[alias]

        async def run(sql: str) -> list[Any]:
            with wrapper.cursor() as cursor:
                cursor.execute(sql)
                return list(cursor.fetchall()) if cursor.description else []

        try:
            yield Work(alias if by_alias else wrapper, run)
        finally:
            wrapper.close()

    @asynccontextmanager
    async def working(url: str) -> AsyncIterator[Work]:
        from django.db import transaction

        async with idle(url) as work:
            with transaction.atomic(using=url):
                yield work

    how = "alias" if by_alias else "connection"
    return Kind(f"django-{how}-{dialect}", dialect, False, idle, working)


BEGIN = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "BEGIN", "mysql": "START TRANSACTION"}


def driver(name: str, dialect: str, idle: Any, *, asynchronous: bool) -> Kind:
    return Kind(name, dialect, asynchronous, idle, by_hand(idle, BEGIN[dialect]))


KINDS = [
    driver("sqlite3", "sqlite", idle_sqlite3, asynchronous=False),
    driver("aiosqlite", "sqlite", idle_aiosqlite, asynchronous=True),
    driver("psycopg", "postgresql", idle_psycopg, asynchronous=False),
    driver("async-psycopg", "postgresql", idle_async_psycopg, asynchronous=True),
    driver("asyncpg", "postgresql", idle_asyncpg, asynchronous=True),
    driver("pymysql", "mysql", idle_pymysql, asynchronous=False),
    driver("mysqlclient", "mysql", idle_mysqlclient, asynchronous=False),
    driver("asyncmy", "mysql", idle_asyncmy, asynchronous=True),
    *(
        plain(f"sqlalchemy-{what}-{name}", name, session=what == "session")
        for what in ("session", "connection")
        for name in ("pysqlite", "psycopg", "pymysql", *(["mysqldb"] if MYSQLCLIENT else []))
    ),
    *(
        awaited(f"sqlalchemy-async-{what}-{name}", name, session=what == "session")
        for what in ("session", "connection")
        for name in ("aiosqlite", "psycopg", "asyncpg", "asyncmy")
    ),
    *(of_django(dialect, by_alias=True) for dialect in BEGIN),
    of_django("postgresql", by_alias=False),
]

ONE_EACH = [kind for kind in KINDS if kind.name in {"sqlite3", "async-psycopg", "pymysql"}]
"""For what is the database's doing, not the connection's."""
