"""How long and how often one call to the store goes on after a failure.

This module decides. It never sleeps and touches no connection.
"""

from __future__ import annotations

import random
import time
from typing import Final

from semel.stores.sql.mysql.errors import concerns_all, is_lost, may_repeat, translate

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.1


class Effort:
    """The patience of one call, for all statements that it sends."""

    def __init__(self, place: str, timeout: float, *, patient: bool = True) -> None:
        """`patient`: whether a lock is worth waiting for, and not somebody else's affair."""
        self.timeout = timeout
        self._patient = patient
        self._place = place
        self._deadline = time.monotonic() + timeout
        self._pause = _FIRST_PAUSE
        self._reconnected = False
        self._verdict: Exception | None = None

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def pause_after(self, error: Exception) -> float:
        """Tell how long to wait before the statement is sent again, or raise what the error means.

        A statement that the server undid (deadlock, lock timeout) is repeated while there is
        time, unless it is a batch: one locked member must not hold up the others. A statement
        whose connection was lost is repeated once, on a new connection: each of ours may be
        carried out twice, and a server that fails twice in a row is down.
        """
        if self.remaining > 0:
            if self._patient and may_repeat(error):
                # Apart from each other: two that met once should not meet again.
                pause = self._pause * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                return min(pause, self.remaining)
            if is_lost(error) and not self._reconnected:
                self._reconnected = True
                return 0.0
        ours = translate(error, self._place)
        if concerns_all(error):
            self._verdict = ours
        raise ours

    def check(self) -> None:
        """Spare the rest of a batch the wait for a server that did not answer its first part."""
        if self._verdict is not None:
            raise type(self._verdict)(*self._verdict.args) from self._verdict.__cause__
