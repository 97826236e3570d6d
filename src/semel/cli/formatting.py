"""Records as people and as programs read them.

A table is plain text. On a terminal some words have a color (`_COLOURS`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from semel.core import run_info
from semel.core.codec import most_attempts
from semel.core.observers import printable
from semel.core.policy import DAY, HOUR, MINUTE
from semel.core.records import Record, State
from semel.errors import SerializationError
from semel.repair import StoredFailure, read_result

STATES: dict[str, tuple[State, ...]] = {
    "processing": (State.PROCESSING,),
    "abandoned": (State.PROCESSING,),
    "exhausted": (State.PROCESSING, State.FAILED),
    "succeeded": (State.SUCCEEDED,),
    "failed": (State.FAILED,),
    "retryable": (State.FAILED,),
}
"""The states as an operator sees them, see `state_of`, and what is stored for each."""

COLUMNS: tuple[str, ...] = ("SCOPE", "KEY", "STATE", "ATTEMPT", "HELD", "AGE", "LEFT")
STUCK: tuple[str, ...] = ("SCOPE", "KEY", "ATTEMPT", "HELD", "STUCK", "BY", "WHY")

_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "1", "2", "31", "32", "33", "36"
_COLOURS: dict[str, dict[str, str]] = {
    "STATE": {
        "processing": _CYAN,
        "abandoned": _RED,
        "exhausted": _RED,
        "succeeded": _GREEN,
        "failed": _RED,
        "retryable": _YELLOW,
    },
    "HELD": {"yes": _RED},
    "RESULT": {"ok": _GREEN, "skipped": _DIM, "warning": _YELLOW, "problem": _RED},
}
"""By the head of a column: the words that stand out in it."""

_HELD: dict[bool | None, str] = {True: "yes", False: "no", None: "-"}


def state_of(record: Record) -> str:
    """Name the state as an operator sees it."""
    if exhausted(record):
        return "exhausted"
    if record.abandoned:
        return "abandoned"
    if record.state is State.FAILED and record.retryable:
        return "retryable"
    return record.state.name.lower()


def exhausted(record: Record) -> bool:
    """Return whether only the bound on attempts keeps the next call from running.

    A held attempt waits for a decision first.
    """
    waits = record.abandoned and not record.hold
    return (waits or record.retryable) and is_last(record)


def is_last(record: Record) -> bool:
    """Return whether an attempt was the last one that its policy allows, however it ended."""
    most, outcome = None, record.outcome
    if outcome is None:
        info = run_info.read(record.run_info)
        most = None if info is None else info.most
    else:
        with suppress(SerializationError):
            most = most_attempts(outcome)
    return most is not None and record.number >= most


def held(record: Record) -> bool | None:
    """Return whether an attempt waits for a decision, once abandoned; None = it has ended."""
    return record.hold if record.state is State.PROCESSING else None


def age(record: Record) -> float:
    """Return the seconds since the record was created."""
    return record.now - record.created_at


def row(record: Record) -> tuple[str, ...]:
    """Return a record as one line of `COLUMNS`."""
    ends = record.expires_at if record.lease_until is None else record.lease_until
    return (
        record.scope,
        record.key,
        state_of(record),
        str(record.number),
        _HELD[held(record)],
        duration(age(record)),
        "-" if ends is None else duration(ends - record.now),
    )


def stuck_row(record: Record) -> tuple[str, ...]:
    """Return an abandoned attempt as one line of `STUCK`."""
    info = run_info.read(record.run_info)
    return (
        record.scope,
        record.key,
        str(record.number),
        _HELD[held(record)],
        duration(record.abandoned_for),
        "-" if info is None else info.by,
        _why(record) or "-",
    )


def _why(record: Record) -> str | None:
    """Say why an attempt was abandoned; None = it was not, or its record does not say."""
    info = run_info.read(record.run_info)
    if info is None or not record.abandoned:
        return None
    why = info.why or "lease ended"
    return f"{why}; no attempt left" if exhausted(record) else why


def fields(record: Record) -> dict[str, Any]:
    """Return a record as plain values, without its outcome."""
    outcome, info = record.outcome, run_info.read(record.run_info)
    written = info if outcome is None else outcome
    return {
        "scope": record.scope,
        "key": record.key,
        "key_digest": record.identity.key_digest,
        "state": state_of(record),
        "attempt": record.number,
        "fence": record.fence,
        "held": held(record),
        "by": None if info is None else info.by,
        "why": _why(record),
        "owner": record.owner.hex(),
        "fingerprint": None if record.fingerprint is None else record.fingerprint.hex(),
        "created_at": moment(record.created_at),
        "updated_at": moment(record.updated_at),
        "lease_until": moment(record.lease_until),
        "expires_at": moment(record.expires_at),
        "error": _error(record),
        "codec": None if written is None else written.codec or None,
        "size": None if outcome is None else len(outcome.data),
    }


def _error(record: Record) -> str | None:
    """Return the type of the error that a failed attempt raised; its text is part of the result."""
    failure = None if record.outcome is None else read_result(record.outcome)
    return failure.type_name if isinstance(failure, StoredFailure) else None


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


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]], *, colour: bool = False) -> str:
    """Align rows below their heads."""
    table = [[printable(cell) for cell in line] for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    if colour:
        lines[0] = painted(lines[0], _BOLD)
        words = [_COLOURS.get(head, {}) for head in heads]
        lines[1:] = [
            "  ".join(
                painted(cell, colours.get(cell)) + " " * (width - len(cell))
                for cell, colours, width in zip(line, words, widths, strict=True)
            ).rstrip()
            for line in table[1:]
        ]
    return "\n".join(lines)


def pairs(named: Mapping[str, object], *, colour: bool = False) -> str:
    """Write fields one below the other."""
    width = max(map(len, named))
    lines = []
    for name, value in named.items():
        text = "-" if value is None else printable(str(value))
        colours = _COLOURS.get(name.upper(), {}) if colour else {}
        lines.append(f"{name.ljust(width)}  {painted(text, colours.get(text))}")
    return "\n".join(lines)


def painted(text: str, colour: str | None) -> str:
    """Write a text in a color, if it has one."""
    return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"


def as_json(value: object) -> str:
    """Write a value for programs; what JSON has no form for is shown as text.

    What a terminal would obey is escaped here, too: people look at JSON.
    """
    written = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()
    return _MAYBE_OBEYED.sub(_escaped, written)


_MAYBE_OBEYED: Final = re.compile(r"[^\x20-\x7e\n]")


def _escaped(character: re.Match[str]) -> str:
    return character[0] if character[0].isprintable() else json.dumps(character[0])[1:-1]
