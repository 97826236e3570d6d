"""A request to stop, which a signal handler may make at any line of the thread that waits for it.

`threading.Event` is no such thing. Its lock is not reentrant: a handler that interrupts `wait`,
`set` or `clear` in the same thread, and calls `set`, waits for ever.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Stop:
    """Set once, by any thread or signal handler; whatever stops begins again with a new one."""

    __slots__ = ("_set", "_wake")

    def __init__(self) -> None:
        self._set = False
        # Its `put` is reentrant, and wakes a `get` that it interrupts.
        self._wake: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Request the stop."""
        self._set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        """Return whether the stop was requested."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait for the request, up to these seconds; returns whether it was made."""
        if not self._set:
            with suppress(Empty):
                self._wake.get(timeout=seconds)
                self._wake.put(None)  # for the next thread that waits
        return self._set
