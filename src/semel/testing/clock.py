"""A clock that moves only when told, for stores that take one."""

from __future__ import annotations

import threading

from semel.core.policy import Duration, seconds

START = 1_700_000_000.0
"""An ordinary moment, so that fences and dates look as they do in production."""


class FakeClock:
    """Seconds from `start` on that pass by `advance` alone: `MemoryStore(clock=FakeClock())`.

    Examples:
        >>> clock = FakeClock(start=1000.0)
        >>> clock.advance(by=60)
        >>> clock()
        1060.0
    """

    def __init__(self, start: float = START) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Tell the time."""
        return self._now

    def advance(self, by: Duration) -> None:
        """Let time pass, `by` so many seconds, or a timedelta."""
        self._move(seconds("the time that passes", by, zero=True))

    def set_back(self, by: Duration) -> None:
        """Let the clock go wrong, as when somebody sets it back `by` so many seconds."""
        self._move(-seconds("what the clock is set back by", by))

    def _move(self, by: float) -> None:
        with self._lock:
            self._now += by
