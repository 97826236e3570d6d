# Generated from stores/sql/postgres/aio.py by `make generate`: change that file instead.
"""The PostgreSQL store for threads, and what runs its operations, one or many at a time.

An operation alone commits by itself, several commit in one transaction. If one member spoils that,
it is undone, and its members run one by one: each has its own answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import sleep
from typing import Any, TypeVar

from psycopg.errors import LockNotAvailable

from semel.core.records import (
    Claim,
    ClaimRequest,
    CompleteRequest,
    Identity,
    RenewRequest,
    Request,
)
from semel.errors import StoreError, StoreUnavailable
from semel.stores.batching import ALONE, Alone
from semel.stores.listening import Watch
from semel.stores.sql.batch import all_differ, filled_in, left_open
from semel.stores.sql.postgres import threads
from semel.stores.sql.postgres.batch import BATCH_LIMIT, PostgresBatchVerbs, answers_of
from semel.stores.sql.postgres.errors import (
    DRIVER_ERRORS,
    MigrationLocked,
    PostgresDeadline,
    TableLocked,
    concerns_all,
    translate,
)
from semel.stores.sql.postgres.listener import PostgresWakeups
from semel.stores.sql.postgres.pool import Session, Source
from semel.stores.sql.postgres.psycopg_sessions import BATCH_LOCK_SHARE
from semel.stores.sql.postgres.schema import (
    READ_COMMITTED,
    Schema,
    check_given,
    checked_columns,
    make_schema,
)
from semel.stores.sql.postgres.settings import all_options, settings
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.schema import DEFAULT_TABLE
from semel.stores.sql.store import SQLStore
from semel.stores.sql.verbs import Operation, OwnColumns, Verb
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT, boolean, positive_seconds

T = TypeVar("T")


class Executor:
    """Runs operations on the connections of a source."""

    def __init__(self, source: Source, schema: Schema, timeout: float) -> None:
        self._source = source
        self._schema = schema
        self._timeout = timeout
        self._prepared = False

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them."""
        if len(operations) > 1:
            try:
                return self._transaction(lambda: one_by_one(operations))
            except StoreUnavailable as error:
                if concerns_all(error):
                    return [StoreUnavailable(*error.args) for _ in operations]
            except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
                pass
        return [self._alone(operation) for operation in operations]

    def _alone(self, operation: Operation[Any]) -> Any:
        try:
            return self.run_one(operation)
        except Exception as error:  # noqa: BLE001 - it reaches the caller as the outcome
            return error

    def run_one(self, operation: Operation[T]) -> T:
        """Run one operation, and raise its error."""
        deadline = PostgresDeadline(self._timeout)
        while True:
            try:
                if not self._prepared:
                    self._prepare(deadline)
                with self._source.lend(deadline) as session:
                    verb = operation.start()
                    try:
                        statement = next(verb)
                        while True:
                            statement = verb.send(session.execute(statement))
                    except StopIteration as end:
                        answer: T = end.value
                        return answer
            except DRIVER_ERRORS as error:
                pause = self._pause_after(error, deadline)
            sleep(pause)

    def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""
        return self._transaction(lambda: self._schema.migrate(columns), migrates=True)

    def close(self) -> None:
        """Close what the source opened."""
        self._source.close()

    def _transaction(self, start: Callable[[], Verb[T]], *, migrates: bool = False) -> T:
        """Run a verb in a transaction, again while there is time and sense in it."""
        deadline = PostgresDeadline(self._timeout)
        while True:
            try:
                if not (self._prepared or migrates):
                    self._prepare(deadline)
                with self._source.lend(deadline) as session:
                    return in_transaction(session, start(), migrates=migrates)
            except DRIVER_ERRORS as error:
                pause = self._pause_after(error, deadline)
            sleep(pause)

    def _pause_after(self, error: Exception, deadline: PostgresDeadline) -> float:
        """Return how long to wait before the next try, or raise what the error means."""
        pause = deadline.pause_after(error)
        if pause is None:
            reason = self._explained(deadline.reason(error), deadline)
            raise translate(reason, self._source.place) from reason
        return pause

    def _explained(self, error: Exception, deadline: PostgresDeadline) -> Exception:
        """Find out what is locked: a record runs elsewhere then, a table is an outage."""
        if not isinstance(error, LockNotAvailable):
            return error
        try:
            with self._source.lend(deadline) as session:
                in_transaction(session, self._schema.try_lock())
        except LockNotAvailable:
            return TableLocked("the table is locked")
        except DRIVER_ERRORS:  # may not lock, or has gone: the first error says what it can
            pass
        return error

    def _prepare(self, deadline: PostgresDeadline) -> None:
        with self._source.lend(deadline) as session:
            if not drive(session, self._schema.check()):
                in_transaction(session, self._schema.migrate({}), migrates=True)
        self._prepared = True


