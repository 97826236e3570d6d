"""How a record looks as a row of the table, and back; and what a listing shows of many rows.

The columns that everybody's idempotency table has come first, under their usual names; ours
follow. Times are whole microseconds since the epoch: SQL compares and indexes them exactly, where
a float would round and a text would depend on its format.

While a record is PROCESSING it has no result, and `result_payload` holds its `run_info`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from semel.core.observers import Log
from semel.core.records import Encoded, Identity, Record, State
from semel.errors import ConfigError, RecordUnreadable
from semel.stores.base import Page
from semel.stores.urls import cursor_after

FORMAT = 1
"""Version of the row's content; rows of a newer version are refused, not guessed at."""

COLUMNS: Final = (
    "idem_key",
    "biz_type",
    "payload_hash",
    "status",
    "result_payload",
    "expire_at",
    "created_at",
    "updated_at",
    "codec",
    "retryable",
    "owner",
    "number",
    "fence",
    "hold",
    "lease_until",
    "superseded",
    "format",
)

_KEY, _SCOPE, _EXPIRES_AT, _FENCE = map(
    COLUMNS.index, ("idem_key", "biz_type", "expire_at", "fence")
)

Row: TypeAlias = tuple[Any, ...]

RUNNING: Final = int(State.PROCESSING)

WITH_UTF8: Final = (
    "open it with client_encoding=utf8 (its encoding is SQL_ASCII, that of the database if it was "
    "not named)"
)
WITH_UNICODE: Final = "open it without use_unicode=False"

MICROSECONDS = 1_000_000

ENTRIES_PURGED: Final = 1000
"""Expired entries of the audit trail that one purge removes at most, whatever its own limit: only
its last batch removes any, so as many must go by then as come between two purges."""


class _States(dict[Any, State]):
    """The states by their numbers: until Python 3.12 an enum looks its members up slowly."""

    def __missing__(self, number: object) -> State:
        raise ValueError(f"{number!r} is not the number of a state")


_STATES: Final = _States({int(state): state for state in State})


def to_row(record: Record) -> Row:
    """Write a record in the order of `COLUMNS`."""
    outcome = record.outcome
    return (
        record.identity.key,
        record.identity.scope,
        record.fingerprint,
        int(record.state),
        record.run_info if outcome is None else outcome.data,
        stamp_or_none(record.expires_at),
        stamp(record.created_at),
        stamp(record.updated_at),
        None if outcome is None else outcome.codec,
        record.retryable,
        record.owner,
        record.number,
        record.fence,
        record.hold,
        stamp_or_none(record.lease_until),
        msgspec.msgpack.encode(record.superseded) if record.superseded else None,
        FORMAT,
    )


def to_record(row: Row, now: float) -> Record:
    """Read a row back, as seen at `now`."""
    try:
        return _read(row, now)
    except (TypeError, ValueError, msgspec.MsgspecError, RecordUnreadable) as broken:
        if _has_expired(row, now):
            return _remains(row, now)
        if isinstance(broken, RecordUnreadable):
            raise
        raise RecordUnreadable(f"its row is damaged ({broken})") from broken


def _has_expired(row: Row, now: float) -> bool:
    expires_at = row[_EXPIRES_AT]
    return isinstance(expires_at, int) and seconds(expires_at) <= now


def _remains(row: Row, now: float) -> Record:
    """Read of an expired row what still counts: it is absent, and fences go on from its own."""
    expires_at, fence = seconds(row[_EXPIRES_AT]), row[_FENCE]
    return Record(
        identity=identity_of(row),
        state=State.FAILED,
        owner=b"",
        number=0,
        fence=fence if isinstance(fence, int) else 0,
        hold=False,
        created_at=expires_at,
        updated_at=expires_at,
        now=now,
        expires_at=expires_at,
    )


def _read(row: Row, now: float) -> Record:
    (
        key,
        scope,
        fingerprint,
        state,
        data,
        expires_at,
        created_at,
        updated_at,
        codec,
        retryable,
        owner,
        number,
        fence,
        hold,
        lease_until,
        superseded,
        version,
    ) = row
    if version > FORMAT:
        raise RecordUnreadable(
            f"it was written by a newer version of semel (format {version}, "
            f"this one reads {FORMAT})"
        )
    return Record(
        identity=Identity(scope, key),
        state=_STATES[state],
        owner=owner,
        number=number,
        fence=fence,
        hold=bool(hold),
        created_at=seconds(created_at),
        updated_at=seconds(updated_at),
        now=now,
        fingerprint=fingerprint,
        superseded=_fingerprints(superseded),
        lease_until=None if lease_until is None else seconds(lease_until),
        expires_at=None if expires_at is None else seconds(expires_at),
        # The SQLite store notes in a running record when it noticed that the clock was set back.
        outcome=None if codec is None or state == RUNNING else Encoded(codec, data),
        retryable=bool(retryable),
        run_info=data if state == RUNNING and isinstance(data, bytes) else b"",
    )


def texts_as_bytes(remedy: str) -> ConfigError:
    """Say that a connection gives bytes for texts, and how to open it so that it does not."""
    return ConfigError(f"this connection returns strings as bytes: {remedy}")


def _fingerprints(stored: bytes | list[bytes] | None) -> tuple[bytes, ...]:
    if isinstance(stored, bytes):
        return msgspec.msgpack.decode(stored, type=tuple[bytes, ...])
    return tuple(stored or ())  # a database with arrays, or none


def stamp(moment: float) -> int:
    """Turn seconds into the table's microseconds."""
    return round(moment * MICROSECONDS)


def seconds(stored: int) -> float:
    """Turn the table's microseconds into seconds."""
    return stored / MICROSECONDS


def stamp_or_none(moment: float | None) -> int | None:
    """`stamp`, for what may be missing."""
    return None if moment is None else stamp(moment)


# --- listings ------------------------------------------------------------------------------


log = Log(__name__)


def listed(rows: Iterable[Row]) -> list[Record]:
    """Read rows that end with the store's time; those that cannot be read are left out.

    One damaged row, or one of a newer version, must not hide all the others. A warning names it by
    its digest; `get` says what is wrong with it, `forget` removes it.
    """
    records: list[Record] = []
    for *columns, now in rows:
        try:
            records.append(to_record(tuple(columns), seconds(now)))
        except RecordUnreadable as unreadable:
            identity = identity_of(columns)
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
    return Page(tuple(listed(shown)), cursor_after(identity_of(shown[-1])) if more else None)


def identity_of(row: Sequence[object]) -> Identity:
    """Read whose row it is, whatever else is wrong with it."""
    return Identity(str(row[_SCOPE]), str(row[_KEY]))


def behind(prefix: str) -> str | None:
    """Find the least text above all that begin with `prefix`; None when nothing is.

    For databases that compare text by code points.
    """
    while prefix:
        last = ord(prefix[-1]) + 1
        prefix = prefix[:-1]
        if last <= 0x10FFFF:  # noqa: PLR2004 - the last code point
            return prefix + chr(0xE000 if 0xD800 <= last < 0xE000 else last)  # noqa: PLR2004 - no surrogates
    return None
