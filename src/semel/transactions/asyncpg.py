"""asyncpg."""

from __future__ import annotations

from typing import Any

from semel.stores.sql.postgres import asyncpg_sessions
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
        """Run one statement."""
        return await asyncpg_sessions.execute(self._connection, statement)
