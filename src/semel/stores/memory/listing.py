"""What the command line, the reconciler and the dashboard see of a memory store.

This module selects records. It changes none, reads no clock and takes no lock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from semel.core import judge
from semel.core.records import Record, State
from semel.stores.base import Counts, Page
from semel.stores.paging import cursor_after, position
from semel.stores.urls import whole_number


def present(stored: Iterable[Record], now: float) -> Iterator[Record]:
    """Leave out what has expired; the others as they are now."""
    for record in stored:
        if judge.present(record, now) is not None:
            yield replace(record, now=now)


def page(
    records: Iterable[Record],
    *,
    scope: str | None,
    prefix: str,
    state: State | None,
    limit: int,
    cursor: str | None,
) -> Page:
    """Take the first `limit` records behind the cursor, by key and then scope."""
    whole_number("limit", limit)
    after = None if cursor is None else position(cursor)
    found = heapq.nsmallest(
        limit + 1,
        (
            record
            for record in records
            if (scope is None or record.identity.scope == scope)
            and record.identity.key.startswith(prefix)
            and (state is None or record.state is state)
            and (after is None or _place(record) > after)
        ),
        key=_place,
    )
    shown = tuple(found[:limit])
    return Page(shown, cursor_after(shown[-1].identity) if len(found) > limit else None)


def stuck(records: Iterable[Record], older_than: float, limit: int) -> list[Record]:
    """Abandoned records whose lease ended at least `older_than` seconds ago, oldest first."""
    return heapq.nlargest(
        limit, (record for record in records if _left(record, older_than)), key=_left_for
    )


def removable(
    stored: Iterable[Record], now: float, abandoned_after: float | None
) -> Iterator[Record]:
    """Expired records and, if asked, those abandoned that long ago which nobody holds."""
    for record in stored:
        if judge.present(record, now) is None or (
            abandoned_after is not None
            and not record.hold
            and _left(replace(record, now=now), abandoned_after)
        ):
            yield record


def counts(records: Iterable[Record]) -> Counts:
    """How many there are, by what is known of them."""
    tally = Counter(
        "abandoned" if record.abandoned else record.state.name.lower() for record in records
    )
    return Counts(**{name: tally[name] for name in Counts.__struct_fields__})


def _place(record: Record) -> tuple[str, str]:
    return record.identity.key, record.identity.scope


def _left(record: Record, seconds: float) -> bool:
    return record.abandoned and _left_for(record) >= seconds


def _left_for(record: Record) -> float:
    return 0.0 if record.lease_until is None else record.now - record.lease_until
