"""sqlite3 for threads, aiosqlite for asyncio."""

from __future__ import annotations

import sqlite3
from typing import Any

from semel.stores.sql.verbs import Reply, Statement
from semel.transactions.links import AsyncPlainLink, PlainLink

BEGIN = "BEGIN IMMEDIATE"

_WAY_IN = f'BEGIN first: connection.execute("{BEGIN}")'


class SQLiteLink(PlainLink):
    """A connection of sqlite3."""

    dialect = "sqlite"
    way_in = _WAY_IN

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        """Ask SQLite itself."""
        return self._connection.in_transaction

    def ensure(self) -> None:
        """Begin what a framework believes to have begun: sqlite3 waits for the first write."""
        if not self._connection.in_transaction:
            self._connection.execute(BEGIN)

    def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        cursor = self._connection.cursor()
        cursor.row_factory = None  # the application's own may be another
        try:
            cursor.execute(statement.sql, statement.parameters)
            return Reply(cursor.fetchall(), cursor.rowcount)
        finally:
            cursor.close()


class AsyncSQLiteLink(AsyncPlainLink):
    """A connection of aiosqlite."""

    dialect = "sqlite"
    way_in = f"BEGIN first: await {_WAY_IN.removeprefix('BEGIN first: ')}"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        """Ask SQLite itself."""
        return bool(self._connection.in_transaction)

    async def ensure(self) -> None:
        """Begin what a framework believes to have begun."""
        if not self._connection.in_transaction:
            await self._connection.execute(BEGIN)

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        cursor = await self._connection.cursor()
        cursor.row_factory = None
        try:
            await cursor.execute(statement.sql, statement.parameters)
            rows = [tuple(row) for row in await cursor.fetchall()]
            return Reply(rows, cursor.rowcount)
        finally:
            await cursor.close()
