"""The alternatives on PostgreSQL, each used as its documentation says."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from benchmarks.contenders.postgres_floors import CONNECTIONS
from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Place,
    TaskContender,
    ThreadContender,
    awaiting,
    calling,
)

POLL = 0.05

# --- by hand: insert on conflict ---------------------------------------------------------

CREATE = """
CREATE TABLE IF NOT EXISTS by_hand (
    key text PRIMARY KEY, status text NOT NULL, result jsonb,
    expires_at timestamptz NOT NULL DEFAULT now() + interval '1 day'
)
"""
CLAIM = "INSERT INTO by_hand (key, status) VALUES (%s, 'running') ON CONFLICT DO NOTHING"
DONE = "UPDATE by_hand SET status = 'done', result = %s::jsonb WHERE key = %s"
LOOK = "SELECT status, result FROM by_hand WHERE key = %s"


def _create(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(CREATE)


@contextmanager
def _hand_threads(place: Place) -> Iterator[Go]:
    _create(place.url)
    with ConnectionPool(
        place.url, min_size=CONNECTIONS, max_size=CONNECTIONS, kwargs={"autocommit": True}
    ) as pool:
        pool.wait()

        def call(key: str) -> Any:
            with pool.connection() as connection:
                mine = connection.execute(CLAIM, (key,)).rowcount == 1
            if mine:
                value = place.work.run()
                with pool.connection() as connection:
                    connection.execute(DONE, (json.dumps(value), key))
                return value
            while True:
                with pool.connection() as connection:
                    found = connection.execute(LOOK, (key,)).fetchone()
                if found is not None and found[0] == "done":
                    return found[1]
                time.sleep(POLL)

        yield calling(call)


@asynccontextmanager
async def _hand_tasks(place: Place) -> AsyncIterator[AsyncGo]:
    _create(place.url)
    async with AsyncConnectionPool(
        place.url, min_size=CONNECTIONS, max_size=CONNECTIONS, kwargs={"autocommit": True}
    ) as pool:
        await pool.wait()

        async def call(key: str) -> Any:
            async with pool.connection() as connection:
                mine = (await connection.execute(CLAIM, (key,))).rowcount == 1
            if mine:
                value = await place.work.arun()
                async with pool.connection() as connection:
                    await connection.execute(DONE, (json.dumps(value), key))
                return value
            while True:
                async with pool.connection() as connection:
                    found = await (await connection.execute(LOOK, (key,))).fetchone()
                if found is not None and found[0] == "done":
                    return found[1]
                await asyncio.sleep(POLL)

        yield awaiting(call)


HAND: ThreadContender = Contender(
    "by hand: insert on conflict, psycopg", "alternative", _hand_threads, "psycopg"
)
ASYNC_HAND: TaskContender = Contender(
    "by hand: insert on conflict, psycopg", "alternative", _hand_tasks, "psycopg"
)


# --- idemkit -----------------------------------------------------------------------------


@contextmanager
def _idemkit_threads(place: Place) -> Iterator[Go]:
    from idemkit import MethodConfig, PostgresBackend, idempotent_sync
    from idemkit.backends.postgres import init_pg
    from idemkit.core.sync_bridge import run_sync

    asyncio.run(init_pg(place.url))
    config = MethodConfig(key_fields=["order_id"], scope=lambda: "bench")

    backend = PostgresBackend.from_url(place.url)

    @idempotent_sync(backend=backend, config=config)
    def order(*, order_id: str) -> str:
        del order_id
        return place.work.run()

    yield calling(lambda key: order(order_id=key))
    run_sync(backend.aclose())


@asynccontextmanager
async def _idemkit_tasks(place: Place) -> AsyncIterator[AsyncGo]:
    from idemkit import MethodConfig, PostgresBackend, idempotent
    from idemkit.backends.postgres import init_pg

    await init_pg(place.url)
    config = MethodConfig(key_fields=["order_id"], scope=lambda: "bench")
    async with PostgresBackend.from_url(place.url) as backend:

        @idempotent(backend=backend, config=config)
        async def order(*, order_id: str) -> str:
            del order_id
            return await place.work.arun()

        yield awaiting(lambda key: order(order_id=key))


IDEMKIT: ThreadContender = Contender("idemkit", "alternative", _idemkit_threads, "idemkit")
ASYNC_IDEMKIT: TaskContender = Contender("idemkit", "alternative", _idemkit_tasks, "idemkit")


# --- DBOS --------------------------------------------------------------------------------


def _launch(url: str) -> Any:
    from dbos import DBOS

    logging.getLogger("dbos").setLevel(logging.ERROR)
    config: Any = {"name": "bench", "system_database_url": url, "log_level": "ERROR"}
    DBOS(config=config)
    return DBOS


@contextmanager
def _dbos_threads(place: Place) -> Iterator[Go]:
    from dbos import SetWorkflowID

    dbos = _launch(place.url)

    @dbos.workflow()
    def order() -> str:
        return place.work.run()

    def call(key: str) -> Any:
        with SetWorkflowID(key):
            return order()

    dbos.launch()
    yield calling(call)
    dbos.destroy(destroy_registry=True)


@asynccontextmanager
async def _dbos_tasks(place: Place) -> AsyncIterator[AsyncGo]:
    from dbos import SetWorkflowID

    dbos = _launch(place.url)

    @dbos.workflow()
    async def order() -> str:
        return await place.work.arun()

    async def call(key: str) -> Any:
        with SetWorkflowID(key):
            return await order()

    dbos.launch()
    yield awaiting(call)
    dbos.destroy(destroy_registry=True)


DBOS: ThreadContender = Contender("DBOS workflow", "alternative", _dbos_threads, "dbos")
ASYNC_DBOS: TaskContender = Contender("DBOS workflow", "alternative", _dbos_tasks, "dbos")

ON_POSTGRES: tuple[ThreadContender, ...] = (HAND, IDEMKIT, DBOS)
ASYNC_ON_POSTGRES: tuple[TaskContender, ...] = (ASYNC_HAND, ASYNC_IDEMKIT, ASYNC_DBOS)
