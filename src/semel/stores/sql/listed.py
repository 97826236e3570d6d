"""What a listing shows of the rows that a database found: those that can be read.

One damaged row, or one of a newer version, must not hide all the others. It is left out, and a
warning names it by its digest; `get` says what is wrong with it, `forget` removes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from semel.core.records import Identity, Record
from semel.errors import RecordUnreadable
from semel.stores.base import Page
from semel.stores.sql.rows import COLUMNS, Row, seconds, to_record
from semel.stores.urls import cursor_after

log = logging.getLogger(__name__)

_KEY, _SCOPE = COLUMNS.index("idem_key"), COLUMNS.index("biz_type")


def listed(rows: Iterable[Row]) -> list[Record]:
    """Read rows that end with the store's time; those that cannot be read are left out."""
    records: list[Record] = []
    for *columns, now in rows:
        try:
            records.append(to_record(tuple(columns), seconds(now)))
        except RecordUnreadable as unreadable:
            identity = _identity(columns)
            log.warning(
                "left out of the listing: %s (scope %s, key_digest %s)",
                unreadable,
                identity.scope,
                identity.digest.hex(),
            )
    return records


def page_of(rows: Sequence[Row], limit: int) -> Page:
    """Make a page; the row after `limit`, if there is one, tells that more pages follow."""
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(tuple(listed(shown)), cursor_after(_identity(shown[-1])) if more else None)


def _identity(row: Sequence[object]) -> Identity:
    return Identity(str(row[_SCOPE]), str(row[_KEY]))
