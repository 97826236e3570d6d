"""What lies under semel on MariaDB: the same statements, sent by the drivers alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import chain
from typing import Any

import pymysql
from asyncmy.cursors import Cursor

from benchmarks.contenders.commands import make_table, mysql_statements
from benchmarks.contenders.postgres_floors import CONNECTIONS
from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Kind,
    Place,
    TaskContender,
    ThreadContender,
)
from semel.stores.sql.mysql.addresses import parse
from semel.stores.sql.mysql.tasks import connector
from semel.stores.sql.verbs import Statement


def connect(url: str) -> pymysql.Connection[Any]:
    address, _ = parse(url, {})
    return pymysql.connect(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        database=address.database,
        autocommit=True,
    )


@contextmanager
def _pymysql(place: Place) -> Iterator[Go]:
    make_table(place.url)
    with closing(connect(place.url)) as connection, connection.cursor() as cursor:

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers
            pairs = mysql_statements(keys, place.work.result, "bare:")
            # A first claim knows by the count that it was inserted; a replay has to read.
            sent: list[Statement] = (
                list(chain.from_iterable(pairs))
                if kind == "first"
                else [each for claim, _ in pairs for each in (claim, claim.then) if each]
            )
            start = time.perf_counter()
            for statement in sent:
                cursor.execute(statement.sql, statement.parameters)
                cursor.fetchall()
            return time.perf_counter() - start

        yield go


PYMYSQL: ThreadContender = Contender(
    "PyMySQL execute of the same statements", "floor", _pymysql, works=False
)


@contextmanager
def _select_one(place: Place) -> Iterator[Go]:
    with closing(connect(place.url)) as connection, connection.cursor() as cursor:

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers, kind
            start = time.perf_counter()
            for _ in keys:
                cursor.execute("SELECT 1")
                cursor.fetchall()
            return time.perf_counter() - start

        yield go


SELECT_ONE_MYSQL: ThreadContender = Contender(
    "PyMySQL SELECT 1: one bare round trip", "usual", _select_one, works=False
)


@asynccontextmanager
async def _unbatched_asyncmy(place: Place) -> AsyncIterator[AsyncGo]:
    make_table(place.url)
    address, _ = parse(place.url, {})
    connect = connector(address, 10.0)
    idle: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await connect())

    async def execute(statement: Statement) -> int:
        connection = await idle.get()
        try:
            cursor = connection.cursor(Cursor)
            await cursor.execute(statement.sql, statement.parameters)
            if not statement.writes:
                await cursor.fetchall()
            return int(cursor.rowcount)
        finally:
            idle.put_nowait(connection)

    async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
        rest = iter(mysql_statements(keys, place.work.result, "unbatched:"))

        async def first() -> None:
            for claim, complete in rest:
                # The count says whether it was inserted: no need to read.
                assert await execute(claim) == 1
                assert await execute(complete) == 1

        async def replay() -> None:
            for claim, _ in rest:
                await execute(claim)
                assert claim.then is not None
                await execute(claim.then)

        caller = first if kind == "first" else replay
        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return time.perf_counter() - start

    yield go
    while not idle.empty():
        await idle.get_nowait().ensure_closed()


UNBATCHED_ASYNCMY: TaskContender = Contender(
    "unbatched asyncmy, the same statements", "usual", _unbatched_asyncmy, works=False
)
