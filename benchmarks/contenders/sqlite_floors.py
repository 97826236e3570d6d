"""What lies under semel on SQLite: the same statements, sent by the drivers alone."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from typing import Any

import aiosqlite

from benchmarks.contenders.commands import SQLiteStatements, make_table, sqlite_statements
from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Kind,
    Place,
    TaskContender,
    ThreadContender,
)
from semel.stores.sql.verbs import Statement

BATCH = 128

FULL = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")


def _file(url: str) -> str:
    return url.removeprefix("sqlite:///")


@asynccontextmanager
async def _aiosqlite(
    place: Place, turns: AbstractAsyncContextManager[Any]
) -> AsyncIterator[AsyncGo]:
    make_table(place.url)
    async with aiosqlite.connect(_file(place.url), timeout=30) as connection:
        for pragma in FULL:
            await connection.execute(pragma)

        async def write(statement: Statement) -> None:
            async with turns:
                await connection.execute(statement.sql, statement.parameters)
                await connection.commit()

        async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            rest = iter(sqlite_statements(keys, place.work.result, "aiosqlite:", time.time()))

            async def caller() -> None:
                for one in rest:
                    if kind == "first":
                        await write(one.claim)
                        await write(one.complete)
                    else:
                        await connection.execute_fetchall(one.look.sql, one.look.parameters)

            start = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(callers)))
            return time.perf_counter() - start

        yield go


AIOSQLITE: TaskContender = Contender(
    "aiosqlite, a transaction for each write",
    "usual",
    lambda place: _aiosqlite(place, asyncio.Lock()),
    works=False,
)

SHARED_AIOSQLITE: TaskContender = Contender(
    "aiosqlite, all tasks in one transaction (unsafe)",
    "usual",
    lambda place: _aiosqlite(place, nullcontext()),
    works=False,
)
"""Without turns, what one task commits another may still be writing, and a rollback undoes both."""


def _bare_batches(connection: sqlite3.Connection, batch: Sequence[SQLiteStatements]) -> None:
    for writes in ([one.claim for one in batch], [one.complete for one in batch]):
        connection.execute("BEGIN IMMEDIATE")
        for one, write in zip(batch, writes, strict=True):
            connection.execute(one.look.sql, one.look.parameters).fetchall()
            connection.execute(write.sql, write.parameters)
        connection.execute("COMMIT")


@contextmanager
def _sqlite_connection(url: str) -> Iterator[sqlite3.Connection]:
    make_table(url)
    opened = sqlite3.connect(_file(url), isolation_level=None, timeout=30)
    with closing(opened) as connection:
        for pragma in FULL:
            connection.execute(pragma)
        yield connection


def _sqlite_lap(
    connection: sqlite3.Connection, place: Place, keys: Sequence[str], kind: Kind, batch: int
) -> float:
    todo = sqlite_statements(keys, place.work.result, "bare:", time.time())
    start = time.perf_counter()
    if kind == "first":
        for begin in range(0, len(todo), batch):
            _bare_batches(connection, todo[begin : begin + batch])
    else:
        for one in todo:
            connection.execute(one.look.sql, one.look.parameters).fetchall()
    return time.perf_counter() - start


@asynccontextmanager
async def _batch_loop(place: Place) -> AsyncIterator[AsyncGo]:
    with _sqlite_connection(place.url) as connection:

        async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            return _sqlite_lap(connection, place, keys, kind, min(callers, BATCH))

        yield go


BATCH_LOOP: TaskContender = Contender(
    "bare sqlite3 batches, the same statements", "floor", _batch_loop, works=False
)


@contextmanager
def _bare_sqlite(place: Place) -> Iterator[Go]:
    with _sqlite_connection(place.url) as connection:
        yield lambda keys, _callers, kind: _sqlite_lap(connection, place, keys, kind, 1)


BARE_SQLITE: ThreadContender = Contender(
    "bare sqlite3, the same statements", "floor", _bare_sqlite, works=False
)
