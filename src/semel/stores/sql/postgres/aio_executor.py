"""The twin of `executor`, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from psycopg.errors import LockNotAvailable

from semel.errors import StoreUnavailable
from semel.stores.sql.postgres.aio_sessions import AsyncSession
from semel.stores.sql.postgres.aio_sources import AsyncSource
from semel.stores.sql.postgres.errors import (
    DRIVER_ERRORS,
    MigrationLocked,
    TableLocked,
    translate,
)
from semel.stores.sql.postgres.patience import Patience, concerns_all
from semel.stores.sql.postgres.schema import READ_COMMITTED, Schema
from semel.stores.sql.verbs import Operation, Verb

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
                return await self._repeated(partial(together, operations=operations))
            except StoreUnavailable as error:
                if concerns_all(error):
                    return [StoreUnavailable(*error.args) for _ in operations]
            except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
                pass
        return [await self._alone(operation) for operation in operations]

    async def run_one(self, operation: Operation[T]) -> T:
        """Run one operation, and raise its error."""
        return await self._repeated(lambda session: drive(session, operation.start()))

    async def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""
        return await self._repeated(
            lambda session: self._migrate(session, columns),
            prepared=True,
        )

    async def close(self) -> None:
        """Close what the source opened."""
        await self._source.close()

    async def _alone(self, operation: Operation[Any]) -> Any:
        try:
            return await self.run_one(operation)
        except Exception as error:  # noqa: BLE001 - it reaches the caller as the outcome
            return error

    async def _repeated(
        self, work: Callable[[AsyncSession], Awaitable[T]], *, prepared: bool = False
    ) -> T:
        """Run the work on a connection, again while there is time and sense in it."""
        patience = Patience(self._timeout)
        while True:
            try:
                if not (self._prepared or prepared):
                    await self._prepare(patience)
                async with self._source.lend(patience) as session:
                    return await work(session)
            except DRIVER_ERRORS as error:
                pause = patience.pause_after(error)
                if pause is None:
                    reason = await self._explained(patience.reason(error), patience)
                    raise translate(reason, self._source.place) from reason
            await asyncio.sleep(pause)

    async def _explained(self, error: Exception, patience: Patience) -> Exception:
        """Find out what is locked: a record runs elsewhere then, a table is an outage."""
        if not isinstance(error, LockNotAvailable):
            return error
        try:
            async with self._source.lend(patience) as session:
                await in_transaction(session, self._schema.try_lock())
        except LockNotAvailable:
            return TableLocked("the table is locked")
        except DRIVER_ERRORS:  # may not lock, or has gone: the first error says what it can
            pass
        return error

    async def _prepare(self, patience: Patience) -> None:
        async with self._source.lend(patience) as session:
            if not await drive(session, self._schema.check()):
                await self._migrate(session, {})
        self._prepared = True

    async def _migrate(self, session: AsyncSession, columns: Mapping[str, str]) -> int:
        try:
            return await in_transaction(session, self._schema.migrate(columns))
        except LockNotAvailable as locked:
            raise MigrationLocked("another program has the lock") from locked


async def together(session: AsyncSession, operations: Sequence[Operation[Any]]) -> list[Any]:
    """Run the operations in one transaction."""
    async with session.transaction():
        await session.execute(READ_COMMITTED)
        return [await drive(session, operation.start()) for operation in operations]


async def in_transaction(session: AsyncSession, verb: Verb[T]) -> T:
    """Run a verb of several statements in one transaction."""
    async with session.transaction():
        await session.execute(READ_COMMITTED)
        return await drive(session, verb)


async def drive(session: AsyncSession, verb: Verb[T]) -> T:
    """Run the statements of a verb to its end."""
    try:
        statement = next(verb)
        while True:
            statement = verb.send(await session.execute(statement))
    except StopIteration as end:
        answer: T = end.value
        return answer
