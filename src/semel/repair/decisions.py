"""What a resolver may find out, the decision that follows, and where it is logged.

A resolver takes the record and looks where the effect would be: at the payment provider, in the
business tables. It says "failed" only with proof that the effect did not happen and no longer can.
Decisions are events; each one is also logged, or appended to a file. The audit trail in the store,
which has an entry before anything is decided, is in `audit`.

Event
└── Decision            who decided, when, on which record
    ├── Resolved        the outcome is stored
    ├── Overtaken       it was decided, but another process wrote the outcome first
    ├── Unresolved      not known yet, or no resolver is registered for the scope
    │   └── ResolverFailed   ... because the resolver itself failed
    └── GaveUp          asked as often as allowed; a person has to decide
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from semel.core.observers import Log
from semel.core.records import Record
from semel.events import Event

# --- what a resolver may find out ----------------------------------------------------------------


class Succeeded(Struct, frozen=True):
    """The operation took effect, and duplicates get this value.

    The value is the result of a function, an `HttpAnswer`, or a `GrpcAnswer`, as the record needs.
    """

    value: object = None


class Failed(Struct, frozen=True):
    """The operation did not take effect, and no longer can."""

    error: str
    """The message of the failure that later callers get."""
    retryable: bool
    """True: the same payload may run again. False: later callers get `PreviousFailure`."""


class Unknown(Struct, frozen=True):
    """The outcome is unknown, or not known yet; the attempt stays abandoned, and held if it was."""

    reason: str = ""


Resolution: TypeAlias = Succeeded | Failed | Unknown
Resolver: TypeAlias = Callable[[Record], Resolution]
AsyncResolver: TypeAlias = Callable[[Record], Resolution | Awaitable[Resolution]]


class ResolvedFailure(Exception):
    """Stands in the record for a failure that a resolver or a person established."""


# --- decisions -----------------------------------------------------------------------------------

Verdict: TypeAlias = Literal["succeeded", "failed", "retryable"]


class Decision(Event, frozen=True, kw_only=True):
    """What was decided about an abandoned attempt."""

    fence: int
    by: str
    """Who decided: a name, the host, and the process."""
    at: float
    """The time, on the store's clock."""


class Resolved(Decision, frozen=True, kw_only=True):
    """The outcome of an abandoned attempt is known and stored."""

    level = logging.INFO
    verdict: Verdict
    kept_until: float
    """When the outcome expires at the earliest, on the store's clock; a later call runs again."""
    reason: str | None = None
    """The reason, if there is one."""


class Overtaken(Decision, frozen=True, kw_only=True):
    """Another process wrote the outcome first; this decision was rejected."""

    level = logging.WARNING
    verdict: Verdict
    reason: str | None = None


class Unresolved(Decision, frozen=True, kw_only=True):
    """The outcome is not known yet; the attempt stays abandoned, and held if it was."""

    level = logging.WARNING
    reason: str
    tries: int
    """How often its resolver ran; 0 if there is none."""


class ResolverFailed(Unresolved, frozen=True, kw_only=True):
    """The resolver failed; `reason` is the type of its error."""

    level = logging.ERROR


class GaveUp(Decision, frozen=True, kw_only=True):
    """The resolver ran as often as allowed; a person has to decide."""

    level = logging.ERROR
    tries: int


# --- the log and the file -------------------------------------------------------------------------

Audit: TypeAlias = Callable[[Decision], object]
"""Logs each decision: who decided what. It never has the raw key."""

_TIMES: Final = {"at", "kept_until"}

audit_logger = Log("semel.audit")


def entry(decision: Decision) -> dict[str, Any]:
    """Write a decision as plain fields."""
    fields = {name: getattr(decision, name) for name in decision.__struct_fields__}
    del fields["identity"]
    if fields.get("reason", "") is None:
        del fields["reason"]
    for name in _TIMES & fields.keys():
        fields[name] = datetime.fromtimestamp(fields[name], UTC).isoformat(timespec="microseconds")
    return {
        "decision": decision.name,
        "scope": decision.scope,
        "key_digest": decision.key_digest,
        **fields,
    }


def log_audit(decision: Decision) -> None:
    """Write a `decision` to the logger `semel.audit`; its fields are in the record's `semel`."""
    fields = entry(decision)
    text = " ".join(f"{name}={_quoted(str(value))}" for name, value in fields.items())
    level, extra = max(decision.level, logging.INFO), {"semel": fields}
    unwritten = audit_logger.tell(level, "%s", text, extra=extra, stacklevel=4)
    if unwritten is not None:
        raise unwritten  # not dropped here: what decides says that the entry is missing


def _quoted(text: str) -> str:
    """Quote what would pass for another field, or for another line of the log."""
    plain = text.isprintable() and not set(text) & _SEPARATORS
    return text if plain else json.dumps(text)


_SEPARATORS: Final = frozenset(' "=')


class AuditFile:
    """Appends one line of JSON for each decision to the file at `path`.

    Several processes can share the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, decision: Decision) -> None:
        """Append the entry in one write, so that lines of two processes never mix."""
        line = msgspec.json.encode(entry(decision)) + b"\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line)
