"""How long and how often one call to the store goes on after a failure.

This module decides. It never sleeps and touches no connection.
"""

from __future__ import annotations

import random
import time
from itertools import chain
from typing import Any, Final

from semel.errors import ValueRejected
from semel.stores.registry import SEARCH_SHARE
from semel.stores.sql.mysql.errors import (
    concerns_all,
    is_lost,
    is_unreachable,
    may_repeat,
    translate,
)
from semel.stores.sql.mysql.session import lock_wait
from semel.stores.sql.mysql.statements import Bulk
from semel.stores.sql.verbs import Reply, Statement

LARGEST_MESSAGE: Final = Statement("SELECT @@max_allowed_packet", (), writes=False)
"""Asked after a connection was lost: a server hangs up on a larger message, often without a word,
and would do so each time that it is sent."""

MOMENT: Final = 0.05
"""Seconds. Less cannot be kept to, and none at all means "do not wait" to a socket."""

_HARDLY_ANY: Final = 0.1
"""The part of its time after which a call is still as good as at its beginning."""

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.1


class Effort:
    """The patience of one call, for all statements that it sends."""

    def __init__(self, place: str, timeout: float, *, patient: bool = True) -> None:
        """`patient`: whether a lock is worth waiting for, and not somebody else's affair."""
        self.timeout = timeout
        self._search_ends: float | None = None
        self._patient = patient
        self._place = place
        self._deadline = time.monotonic() + timeout
        self._pause = _FIRST_PAUSE
        self._reconnected = False
        self._verdict: Exception | None = None
        # The server answers that a record is locked after this time. Who did not wait for that
        # answer could not tell a locked record from a server that is away.
        self._least = min(timeout, (lock_wait(timeout) if patient else 1) + 0.5)

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def statement_time(self) -> float:
        """Seconds that the next statement may take: what remains, or the wait for a lock."""
        left = self.remaining
        if left > self.timeout * (1 - _HARDLY_ANY):
            return self.timeout  # the same for most, so that the driver need not be told each time
        return max(left, self._least)

    def pause_after(self, error: Exception) -> float:
        """Tell how long to wait before the statement is sent again, or raise what the error means.

        A statement that the server undid (deadlock, lock timeout) is repeated while there is
        time, unless it is a batch: one locked member must not hold up the others. A statement
        whose connection was lost is repeated once, on a new connection: each of ours may be
        carried out twice, and what breaks two connections would break a third. A server that
        cannot be reached is looked for, because it may be restarting, but not to the end: while
        it is down, every caller pays for that.
        """
        if self.remaining > 0:
            if self._patient and may_repeat(error):
                return min(self._next_pause(), self.remaining)
            if is_unreachable(error) and self._searches():
                return self._next_pause()
            if is_lost(error) and not self._reconnected:
                self._reconnected = True
                return 0.0
        ours = translate(error, self._place)
        if concerns_all(error):
            self._verdict = ours
        raise ours

    def check_size(self, size: int, largest: Reply) -> None:
        """Refuse to send again what this server can never take."""
        ((limit,),) = largest.rows
        if size > limit - min(1024, limit // 16):  # what the drivers add is only guessed
            raise ValueRejected(
                f"{self._place} cannot take this: {size} bytes, and its max_allowed_packet is "
                f"{limit}; raise that, or let the policy's max_result_bytes be well below it"
            )

    def _next_pause(self) -> float:
        # Apart from each other: two that met once should not meet again.
        pause = self._pause * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return pause

    def _searches(self) -> bool:
        now = time.monotonic()
        if self._search_ends is None:
            self._search_ends = now + self.timeout * SEARCH_SHARE
        return now < self._search_ends

    def check(self) -> None:
        """Spare the rest of a batch the wait for a server that did not answer its first part."""
        if self._verdict is not None:
            raise type(self._verdict)(*self._verdict.args) from self._verdict.__cause__


def message_size(connection: Any, statement: Statement) -> int:
    """Count the bytes of a statement about as its driver, PyMySQL or asyncmy, writes them."""
    values = statement.parameters
    if isinstance(statement, Bulk):
        values = tuple(chain.from_iterable(values))
    text = len(statement.sql) + sum(len(connection.escape(value)) for value in values)
    return text if statement.then is None else text + message_size(connection, statement.then)