def one_by_one(operations: Sequence[Operation[Any]]) -> Verb[list[Any]]:
    """Run the operations one after the other, as one verb."""
    answers = []
    for operation in operations:
        answers.append((yield from operation.start()))  # noqa: PERF401 - no comprehension can yield
    return answers


def in_transaction(session: Session, verb: Verb[T], *, migrates: bool = False) -> T:
    """Run a verb of several statements in one transaction."""
    try:
        with session.transaction():
            session.execute(READ_COMMITTED)
            return drive(session, verb)
    except LockNotAvailable as locked:
        if migrates:
            raise MigrationLocked("another program has the lock") from locked
        raise


def drive(session: Session, verb: Verb[T]) -> T:
    """Run the statements of a verb to its end."""
    try:
        statement = next(verb)
        while True:
            statement = verb.send(session.execute(statement))
    except StopIteration as end:
        answer: T = end.value
        return answer


class Batches:
    """The verbs for many, each one statement; ALONE stands for what that cannot tell."""

    def __init__(self, verbs: PostgresBatchVerbs, executor: Executor, renewals: Executor) -> None:
        """`renewals` has a connection of its own: claims, however many, must not hold them up."""
        self._verbs = verbs
        self._executor = executor
        self._renewals = renewals

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        answer = _ANSWERS.get(kinds.pop()) if len(kinds) == 1 else None
        return [ALONE] * len(requests) if answer is None else answer(self, requests)

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError | Alone]:
        """`claim` for each."""
        if self._verbs.has_own_columns:  # their types are the application's: no array has them
            return [ALONE] * len(asks)
        return self._sent(self._executor, self._verbs.claim_batch, asks)

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError | Alone]:
        """`complete` for each."""
        return self._sent(self._executor, self._verbs.complete_batch, asks)

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError | Alone]:
        """`renew` for each, unless one is to be parked."""
        if any(ask.lease <= 0 for ask in asks):
            return [ALONE] * len(asks)
        return self._sent(self._renewals, self._verbs.renew_batch, asks)

    def _sent(
        self,
        executor: Executor,
        batch: Callable[[Sequence[Any]], Operation[list[Any]]],
        asks: Sequence[Any],
    ) -> list[Any]:
        if not asks or not all_differ(asks):
            return [ALONE] * len(asks)
        answers: list[Any] = []
        for start in range(0, len(asks), BATCH_LIMIT):
            part = asks[start : start + BATCH_LIMIT]
            answers += answers_of(executor.run([batch(part)])[0], len(part))
        return answers


_ANSWERS: dict[type, Callable[..., Any]] = {
    ClaimRequest: Batches.claim_many,
    CompleteRequest: Batches.complete_many,
    RenewRequest: Batches.renew_many,
}
"""Not in the object itself: it would stay until the garbage collector runs."""


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> PostgresStore:
    """Open a store for threads; connects on first use."""
    address, merged = all_options(url, timeout, options)
    return PostgresStore(address, prefix=prefix, **merged)


class Singles(SQLStore):
    """Answers requests one by one."""

    _executor: Executor

    # Handed on, not awaited: one coroutine less in every call.
    def _run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, operation: Operation[T]
    ) -> T:
        return self._executor.run_one(operation)


class PostgresStore(Singles):
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
        source, reserved = threads.sources(own, pool, connection, columns)
        self._schema = make_schema(table, schema, partitions, autocreate)
        self._postgres = Executor(source, self._schema, seconds)
        self._wakeups = PostgresWakeups(own, source.place)
        self._postgres_verbs = PostgresBatchVerbs(
            self._schema.table,
            prefix,
            checked_columns(columns),
            self._wakeups,
            seconds * BATCH_LOCK_SHARE,
        )
        self._renewals = Executor(reserved, self._schema, seconds)
        self._batches = Batches(self._postgres_verbs, self._postgres, self._renewals)
        super().__init__(self._postgres_verbs, self._postgres)
        self._shares = boolean("batching", batching)
        """Whether threads that ask at the same time share statements; threads never do."""

    def watch(self, identity: Identity) -> Watch:
        """Listen for the end of the record's running attempt."""
        return self._wakeups.watch(self._postgres_verbs.digest(identity))

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        answers = self._batches.send(requests)
        return filled_in(answers, super().send(left_open(requests, answers)))

    def close(self) -> None:
        """Release what this store opened itself."""
        self._wakeups.close()
        self._renewals.close()
        super().close()

    def verbs_on(self, table: str | None) -> PostgresVerbs:
        """Return what transactional mode needs: the verbs on the store's table, or on another one.

        The other one is in the same schema.
        """
        if table is None:
            return self._postgres_verbs
        return self._postgres_verbs.on(self._schema.beside(table))

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._schema.create_nothing()

    def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return self._postgres.migrate(columns or {})

    def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return self._run(self._postgres_verbs.diagnose())

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        return self._schema.script()
