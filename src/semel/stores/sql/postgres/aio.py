"""The PostgreSQL store for asyncio, and what runs its operations, one or many at a time.

An operation alone commits by itself, several commit in one transaction. If one member spoils that,
it is undone, and its members run one by one: each has its own answer.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg.errors import LockNotAvailable
from psycopg_pool import AsyncConnectionPool

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.core.records import Identity
from semel.errors import StoreUnavailable
from semel.stores.batching import AsyncSlots
from semel.stores.listening import AsyncListener, AsyncWatch
from semel.stores.sql.aio import (
    AsyncExecutor,
    AsyncPool,
    AsyncServerStore,
    AsyncSession,
    AsyncSource,
    drive,
    in_turn,
)
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import errors, tasks
from semel.stores.sql.postgres.batch import PostgresBatchVerbs
from semel.stores.sql.postgres.errors import (
    BECAME_REPLICA,
    DRIVER_ERRORS,
    MigrationLocked,
    TableLocked,
    TimeIsUp,
)
from semel.stores.sql.postgres.listener import AsyncPostgresSubscriber, channel
from semel.stores.sql.postgres.settings import Settings, all_options, check_given, settings
from semel.stores.sql.postgres.threads import (
    BATCH_LOCK_SHARE,
    OF_GIVEN_CONNECTION,
    OF_GIVEN_POOL,
    AsyncConnection,
    AsyncPsycopgSession,
    check_idle,
    check_process,
)
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.schema import (
    DEFAULT_TABLE,
    POSTGRES_COLUMNS,
    READ_COMMITTED,
    PostgresSchema,
    checked_columns,
)
from semel.stores.sql.verbs import Operation, OwnColumns, Verb
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT, boolean, positive_seconds

T = TypeVar("T")


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncPostgresStore:
    """Open a store for asyncio; connects on first use."""
    address, merged = all_options(url, timeout, options)
    return AsyncPostgresStore(address, prefix=prefix, **merged)


class AsyncPostgresStore(AsyncServerStore):
    """A store for asyncio. It belongs to the first event loop that uses it.

    It takes a URL, or `pool=` or `connection=` of the application, which it never closes. A
    connection must not be in a transaction when the store is used. Stores with different prefixes
    may share a table and never see each other's records. Times are the server's.
    """

    dialect = "postgresql"

    def __init__(
        self,
        url: str | None = None,
        *,
        pool: tasks.Pool | None = None,
        connection: tasks.Connection | None = None,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        schema: str | None = None,
        columns: OwnColumns | None = None,
        partitions: int | str | None = None,
        autocreate: bool | str = True,
        timeout: float | str = DEFAULT_TIMEOUT,
        batching: bool | str = True,
        **options: Any,
    ) -> None:
        check_given(url, pool, connection, options)
        seconds = positive_seconds("timeout", timeout)
        own = None if url is None else settings(url, options, seconds)
        source, reserved = (
            given_source(pool, connection) if own is None else own_pools(own, columns)
        )
        self._schema = PostgresSchema(table, schema, partitions=partitions, autocreate=autocreate)
        self._wakeups = AsyncPostgresWakeups(own, source.place)
        self._verbs = PostgresBatchVerbs(
            self._schema.table,
            prefix,
            checked_columns(columns, POSTGRES_COLUMNS),
            self._wakeups,
            seconds * BATCH_LOCK_SHARE,
        )
        calls = AsyncPostgresExecutor(source, self._schema, seconds)
        renewals = AsyncPostgresExecutor(reserved, self._schema, seconds)
        super().__init__(self._verbs, calls, calls, renewals, shares=boolean("batching", batching))

    def watch(self, identity: Identity) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        notice_fork()
        return self._wakeups.watch(self._verbs.digest(identity))

    async def close(self) -> None:
        """Release what this store opened itself."""
        await self._wakeups.close()
        await super().close()

    def verbs_on(self, table: str | None) -> PostgresVerbs:
        """Return what transactional mode needs: the verbs on the store's table, or on another one.

        The other one is in the same schema.
        """
        return self._verbs if table is None else self._verbs.on(self._schema.beside(table))

    async def diagnose(self) -> list[str]:
        """Return what the server's settings put at risk."""
        return await self._calls.run_one(self._verbs.diagnose())


class AsyncPostgresWakeups(ForkAware):
    """Everything that a store hears. It contains the digests of the records it listens for."""

    def __init__(self, settings: Settings | None, place: str) -> None:
        listens = settings is not None and settings.own_session
        self._new_subscriber = (
            partial(AsyncPostgresSubscriber, cast("Settings", settings)) if listens else None
        )
        self._place = place
        self._begin()
        follow_forks(self)

    def _begin(self) -> None:
        self._listener = AsyncListener(self._new_subscriber, self._place)

    def __contains__(self, digest: object) -> bool:
        return self._listener.subscriptions.is_subscribed(channel(cast("UUID", digest)))

    def watch(self, digest: UUID) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        return AsyncWatch(self._listener, channel(digest))

    async def close(self) -> None:
        """End the connection."""
        await self._listener.close()

    def after_fork_in_child(self) -> None:
        """Listen on a connection of its own."""
        leave_alone(self._listener)
        self._begin()


