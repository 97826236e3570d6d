"""asyncmy."""

from __future__ import annotations

from typing import Any

from semel.stores.sql.mysql import tasks
from semel.stores.sql.verbs import Reply, Statement
from semel.transactions.links import AsyncPlainLink


class AsyncmyLink(AsyncPlainLink):
    """A connection of asyncmy."""

    dialect = "mysql"
    way_in = "call `await connection.begin()` first"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        """Ask for what the server said last."""
        return bool(self._connection.get_transaction_status())

    def joins(self) -> bool:
        """Under autocommit this server takes a savepoint and forgets it at once."""
        return self.in_transaction() or not self._connection.get_autocommit()

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        return await tasks.send(self._connection, statement)
