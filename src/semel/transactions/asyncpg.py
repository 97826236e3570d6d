"""asyncpg."""

from __future__ import annotations

from typing import Any

from semel.stores.sql.verbs import Reply, Statement
from semel.transactions.links import AsyncPlainLink


class AsyncpgLink(AsyncPlainLink):
    """An `asyncpg.Connection`, its own or a pool's."""

    dialect = "postgresql"
    way_in = "use `async with connection.transaction():` around it"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        """Ask for what the server said last."""
        return bool(self._connection.is_in_transaction())

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement; asyncpg gives either its rows or how many it changed."""
        if statement.writes and " RETURNING " not in statement.sql:
            status: str = await self._connection.execute(statement.sql, *statement.parameters)
            *_, last = status.split()
            return Reply([], int(last) if last.isdigit() else 0)
        rows = await self._connection.fetch(statement.sql, *statement.parameters)
        return Reply([tuple(row) for row in rows], len(rows))
