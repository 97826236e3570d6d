"""Decides whether the front is asked: not again and again while it is down.

This module decides; time is an argument. The first error opens the breaker. While it is open no
call is made; when its pause is over one call is let through to try. An error then makes the next
pause longer, an answer closes the breaker. A call that is let through moves the time of the next
one on, so a call that never comes back blocks nobody.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Final

from semel.errors import RecordUnreadable, StoreError, StoreFull
from semel.stores.forking import ForkSafeLock

log = logging.getLogger(__name__)

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0

_OF_ONE_KEY: Final = (StoreFull, RecordUnreadable)
"""Errors that say nothing about other keys: a full server still answers for those it has."""


class Breaker:
    """The breaker of one front, shared by all callers of a store.

    `patience` is how long a call may take: no second one tries while the first may still answer.
    """

    def __init__(self, where: str, patience: float) -> None:
        self._where = where
        self._patience = patience
        self._lock = ForkSafeLock()
        self._pause = FIRST_PAUSE
        self._tried = 0.0
        """When the breaker opened, or the last call was let through to try."""
        self._next: float | None = None
        """When one call may try again; None while the front is in use."""

    def allows(self, now: float) -> bool:
        """Whether a call may begin now."""
        with self._lock.lock:
            if self._next is None:
                return True
            if now < self._next:
                return False
            self._tried, self._next = now, now + max(self._pause, self._patience)
            return True

    def learn(self, answers: Sequence[object], began: float, now: float) -> None:
        """Take the answers of a call into account that began at `began`."""
        errors = [each for each in answers if isinstance(each, StoreError)]
        outage = next((each for each in errors if not isinstance(each, _OF_ONE_KEY)), None)
        if outage is None and self._next is None:
            return
        with self._lock.lock:
            was_open = self._next is not None
            if was_open and began < self._tried:
                return  # it began before the outage was known, and tells nothing new
            if outage is None:
                self._next, self._pause = None, FIRST_PAUSE
            else:
                self._pause = min(self._pause * 2, LONGEST_PAUSE) if was_open else FIRST_PAUSE
                # Jitter: the callers of many processes must not come back all at once.
                pause = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                self._tried, self._next = now, now + pause
        if outage is None:
            log.info("the front at %s is in use again", self._where)
        elif not was_open:
            log.warning("the front is out of use, SQL answers alone: %s", outage)
