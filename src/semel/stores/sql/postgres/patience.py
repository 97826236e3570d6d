"""How long a call may take, and what is worth repeating within that time.

This module decides. It never waits and touches no connection.

A deadlock, a serialization failure and a duplicate that was inserted at the same moment undo the
whole statement: it is repeated. So is one whose connection was lost, on another connection: every
verb is safe to send twice. A server that cannot be reached is looked for, because it may be
restarting, but not to the end: while it is down, every caller pays for that.
"""

from __future__ import annotations

import random
import time
from typing import Final

import psycopg
from psycopg import errors as sql
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from semel.errors import StoreUnavailable
from semel.stores.registry import SEARCH_SHARE
from semel.stores.sql.postgres.errors import (
    MigrationLocked,
    TableLocked,
    TimeIsUp,
    is_hopeless,
)

MOST_REPEATS: Final = 12
"""Of what was undone. A lost server is looked for as often as there is time to."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25

UNDONE: Final = (sql.SerializationFailure, sql.DeadlockDetected, sql.UniqueViolation)
"""The statement was undone and may succeed when sent again.

A unique violation is one of them: the index on the key can notice a row that was inserted at the
same moment before `ON CONFLICT`, which watches the digest, does.
"""

_NOT_THE_CONNECTION: Final = (
    TimeIsUp,
    TableLocked,
    MigrationLocked,
    PoolTimeout,
    PoolClosed,
    TooManyRequests,
)
_GOING_DOWN: Final = (sql.AdminShutdown, sql.CrashShutdown, sql.CannotConnectNow)
_CROWDED: Final = sql.TooManyConnections
"""Only asyncpg gives the code: libpq describes a refused connection in words."""
BECAME_REPLICA: Final = sql.ReadOnlySqlTransaction
"""After a failover, a connection may be left with the server that is no longer the primary."""


def is_lost(error: BaseException) -> bool:
    """Whether the connection, not the statement, was the trouble."""
    if isinstance(error, _NOT_THE_CONNECTION) or is_hopeless(error):
        return False
    return isinstance(error, (*_GOING_DOWN, _CROWDED, BECAME_REPLICA)) or (
        # The client's own errors have no code of the server.
        isinstance(error, psycopg.OperationalError)
        and (error.sqlstate is None or error.sqlstate.startswith("08"))
    )


def concerns_all(error: StoreUnavailable) -> bool:
    """Whether every member of a batch would meet the same: the trouble is with the server."""
    return isinstance(
        error.__cause__, (psycopg.OperationalError, BECAME_REPLICA)
    ) and not isinstance(error.__cause__, (*UNDONE, sql.LockNotAvailable, sql.QueryCanceled))


class Patience:
    """The time and the repeats of one call."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._search_ends: float | None = None
        self._repeats = 0
        self._first: Exception | None = None

    @property
    def left(self) -> float:
        """Seconds until the deadline, never less than nothing."""
        return max(0.0, self.deadline - time.monotonic())

    def reason(self, error: Exception) -> Exception:
        """Tell why the call failed: running out of time is only how a repeated one ends."""
        return error if self._first is None or not isinstance(error, TimeIsUp) else self._first

    def pause_after(self, error: Exception) -> float | None:
        """How long to wait before the call is repeated; None when it should not be."""
        if isinstance(error, UNDONE) and self._repeats < MOST_REPEATS:
            end = self.deadline
        elif is_lost(error):
            end = self._end_of_search()
        else:
            return None
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._repeats)
        pause = random.uniform(longest / 2, longest)  # noqa: S311 - two that met must not meet again
        self._repeats += 1
        self._first = self._first or error
        return pause if time.monotonic() + pause < end else None

    def _end_of_search(self) -> float:
        """Give the moment when a server that was lost is given up, counted from its loss."""
        if self._search_ends is None:
            self._search_ends = time.monotonic() + self._seconds * SEARCH_SHARE
        return min(self._search_ends, self.deadline)
