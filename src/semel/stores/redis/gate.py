"""Lets as many callers in as there are connections; the others wait, for a bounded time.

redis-py's own pools refuse the caller that finds every connection in use (only one of its four
pool kinds can wait), so a burst would fail instead of queueing. A gate stands in front of every
client that semel opened itself.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import ReferenceType, ref

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks

MOST_PLACES = 1 << 16
"""There are no more ports to connect from; who asks for more means "as many as there may be"."""


class Place:
    """The right to one exchange. One that nobody holds any more returns by itself.

    So none is lost when an exception of a signal handler strikes between taking and giving.
    """

    __slots__ = ("_free",)

    def __init__(self, free: ReferenceType[SimpleQueue[Any]]) -> None:
        self._free = free

    def __del__(self) -> None:
        free = self._free()
        if free is not None:  # else the gate is gone, or was left behind by a fork
            free.put(Place(self._free))


class Gate:
    """Takes and gives places: one for each exchange with the server."""

    def __init__(self, places: int, timeout: float, where: str) -> None:
        self._places = places
        self._timeout = timeout
        self._where = where
        self.after_fork_in_child()
        follow_forks(self)

    def take(self) -> Place:
        """Wait for a place; whoever takes it gives it back by `give`."""
        try:
            return self._free.get(timeout=self._timeout)
        except Empty:
            raise _full(self._places, self._timeout, self._where) from None

    def before_fork(self) -> None:
        """Do nothing: a queue of this kind is never caught half changed."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Open anew: places taken by the parent's threads will never come back here."""
        # A semaphore would do, at ten times the cost: that one is written in Python.
        self._free: SimpleQueue[Place] = SimpleQueue()
        free = ref(self._free)
        for _ in range(min(self._places, MOST_PLACES)):
            self._free.put(Place(free))
        self.give: Callable[[Any], None] = self._free.put
        """Give a place back; no function of ours around it: every exchange asks."""


class OpenGate:
    """The gate of those who do not wait at one."""

    def take(self) -> None:
        """Go on."""

    def give(self, place: Any) -> None:
        """Nothing was taken."""


def _full(places: int, timeout: float, where: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"all {places} connections to {where} stayed in use for {timeout:g} s; nothing was sent. "
        "Raise max_connections, or look for what holds them"
    )