# --- what runs operations -----------------------------------------------------------------------


class TransactionSession(AsyncSession, Protocol):
    """A connection that is lent for one call, and may have a transaction."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; it ends with the block."""
        ...


class AsyncPostgresExecutor(AsyncExecutor):
    """Runs operations on the connections of a source."""

    schema: PostgresSchema
    rules = errors

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations, in one transaction if that goes; return their outcomes."""
        if len(operations) > 1:
            try:
                return await self._transaction(lambda: one_by_one(operations))
            except StoreUnavailable as error:
                if errors.fails_every_request(error):
                    return [StoreUnavailable(*error.args) for _ in operations]
            except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
                pass
        return [await self.outcome(operation, self.deadline()) for operation in operations]

    async def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""

        async def work(session: TransactionSession) -> int:
            return await in_transaction(session, self.schema.migrate(columns), migrates=True)

        return await self.repeated(work, self.deadline())

    async def prepare(self, deadline: Deadline) -> None:
        """Look whether the table is there, and make it if that is wanted."""
        async with self.pool.lend(deadline) as session:
            if not await drive(session, self.schema.check()):
                await in_transaction(session, self.schema.migrate({}), migrates=True)
        self.schema.ensured = True

    async def _transaction(self, start: Callable[[], Verb[T]]) -> T:
        deadline = self.deadline()

        async def work(session: TransactionSession) -> T:
            return await in_transaction(session, start())

        return await self.repeated(work, deadline)

    async def reason(self, error: Exception, deadline: Deadline) -> Exception:
        """Return why the call failed: running out of time is only how a repeated one ends.

        Of a lock, find out what is locked: a record runs elsewhere then, a table is an outage.
        """
        if isinstance(error, TimeIsUp) and deadline.first is not None:
            error = deadline.first
        if not isinstance(error, LockNotAvailable):
            return error
        try:
            async with self.pool.lend(deadline) as session:
                await in_transaction(session, self.schema.try_lock())
        except LockNotAvailable:
            return TableLocked("the table is locked")
        except DRIVER_ERRORS:  # may not lock, or has gone: the first error says what it can
            pass
        return error


def one_by_one(operations: Sequence[Operation[Any]]) -> Verb[list[Any]]:
    """Run the operations one after the other, as one verb."""
    answers = []
    for operation in operations:
        answers.append((yield from operation.start()))  # noqa: PERF401 - no comprehension can yield
    return answers


async def in_transaction(
    session: TransactionSession, verb: Verb[T], *, migrates: bool = False
) -> T:
    """Run a verb of several statements in one transaction."""
    try:
        async with session.transaction():
            await session.execute(READ_COMMITTED)
            return await drive(session, verb)
    except LockNotAvailable as locked:
        if migrates:
            raise MigrationLocked("another program has the lock") from locked
        raise


# --- where connections come from: those for all calls, and those for renewals -------------------
#
# What the application has is given back as it was, and not closed: but for a pool's connection to a
# server that takes no writes any more, which the pool replaces.


def own_pools(own: Settings, columns: OwnColumns | None) -> tuple[AsyncSource, AsyncSource]:
    """Make pools of our own."""
    connect = partial(tasks.connect_for(own, columns), own)
    calls = AsyncPool(connect, errors, own.place, max_size=own.max_size, min_size=own.min_size)
    renewals = AsyncPool(connect, errors, own.place, max_size=1)  # nobody else can keep it busy
    renewals.spares = (calls,)
    return calls, renewals


def given_source(
    pool: tasks.Pool | None, connection: tasks.Connection | None
) -> tuple[AsyncSource, AsyncSource]:
    """Use what the application gave."""
    source: AsyncSource = (
        tasks.source_of(connection, AsyncGivenConnection)
        if pool is None
        else tasks.source_of(pool, AsyncGivenPool)
    )
    return source, source


class AsyncGivenPool:
    """A pool of psycopg's that the application opened, and will close."""

    place = OF_GIVEN_POOL

    def __init__(self, pool: Any) -> None:
        self._pool: AsyncConnectionPool[Any] = pool
        self._opened_by = os.getpid()

    @asynccontextmanager
    async def lend(self, deadline: Deadline) -> AsyncIterator[AsyncSession]:
        """Borrow a connection, and give it back as it was."""
        check_process(self._opened_by)
        connection = await self._pool.getconn(timeout=deadline.left)
        try:
            async with committing(connection):
                yield AsyncPsycopgSession(connection)
        except BECAME_REPLICA:
            await connection.close()  # the pool opens another, which may reach the primary
            raise
        finally:
            await self._pool.putconn(connection)

    async def close(self) -> None:
        """Leave it open."""


class AsyncGivenConnection:
    """A connection of psycopg's that the application opened, and will close."""

    place = OF_GIVEN_CONNECTION

    def __init__(self, connection: Any) -> None:
        self._connection: AsyncConnection = connection
        self._opened_by = os.getpid()
        self._turn = AsyncSlots(1)

    @asynccontextmanager
    async def lend(self, deadline: Deadline) -> AsyncIterator[AsyncSession]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        async with in_turn(self._turn, deadline), committing(self._connection):
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
