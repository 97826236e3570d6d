"""The smallest store that lists its records, too."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from contract.reference_store import DictStore
from semel.core.records import (
    AUDIT_SCOPE,
    CountRequest,
    Counts,
    Page,
    PurgeRequest,
    Record,
    Request,
    ScanRequest,
    StuckRequest,
)


class ListingStore(DictStore):
    """Answers the requests about all records, too."""

    unsupported = frozenset()

    def answer(self, request: Request[Any]) -> Any:
        match request:
            case ScanRequest():
                return self._page(request)
            case StuckRequest():
                return self._stuck(request)
            case PurgeRequest():
                return self._purge(request)
            case CountRequest():
                return self._counts()
        return super().answer(request)

    def _page(self, ask: ScanRequest) -> Page:
        after = "" if ask.cursor is None else ask.cursor
        found = [
            record
            for record in self._as_of_now()
            if record.remaining != 0  # it has not expired
            and ask.covers(record.scope)
            and record.key.startswith(ask.prefix)
            and (ask.state is None or record.state is ask.state)
            and place(record) > after
        ]
        found.sort(key=place)
        page = found[: ask.limit]
        return Page(tuple(page), place(page[-1]) if len(found) > ask.limit else None)

    def _stuck(self, ask: StuckRequest) -> list[Record]:
        stuck = [r for r in self._as_of_now() if abandoned_for(r) >= ask.older_than]
        return sorted(stuck, key=abandoned_for, reverse=True)[: ask.limit]

    def _purge(self, ask: PurgeRequest) -> int:
        def may_go(record: Record) -> bool:
            if record.remaining == 0 or ask.abandoned_after is None:
                return record.remaining == 0
            return not record.hold and abandoned_for(record) >= ask.abandoned_after

        with self._lock:  # in a database: delete if it is still the record that was judged
            found = [each.identity for each in self._as_of_now() if may_go(each)]
            entries = [each for each in found if each.scope == AUDIT_SCOPE]
            gone = [each for each in found if each.scope != AUDIT_SCOPE][: ask.limit]
            for identity in (*gone, *entries):
                del self._records[identity]
        return len(gone)

    def _counts(self) -> Counts:
        tally = Counter(
            "abandoned" if record.abandoned else record.state.name.lower()
            for record in self._as_of_now()
            if record.remaining != 0 and record.scope != AUDIT_SCOPE
        )
        return Counts(**{name: tally[name] for name in Counts.__struct_fields__})

    def _as_of_now(self) -> list[Record]:
        now = self._clock()
        return [replace(record, now=now) for record in list(self._records.values())]


def place(record: Record) -> str:
    """Return where a record stands in a listing: a unique text that never changes."""
    return record.identity.digest.hex()


def abandoned_for(record: Record) -> float:
    """Return how many seconds ago its lease ended; negative if it has none, or runs."""
    return -1.0 if record.lease_until is None else record.now - record.lease_until
