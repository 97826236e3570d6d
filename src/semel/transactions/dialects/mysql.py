"""MySQL and MariaDB: the row is the line; it is inserted first, then read as it is now.

A plain SELECT under REPEATABLE READ shows the past: the row that the insert has just met would be
missing. So every look locks. A look before the insert, even one that does not wait, would lock the
gap of an absent key, and two of those that insert are a deadlock: who does not want to wait bounds
the wait of the insert.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from semel.core.records import CompleteRequest, Identity
from semel.errors import ConfigError, ValueRejected
from semel.stores.sql.mysql.statements import READ_NOW, MySQLTable
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.rows import WITH_UNICODE, texts_as_bytes
from semel.stores.sql.verbs import Statement, Verb
from semel.transactions.links import question

if TYPE_CHECKING:  # one of them is there, with its driver
    from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore

_SESSION: Final = (
    "SELECT @@SESSION.innodb_lock_wait_timeout, DATABASE(), VERSION(), @@max_allowed_packet, "
    "@@innodb_rollback_on_timeout"
)
_BOUND: Final = "SET SESSION innodb_lock_wait_timeout = %s"


def records(store: MySQLStore | AsyncMySQLStore, table: str | None) -> MySQLRecords:
    """Give the records of a store, or those in another table of the same prefix."""
    own: MySQLTable = store._verbs._table  # type: ignore[attr-defined]
    return MySQLRecords(_LockingTable(table or own.name, own.prefix, own._own), store._database)


class _LockingTable(MySQLTable):
    """The table, read with FOR UPDATE.

    A row that is locked and has a new owner's id was made by its insert: LAST_INSERT_ID() is not
    needed to tell, and stays what the application's own last insert has made it.
    """

    new_fence = READ_NOW
    made_here = "1"
    largest = math.inf
    """Bytes of one message; on a larger one the server hangs up, and the transaction is gone."""

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner, unless the server can never take its result."""
        size = len(ask.result.data)
        if size > self.largest:
            raise ValueRejected(
                f"the result has {size} bytes, and the server's max_allowed_packet is "
                f"{self.largest}; raise that, or lower the policy's max_result_bytes"
            )
        return super().complete(ask)

    def read(self, identity: Identity) -> Statement:
        """Read the newest version of the row, and keep others from changing it."""
        plain = super().read(identity)
        return plain._replace(sql=f"{plain.sql} FOR UPDATE")


class MySQLRecords:
    """The records of one table."""

    has_lock = False  # the row is the lock
    by_key = True

    def __init__(self, table: _LockingTable, database: str | None) -> None:
        self.verbs = MySQLVerbs(table)
        self._table = table
        self._database = database
        """The store's, if its URL has named it."""
        self.rolls_back = False

    def prepare(self, seconds: float, *, wait: bool) -> Verb[int]:
        """Bound the wait for row locks; the servers count whole seconds, MySQL from one on."""
        reply = yield question(_SESSION)
        ((before, database, version, self._table.largest, rolls_back),) = reply.rows
        if isinstance(version, bytes):
            raise texts_as_bytes(WITH_UNICODE)
        self._check(database)
        self.rolls_back = bool(rolls_back)
        least = 0 if "MariaDB" in version else 1
        bound = max(1, math.ceil(seconds)) if wait else least
        yield question(_BOUND, bound)
        told: int = before
        return told

    def restore(self, before: int) -> Verb[None]:
        """Bound it as before."""
        yield question(_BOUND, before)

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:  # noqa: ARG002 - see above
        """Do nothing: the insert of the claim stands in line."""
        yield from ()
        return True

    def hold(self, identity: Identity, owner: bytes, *, held: bool) -> Verb[None]:
        """Mark the attempt."""
        yield Statement(
            f"UPDATE {self._table.quoted} SET hold = %s WHERE digest = %s AND owner = %s",  # noqa: S608 - a checked name
            (held, self._table.digest(identity), owner),
            writes=True,
        )

    def _check(self, database: str | None) -> None:
        # Names that differ in capitals alone may be one: that depends on the server's file system.
        own = self._database
        if own is not None and own.casefold() != (database or "").casefold():
            raise ConfigError(
                f"the connection is to the database {database}, the engine keeps its records in "
                f"{own}: open it with the URL of the database that the connection is to"
            )
