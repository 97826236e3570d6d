"""MySQL and MariaDB: the row is the line; it is inserted first, then read as it is now.

A plain SELECT under REPEATABLE READ shows the past: the row that the insert has just met would be
missing. So every look locks.
"""

from __future__ import annotations

import math

from semel.core.records import Identity
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.mysql.table import MySQLTable
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.verbs import Statement, Verb
from semel.transactions.links import question


def records(store: MySQLStore | AsyncMySQLStore, table: str | None) -> MySQLRecords:
    """Give the records of a store, or those in another table of the same prefix."""
    own: MySQLTable = store._verbs._table  # type: ignore[attr-defined]
    return MySQLRecords(_LockingTable(table or own.name, own.prefix, own._own))


class _LockingTable(MySQLTable):
    """The table, read with FOR UPDATE."""

    def read(self, identity: Identity) -> Statement:
        """Read the newest version of the row, and keep others from changing it."""
        plain = super().read(identity)
        return plain._replace(sql=f"{plain.sql} FOR UPDATE")


class MySQLRecords:
    """The records of one table."""

    def __init__(self, table: MySQLTable) -> None:
        self.verbs = MySQLVerbs(table)
        self._table = table

    def wait_at_most(self, seconds: float) -> Verb[int]:
        """Bound the wait for row locks; the server counts whole seconds, from one on."""
        reply = yield question("SELECT @@SESSION.innodb_lock_wait_timeout")
        yield question("SET SESSION innodb_lock_wait_timeout = %s", max(1, math.ceil(seconds)))
        before: int = reply.rows[0][0]
        return before

    def restore(self, before: int) -> Verb[None]:
        """Bound it as before."""
        yield question("SET SESSION innodb_lock_wait_timeout = %s", before)

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:  # noqa: ARG002 - see above
        """Do nothing: the insert of the claim stands in line."""
        yield from ()
        return True

    def hold(self, identity: Identity, owner: bytes) -> Verb[None]:
        """Mark the attempt as held."""
        yield Statement(
            f"UPDATE {self._table.name} SET hold = 1 WHERE digest = %s AND owner = %s",  # noqa: S608 - a checked name
            (self._table.digest(identity), owner),
            writes=True,
        )
