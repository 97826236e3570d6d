"""The statements that look at many records, and the purge.

This module writes SQL. It runs none. Every query follows an index and ends after `limit` rows.
"""

from __future__ import annotations

from typing import Final

from semel.core.records import Record, State
from semel.stores.base import Counts, Page
from semel.stores.paging import position
from semel.stores.sql.listed import listed, page_of
from semel.stores.sql.mysql.table import NOW, READ_COLUMNS, READ_NOW, MySQLTable
from semel.stores.sql.ranges import behind
from semel.stores.sql.rows import stamp
from semel.stores.sql.verbs import Statement, Verb
from semel.stores.urls import whole_number

PURGED_AT_ONCE: Final = 100
"""Rows that one DELETE removes and commits: no claim waits for more than this."""

_EARLIER: Final = f"{NOW} - INTERVAL %s MICROSECOND"
_DUE: Final = "FORCE INDEX (due)"
"""Left to itself, MariaDB takes the prefix of this index alone, and reads every record that ended
before it comes to the first lease."""


class Listing:
    """What the command line, the reconciler and the dashboard ask of a table."""

    def __init__(self, table: MySQLTable) -> None:
        self._table = table
        self._select = f"SELECT {READ_COLUMNS}, {READ_NOW} FROM {table.quoted}"  # noqa: S608 - a checked name

    def page(
        self, scope: str | None, prefix: str, state: State | None, limit: int, cursor: str | None
    ) -> Verb[Page]:
        """List records in the order of the unique index, so that no page sorts or skips."""
        whole_number("limit", limit)
        where = ["prefix = %s", f"(expire_at IS NULL OR expire_at > {NOW})"]
        values: list[object] = [self._table.prefix]
        for condition, value in (
            ("idem_key >= %s", prefix),
            ("idem_key < %s", behind(prefix)),
            ("biz_type = %s", scope),
            ("status = %s", None if state is None else int(state)),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        if cursor is not None:
            # Written out: neither server uses an index for (a, b) > (x, y).
            key, last_scope = position(cursor)
            where.append("idem_key >= %s AND (idem_key > %s OR biz_type > %s)")
            values.extend((key, key, last_scope))
        reply = yield Statement(
            f"{self._select} WHERE {' AND '.join(where)} ORDER BY idem_key, biz_type LIMIT %s",
            (*values, limit + 1),
            writes=False,
        )
        return page_of(reply.rows, limit)

    def stuck(self, older_than: float, limit: int) -> Verb[list[Record]]:
        """Read the leases from the old end of their index; a record that has ended has none."""
        reply = yield Statement(
            f"{self._select} {_DUE} WHERE prefix = %s AND lease_until <= {_EARLIER} "
            "ORDER BY lease_until LIMIT %s",
            (self._table.prefix, stamp(older_than), limit),
            writes=False,
        )
        return listed(reply.rows)

    def purge(self, limit: int, abandoned_after: float | None) -> Verb[int]:
        """Remove what may go, a few rows at a time, each of them looked at again as it goes."""
        removed = yield from self._remove(
            f"lease_until IS NULL AND expire_at <= {NOW}", "expire_at", (), limit
        )
        if abandoned_after is not None and removed < limit:
            removed += yield from self._remove(
                f"lease_until <= {_EARLIER} AND hold = 0",
                "lease_until",
                (stamp(abandoned_after),),
                limit - removed,
            )
        return removed

    def _remove(self, may_go: str, by: str, values: tuple[int, ...], limit: int) -> Verb[int]:
        name = self._table.quoted
        found = yield Statement(
            f"SELECT digest FROM {name} {_DUE} "  # noqa: S608 - a checked name
            f"WHERE prefix = %s AND {may_go} ORDER BY {by} LIMIT %s",
            (self._table.prefix, *values, limit),
            writes=False,
        )
        digests = sorted(row[0] for row in found.rows)
        removed = 0
        for start in range(0, len(digests), PURGED_AT_ONCE):
            some = digests[start : start + PURGED_AT_ONCE]
            marks = ", ".join(["%s"] * len(some))
            reply = yield Statement(
                f"DELETE FROM {name} WHERE digest IN ({marks}) AND {may_go}",  # noqa: S608 - checked
                (*some, *values),
                writes=True,
            )
            removed += reply.changed
        return removed

    def counts(self) -> Verb[Counts]:
        """Count what has not expired."""
        reply = yield Statement(
            f"SELECT COUNT(CASE WHEN lease_until > {NOW} THEN 1 END), "  # noqa: S608 - checked
            f"COUNT(CASE WHEN lease_until <= {NOW} THEN 1 END), "
            "COUNT(CASE WHEN status = 1 THEN 1 END), COUNT(CASE WHEN status = 2 THEN 1 END) "
            f"FROM {self._table.quoted} WHERE prefix = %s "
            f"AND (expire_at IS NULL OR expire_at > {NOW})",
            (self._table.prefix,),
            writes=False,
        )
        return Counts(*reply.rows[0])
