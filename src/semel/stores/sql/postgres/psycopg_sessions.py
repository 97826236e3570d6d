"""psycopg's connections as the store needs them: no wait without an end, settings of our own.

A server that is frozen, or cut off, sends nothing, not even an error; only the client can end such
a wait. psycopg waits in slices and tells its generators when one has passed: there the deadline of
the call is looked at.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from math import ceil
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

import psycopg
from psycopg.abc import PQGen, PQGenConn
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.waiting import Ready

from semel.core.optional import inside
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.rows import WITH_UTF8, texts_as_bytes
from semel.stores.sql.verbs import Reply, Statement

R = TypeVar("R")
V = TypeVar("V")
Y = TypeVar("Y")

LOCK_SHARE, STATEMENT_SHARE = 0.8, 0.9
"""Which part of the call's time each wait of the server may take. Each ends before the next one
out (the last is ours), so that the error names the cause."""

BATCH_LOCK_SHARE: Final = 0.1
"""Less for a batch, so that one member's lock does not make all the others wait."""

CONFIGURE: Final = (
    "SELECT set_config('lock_timeout', $1, false), set_config('statement_timeout', $2, false), "
    "set_config('default_transaction_isolation', 'read committed', false), "
    "set_config('enable_seqscan', 'off', false)"
)
"""The last one because every statement has its index, and its plan is kept: made while the table is
small, it would read all of it for each batch, until statistics are taken of what it has become.
Only `counts`, which has to read everything, takes half as long again by an index."""


class _Limit(Protocol):
    deadline: float
    """Of the monotonic clock."""


class _Connecting(threading.local):
    """How long this thread may wait for the connection that psycopg makes for it."""

    deadline = float("inf")


_connecting: Final = _Connecting()

# Overridden below: without it a connection that is being opened would wait without an end.
inside("psycopg", "psycopg:Connection._connect_gen")


class BoundedConnection(psycopg.Connection[Any]):
    """A connection for threads, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")
    idle_since = float("inf")

    @classmethod
    def connect_until(cls, deadline: float, conninfo: str, **options: Any) -> Self:
        """Connect; libpq's own limit counts whole seconds, of which it takes two at least."""
        _connecting.deadline = deadline
        try:
            return cls.connect(conninfo, **options)
        finally:
            _connecting.deadline = float("inf")

    @classmethod
    def _connect_gen(cls, conninfo: str = "", **options: Any) -> PQGenConn[Self]:
        # psycopg 3.2 has an option here (timeout), 3.3 has none.
        return _bounded(super()._connect_gen(conninfo, **options), _connecting)

    def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        return super().wait(_bounded(gen, self), *args, **options)


class AsyncBoundedConnection(psycopg.AsyncConnection[Any]):
    """A connection for asyncio, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")
    idle_since = float("inf")

    async def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        return await super().wait(_bounded(gen, self), *args, **options)


def _bounded(gen: Generator[Y, R, V], limit: _Limit) -> Generator[Y, R, V]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready == Ready.NONE and time.monotonic() >= limit.deadline:
                raise TimeIsUp("the server has not answered")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: V = end.value
        return result


def is_dead(connection: BoundedConnection | AsyncBoundedConnection) -> bool:
    """Whether the server is known to have hung up, asked without sending anything."""
    try:
        connection.pgconn.consume_input()  # its last words
        connection.pgconn.consume_input()  # the end
    except psycopg.OperationalError:
        return True
    return connection.closed


def limits(timeout: float) -> tuple[str, str]:
    """Give `CONFIGURE` its values."""
    # Never 0, which means no limit at all.
    return f"{ceil(timeout * LOCK_SHARE * 1000)}ms", f"{ceil(timeout * STATEMENT_SHARE * 1000)}ms"


# --- sessions ---------------------------------------------------------------------------------

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]


class _OwnConnection:
    """What a session of our own pool knows of its connection."""

    bounded: Any
    idle_since = float("inf")
    slot: object = None
    lost = False

    def begin(self, deadline: Deadline) -> None:
        """Serve a call: every wait ends at its deadline."""
        self.bounded.deadline = deadline.at

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        return is_dead(self.bounded)

    @property
    def idle(self) -> bool:
        """Whether it may be used again; an answer that may still come would meet a stranger."""
        # Not by `info`, which makes an object for the answer and one for the question.
        status = self.bounded.pgconn.transaction_status
        return not self.lost and bool(status == TransactionStatus.IDLE)


class PsycopgSession:
    """A connection of psycopg's, for threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, statement: Statement) -> Reply:
        return execute(self._connection, statement)

    def transaction(self) -> AbstractContextManager[Any]:
        return self._connection.transaction()


