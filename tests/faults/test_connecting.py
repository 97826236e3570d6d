"""An exception while a connection is opened: a connection is used only when it is set up.

A signal handler, a time limit or a cancellation may raise at any line of the handshake (login,
choice of the database, settings of the session), the driver's lines among them. Each connection
here is struck at each of these lines in turn. The next call then uses the right database, with the
right settings, and gets its own replies.

| # | fault | what must hold |
|---|---|---|
| 55 | an exception between an act and the note of it | the next call works |
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import redis
import redis.asyncio

from engines.facade import World, until
from interrupting import PACKAGE, Step, TimeLimit, Trace
from semel import AsyncIdempotency, Idempotency, open_async_store, open_store
from semel.errors import IdempotencyError
from semel.stores.redis import AsyncRedisStore, RedisStore
from semel.stores.sql.errors import Deadline
from semel.stores.sql.sqlite import SQLiteStore
from semel.stores.sql.verbs import Statement
from servers.redis import (
    open_connections,
    redis_cluster,
    redis_sentinel,
    redis_server,
    wait_until,
)
from stores.sqlite_helpers import identity

pytestmark = [
    pytest.mark.usefixtures("not_measured"),
    # What is struck inside a driver is left to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

fault = pytest.mark.fault
more = pytest.mark.more

STORES = f"{PACKAGE}/stores"
keys = (f"k{number}" for number in count())


def folder_of(driver: Any) -> str:
    return str(Path(driver.__file__).parent)


def lines_of(trace: Trace, functions: tuple[str, ...], least: int) -> list[Step]:
    """List the lines of these functions, whether the driver's or ours."""
    lines = [
        step
        for step in trace.steps
        if step[1] == "line"
        and (step[0].co_name in functions or step[0].co_filename.startswith(f"{STORES}/redis"))
    ]
    assert len(lines) > least
    return lines


def ran() -> str:
    return "ran"


async def ran_async() -> str:
    return "ran"


# --- Redis ----------------------------------------------------------------------------------------

PASSWORD = "secret"
NAME = "semel-places"
DATABASE = 3
PARTS = ("connection", "sentinel")
CLIENT = folder_of(redis)
REDIS = tuple(f"{CLIENT}{color}/{name}.py" for color in ("", "/asyncio") for name in PARTS)
REDIS += tuple(f"{STORES}/redis/{name}.py" for name in ("threads", "tasks", "redis_py", "cluster"))
CONNECTING = (
    "get_connection",
    "ensure_connection",
    "acquire_connection",
    "connect",
    "connect_to",
    "_connect_retry",
    "connect_check_health",
    "_connect",
    "on_connect",
    "on_connect_check_health",
    "send_command",
    "send_packed_command",
    "read_response",
)


TAKING = (*CONNECTING, "make_connection", "release")
PLACES = 2


class OneRedis:
    """A server with a password; records are in a database that a new connection does not have."""

    def __init__(self, url: str, *servers: Any, database: int = DATABASE) -> None:
        self.url = url
        self._database = database
        self._servers = servers

    def check(self) -> None:
        for server in self._servers:
            with closing(server.client()) as client:
                assert set(client.info("keyspace")) == {f"db{self._database}"}

    def cut(self) -> None:
        """Close the connections that are named, so that the next call takes a new one."""
        for server in self._servers:
            with closing(server.client()) as client:
                for connection in client.client_list():
                    if connection["name"] == NAME:
                        client.client_kill_filter(_id=connection["id"])

    def check_connections(self, expected: int) -> None:
        for server in self._servers:
            with closing(server.client()) as client:
                wait_until(
                    lambda client=client: open_connections(client, NAME) == expected,
                    f"{expected} connections are open",
                )


@contextmanager
def one_server() -> Iterator[OneRedis]:
    with redis_server(password=PASSWORD) as server:
        yield OneRedis(server.url.replace("/0", f"/{DATABASE}"), server)


@contextmanager
def sentinel() -> Iterator[OneRedis]:
    with redis_sentinel(fails_over=False) as servers:
        yield OneRedis(servers.url.replace("/0", f"/{DATABASE}"), servers.primary)


@contextmanager
def cluster() -> Iterator[OneRedis]:
    with redis_cluster(1) as servers:
        yield OneRedis(servers.url, *servers.servers, database=0)


def by_url(url: str) -> tuple[Any, Callable[[], object]]:
    return url, int


def by_client(url: str) -> tuple[Any, Callable[[], object]]:
    client = redis.Redis.from_url(url)
    return RedisStore(client), client.close


