"""PostgreSQL: an advisory lock of the transaction is the line, at every isolation level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.core.records import Identity
from semel.stores.sql.postgres.schema import Schema
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.verbs import Statement, Verb
from semel.transactions.links import question

if TYPE_CHECKING:  # one of them is there, with its driver
    from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore

_BOUND = (
    "WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS bound) "
    "SELECT bound, set_config('lock_timeout', $1::text, true) FROM before"
)
_RESTORE = "SELECT set_config('lock_timeout', $1::text, true)"
_LOCK = "SELECT true FROM pg_advisory_xact_lock($1::bigint)"
_TRY_LOCK = "SELECT pg_try_advisory_xact_lock($1::bigint)"


def records(store: PostgresStore | AsyncPostgresStore, table: str | None) -> PostgresRecords:
    """Give the records of a store, or those in another table of the same schema and prefix."""
    verbs: PostgresVerbs = store._verbs  # type: ignore[assignment]
    if table is None:
        return PostgresRecords(verbs, store._schema.table)
    schema = Schema(table, store._schema._schema, partitions=None, autocreate=False)
    own = verbs._table
    return PostgresRecords(PostgresVerbs(schema.table, own.prefix, own.columns), schema.table)


class PostgresRecords:
    """The records of one table."""

    by_key = True
    rolls_back = False

    def __init__(self, verbs: PostgresVerbs, table: str) -> None:
        self.verbs = verbs
        self.has_lock = False
        self._hold = f"UPDATE {table} SET hold = $1::boolean WHERE digest = $2 AND owner = $3"  # noqa: S608 - a checked name

    def prepare(self, seconds: float, *, wait: bool) -> Verb[str]:  # noqa: ARG002 - `lock` asks
        """Bound the wait for locks until it is restored, or the savepoint before is undone.

        Which server and database a connection reaches is not known here: poolers rename both.
        """
        # 0 would mean for ever.
        reply = yield question(_BOUND, f"{max(1, round(seconds * 1000))}ms")
        before: str = reply.rows[0][0]
        return before

    def restore(self, before: str) -> Verb[None]:
        """Bound it as before."""
        yield question(_RESTORE, before)

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:
        """Take the lock of the record; the end of the transaction, or undoing, gives it back."""
        number = int.from_bytes(self.verbs.short_digest(identity)[:8], "big", signed=True)
        reply = yield question(_LOCK if wait else _TRY_LOCK, number)
        self.has_lock = bool(reply.rows[0][0])
        return self.has_lock

    def hold(self, identity: Identity, owner: bytes, *, held: bool) -> Verb[None]:
        """Mark the attempt."""
        yield Statement(self._hold, (held, self.verbs.digest(identity), owner), writes=True)
