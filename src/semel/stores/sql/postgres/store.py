# Generated from stores/sql/postgres/aio.py by `make generate`: change that file instead.
"""The PostgreSQL store for threads, and what runs its operations, one or many at a time.

An operation alone commits by itself, several commit in one transaction. If one member spoils that,
it is undone, and its members run one by one: each has its own answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg.errors import LockNotAvailable
from psycopg_pool import ConnectionPool

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.core.records import Identity
from semel.errors import StoreUnavailable
from semel.stores.listening import Listener, Watch
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import errors, threads
from semel.stores.sql.postgres.batch import PostgresBatchVerbs
from semel.stores.sql.postgres.errors import (
    BECAME_REPLICA,
    DRIVER_ERRORS,
    MigrationLocked,
    TableLocked,
    TimeIsUp,
)
from semel.stores.sql.postgres.listener import PostgresSubscriber, channel
from semel.stores.sql.postgres.settings import Settings, all_options, check_given, settings
from semel.stores.sql.postgres.threads import (
    BATCH_LOCK_SHARE,
    OF_GIVEN_CONNECTION,
    OF_GIVEN_POOL,
    Connection,
    PsycopgSession,
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
from semel.stores.sql.store import (
    Executor,
    Pool,
    ServerStore,
    Session,
    Source,
    drive,
    in_turn,
)
from semel.stores.sql.verbs import Operation, OwnColumns, Verb
from semel.stores.thread_batching import Slots
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT, boolean, positive_seconds

T = TypeVar("T")


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> PostgresStore:
    """Open a store for threads; connects on first use."""
    address, merged = all_options(url, timeout, options)
    return PostgresStore(address, prefix=prefix, **merged)


class PostgresStore(ServerStore):
    """A store for threads. Any number of threads may use it.

    It takes a URL, or `pool=` or `connection=` of the application, which it never closes. A
    connection must not be in a transaction when the store is used. Stores with different prefixes
    may share a table and never see each other's records. Times are the server's.
    """

    dialect = "postgresql"

    def __init__(
        self,
        url: str | None = None,
        *,
        pool: threads.Pool | None = None,
        connection: threads.Connection | None = None,
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
        self._wakeups = PostgresWakeups(own, source.place)
        self._verbs = PostgresBatchVerbs(
            self._schema.table,
            prefix,
            checked_columns(columns, POSTGRES_COLUMNS),
            self._wakeups,
            seconds * BATCH_LOCK_SHARE,
        )
        calls = PostgresExecutor(source, self._schema, seconds)
        renewals = PostgresExecutor(reserved, self._schema, seconds)
        super().__init__(self._verbs, calls, calls, renewals, shares=boolean("batching", batching))

    def watch(self, identity: Identity) -> Watch:
        """Listen for the end of the record's running attempt."""
        notice_fork()
        return self._wakeups.watch(self._verbs.digest(identity))

    def close(self) -> None:
        """Release what this store opened itself."""
        self._wakeups.close()
        super().close()

    def verbs_on(self, table: str | None) -> PostgresVerbs:
        """Return what transactional mode needs: the verbs on the store's table, or on another one.

        The other one is in the same schema.
        """
        return self._verbs if table is None else self._verbs.on(self._schema.beside(table))

    def diagnose(self) -> list[str]:
        """Return what the server's settings put at risk."""
        return self._calls.run_one(self._verbs.diagnose())


class PostgresWakeups(ForkAware):
    """Everything that a store hears. It contains the digests of the records it listens for."""

    def __init__(self, settings: Settings | None, place: str) -> None:
        listens = settings is not None and settings.own_session
        self._new_subscriber = (
            partial(PostgresSubscriber, cast("Settings", settings)) if listens else None
        )
        self._place = place
        self._begin()
        follow_forks(self)

    def _begin(self) -> None:
        self._listener = Listener(self._new_subscriber, self._place)

    def __contains__(self, digest: object) -> bool:
        return self._listener.subscriptions.is_subscribed(channel(cast("UUID", digest)))

    def watch(self, digest: UUID) -> Watch:
        """Listen for the end of the record's running attempt."""
        return Watch(self._listener, channel(digest))

    def close(self) -> None:
        """End the connection."""
        self._listener.close()

    def after_fork_in_child(self) -> None:
        """Listen on a connection of its own."""
        leave_alone(self._listener)
        self._begin()


# --- what runs operations -----------------------------------------------------------------------


