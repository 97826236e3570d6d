"""What the application already has, for asyncio: a pool or a connection of psycopg or asyncpg.

Each is given back as it was, and never closed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import asyncpg
import psycopg
from asyncpg.pool import PoolConnectionProxy
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from semel.errors import StoreUnavailable
from semel.stores.sql.postgres.aio_sessions import (
    AsyncConnection,
    AsyncPsycopgSession,
    AsyncSession,
)
from semel.stores.sql.postgres.aio_sources import AsyncSource
from semel.stores.sql.postgres.asyncpg_sessions import (
    AsyncpgConnection,
    AsyncpgSession,
    psycopgs_errors,
)
from semel.stores.sql.postgres.lending import check_idle, check_process, open_transaction
from semel.stores.sql.postgres.patience import Patience

AsyncPool: TypeAlias = AsyncConnectionPool[Any]
AsyncpgPool: TypeAlias = "asyncpg.Pool"


def source_of_pool(pool: AsyncPool | AsyncpgPool) -> AsyncSource:
    """Use a pool of either driver."""
    return AsyncpgGivenPool(pool) if isinstance(pool, asyncpg.Pool) else AsyncGivenPool(pool)


def source_of_connection(connection: AsyncConnection | AsyncpgConnection) -> AsyncSource:
    """Use a connection of either driver."""
    if isinstance(connection, (asyncpg.Connection, PoolConnectionProxy)):
        return AsyncpgGivenConnection(connection)
    return AsyncGivenConnection(connection)


class AsyncGivenPool:
    """A pool that the application opened, and will close."""

    place = "the PostgreSQL database of the given pool"

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._opened_by = os.getpid()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncSession]:
        """Borrow a connection, and give it back as it was."""
        check_process(self._opened_by)
        connection = await self._pool.getconn(timeout=patience.left)
        try:
            async with committing(connection):
                yield AsyncPsycopgSession(connection)
        finally:
            await self._pool.putconn(connection)

    async def close(self) -> None:
        """Leave it open."""


class AsyncGivenConnection:
    """A connection that the application opened, and will close."""

    place = "the PostgreSQL database of the given connection"

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._opened_by = os.getpid()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncSession]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        async with _in_turn(self._lock, patience), committing(self._connection):
            yield AsyncPsycopgSession(self._connection)

    async def close(self) -> None:
        """Leave it open."""


@asynccontextmanager
async def committing(connection: AsyncConnection) -> AsyncIterator[None]:
    """Let each statement commit by itself for a while."""
    check_idle(connection)
    before = connection.autocommit
    await connection.set_autocommit(True)
    try:
        yield
    finally:
        with suppress(psycopg.OperationalError):  # it broke
            await connection.set_autocommit(before)


class AsyncpgGivenPool:
    """A pool of asyncpg's that the application opened, and will close."""

    place = AsyncGivenPool.place

    def __init__(self, pool: AsyncpgPool) -> None:
        self._pool = pool
        self._opened_by = os.getpid()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncSession]:
        """Borrow a connection, and give it back."""
        check_process(self._opened_by)
        try:
            with psycopgs_errors():
                lent = await self._pool.acquire(timeout=patience.left)
        except psycopg.OperationalError as error:
            raise _told_by_a_pool(error) from error
        try:
            yield AsyncpgSession(lent)
        finally:
            await self._pool.release(lent)

    async def close(self) -> None:
        """Leave it open."""


class AsyncpgGivenConnection:
    """A connection of asyncpg's that the application opened, and will close."""

    place = AsyncGivenConnection.place

    def __init__(self, connection: AsyncpgConnection) -> None:
        self._connection = connection
        self._opened_by = os.getpid()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncSession]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        async with _in_turn(self._lock, patience):
            if not self._connection.is_closed() and self._connection.is_in_transaction():
                raise open_transaction()
            yield AsyncpgSession(self._connection)

    async def close(self) -> None:
        """Leave it open."""


@asynccontextmanager
async def _in_turn(lock: asyncio.Lock, patience: Patience) -> AsyncIterator[None]:
    try:
        await asyncio.wait_for(lock.acquire(), patience.left)
    except TimeoutError:
        raise StoreUnavailable(
            "the given connection was busy with other calls all the time"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _told_by_a_pool(error: psycopg.OperationalError) -> psycopg.OperationalError:
    match error.__cause__:
        case TimeoutError():
            return PoolTimeout("no connection was free")
        case asyncpg.InterfaceError():
            return PoolClosed(str(error))
        case _:
            return error
