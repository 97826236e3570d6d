"""Logical idempotency: compare-and-set updates that need no record. See `updates`."""

from semel.guards.updates import (
    AlreadyApplied,
    Applied,
    Conflict,
    Guarded,
    StateGuard,
    VersionGuard,
    transition,
    update_if_version,
)

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
