"""What an open transaction that has a record is to a claim of it: the record is busy."""

from __future__ import annotations

from typing import Final, TypeVar

from semel.core.records import Busy
from semel.errors import StoreUnavailable

T = TypeVar("T")

ASK_AGAIN_AFTER: Final = 0.1
"""Seconds. An open transaction has the key, and nobody can tell how long it will."""


class RecordLocked(StoreUnavailable):
    """The store is there, and says that somebody has this record: not a reason to run without it.

    A policy with store_error="open" would run the function beside the transaction that does.
    """


def busy_if_locked(outcome: T | RecordLocked) -> T | Busy:
    """Turn the lock of another's transaction into what it means to a claim."""
    return Busy(ASK_AGAIN_AFTER) if isinstance(outcome, RecordLocked) else outcome