@fault(55)
@pytest.mark.parametrize(
    ("servers", "opened"),
    [
        (one_server, by_url),
        pytest.param(one_server, by_client, marks=more),
        pytest.param(sentinel, by_url, marks=more),
        pytest.param(cluster, by_url, marks=more),
    ],
)
def test_redis_uses_no_connection_whose_handshake_was_struck(servers, opened):
    with servers() as given:

        def struck(trace: Trace) -> str:
            store, close = opened(given.url)
            with Idempotency(store) as idem:
                with suppress(TimeLimit, IdempotencyError):
                    trace.run(lambda: idem.execute(next(keys), ran))
                result = idem.execute(next(keys), ran)
            close()
            return result

        for _ in range(2):
            listed = Trace(within=REDIS)
            struck(listed)
        for step in lines_of(listed, CONNECTING, 100):
            where = f"{step[0].co_qualname}:{step[2]}"
            assert struck(Trace(step, TimeLimit(), within=REDIS)) == "ran", where
        given.check()


def by_async_client(url: str) -> tuple[Any, Callable[[], Any]]:
    client = redis.asyncio.Redis.from_url(url)
    return AsyncRedisStore(client), client.connection_pool.disconnect


def by_async_url(url: str) -> tuple[Any, Callable[[], Any]]:
    return url, asyncio.sleep


@fault(55)
@pytest.mark.parametrize("error", [TimeLimit, pytest.param(asyncio.CancelledError, marks=more)])
@pytest.mark.parametrize(
    ("servers", "opened"),
    [
        (one_server, by_async_url),
        pytest.param(one_server, by_async_client, marks=more),
        pytest.param(sentinel, by_async_url, marks=more),
        pytest.param(cluster, by_async_url, marks=more),
    ],
)
async def test_so_it_is_with_tasks(servers, opened, error):
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # what strikes a call-back
    with servers() as given:

        async def struck(trace: Trace) -> str:
            store, close = opened(given.url)
            async with AsyncIdempotency(store) as idem, asyncio.timeout(60):
                with suppress(TimeLimit, asyncio.CancelledError, IdempotencyError):
                    await trace.awaited(idem.execute(next(keys), ran_async))
                result = await idem.execute(next(keys), ran_async)
            await close(0)
            return result

        for _ in range(2):
            listed = Trace(within=REDIS)
            await struck(listed)
        for step in lines_of(listed, CONNECTING, 100):
            where = f"{step[0].co_qualname}:{step[2]}"
            assert await struck(Trace(step, error(), within=REDIS)) == "ran", where
        given.check()


def callers_at_once(idem: Idempotency) -> list[str]:
    """As many callers as there are places, each in its function at the same time."""
    together = threading.Barrier(PLACES)

    def run() -> str:
        together.wait(60)
        return "ran"

    with ThreadPoolExecutor(PLACES) as threads:
        calls = [threads.submit(idem.execute, next(keys), run) for _ in range(PLACES)]
        return [call.result() for call in calls]


@fault(55)
@pytest.mark.parametrize("servers", [one_server, pytest.param(cluster, marks=more)])
def test_redis_loses_no_place_when_taking_a_connection_is_struck(servers):
    with servers() as given:
        url = f"{given.url}?max_connections={PLACES}&client_name={NAME}"
        with Idempotency(url) as idem:

            def struck(trace: Trace) -> None:
                given.cut()
                with suppress(TimeLimit, IdempotencyError):
                    trace.run(lambda: idem.execute(next(keys), ran))

            for _ in range(2):
                listed = Trace(within=REDIS)
                struck(listed)
            for step in lines_of(listed, TAKING, 100):
                struck(Trace(step, TimeLimit(), within=REDIS))
                where = f"{step[0].co_qualname}:{step[2]}"
                assert idem.execute(next(keys), ran) == "ran", where
            gc.collect()
            given.check_connections(1)
            assert callers_at_once(idem) == ["ran"] * PLACES
        given.check_connections(0)


@fault(55)
@pytest.mark.parametrize("servers", [one_server])
async def test_nor_does_it_with_tasks(servers):
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with servers() as given:
        url = f"{given.url}?max_connections={PLACES}&client_name={NAME}"
        async with AsyncIdempotency(url) as idem:

            async def struck(trace: Trace) -> None:
                given.cut()
                calls = idem.internals.store.transport._connections.calls
                await until(lambda: calls.connection is None or calls.connection.broken)
                with suppress(TimeLimit, IdempotencyError):
                    async with asyncio.timeout(60):
                        await trace.awaited(idem.execute(next(keys), ran_async))

            for _ in range(2):
                listed = Trace(within=REDIS)
                await struck(listed)
            for step in lines_of(listed, TAKING, 100):
                await struck(Trace(step, TimeLimit(), within=REDIS))
                where = f"{step[0].co_qualname}:{step[2]}"
                assert await idem.execute(next(keys), ran_async) == "ran", where
            gc.collect()
            given.check_connections(1)
        given.check_connections(0)


