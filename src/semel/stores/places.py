"""A limited number of places for threads: at connections, or at work that few may do at a time.

Taking and giving are one step each, which no exception of a signal handler can tear apart; a
semaphore for threads is written in Python, and may lose a place or keep its lock. It costs ten
times as much, too.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final
from weakref import ReferenceType, ref

from semel.stores.forking import follow_forks

MOST_PLACES: Final = 1 << 16
"""There are no more ports to connect from; who asks for more means "as many as there may be"."""


class Place:
    """The right to be one of a limited number. One that nobody holds any more returns by itself.

    So none is lost when an exception of a signal handler strikes between taking and giving.
    """

    __slots__ = ("_free",)

    def __init__(self, free: ReferenceType[SimpleQueue[Any]]) -> None:
        self._free = free

    def __del__(self) -> None:
        free = self._free()
        if free is not None:  # else all of them are gone, or were left behind by a fork
            free.put(Place(self._free))


class Places:
    """Gives each place to one holder at a time."""

    def __init__(self, count: int) -> None:
        self._places = count
        self.after_fork_in_child()
        follow_forks(self)

    def before_fork(self) -> None:
        """Do nothing: a queue of this kind is never caught half changed."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Begin anew: places taken by the parent's threads will never come back here."""
        self._free: SimpleQueue[Place] = SimpleQueue()
        free = ref(self._free)
        for _ in range(min(self._places, MOST_PLACES)):
            self._free.put(Place(free))
        # No functions of ours around these: every exchange with a server asks.
        self.get: Callable[..., Place] = self._free.get
        """Take a place (`block=`, `timeout=`); raises `queue.Empty`."""
        self.give: Callable[[Any], None] = self._free.put
        """Give a place back."""
