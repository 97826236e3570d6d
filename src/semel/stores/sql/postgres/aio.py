"""The PostgreSQL store for asyncio, and what runs its operations, one or many at a time.

An operation alone commits by itself, several commit in one transaction. If one member spoils that,
it is undone, and its members run one by one: each has its own answer.
"""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
from semel.stores.batching import ALONE, Alone, Batcher
from semel.stores.listening import AsyncWatch
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.batch import all_differ, filled_in, left_open
from semel.stores.sql.postgres import tasks
from semel.stores.sql.postgres.aio_pool import AsyncSession, AsyncSource
from semel.stores.sql.postgres.batch import BATCH_LIMIT, PostgresBatchVerbs, answers_of
from semel.stores.sql.postgres.errors import (
    DRIVER_ERRORS,
    MigrationLocked,
    PostgresDeadline,
    TableLocked,
    concerns_all,
    translate,
)
from semel.stores.sql.postgres.listener import AsyncPostgresWakeups
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
from semel.stores.sql.verbs import Operation, OwnColumns, Verb
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT, boolean, positive_seconds

T = TypeVar("T")


class AsyncExecutor:
    """Runs operations on the connections of a source."""

    def __init__(self, source: AsyncSource, schema: Schema, timeout: float) -> None:
        self._source = source
        self._schema = schema
        self._timeout = timeout
        self._prepared = False

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them."""
        if len(operations) > 1:
            try:
                return await self._transaction(lambda: one_by_one(operations))
            except StoreUnavailable as error:
                if concerns_all(error):
                    return [StoreUnavailable(*error.args) for _ in operations]
            except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
                pass
        return [await self._alone(operation) for operation in operations]

    async def _alone(self, operation: Operation[Any]) -> Any:
        try:
            return await self.run_one(operation)
        except Exception as error:  # noqa: BLE001 - it reaches the caller as the outcome
            return error

    async def run_one(self, operation: Operation[T]) -> T:
        """Run one operation, and raise its error."""
        deadline = PostgresDeadline(self._timeout)
        while True:
            try:
                if not self._prepared:
                    await self._prepare(deadline)
                async with self._source.lend(deadline) as session:
                    verb = operation.start()
                    try:
                        statement = next(verb)
                        while True:
                            statement = verb.send(await session.execute(statement))
                    except StopIteration as end:
                        answer: T = end.value
                        return answer
            except DRIVER_ERRORS as error:
                pause = await self._pause_after(error, deadline)
            await sleep(pause)

    async def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""
        return await self._transaction(lambda: self._schema.migrate(columns), migrates=True)

    async def close(self) -> None:
        """Close what the source opened."""
        await self._source.close()

    async def _transaction(self, start: Callable[[], Verb[T]], *, migrates: bool = False) -> T:
        """Run a verb in a transaction, again while there is time and sense in it."""
        deadline = PostgresDeadline(self._timeout)
        while True:
            try:
                if not (self._prepared or migrates):
                    await self._prepare(deadline)
                async with self._source.lend(deadline) as session:
                    return await in_transaction(session, start(), migrates=migrates)
            except DRIVER_ERRORS as error:
                pause = await self._pause_after(error, deadline)
            await sleep(pause)

    async def _pause_after(self, error: Exception, deadline: PostgresDeadline) -> float:
        """Return how long to wait before the next try, or raise what the error means."""
        pause = deadline.pause_after(error)
        if pause is None:
            reason = await self._explained(deadline.reason(error), deadline)
            raise translate(reason, self._source.place) from reason
        return pause

    async def _explained(self, error: Exception, deadline: PostgresDeadline) -> Exception:
        """Find out what is locked: a record runs elsewhere then, a table is an outage."""
        if not isinstance(error, LockNotAvailable):
            return error
        try:
            async with self._source.lend(deadline) as session:
                await in_transaction(session, self._schema.try_lock())
        except LockNotAvailable:
            return TableLocked("the table is locked")
        except DRIVER_ERRORS:  # may not lock, or has gone: the first error says what it can
            pass
        return error

    async def _prepare(self, deadline: PostgresDeadline) -> None:
        async with self._source.lend(deadline) as session:
            if not await drive(session, self._schema.check()):
                await in_transaction(session, self._schema.migrate({}), migrates=True)
        self._prepared = True


def one_by_one(operations: Sequence[Operation[Any]]) -> Verb[list[Any]]:
    """Run the operations one after the other, as one verb."""
    answers = []
    for operation in operations:
        answers.append((yield from operation.start()))  # noqa: PERF401 - no comprehension can yield
    return answers


async def in_transaction(session: AsyncSession, verb: Verb[T], *, migrates: bool = False) -> T:
    """Run a verb of several statements in one transaction."""
    try:
        async with session.transaction():
            await session.execute(READ_COMMITTED)
            return await drive(session, verb)
    except LockNotAvailable as locked:
        if migrates:
            raise MigrationLocked("another program has the lock") from locked
        raise


async def drive(session: AsyncSession, verb: Verb[T]) -> T:
    """Run the statements of a verb to its end."""
    try:
        statement = next(verb)
        while True:
            statement = verb.send(await session.execute(statement))
    except StopIteration as end:
        answer: T = end.value
        return answer


class AsyncBatches:
    """The verbs for many, each one statement; ALONE stands for what that cannot tell."""

    def __init__(
        self, verbs: PostgresBatchVerbs, executor: AsyncExecutor, renewals: AsyncExecutor
    ) -> None:
        """`renewals` has a connection of its own: claims, however many, must not hold them up."""
        self._verbs = verbs
        self._executor = executor
        self._renewals = renewals

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        answer = _ANSWERS.get(kinds.pop()) if len(kinds) == 1 else None
        return [ALONE] * len(requests) if answer is None else await answer(self, requests)

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError | Alone]:
        """`claim` for each."""
        if self._verbs.has_own_columns:  # their types are the application's: no array has them
            return [ALONE] * len(asks)
        return await self._sent(self._executor, self._verbs.claim_batch, asks)

    async def complete_many(
        self, asks: Sequence[CompleteRequest]
    ) -> list[bool | StoreError | Alone]:
        """`complete` for each."""
        return await self._sent(self._executor, self._verbs.complete_batch, asks)

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError | Alone]:
        """`renew` for each, unless one is to be parked."""
        if any(ask.lease <= 0 for ask in asks):
            return [ALONE] * len(asks)
        return await self._sent(self._renewals, self._verbs.renew_batch, asks)

    async def _sent(
        self,
        executor: AsyncExecutor,
        batch: Callable[[Sequence[Any]], Operation[list[Any]]],
        asks: Sequence[Any],
    ) -> list[Any]:
        if not asks or not all_differ(asks):
            return [ALONE] * len(asks)
        answers: list[Any] = []
        for start in range(0, len(asks), BATCH_LIMIT):
            part = asks[start : start + BATCH_LIMIT]
            answers += answers_of((await executor.run([batch(part)]))[0], len(part))
        return answers


_ANSWERS: dict[type, Callable[..., Any]] = {
    ClaimRequest: AsyncBatches.claim_many,
    CompleteRequest: AsyncBatches.complete_many,
    RenewRequest: AsyncBatches.renew_many,
}
"""Not in the object itself: it would stay until the garbage collector runs."""


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncPostgresStore:
    """Open a store for asyncio; connects on first use."""
    address, merged = all_options(url, timeout, options)
    return AsyncPostgresStore(address, prefix=prefix, **merged)


class AsyncSingles(AsyncSQLStore):
    """Answers requests one by one."""

    _executor: AsyncExecutor

    # Handed on, not awaited: one coroutine less in every call.
    def _run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, operation: Operation[T]
    ) -> Coroutine[Any, Any, T]:
        return self._executor.run_one(operation)


class AsyncPostgresStore(AsyncSingles):
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
        source, reserved = tasks.sources(own, pool, connection, columns)
        self._schema = make_schema(table, schema, partitions, autocreate)
        self._postgres = AsyncExecutor(source, self._schema, seconds)
        self._wakeups = AsyncPostgresWakeups(own, source.place)
        self._postgres_verbs = PostgresBatchVerbs(
            self._schema.table,
            prefix,
            checked_columns(columns),
            self._wakeups,
            seconds * BATCH_LOCK_SHARE,
        )
        self._renewals = AsyncExecutor(reserved, self._schema, seconds)
        self._batches = AsyncBatches(self._postgres_verbs, self._postgres, self._renewals)
        super().__init__(self._postgres_verbs, self._postgres)
        self._shares = boolean("batching", batching)
        """Whether tasks that ask at the same time share statements; threads never do."""
        self._batcher = (
            Batcher(AsyncSingles(self._postgres_verbs, self._postgres).ask, self._batches.send)
            if self._shares
            else None
        )

    def watch(self, identity: Identity) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        return self._wakeups.watch(self._postgres_verbs.digest(identity))

    def ask(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: Request[T]
    ) -> Coroutine[Any, Any, T]:
        """Answer one request; claims, and completes, together with those of the same time."""
        return super().ask(request) if self._batcher is None else self._batcher.ask(request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        answers = await self._batches.send(requests)
        return filled_in(answers, await super().send(left_open(requests, answers)))

    async def close(self) -> None:
        """Release what this store opened itself."""
        if self._batcher is not None:
            await self._batcher.close()
        await self._wakeups.close()
        await self._renewals.close()
        await super().close()

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

    async def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return await self._postgres.migrate(columns or {})

    async def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return await self._run(self._postgres_verbs.diagnose())

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        return self._schema.script()