class OwnPsycopgSession(_OwnConnection, PsycopgSession):
    """One that we opened."""

    def __init__(self, connection: BoundedConnection) -> None:
        super().__init__(connection)
        self.bounded: BoundedConnection = connection

    def close(self) -> None:
        self.bounded.close()


class AsyncPsycopgSession:
    """A connection of psycopg's, for asyncio."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def execute(self, statement: Statement) -> Reply:
        return await async_execute(self._connection, statement)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._connection.transaction()


class OwnAsyncPsycopgSession(_OwnConnection, AsyncPsycopgSession):
    """One that we opened."""

    def __init__(self, connection: AsyncBoundedConnection) -> None:
        super().__init__(connection)
        self.bounded: AsyncBoundedConnection = connection

    async def close(self) -> None:
        await self.bounded.close()


def connect(settings: Settings, deadline: Deadline) -> OwnPsycopgSession:
    """Open a connection, with settings of our own."""
    connection = BoundedConnection.connect_until(
        deadline.at,
        settings.conninfo,
        autocommit=True,
        prepare_threshold=settings.prepare_threshold,
        client_encoding="utf8",  # SQL_ASCII, that of a database, gives bytes for texts
    )
    connection.deadline = deadline.at
    if settings.own_session:
        try:
            psycopg.RawCursor(connection).execute(CONFIGURE, limits(settings.timeout))
        except BaseException:
            connection.close()
            raise
    return OwnPsycopgSession(connection)


def execute(connection: Connection, statement: Statement) -> Reply:
    """Run one statement, by a cursor."""
    with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = [] if cursor.description is None else cursor.fetchall()
        return Reply(rows, cursor.rowcount)


async def async_connect(settings: Settings, deadline: Deadline) -> OwnAsyncPsycopgSession:
    """Open a connection, with settings of our own."""
    try:
        async with asyncio.timeout(deadline.left):
            connection = await AsyncBoundedConnection.connect(
                settings.conninfo,
                autocommit=True,
                prepare_threshold=settings.prepare_threshold,
                client_encoding="utf8",  # SQL_ASCII, that of a database, gives bytes for texts
            )
    except TimeoutError:
        raise TimeIsUp("the server has not answered") from None
    connection.deadline = deadline.at
    if settings.own_session:
        try:
            await psycopg.AsyncRawCursor(connection).execute(CONFIGURE, limits(settings.timeout))
        except BaseException:
            await connection.close()
            raise
    return OwnAsyncPsycopgSession(connection)


async def async_execute(connection: AsyncConnection, statement: Statement) -> Reply:
    """Run one statement, by a cursor."""
    async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = [] if cursor.description is None else await cursor.fetchall()
        return Reply(rows, cursor.rowcount)


# --- what the application gives: checked before it is used --------------------------------------

OF_GIVEN_POOL: Final = "the PostgreSQL database of the given pool"
OF_GIVEN_CONNECTION: Final = "the PostgreSQL database of the given connection"
"""The names of databases that are only known by their connections."""


def check_process(opened_by: int) -> None:
    """Refuse a connection of another process: two programs would speak through one socket."""
    if os.getpid() != opened_by:
        raise StoreUnavailable(
            "the given connection or pool is from before the fork; open another one in this process"
        )


def check_idle(connection: Connection | AsyncConnection) -> None:
    """Refuse while the application's own transaction is open: ours would become part of it."""
    check_answers(connection)
    if connection.info.transaction_status in {
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    }:
        raise open_transaction()


def check_answers(connection: Connection | AsyncConnection) -> None:
    """Refuse a connection whose answers come later, or are not what we ask for."""
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ConfigError(
            "the connection is in pipeline mode, in which answers come later than semel needs "
            "them; use it outside the block of connection.pipeline()"
        )
    if connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII":
        raise texts_as_bytes(WITH_UTF8)


def open_transaction() -> StoreError:
    """Tell that the application is in the middle of something."""
    return StoreError(
        "the given connection has an open transaction; commit it or roll it back first, or "
        "give the store a connection of its own"
    )
