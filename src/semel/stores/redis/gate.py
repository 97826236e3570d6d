"""Lets as many callers in as there are connections; the others wait, for a bounded time.

redis-py's own pools refuse the caller that finds every connection in use (only one of its four
pool kinds can wait), so a burst would fail instead of queueing. A gate stands in front of every
client that semel opened itself.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from types import TracebackType

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks

MOST_PLACES = 1 << 16
"""There are no more ports to connect from; who asks for more means "as many as there may be"."""


class Gate:
    """A context manager around one exchange with the server."""

    def __init__(self, places: int, timeout: float, where: str) -> None:
        self._places = places
        self._timeout = timeout
        self._where = where
        self.after_fork_in_child()
        follow_forks(self)

    def __enter__(self) -> None:
        try:
            self._free.get(timeout=self._timeout)
        except Empty:
            raise _full(self._places, self._timeout, self._where) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._free.put(None)

    def before_fork(self) -> None:
        """Do nothing: a queue of this kind is never caught half changed."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Open anew: places taken by the parent's threads will never come back here."""
        # A semaphore would do, at ten times the cost: that one is written in Python.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(min(self._places, MOST_PLACES)):
            self._free.put(None)


def _full(places: int, timeout: float, where: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"all {places} connections to {where} stayed in use for {timeout:g} s; nothing was sent. "
        "Raise max_connections, or look for what holds them"
    )
