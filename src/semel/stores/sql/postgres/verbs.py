"""The verbs on PostgreSQL: those of all servers, what is listed, and who waits for wake-ups.

Every statement commits by itself. It reads as of its beginning, though: when the row was made while
it ran, it neither wrote nor shows why; then it is sent again.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final
from uuid import UUID

from semel.core.records import Busy, Claim, ClaimRequest, Identity, Record
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.sql.postgres.statements import PostgresTable
from semel.stores.sql.rows import Row, behind, listed, page_of
from semel.stores.sql.verbs import OwnColumns, Statement, SwapVerbs, Verb, operation
from semel.stores.urls import position, whole_number

UNSAFE_WHEN_OFF: Final = {
    "fsync": "a crash of the machine may damage the whole database; set it to on",
    "full_page_writes": "a crash of the machine may damage the whole database; set it to on",
    "synchronous_commit": "a crash of the server loses the last commits, and their operations run "
    "again; set it to on for the role that semel uses",
}
"""Settings that are dangerous when they are off, and why."""


class PostgresVerbs(SwapVerbs):
    """The verbs of the store SPI, on one table, for the store of one prefix."""

    _table: PostgresTable

    def __init__(
        self, table: str, prefix: str, columns: OwnColumns, waiting: Container[UUID] = ()
    ) -> None:
        """`waiting` has the digests of the records whose end somebody waits to hear of."""
        super().__init__(PostgresTable(table, prefix, columns))
        self._waiting = waiting

    @property
    def table(self) -> str:
        """The name of the table, as it stands in statements."""
        return self._table.name

    def on(self, table: str) -> PostgresVerbs:
        """Return the verbs on another table, for the same prefix."""
        return PostgresVerbs(table, self._table.prefix, self._table.columns)

    def digest(self, identity: Identity) -> UUID:
        """Return the primary key of a record."""
        return self._table.digest(identity)

    def short_digest(self, identity: Identity) -> bytes:
        """Return the primary key as bytes."""
        return self._table.short_digest(identity)

    def _note_of_waiter(self, ask: ClaimRequest, answer: Claim, row: Row) -> Statement | None:
        """Only for those who wait: another duplicate that gets nothing writes nothing."""
        *_, waited_for, _inserted = row
        # Who asks for no lease is in a transaction of its own, and does not wait for a wake-up.
        if waited_for or ask.lease <= 0 or not isinstance(answer, Busy):
            return None
        if self.digest(ask.identity) not in self._waiting:
            return None
        return self._table.note_waiter(ask.identity, answer.owner)

    @operation(peek=False)
    def page(self, ask: ScanRequest) -> Verb[Page]:
        """List records by key, then scope."""
        whole_number("limit", ask.limit)
        after_key, after_scope = (None, None) if ask.cursor is None else position(ask.cursor)
        reply = yield self._table.statements.page(
            prefix=self._table.prefix,
            start=max(ask.prefix, after_key or ""),
            behind=behind(ask.prefix),
            scope=ask.scope,
            state=None if ask.state is None else int(ask.state),
            after_key=after_key,
            after_scope=after_scope,
            limit=ask.limit + 1,
        )
        return page_of(reply.rows, ask.limit)

    @operation(peek=False)
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Abandoned records, oldest first."""
        reply = yield self._table.statements.stuck(
            prefix=self._table.prefix, since=-ask.older_than, limit=ask.limit
        )
        return listed(reply.rows)

    @operation(peek=False)
    def purge(self, ask: PurgeRequest) -> Verb[int]:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        reply = yield self._table.statements.purge_expired(
            prefix=self._table.prefix, limit=ask.limit
        )
        removed = reply.changed
        if ask.abandoned_after is not None and removed < ask.limit:
            reply = yield self._table.statements.purge_abandoned(
                prefix=self._table.prefix, limit=ask.limit - removed, since=-ask.abandoned_after
            )
            removed += reply.changed
        return removed

    @operation(peek=False)
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count the records by state."""
        reply = yield self._table.statements.counts(prefix=self._table.prefix)
        return Counts(*reply.rows[0])

    @operation(peek=False)
    def diagnose(self) -> Verb[list[str]]:
        """Tell which settings of the server, or of this session, let it lose what it committed."""
        reply = yield Statement(
            "SELECT name::text FROM pg_catalog.pg_settings WHERE name = ANY ($1::text[]) "
            "AND setting = 'off' ORDER BY name",
            (list(UNSAFE_WHEN_OFF),),
            writes=False,
        )
        return [f"{name} is off: {UNSAFE_WHEN_OFF[name]}" for (name,) in reply.rows]
