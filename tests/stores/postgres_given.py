"""What the PostgreSQL tests ask for: either kind of store by plain calls, and ways to be in its way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg

from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from semel.testing import StoreDriver
from stores.sqlite_helpers import wait_until

KINDS = {"threads": PostgresStore, "asyncio": AsyncPostgresStore}


@contextlib.contextmanager
def driven(kind, *args, **options):
    """A store of either kind behind plain calls, closed in the end."""
    driver = StoreDriver(KINDS[kind](*args, **options))
    try:
        yield driver
    finally:
        driver.close()


def always_in_batches(store):
    """Let every claim and complete of a store for asyncio go the way of those who come in crowds."""
    for queue in (store._batcher._claims, store._batcher._completes):
        queue.ask = functools.partial(_with_the_next_batch, queue)
    return store


async def _with_the_next_batch(queue, request):
    queue._loop = asyncio.get_running_loop()
    return await (queue._ask_one(request) if queue._closed else queue._join(request, queue._loop))


def migrate(url, **columns):
    """Make the table, as an administrator would."""
    with contextlib.closing(PostgresStore(url)) as store:
        return store.migrate(columns=columns)


@contextlib.contextmanager
def transaction(url):
    """A connection with a transaction open; rolled back unless the test commits."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1")
        try:
            yield connection
        finally:
            with contextlib.suppress(psycopg.OperationalError):  # its server may be gone
                connection.rollback()


def rows(url, sql, *values):
    """Ask the database behind the store's back."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql, values or None)
        return cursor.fetchall() if cursor.description else []


def blocked(url, count=1):
    """Whether so many sessions wait for a lock that somebody else holds."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"
    return rows(url, waiting) == [(count,)]


@contextlib.contextmanager
def meanwhile(work):
    """Run `work` in a thread beside the block; gives the future of its answer."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(work)


@contextlib.contextmanager
def blocking(url, work, *, lock):
    """Run `work` until it waits behind a transaction that ran `lock`; gives both."""
    with transaction(url) as holder:
        holder.execute(lock)
        with meanwhile(work) as answer:
            wait_until(lambda: blocked(url))
            yield holder, answer


def in_threads(work, count):
    """Run `work(number)` in so many threads at the same moment, and list the answers."""
    ready = threading.Barrier(count)

    def start(number):
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(start, range(count)))
