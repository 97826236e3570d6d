"""psycopg 3, for threads and for asyncio."""

from __future__ import annotations

from typing import Any

from psycopg.pq import TransactionStatus

from semel.stores.sql.postgres import aio_sessions, sessions
from semel.stores.sql.postgres.lending import check_answers
from semel.stores.sql.verbs import Reply, Statement
from semel.transactions.links import AsyncPlainLink, PlainLink

_OPEN = frozenset({TransactionStatus.INTRANS, TransactionStatus.INERROR})


class PsycopgLink(PlainLink):
    """A `psycopg.Connection`, or the `Transaction` that its `transaction()` gives."""

    dialect = "postgresql"
    way_in = "use `with connection.transaction():` around it"

    def __init__(self, connection: Any) -> None:
        self._connection = getattr(connection, "connection", connection)

    def in_transaction(self) -> bool:
        """Ask for what the server said last."""
        check_answers(self._connection)
        return self._connection.info.transaction_status in _OPEN

    def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        return sessions.execute(self._connection, statement)


class AsyncPsycopgLink(AsyncPlainLink):
    """A `psycopg.AsyncConnection`, or the `AsyncTransaction` that its `transaction()` gives."""

    dialect = "postgresql"
    way_in = "use `async with connection.transaction():` around it"

    def __init__(self, connection: Any) -> None:
        self._connection = getattr(connection, "connection", connection)

    def in_transaction(self) -> bool:
        """Ask for what the server said last."""
        check_answers(self._connection)
        return self._connection.info.transaction_status in _OPEN

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        return await aio_sessions.execute(self._connection, statement)
