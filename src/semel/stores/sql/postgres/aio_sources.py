"""The twin of `sources`, for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool

from semel.errors import ConfigError, StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.sql.postgres.connections import (
    CONFIGURE,
    AsyncBoundedConnection,
    is_dead,
    limits,
    opening,
)
from semel.stores.sql.postgres.lending import (
    check_idle,
    check_process,
    leave_alone,
)
from semel.stores.sql.postgres.patience import BECAME_REPLICA, Patience
from semel.stores.sql.postgres.settings import Settings

AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]
AsyncPool: TypeAlias = AsyncConnectionPool[Any]


class AsyncSource(Protocol):
    """What an executor asks for connections."""

    place: str
    """The name of the database, for error messages."""
    refused: str
    """What the server said when a connection was last tried in vain."""

    def first(self, patience: Patience) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend the connection that finds out whether everything is as it should be."""
        ...

    def lend(self, patience: Patience) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend a connection for one call."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


class AsyncOwnPool:
    """A pool that is opened by the first call, and again by the first call after a fork."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        self.place = settings.place
        self.refused = ""
        self._settings = settings
        self._timeout = timeout
        self._pool: AsyncPool | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        follow_forks(self)

    @asynccontextmanager
    async def first(self, patience: Patience) -> AsyncIterator[AsyncConnection]:
        """Connect without the pool, which would not tell at once why it cannot."""
        connection: AsyncBoundedConnection = await AsyncBoundedConnection.connect(
            self._settings.conninfo, **opening(self._settings, self._note)
        )
        try:
            connection.deadline = patience.deadline
            await self._configure(connection)
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncConnection]:
        """Lend a connection that was not hung up meanwhile, as far as one can know."""
        pool = await self._opened()
        while True:
            connection = await pool.getconn(timeout=patience.left)
            if not is_dead(connection):
                break
            await connection.close()
            await pool.putconn(connection)
        try:
            connection.deadline = patience.deadline
            yield connection
        except BECAME_REPLICA:
            await connection.close()
            raise
        finally:
            if connection.info.transaction_status is not TransactionStatus.IDLE:
                await connection.close()  # an answer may still be on its way
            await pool.putconn(connection)

    async def close(self) -> None:
        """Close the pool for good."""
        self._closed = True
        if self._pool is not None:
            await self._pool.close()

    async def _opened(self) -> AsyncPool:
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} was closed")
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._loop = loop
            self._pool = AsyncConnectionPool(
                self._settings.conninfo,
                connection_class=AsyncBoundedConnection,
                kwargs=opening(self._settings, self._note),
                configure=self._configure,
                min_size=self._settings.min_size,
                max_size=self._settings.max_size,
                # The next caller makes it try again at once; its own pauses get long.
                reconnect_timeout=self._timeout,
                open=False,
            )
        if self._loop is not loop:
            raise ConfigError(
                "a store for asyncio belongs to the event loop that used it first; open another "
                "one for this loop"
            )
        if self._pool.closed:
            await self._pool.open()
        return self._pool

    async def _configure(self, connection: AsyncConnection) -> None:
        self.refused = ""
        if self._settings.own_session:
            await psycopg.AsyncRawCursor(connection).execute(CONFIGURE, limits(self._timeout))

    def _note(self, error: psycopg.Error) -> None:
        self.refused = str(error)

    def before_fork(self) -> None:
        """Do nothing: a fork interrupts no task."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Open another pool: this one's sockets are the parent's, and its loop is not here."""
        if self._pool is not None:
            leave_alone(self._pool)
        self._pool = None


class AsyncGivenPool:
    """A pool that the application opened, and will close."""

    place = "the PostgreSQL database of the given pool"
    refused = ""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._opened_by = os.getpid()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncConnection]:
        """Borrow a connection, and give it back as it was."""
        check_process(self._opened_by)
        connection = await self._pool.getconn(timeout=patience.left)
        try:
            async with committing(connection):
                yield connection
        finally:
            await self._pool.putconn(connection)

    first = lend

    async def close(self) -> None:
        """Leave it open."""


class AsyncGivenConnection:
    """A connection that the application opened, and will close."""

    place = "the PostgreSQL database of the given connection"
    refused = ""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._opened_by = os.getpid()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncConnection]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        try:
            await asyncio.wait_for(self._lock.acquire(), patience.left)
        except TimeoutError:
            raise StoreUnavailable(
                "the given connection was busy with other calls all the time"
            ) from None
        try:
            async with committing(self._connection):
                yield self._connection
        finally:
            self._lock.release()

    first = lend

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
        if not connection.closed:
            await connection.set_autocommit(before)
