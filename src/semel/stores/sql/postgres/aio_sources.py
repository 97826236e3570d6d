"""The twin of `sources`, for asyncio."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg_pool import AsyncConnectionPool

from semel.errors import ConfigError, StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.sql.postgres.connections import (
    CONFIGURE,
    AsyncBoundedConnection,
    is_dead,
    is_idle,
    limits,
)
from semel.stores.sql.postgres.lending import (
    check_idle,
    check_process,
    exhausted,
    is_old,
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

    def lend(self, patience: Patience) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend a connection for one call."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


class AsyncOwnPool:
    """Connections that are opened when they are needed, and kept for the next call.

    Not psycopg_pool's: that connects in the background, so that a caller does not learn why it
    cannot. Its workers do not outlive a fork, and keep an event loop that is torn down from ending.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self.place = settings.place
        self._settings = settings
        self._timeout = timeout
        self._closed = False
        self._start()
        follow_forks(self)

    def _start(self) -> None:
        self._seats = asyncio.Semaphore(self._settings.max_size)
        self._free: deque[AsyncBoundedConnection] = deque()
        """The one that was used last is used next, so that the others become old."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def lend(self, patience: Patience) -> AsyncIterator[AsyncConnection]:
        """Lend a connection that was not hung up meanwhile, as far as one can know."""
        await self._take_seat(patience)
        try:
            connection = await self._take() or await self._connect(patience)
            connection.deadline = patience.deadline
            try:
                yield connection
            except BECAME_REPLICA:
                await connection.close()
                raise
            finally:
                await self._give_back(connection)
        finally:
            self._seats.release()

    async def close(self) -> None:
        """Close the connections; those that are lent out, when they come back."""
        self._closed = True
        with suppress(IndexError):
            while True:
                await self._free.pop().close()

    async def _take_seat(self, patience: Patience) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} was closed")
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise ConfigError(
                "a store for asyncio belongs to the event loop that used it first; open another "
                "one for this loop"
            )
        self._loop = loop
        if not self._seats.locked():
            await self._seats.acquire()  # one is free: no need for a timer
            return
        try:
            async with asyncio.timeout(patience.left):
                await self._seats.acquire()
        except TimeoutError:
            raise exhausted(self._settings) from None

    async def _take(self) -> AsyncBoundedConnection | None:
        with suppress(IndexError):  # none is left
            while True:
                connection = self._free.pop()
                if not is_dead(connection):
                    return connection
                await connection.close()
        return None

    async def _connect(self, patience: Patience) -> AsyncBoundedConnection:
        connection = await AsyncBoundedConnection.connect(
            self._settings.conninfo,
            autocommit=True,
            prepare_threshold=self._settings.prepare_threshold,
        )
        connection.deadline = patience.deadline
        if self._settings.own_session:
            try:
                await psycopg.AsyncRawCursor(connection).execute(CONFIGURE, limits(self._timeout))
            except BaseException:
                await connection.close()
                raise
        return connection

    async def _give_back(self, connection: AsyncBoundedConnection) -> None:
        if self._closed or not is_idle(connection):
            await connection.close()
            return
        connection.idle_since = time.monotonic()
        self._free.append(connection)
        with suppress(IndexError):
            while len(self._free) > self._settings.min_size and is_old(self._free[0]):
                await self._free.popleft().close()

    def before_fork(self) -> None:
        """Do nothing: nothing is left half done that the child would see."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Start with no connection: these sockets are the parent's."""
        leave_alone(self._free)
        self._start()


class AsyncGivenPool:
    """A pool that the application opened, and will close."""

    place = "the PostgreSQL database of the given pool"

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
