"""Logical idempotency: compare-and-set updates that need no record. See `updates`."""

from semel.guards.rows import AlreadyApplied, Applied, Conflict, Guarded
from semel.guards.updates import StateGuard, VersionGuard, transition, update_if_version

__all__ = [
    "AlreadyApplied",
    "Applied",
    "Conflict",
    "Guarded",
    "StateGuard",
    "VersionGuard",
    "transition",
    "update_if_version",
]
