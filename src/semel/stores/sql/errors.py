"""What the errors of any database mean, and how long a call is repeated after them.

The stores and `idem.transaction()` read the list of rejections. The codes are the databases' own,
so no driver is imported: PostgreSQL's SQLSTATE, MySQL's numbers, the names of SQLite's primary
result codes.
"""

from __future__ import annotations

import enum
import random
import time
from typing import Final, Protocol, TypeVar

from semel.core.records import Busy
from semel.errors import StoreUnavailable
from semel.stores.urls import SEARCH_SHARE

T = TypeVar("T")

ASK_AGAIN_AFTER: Final = 0.1
"""Seconds. An open transaction has the key, and its end cannot be predicted."""


class RecordLocked(StoreUnavailable):
    """The store answers that another transaction has this record: no reason to run without it.

    A policy with store_error="open" would run the function beside the transaction that does.
    """


def busy_if_locked(outcome: T | RecordLocked) -> T | Busy:
    """Turn the lock of another's transaction into what it means to a claim."""
    return Busy(ASK_AGAIN_AFTER) if isinstance(outcome, RecordLocked) else outcome


_CLASSES: Final = ("22", "23")
"""Data exceptions and integrity constraints, as the first part of an SQLSTATE."""

_SQLSTATE: Final = 5
"""Characters."""

_OTHERWISE: Final = frozenset({
    "23502",  # NOT NULL: nobody fills the column, whatever the value is
    "23505",  # another row with this key: it may have come at the same moment
})  # fmt: skip
"""What these classes have that is no fault of the value."""

REJECTED: Final[frozenset[str | int]] = frozenset({
    "54000",  # PostgreSQL: beyond a limit of the server
    "P0001",  # PostgreSQL: a trigger of the application's own says no (RAISE)
    1118,     # a row larger than a page, or a part of the redo log, can hold
    1153,     # larger than max_allowed_packet
    1264,     # out of range
    1292,     # not a time
    1301,     # a part of it is larger than max_allowed_packet
    1366,     # not a text of this character set
    1406,     # too long
    1441,     # a time after the year 9999
    1452,     # against a FOREIGN KEY of the application's own
    1644,     # a trigger of the application's own says no (SIGNAL)
    3819,     # MySQL: against a CHECK of the application's own
    4025,     # MariaDB: the same
    "SQLITE_CONSTRAINT",  # against a CHECK, or a trigger's RAISE, of the application's own
    "SQLITE_MISMATCH",
    "SQLITE_TOOBIG",
})  # fmt: skip

_TOO_LARGE: Final = "invalid memory alloc request size"
"""What PostgreSQL says, as an internal error and in English always, of a value that it cannot hold
in one piece."""


def rejects_value(code: str | int | None) -> bool:
    """Whether a code means that the value can never be stored."""
    if isinstance(code, str) and len(code) == _SQLSTATE and code.startswith(_CLASSES):
        return code not in _OTHERWISE
    return code in REJECTED


def is_too_large(text: str) -> bool:
    """Whether PostgreSQL's words mean the same."""
    return _TOO_LARGE in text


# --- which statements are repeated, and for how long ------------------------------------------


class Repeat(enum.Enum):
    """Why a statement is worth sending again; every statement of ours may be carried out twice."""

    UNDONE = enum.auto()
    """The server rolled it back. Repeated a few times only: the conflict may stay."""
    LOCKED = enum.auto()
    """The server undid it, because others have the record. While there is time."""
    LOST = enum.auto()
    """Its connection broke. Once: what breaks two connections would break a third."""
    AWAY = enum.auto()
    """The server cannot be reached. It is looked for."""


class ErrorRules(Protocol):
    """What the errors of a database mean: the module `errors` of each knows."""

    def repeat_after(self, error: Exception) -> Repeat | None:
        """Return whether what met this error is worth sending again."""
        ...

    def translate(self, error: Exception, place: str) -> Exception:
        """Turn a driver's error into one of semel that names the place; return others unchanged."""
        ...

    def fails_every_request(self, error: Exception) -> bool:
        """Whether every other statement would meet this error, too."""
        ...

    def breaks_all_connections(self, error: BaseException) -> bool:
        """Whether this error of a driver means that no open connection can be used any more."""
        ...


MOST_REPEATS: Final = 12
"""Of what was undone. A lost server is looked for as often as there is time to."""

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.25


class Deadline:
    """The time of one call, and the pauses between its repeats. It never waits."""

    def __init__(self, seconds: float, *, waits_for_locks: bool = True) -> None:
        """`waits_for_locks`: one locked member of a batch must not hold up the others."""
        self.seconds = seconds
        self.at = time.monotonic() + seconds
        self.first: Exception | None = None
        """The error after which the call was first repeated."""
        self.verdict: Exception | None = None
        """What the rest of the call would meet as well."""
        self.bytes_lost = 0
        """The size of the message on which a connection was lost, until that is looked into."""
        self._waits_for_locks = waits_for_locks
        self._repeats = 0
        self._reconnected = False
        self._longest = _FIRST_PAUSE
        self._search_ends: float | None = None

    @property
    def left(self) -> float:
        """Seconds until the deadline, never less than nothing."""
        return max(0.0, self.at - time.monotonic())

    @property
    def end_of_search(self) -> float:
        """The moment when a server that was lost is given up, counted from its loss.

        It is looked for, because it may be restarting, but not to the end: while it is down, every
        caller pays for that.
        """
        if self._search_ends is None:
            self._search_ends = time.monotonic() + self.seconds * SEARCH_SHARE
        return min(self._search_ends, self.at)

    def next_pause(self) -> float:
        """Return how long to wait before the next try, longer each time."""
        longest, self._longest = self._longest, min(2 * self._longest, _LONGEST_PAUSE)
        return random.uniform(longest / 2, longest)  # noqa: S311 - two that met must not meet again

    def pause_after(self, error: Exception, repeat: Repeat | None) -> float | None:
        """Return how long to wait before the statement is sent again; None = it should not be."""
        end = self.at
        match repeat:
            case Repeat.LOST if not self._reconnected and self.left > 0:
                self._reconnected = True
                return 0.0
            case Repeat.AWAY:
                end = self.end_of_search
            case Repeat.LOCKED if self._waits_for_locks:
                pass
            case Repeat.UNDONE if self._repeats < MOST_REPEATS:
                pass
            case _:
                return None
        self._repeats += 1
        self.first = self.first or error
        pause = self.next_pause()
        if time.monotonic() + pause >= end:
            return None
        # Its frames know this deadline: what they hold would stay until the garbage collector runs.
        error.__traceback__ = None
        return pause

    def check(self) -> None:
        """Spare the rest of a call the wait for a server that did not answer its first part."""
        if self.verdict is not None:
            raise type(self.verdict)(*self.verdict.args) from self.verdict.__cause__
