"""A call that has waited for a place in the pool has only the rest of its time for the server.

The server here is one that does not answer. What is asked of it has a moment left, of a timeout
that is far longer: it must end with the moment.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from semel.errors import StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import aio, store, tasks, threads
from semel.stores.sql.mysql.addresses import parse
from semel.stores.sql.mysql.errors import MySQLDeadline
from semel.stores.sql.postgres.aio_pool import AsyncOwnPool
from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.pool import OwnPool
from semel.stores.sql.postgres.psycopg_sessions import async_connect
from semel.stores.sql.postgres.settings import settings
from semel.stores.sql.postgres.tasks import connect_asyncpg
from semel.stores.sql.postgres.threads import connect_prepared
from semel.stores.sql.verbs import Statement

TIMEOUT = 40.0
"""Of the store."""
MOMENT = 0.5
SOON = 10.0

SLOW = Statement(f"SELECT SLEEP({TIMEOUT / 2})", (), writes=False)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


# --- connecting ------------------------------------------------------------------------------


def test_a_thread_connects_to_postgres_no_longer_than_its_call_may_take(silent_port):
    url = f"postgresql://semel@127.0.0.1:{silent_port}/semel"
    pool = OwnPool(settings(url, {}, TIMEOUT), connect_prepared)
    with soon(), pytest.raises(TimeIsUp):
        pool.take(Deadline(MOMENT))


@pytest.mark.parametrize("connect", [async_connect, connect_asyncpg])
async def test_a_task_connects_to_postgres_no_longer_than_its_call_may_take(connect, silent_port):
    url = f"postgresql://semel@127.0.0.1:{silent_port}/semel"
    pool = AsyncOwnPool(settings(url, {}, TIMEOUT), connect)
    with soon(), pytest.raises(psycopg.OperationalError):
        await pool.take(Deadline(MOMENT))


def mysql_pool(kind: Any, url: str) -> Any:
    address, _ = parse(url, {})
    pool = store.Pool if kind is threads else aio.Pool
    return pool(kind.connector(address, TIMEOUT), address.place, TIMEOUT, size=1)


def test_a_thread_connects_to_mysql_no_longer_than_its_call_may_take(silent_port):
    pool = mysql_pool(threads, f"mysql://semel:secret@127.0.0.1:{silent_port}/semel")
    # By its words: where another test has loaded the driver again, its classes are others.
    with soon(), pytest.raises(Exception, match="timed out"):
        pool.take(MOMENT)


async def test_a_task_connects_to_mysql_no_longer_than_its_call_may_take(silent_port):
    pool = mysql_pool(tasks, f"mysql://semel:secret@127.0.0.1:{silent_port}/semel")
    with soon(), pytest.raises(TimeoutError):
        await pool.take(MOMENT)


# --- statements of MySQL (PostgreSQL's end at the call's deadline anyway) ------------------------


def slowly():
    yield SLOW


def test_a_statement_of_a_thread_takes_no_longer_than_its_call_may(mysql_url):
    pool = mysql_pool(threads, mysql_url)
    pool.give_back(pool.take(TIMEOUT))
    session = store._Session(pool, MySQLDeadline(pool.place, MOMENT))
    with soon(), pytest.raises(StoreUnavailable):
        session.drive(slowly())


async def test_a_statement_of_a_task_takes_no_longer_than_its_call_may(mysql_url):
    pool = mysql_pool(tasks, mysql_url)
    pool.give_back(await pool.take(TIMEOUT))
    session = aio._Session(pool, MySQLDeadline(pool.place, MOMENT))
    with soon(), pytest.raises(StoreUnavailable):
        await session.drive(slowly())
    await asyncio.wait_for(pool.close(), SOON)


def test_a_statement_has_what_remains_but_time_enough_to_hear_of_a_lock(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr("semel.stores.sql.errors.time", clock)
    call = MySQLDeadline("here", 10.0)
    batch = MySQLDeadline("here", 10.0, waits_for_locks=False)
    assert call.statement_time == batch.statement_time == 10.0
    clock.now = 0.5
    assert call.statement_time == batch.statement_time == 10.0  # the driver is not told anew
    clock.now = 3.0
    assert call.statement_time == batch.statement_time == 7.0
    clock.now = 9.9
    assert call.statement_time == 5.5  # the server waits for a lock for 5 s
    assert batch.statement_time == 1.5
    assert MySQLDeadline("here", 1.0).statement_time == 1.0
