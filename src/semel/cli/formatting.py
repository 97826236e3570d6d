"""Records as people and as programs read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from semel.core.policy import DAY, HOUR, MINUTE
from semel.core.records import Record, State

STATES: dict[str, State] = {
    "processing": State.PROCESSING,
    "abandoned": State.PROCESSING,
    "succeeded": State.SUCCEEDED,
    "failed": State.FAILED,
    "retryable": State.FAILED,
}
"""The states as an operator sees them, see `state_of`, and what is stored for each."""

COLUMNS: tuple[str, ...] = ("SCOPE", "KEY", "STATE", "ATTEMPT", "HELD", "AGE", "LEFT")


def state_of(record: Record) -> str:
    """Name the state as an operator sees it."""
    if record.abandoned:
        return "abandoned"
    if record.state is State.FAILED and record.retryable:
        return "retryable"
    return record.state.name.lower()


def held(record: Record) -> bool | None:
    """Tell whether an attempt waits for somebody to decide, once abandoned; None = it has ended."""
    return record.hold if record.state is State.PROCESSING else None


def row(record: Record) -> tuple[str, ...]:
    """Return a record as one line of `COLUMNS`."""
    ends = record.expires_at if record.lease_until is None else record.lease_until
    return (
        record.scope,
        record.key,
        state_of(record),
        str(record.number),
        {True: "yes", False: "no", None: "-"}[held(record)],
        duration(record.now - record.created_at),
        "-" if ends is None else duration(ends - record.now),
    )


def fields(record: Record) -> dict[str, Any]:
    """Return a record as plain values, without its outcome."""
    outcome = record.outcome
    return {
        "scope": record.scope,
        "key": record.key,
        "key_digest": record.identity.key_digest,
        "state": state_of(record),
        "attempt": record.number,
        "fence": record.fence,
        "held": held(record),
        "owner": record.owner.hex(),
        "fingerprint": None if record.fingerprint is None else record.fingerprint.hex(),
        "created_at": moment(record.created_at),
        "updated_at": moment(record.updated_at),
        "lease_until": moment(record.lease_until),
        "expires_at": moment(record.expires_at),
        "codec": None if outcome is None else outcome.codec,
        "size": None if outcome is None else len(outcome.data),
    }


def moment(at: float | None) -> str | None:
    """Write a time as ISO 8601."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def duration(seconds: float) -> str:
    """Write seconds in the two units that matter: 3d4h, 5m0s, 0.25s; the past has a minus."""
    sign, left = ("-", -seconds) if seconds < 0 else ("", seconds)
    if left < MINUTE:
        return f"{sign}{left:.2f}s"
    units = (("d", DAY), ("h", HOUR), ("m", MINUTE), ("s", 1.0))
    first = next(at for at, (_, size) in enumerate(units) if left >= size)
    (large, size), (small, part) = units[first : first + 2]
    return f"{sign}{int(left // size)}{large}{int(left % size // part)}{small}"


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align rows below their heads."""
    table = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in table
    )
    return "\n".join(line.rstrip() for line in lines)


def as_json(value: object) -> str:
    """Write a value for programs; what JSON has no form for is shown as text."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()