class Credentials(redis.CredentialProvider):
    """A provider that fails once, with an error of its own."""

    failures = 1

    def get_credentials(self) -> tuple[str]:
        if self.failures:
            self.failures -= 1
            raise LookupError("no token")
        return (PASSWORD,)


@fault(55)
def test_a_failing_credential_provider_leaves_no_connection_without_a_login(kind):
    with one_server() as given, World(kind, given.url) as world:
        opened = open_store if kind == "threads" else open_async_store
        url = given.url.replace(f":{PASSWORD}@", "")
        store = opened(url, credential_provider=Credentials())
        with pytest.raises(LookupError):
            world.kind.finish(store.get, identity("k"))
        assert world.kind.finish(store.get, identity("k")) is None
        world.kind.finish(store.close)


# --- SQL ------------------------------------------------------------------------------------------

SETTINGS = {
    "postgres": "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'), "
    "current_setting('default_transaction_isolation'), current_setting('enable_seqscan')",
    "mysql": "SELECT @@sql_mode, @@innodb_lock_wait_timeout, @@tx_isolation, @@time_zone, "
    "@@autocommit, @@character_set_client",
}


SQL_CONNECTING = (
    "take",
    "_open",
    "open_session",
    "open_connection",
    "_set_up",
    "connect",
    "connect_until",
    "connect_within",
    "connect_prepared",
    "connect_asyncpg",
    "_request_authentication",
    "_bounded",
)


def look(store: str) -> Statement:
    return Statement(SETTINGS[store], (), writes=False)


@fault(55)
@pytest.mark.parametrize("store", ["postgres", "mysql"])
def test_sql_uses_no_connection_whose_set_up_was_struck(request, store):
    url = request.getfixturevalue(f"{store}_url")
    within = (f"{STORES}/sql", folder_of(psycopg), folder_of(pymysql))

    def struck(trace: Trace) -> Any:
        with Idempotency(url) as idem:
            with suppress(TimeLimit, IdempotencyError):
                trace.run(lambda: idem.execute(next(keys), ran))
            assert idem.execute(next(keys), ran) == "ran"
            with idem.internals.store._calls.pool.lend(Deadline(60)) as session:
                session.begin(Deadline(60))
                return session.execute(look(store)).rows

    for _ in range(2):
        listed = Trace(within=within)
        expected = struck(listed)
    for step in lines_of(listed, SQL_CONNECTING, 30):
        where = f"{step[0].co_qualname}:{step[2]}"
        assert struck(Trace(step, TimeLimit(), within=within)) == expected, where


@fault(55)
@pytest.mark.parametrize("store", ["postgres", "mysql"])
async def test_so_it_is_with_sql_and_tasks(request, store):
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    url = request.getfixturevalue(f"{store}_url")
    # Not the driver's: what strikes inside of asyncpg leaves a socket that its loop never closes.
    within = (f"{STORES}/sql",)

    async def struck(trace: Trace) -> Any:
        async with AsyncIdempotency(url) as idem, asyncio.timeout(60):
            with suppress(TimeLimit, IdempotencyError):
                await trace.awaited(idem.execute(next(keys), ran_async))
            assert await idem.execute(next(keys), ran_async) == "ran"
            async with idem.internals.store._calls.pool.lend(Deadline(60)) as session:
                session.begin(Deadline(60))
                return (await session.execute(look(store))).rows

    for _ in range(2):
        listed = Trace(within=within)
        expected = await struck(listed)
    for step in lines_of(listed, SQL_CONNECTING, 20):
        where = f"{step[0].co_qualname}:{step[2]}"
        assert await struck(Trace(step, TimeLimit(), within=within)) == expected, where


@fault(55)
@pytest.mark.parametrize("given", [False, True], ids=["file", "connection"])
def test_sqlite_uses_no_connection_whose_set_up_was_struck(tmp_path, given):
    within = (f"{STORES}/sql/sqlite.py",)
    numbers = count()

    def struck(trace: Trace) -> Any:
        path = tmp_path / f"{next(numbers)}.db"
        own = sqlite3.connect(path, check_same_thread=False)
        store = SQLiteStore(connection=own) if given else SQLiteStore(path)
        with closing(own), closing(store):
            with suppress(TimeLimit, IdempotencyError):
                trace.run(lambda: store.get(identity("k")))
            assert store.get(identity("k")) is None
            used = store._executor._session._connection
            names = ("synchronous", "busy_timeout", "wal_autocheckpoint", "journal_mode")
            return [used.execute(f"PRAGMA {name}").fetchone() for name in names]

    for _ in range(2):
        listed = Trace(within=within)
        expected = struck(listed)
    lines = [step for step in listed.steps if step[1] == "line"]
    assert len(lines) > 10
    for step in lines:
        where = f"{step[0].co_qualname}:{step[2]}"
        assert struck(Trace(step, TimeLimit(), within=within)) == expected, where
