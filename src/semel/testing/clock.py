"""A clock that moves only when told, for stores that take one."""

from __future__ import annotations

import threading

START = 1_700_000_000.0
"""An ordinary moment, so that fences and dates look as they do in production."""


class FakeClock:
    """Seconds that pass by `advance` alone: `MemoryStore(clock=FakeClock())`."""

    def __init__(self, start: float = START) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Tell the time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; a negative number is a clock that was set back."""
        with self._lock:
            self._now += seconds
