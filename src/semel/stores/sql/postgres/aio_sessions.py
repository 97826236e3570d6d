"""What an async executor needs of a connection, and how psycopg's gives it.

Sessions raise psycopg's errors, whatever their driver: `errors` and `patience` know only those.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.rows import tuple_row

from semel.stores.sql.postgres.connections import (
    CONFIGURE,
    AsyncBoundedConnection,
    is_dead,
    is_idle,
    limits,
)
from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.patience import Patience
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.verbs import Reply, Statement

AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]


class AsyncSession(Protocol):
    """A connection that is lent for one call."""

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; it ends with the block."""
        ...


class OwnAsyncSession(AsyncSession, Protocol):
    """A connection that belongs to our own pool."""

    idle_since: float
    seat: object
    """Its place in the pool while it is lent: a session that is lost takes none along."""

    def end_waits_at(self, deadline: float) -> None:
        """Let every wait end at this moment of the monotonic clock."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        ...

    async def close(self) -> None:
        """Close it."""
        ...


class AsyncPsycopgSession:
    """A connection of psycopg's."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        return await execute(self._connection, statement)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; it ends with the block."""
        return self._connection.transaction()


class OwnAsyncPsycopgSession(AsyncPsycopgSession):
    """One that we opened."""

    idle_since = float("inf")
    seat: object = None

    def __init__(self, connection: AsyncBoundedConnection) -> None:
        super().__init__(connection)
        self.bounded = connection

    def end_waits_at(self, deadline: float) -> None:
        """Let every wait end at this moment of the monotonic clock."""
        self.bounded.deadline = deadline

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        return is_dead(self.bounded)

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        return is_idle(self.bounded)

    async def close(self) -> None:
        """Close it."""
        await self.bounded.close()


async def connect_psycopg(settings: Settings, patience: Patience) -> OwnAsyncPsycopgSession:
    """Open a connection, with settings of our own."""
    try:
        async with asyncio.timeout(patience.left):
            connection = await AsyncBoundedConnection.connect(
                settings.conninfo,
                autocommit=True,
                prepare_threshold=settings.prepare_threshold,
                client_encoding="utf8",  # SQL_ASCII, that of a database, gives bytes for texts
            )
    except TimeoutError:
        raise TimeIsUp("the server has not answered") from None
    connection.deadline = patience.deadline
    if settings.own_session:
        try:
            await psycopg.AsyncRawCursor(connection).execute(CONFIGURE, limits(settings.timeout))
        except BaseException:
            await connection.close()
            raise
    return OwnAsyncPsycopgSession(connection)


async def execute(connection: AsyncConnection, statement: Statement) -> Reply:
    """Run one statement."""
    async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = [] if cursor.description is None else await cursor.fetchall()
        return Reply(rows, cursor.rowcount)
