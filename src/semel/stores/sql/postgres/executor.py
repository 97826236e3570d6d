"""Runs operations for threads: one alone commits by itself, a batch commits in one transaction.

A batch that one member spoils is undone, and its members run one by one: each has its own answer.
`aio_executor` is the twin of this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from psycopg.errors import LockNotAvailable

from semel.errors import StoreUnavailable
from semel.stores.sql.postgres.errors import (
    DRIVER_ERRORS,
    MigrationLocked,
    TableLocked,
    translate,
)
from semel.stores.sql.postgres.patience import Patience, concerns_all
from semel.stores.sql.postgres.schema import READ_COMMITTED, Schema
from semel.stores.sql.postgres.sessions import Session
from semel.stores.sql.postgres.sources import Source
from semel.stores.sql.verbs import Operation, Verb

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
                return self._repeated(partial(together, operations=operations))
            except StoreUnavailable as error:
                if concerns_all(error):
                    return [StoreUnavailable(*error.args) for _ in operations]
            except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
                pass
        return [self._alone(operation) for operation in operations]

    def run_one(self, operation: Operation[T]) -> T:
        """Run one operation, and raise its error."""
        return self._repeated(lambda session: drive(session, operation.start()))

    def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""
        return self._repeated(
            lambda session: self._migrate(session, columns),
            prepared=True,
        )

    def close(self) -> None:
        """Close what the source opened."""
        self._source.close()

    def _alone(self, operation: Operation[Any]) -> Any:
        try:
            return self.run_one(operation)
        except Exception as error:  # noqa: BLE001 - it reaches the caller as the outcome
            return error

    def _repeated(self, work: Callable[[Session], T], *, prepared: bool = False) -> T:
        """Run the work on a connection, again while there is time and sense in it."""
        patience = Patience(self._timeout)
        while True:
            try:
                if not (self._prepared or prepared):
                    self._prepare(patience)
                with self._source.lend(patience) as session:
                    return work(session)
            except DRIVER_ERRORS as error:
                pause = patience.pause_after(error)
                if pause is None:
                    reason = self._explained(patience.reason(error), patience)
                    raise translate(reason, self._source.place) from reason
            time.sleep(pause)

    def _explained(self, error: Exception, patience: Patience) -> Exception:
        """Find out what is locked: a record runs elsewhere then, a table is an outage."""
        if not isinstance(error, LockNotAvailable):
            return error
        try:
            with self._source.lend(patience) as session:
                in_transaction(session, self._schema.try_lock())
        except LockNotAvailable:
            return TableLocked("the table is locked")
        except DRIVER_ERRORS:  # may not lock, or has gone: the first error says what it can
            pass
        return error

    def _prepare(self, patience: Patience) -> None:
        with self._source.lend(patience) as session:
            if not drive(session, self._schema.check()):
                self._migrate(session, {})
        self._prepared = True

    def _migrate(self, session: Session, columns: Mapping[str, str]) -> int:
        try:
            return in_transaction(session, self._schema.migrate(columns))
        except LockNotAvailable as locked:
            raise MigrationLocked("another program has the lock") from locked


def together(session: Session, operations: Sequence[Operation[Any]]) -> list[Any]:
    """Run the operations in one transaction."""
    with session.transaction():
        session.execute(READ_COMMITTED)
        return [drive(session, operation.start()) for operation in operations]


def in_transaction(session: Session, verb: Verb[T]) -> T:
    """Run a verb of several statements in one transaction."""
    with session.transaction():
        session.execute(READ_COMMITTED)
        return drive(session, verb)


def drive(session: Session, verb: Verb[T]) -> T:
    """Run the statements of a verb to its end."""
    try:
        statement = next(verb)
        while True:
            statement = verb.send(session.execute(statement))
    except StopIteration as end:
        answer: T = end.value
        return answer