class TransactionSession(Session, Protocol):
    """A connection that is lent for one call, and may have a transaction."""

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction; it ends with the block."""
        ...


class PostgresExecutor(Executor):
    """Runs operations on the connections of a source."""

    schema: PostgresSchema
    rules = errors

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations, in one transaction if that goes; return their outcomes."""
        if len(operations) > 1:
            try:
                return self._transaction(lambda: one_by_one(operations))
            except StoreUnavailable as error:
                if errors.fails_every_request(error):
                    return [StoreUnavailable(*error.args) for _ in operations]
            except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
                pass
        return [self.outcome(operation, self.deadline()) for operation in operations]

    def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""

        def work(session: TransactionSession) -> int:
            return in_transaction(session, self.schema.migrate(columns), migrates=True)

        return self.repeated(work, self.deadline())

    def prepare(self, deadline: Deadline) -> None:
        """Look whether the table is there, and make it if that is wanted."""
        with self.pool.lend(deadline) as session:
            if not drive(session, self.schema.check()):
                in_transaction(session, self.schema.migrate({}), migrates=True)
        self.schema.ensured = True

    def _transaction(self, start: Callable[[], Verb[T]]) -> T:
        deadline = self.deadline()

        def work(session: TransactionSession) -> T:
            return in_transaction(session, start())

        return self.repeated(work, deadline)

    def reason(self, error: Exception, deadline: Deadline) -> Exception:
        """Return why the call failed: running out of time is only how a repeated one ends.

        Of a lock, find out what is locked: a record runs elsewhere then, a table is an outage.
        """
        if isinstance(error, TimeIsUp) and deadline.first is not None:
            error = deadline.first
        if not isinstance(error, LockNotAvailable):
            return error
        try:
            with self.pool.lend(deadline) as session:
                in_transaction(session, self.schema.try_lock())
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


def in_transaction(session: TransactionSession, verb: Verb[T], *, migrates: bool = False) -> T:
    """Run a verb of several statements in one transaction."""
    try:
        with session.transaction():
            session.execute(READ_COMMITTED)
            return drive(session, verb)
    except LockNotAvailable as locked:
        if migrates:
            raise MigrationLocked("another program has the lock") from locked
        raise


# --- where connections come from: those for all calls, and those for renewals -------------------
#
# What the application has is given back as it was, and not closed: but for a pool's connection to a
# server that takes no writes any more, which the pool replaces.


def own_pools(own: Settings, columns: OwnColumns | None) -> tuple[Source, Source]:
    """Make pools of our own."""
    connect = partial(threads.connect_for(own, columns), own)
    calls = Pool(connect, errors, own.place, max_size=own.max_size, min_size=own.min_size)
    renewals = Pool(connect, errors, own.place, max_size=1)  # nobody else can keep it busy
    renewals.spares = (calls,)
    return calls, renewals


def given_source(
    pool: threads.Pool | None, connection: threads.Connection | None
) -> tuple[Source, Source]:
    """Use what the application gave."""
    source: Source = (
        threads.source_of(connection, GivenConnection)
        if pool is None
        else threads.source_of(pool, GivenPool)
    )
    return source, source


class GivenPool:
    """A pool of psycopg's that the application opened, and will close."""

    place = OF_GIVEN_POOL

    def __init__(self, pool: Any) -> None:
        self._pool: ConnectionPool[Any] = pool
        self._opened_by = os.getpid()

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Session]:
        """Borrow a connection, and give it back as it was."""
        check_process(self._opened_by)
        connection = self._pool.getconn(timeout=deadline.left)
        try:
            with committing(connection):
                yield PsycopgSession(connection)
        except BECAME_REPLICA:
            connection.close()  # the pool opens another, which may reach the primary
            raise
        finally:
            self._pool.putconn(connection)

    def close(self) -> None:
        """Leave it open."""


class GivenConnection:
    """A connection of psycopg's that the application opened, and will close."""

    place = OF_GIVEN_CONNECTION

    def __init__(self, connection: Any) -> None:
        self._connection: Connection = connection
        self._opened_by = os.getpid()
        self._turn = Slots(1)

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Session]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        with in_turn(self._turn, deadline), committing(self._connection):
            yield PsycopgSession(self._connection)

    def close(self) -> None:
        """Leave it open."""


@contextmanager
def committing(connection: Connection) -> Iterator[None]:
    """Let each statement commit by itself for a while."""
    check_idle(connection)
    before = connection.autocommit
    connection.set_autocommit(True)
    try:
        yield
    finally:
        with suppress(psycopg.OperationalError):  # it broke
            connection.set_autocommit(before)
