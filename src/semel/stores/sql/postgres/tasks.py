"""A store for asyncio: asyncpg's connections, several times quicker than psycopg's with arrays.

psycopg's serve where asyncpg cannot do what is asked for. asyncpg's errors become psycopg's here,
by their code, so that everything else knows one kind of error. A wait ends at the deadline of the
call: the connection is cut then, and the server's own limits (`CONFIGURE`) end what it still does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeAlias
from urllib.parse import urlencode

import asyncpg
import psycopg
from asyncpg.pool import PoolConnectionProxy
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from semel.stores.batching import AsyncSlots
from semel.stores.sql.aio import AsyncOwnSession, AsyncSession, AsyncSource, in_turn
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres.errors import BECAME_REPLICA, TimeIsUp
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.postgres.threads import (
    CONFIGURE,
    OF_GIVEN_CONNECTION,
    OF_GIVEN_POOL,
    AsyncConnection,
    async_connect,
    check_process,
    limits,
    open_transaction,
)
from semel.stores.sql.verbs import OwnColumns, Reply, Statement

AsyncpgConnection: TypeAlias = Any
"""`asyncpg.Connection`, whose types its releases do not agree on."""

_connect: Any = asyncpg.connect

_PASSED_ON: Final = {
    "user": "user",
    "password": "password",
    "dbname": "database",
    "passfile": "passfile",
    "target_session_attrs": "target_session_attrs",
}
_OF_TLS: Final = frozenset({"sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword"})
_UNDERSTOOD: Final = frozenset(
    {
        *_PASSED_ON,
        *_OF_TLS,
        "host",
        "port",
        "connect_timeout",
        "application_name",
        "fallback_application_name",
    }
)

_DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # TimeoutError is one
)


def asyncpg_understands(settings: Settings) -> bool:
    """Whether asyncpg can do everything that is asked for; psycopg, with libpq, can do the rest.

    Without prepared statements it needs two round trips, which a bouncer may send to two servers.
    """
    asked = _asked(settings)
    return (
        settings.prepare and _UNDERSTOOD.issuperset(asked) and asked.get("sslrootcert") != "system"
    )


def _asked(settings: Settings) -> dict[str, Any]:
    """Return every option in force: those of the environment, as libpq reads it, and the URL's."""
    defaults = {
        option.keyword.decode(): os.fsdecode(option.val)
        for option in Conninfo.get_defaults()
        if option.val and option.val != option.compiled
    }
    return defaults | conninfo_to_dict(settings.conninfo)


class AsyncpgSession:
    """A connection of asyncpg's."""

    def __init__(self, connection: AsyncpgConnection) -> None:
        self._connection = connection

    async def execute(self, statement: Statement) -> Reply:
        with psycopgs_errors():
            return await execute(self._connection, statement)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        with psycopgs_errors():
            transaction = self._connection.transaction()
            await transaction.start()
            try:
                yield
            except BaseException:
                # What led here must reach the caller, CancelledError above all. A connection that
                # is closed, or breaks now, takes its transaction along.
                with suppress(Exception):
                    await transaction.rollback()
                raise
            await transaction.commit()


