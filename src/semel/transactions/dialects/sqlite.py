"""SQLite: one writer at a time, so that the line is the whole database's."""

from __future__ import annotations

from semel.core.records import Identity
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.stores.sql.sqlite_table import SQLiteTable
from semel.stores.sql.verbs import Statement, Verb, Verbs
from semel.transactions.links import command, question


def records(store: SQLiteStore | AsyncSQLiteStore, table: str | None) -> SQLiteRecords:
    """Give the records of a store, or those in another table of the same prefix."""
    own: SQLiteTable = store._verbs._table  # type: ignore[attr-defined]
    return SQLiteRecords(own if table is None else SQLiteTable(table, own._prefix, own._clock))


class SQLiteRecords:
    """The records of one table."""

    def __init__(self, table: SQLiteTable) -> None:
        self.verbs = Verbs(table)
        self._table = table

    def wait_at_most(self, seconds: float) -> Verb[int]:
        """Bound the wait for the write lock."""
        reply = yield question("PRAGMA busy_timeout")
        yield command(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
        before: int = reply.rows[0][0]
        return before

    def restore(self, before: int) -> Verb[None]:
        """Bound it as before."""
        yield command(f"PRAGMA busy_timeout = {before}")

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:  # noqa: ARG002 - one line for all
        """Take the write lock before the first read: a reader that wants to write may not wait."""
        yield command(f"DELETE FROM {self._table.name} WHERE 0")  # noqa: S608 - a checked name
        return True

    def hold(self, identity: Identity, owner: bytes) -> Verb[None]:
        """Mark the attempt as held."""
        yield Statement(
            f"UPDATE {self._table.name} SET hold = 1 WHERE identity = ? AND owner = ?",  # noqa: S608 - the same
            (self._table._digest(identity), owner),
            writes=True,
        )
