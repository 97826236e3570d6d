"""Lets as many callers in as there are connections; the others wait, for a bounded time.

redis-py's own pools refuse the caller that finds every connection in use (only one of its four
pool kinds can wait), so a burst would fail instead of queueing. A gate stands in front of every
client that semel opened itself.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from semel.errors import StoreUnavailable


class Gate:
    """A context manager around one exchange with the server."""

    def __init__(self, places: int, timeout: float, where: str) -> None:
        self._places = places
        self._timeout = timeout
        self._where = where
        self._open()

    def _open(self) -> None:
        self._free = threading.BoundedSemaphore(self._places)
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            self._open()  # forked: places taken by the parent's threads will never come back here
        if not self._free.acquire(timeout=self._timeout):
            raise _full(self._places, self._timeout, self._where)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._free.release()


def _full(places: int, timeout: float, where: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"all {places} connections to {where} stayed in use for {timeout:g} s; nothing was sent. "
        "Raise max_connections, or look for what holds them"
    )