class OwnAsyncpgSession(AsyncpgSession):
    """One that we opened."""

    idle_since = float("inf")
    slot: object = None
    lost = False
    _deadline = float("inf")
    _timed_out = False

    def begin(self, deadline: Deadline) -> None:
        """Serve a call: every wait ends at its deadline."""
        self._deadline = deadline.at

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement, until the deadline."""
        left = max(0.0, self._deadline - time.monotonic())
        alarm = asyncio.get_running_loop().call_later(left, self._cut)
        try:
            try:
                return _reply(await _sent(self._connection, statement))
            except _DRIVER_ERRORS as error:
                raise _as_psycopg(error) from error
        except Exception as error:
            if self._timed_out:  # whatever asyncpg makes of it
                raise TimeIsUp("the server has not answered") from error
            raise
        except asyncio.CancelledError:
            self._connection.terminate()  # an answer may still come: it would meet a stranger
            raise
        finally:
            alarm.cancel()

    def _cut(self) -> None:
        self._timed_out = True
        self._connection.terminate()

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        return bool(self._connection.is_closed())

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        return not (self.lost or self.dead or self._connection.is_in_transaction())

    async def close(self) -> None:
        """Close it; the server is not waited for."""
        self._connection.terminate()


async def connect_asyncpg(settings: Settings, deadline: Deadline) -> OwnAsyncpgSession:
    """Open a connection, with settings of our own."""
    asked = _asked(settings)
    tls = {name: value for name, value in asked.items() if name in _OF_TLS}
    given = {theirs: asked[ours] for ours, theirs in _PASSED_ON.items() if ours in asked}
    name = asked.get("application_name") or asked["fallback_application_name"]
    bound = float(str(asked["connect_timeout"]))
    with psycopgs_errors():
        connection = await _connect(
            f"postgresql://?{urlencode(tls)}" if tls else None,
            host=_listed(asked.get("host")),
            port=_listed(asked.get("port")),
            timeout=min(bound, max(deadline.left, _LEAST_TO_CONNECT)),
            server_settings={"application_name": name},
            # The statements are few, and the same for ever.
            max_cached_statement_lifetime=0,
            max_cacheable_statement_size=0,
            **given,
        )
    try:
        session = OwnAsyncpgSession(connection)
        session.begin(deadline)
        await session.execute(Statement(CONFIGURE, limits(settings.timeout), writes=False))
    except BaseException:
        connection.terminate()
        raise
    return session


_LEAST_TO_CONNECT = 0.05


def _listed(value: Any) -> list[Any] | None:
    return None if value is None else str(value).split(",")


async def execute(connection: AsyncpgConnection, statement: Statement) -> Reply:
    """Run one statement."""
    return _reply(await _sent(connection, statement))


def _sent(connection: AsyncpgConnection, statement: Statement) -> Awaitable[Any]:
    """Send a statement; asyncpg gives either its rows or how many it changed."""
    if statement.writes and " RETURNING " not in statement.sql:
        changing: Awaitable[str] = connection.execute(statement.sql, *statement.parameters)
        return changing
    rows: Awaitable[list[Any]] = connection.fetch(statement.sql, *statement.parameters)
    return rows


def _reply(answer: Any) -> Reply:
    if isinstance(answer, str):  # "UPDATE 1"
        *_, last = answer.split()
        return Reply([], int(last) if last.isdigit() else 0)
    return Reply([tuple(row) for row in answer], len(answer))


@contextmanager
def psycopgs_errors() -> Iterator[None]:
    """Raise what psycopg would have raised."""
    try:
        yield
    except _DRIVER_ERRORS as error:
        raise _as_psycopg(error) from error


def _as_psycopg(error: Exception) -> psycopg.Error:
    if isinstance(error, asyncpg.PostgresError):
        # It quotes the row with its key, and a traceback shows it.
        setattr(error, "detail", None)  # noqa: B010 - asyncpg's types do not know it
        try:
            kind = psycopg.errors.lookup(getattr(error, "sqlstate", None) or "")
        except KeyError:
            kind = psycopg.DatabaseError
        return kind(str(error))
    if isinstance(error, OSError) and error.errno:
        return psycopg.OperationalError(f"connection failed: {os.strerror(error.errno)}")
    return psycopg.OperationalError(str(error) or "connection timeout expired")


# --- what the application has -------------------------------------------------------------------

AsyncpgPool: TypeAlias = "asyncpg.Pool"
Pool: TypeAlias = "AsyncConnectionPool[Any] | AsyncpgPool"
Connection: TypeAlias = "AsyncConnection | AsyncpgConnection"


class AsyncpgGivenPool:
    """A pool of asyncpg's that the application opened, and will close."""

    place = OF_GIVEN_POOL

    def __init__(self, pool: AsyncpgPool) -> None:
        self._pool = pool
        self._opened_by = os.getpid()

    @asynccontextmanager
    async def lend(self, deadline: Deadline) -> AsyncIterator[AsyncSession]:
        """Borrow a connection, and give it back."""
        check_process(self._opened_by)
        try:
            with psycopgs_errors():
                lent = await self._pool.acquire(timeout=deadline.left)
        except psycopg.OperationalError as error:
            raise _told_by_a_pool(error) from error
        try:
            yield AsyncpgSession(lent)
        except BECAME_REPLICA:
            lent.terminate()  # the pool opens another, which may reach the primary
            raise
        finally:
            await self._pool.release(lent)

    async def close(self) -> None:
        """Leave it open."""


class AsyncpgGivenConnection:
    """A connection of asyncpg's that the application opened, and will close."""

    place = OF_GIVEN_CONNECTION

    def __init__(self, connection: AsyncpgConnection) -> None:
        self._connection = connection
        self._opened_by = os.getpid()
        self._turn = AsyncSlots(1)

    @asynccontextmanager
    async def lend(self, deadline: Deadline) -> AsyncIterator[AsyncSession]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        async with in_turn(self._turn, deadline):
            if not self._connection.is_closed() and self._connection.is_in_transaction():
                raise open_transaction()
            yield AsyncpgSession(self._connection)

    async def close(self) -> None:
        """Leave it open."""


def _told_by_a_pool(error: psycopg.OperationalError) -> psycopg.OperationalError:
    match error.__cause__:
        case TimeoutError():
            return PoolTimeout("no connection was free")
        case asyncpg.InterfaceError():
            return PoolClosed(str(error))
        case _:
            return error


# --- which of the two drivers serves ------------------------------------------------------------


def connect_for(
    own: Settings, columns: OwnColumns | None
) -> Callable[[Settings, Deadline], Awaitable[AsyncOwnSession]]:
    """Return what opens a connection."""
    # asyncpg wants values of the very type of their column: for semel's that is no question.
    return connect_asyncpg if asyncpg_understands(own) and not columns else async_connect


def source_of(given: Any, of_psycopg: Callable[[Any], AsyncSource]) -> AsyncSource:
    """Return what takes connections from what the application gave."""
    if isinstance(given, asyncpg.Pool):
        return AsyncpgGivenPool(given)
    if isinstance(given, (asyncpg.Connection, PoolConnectionProxy)):
        return AsyncpgGivenConnection(given)
    return of_psycopg(given)
