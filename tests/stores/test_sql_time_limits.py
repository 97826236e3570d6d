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
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from semel.errors import StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import aio, errors, store
from semel.stores.sql.mysql.addresses import SessionSettings, parse
from semel.stores.sql.mysql.errors import least_time, statement_time
from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.settings import settings
from semel.stores.sql.postgres.tasks import connect_asyncpg
from semel.stores.sql.postgres.threads import async_connect, connect_prepared
from semel.stores.sql.schema import MySQLSchema
from semel.stores.sql.verbs import Statement, operation

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
    with soon(), pytest.raises(TimeIsUp):
        connect_prepared(settings(url, {}, TIMEOUT), Deadline(MOMENT))


@pytest.mark.parametrize("connect", [async_connect, connect_asyncpg])
async def test_a_task_connects_to_postgres_no_longer_than_its_call_may_take(connect, silent_port):
    url = f"postgresql://semel@127.0.0.1:{silent_port}/semel"
    with soon(), pytest.raises(psycopg.OperationalError):
        await connect(settings(url, {}, TIMEOUT), Deadline(MOMENT))


def mysql_pool(kind: Any, url: str) -> Any:
    address, _ = parse(url, {})
    driver, pool = (kind.threads, kind.Pool) if kind is store else (kind.tasks, kind.AsyncPool)
    connect = driver.connector(address, TIMEOUT)
    session_settings = SessionSettings(TIMEOUT, waits_for_locks=False)
    least = least_time(TIMEOUT, waits_for_locks=False)
    opened = partial(kind.open_session, connect, address.place, session_settings, least)
    return pool(opened, errors, address.place, max_size=1)


def test_a_thread_connects_to_mysql_no_longer_than_its_call_may_take(silent_port):
    pool = mysql_pool(store, f"mysql://semel:secret@127.0.0.1:{silent_port}/semel")
    # By its words: where another test has loaded the driver again, its classes are others.
    with soon(), pytest.raises(Exception, match="timed out"):
        pool.take(Deadline(MOMENT))


async def test_a_task_connects_to_mysql_no_longer_than_its_call_may_take(silent_port):
    pool = mysql_pool(aio, f"mysql://semel:secret@127.0.0.1:{silent_port}/semel")
    with soon(), pytest.raises(TimeoutError):
        await pool.take(Deadline(MOMENT))


# --- statements of MySQL (PostgreSQL's end at the call's deadline anyway) ------------------------


@operation
def slowly():
    yield SLOW


def schema() -> MySQLSchema:
    found = MySQLSchema("idempotent_record", 1, autocreate=False)
    found.ensured = True
    return found


def test_a_statement_of_a_thread_takes_no_longer_than_its_call_may(mysql_url):
    pool = mysql_pool(store, mysql_url)
    pool.give_back(pool.take(Deadline(TIMEOUT)))
    executor = store.MySQLExecutor(pool, schema(), MOMENT)
    with soon(), pytest.raises(StoreUnavailable):
        executor.run_one(slowly())


async def test_a_statement_of_a_task_takes_no_longer_than_its_call_may(mysql_url):
    pool = mysql_pool(aio, mysql_url)
    await pool.give_back(await pool.take(Deadline(TIMEOUT)))
    executor = aio.AsyncMySQLExecutor(pool, schema(), MOMENT)
    with soon(), pytest.raises(StoreUnavailable):
        await executor.run_one(slowly())
    await asyncio.wait_for(pool.close(), SOON)


def test_a_statement_has_what_remains_but_time_enough_to_hear_of_a_lock(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr("semel.stores.sql.errors.time", clock)
    deadline = Deadline(10.0)
    call, batch = (least_time(10.0, waits_for_locks=waits) for waits in (True, False))
    assert statement_time(deadline, call) == statement_time(deadline, batch) == 10.0
    clock.now = 0.5  # the driver is not told anew
    assert statement_time(deadline, call) == statement_time(deadline, batch) == 10.0
    clock.now = 3.0
    assert statement_time(deadline, call) == statement_time(deadline, batch) == 7.0
    clock.now = 9.9
    assert statement_time(deadline, call) == 5.5  # the server waits for a lock for 5 s
    assert statement_time(deadline, batch) == 1.5
    assert statement_time(Deadline(1.0), least_time(1.0, waits_for_locks=True)) == 1.0
