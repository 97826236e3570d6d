"""Who leads each shared execution of a process, and who waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from semel.core.records import Finished
from semel.errors import StoreError, StoreUnavailable

T = TypeVar("T")

logger = logging.getLogger("semel")

AFTER_TROUBLE = 1.0
"""Seconds until a timer whose tick failed is there again."""

Answer: TypeAlias = Finished | StoreError
"""What a shared execution tells the calls that wait for it."""

LEAD: Literal["lead"] = "lead"
LATE: Literal["late"] = "late"
Given: TypeAlias = Answer | Literal["lead", "late"]
"""An answer; or this call leads now; or its time ran out."""


class NoTimer(StoreUnavailable):
    """A claim cannot be renewed because no thread could be started: it is given back."""


class Seats(Generic[T]):
    """Who leads each shared execution, and who waits for it. The order of waiting is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, dict[T, None]] = {}

    def lead(self, place: Hashable) -> bool:
        """Lead when nobody does."""
        fresh: dict[T, None] = {}
        return self._waiting.setdefault(place, fresh) is fresh  # one step: needs no lock

    def take_lead(self, place: Hashable, seat: Callable[[], T]) -> T | None:
        """Lead when nobody does (None), else take a seat."""
        with self._lock:
            while not self.lead(place):
                row, mine = self._waiting.get(place), seat()
                if row is None:
                    continue  # its leader has just left
                row[mine] = None
                if self._waiting.get(place) is row:
                    return mine
                del row[mine]  # the leader left meanwhile, and may have seen an empty row
            return None

    def end(self, place: Hashable) -> Iterable[T]:
        """Nobody leads any more; gives those who waited."""
        # One step (of a Python with its global lock): mostly nobody waits, and no lock is needed.
        row = self._waiting.pop(place, None)
        if not row:
            return ()
        with self._lock:  # whoever is just taking a seat sees that the row is gone
            return tuple(row)

    def next_leader(self, place: Hashable) -> T | None:
        """Take the first who waits out of the row; the execution ends when there is none."""
        with self._lock:
            waiting = self._waiting.get(place)
            if not waiting:
                self._waiting.pop(place, None)
                return None
            first = next(iter(waiting))
            del waiting[first]
            return first

    def leave(self, place: Hashable, seat: T) -> bool:
        """Give up a seat; False when something was given to it already."""
        with self._lock:
            waiting = self._waiting.get(place, {})
            return waiting.pop(seat, False) is None


_of_stores: WeakKeyDictionary[object, Any] = WeakKeyDictionary()


def one_for(store: object, kind: type[T]) -> T:
    """Give the one object of this kind that belongs to a store."""
    return _one_of(_of_stores, store, kind)


def _one_of(known: WeakKeyDictionary[object, Any], owner: object, kind: type[T]) -> T:
    try:
        found = known.setdefault(owner, kind())
    except TypeError:
        return kind()  # An owner that cannot be referenced weakly: each engine for itself.
    return found if isinstance(found, kind) else kind()


class SeatsOfLoops:
    """The seats of each event loop that uses a store: what waits belongs to its loop."""

    def __init__(self) -> None:
        self._of_loops: WeakKeyDictionary[object, Any] = WeakKeyDictionary()

    def of(self, loop: object) -> Seats[Any]:
        """Give those of one loop."""
        return _one_of(self._of_loops, loop, Seats)


def forget_flights() -> None:
    """In a forked child nobody leads, whatever the parent's threads were doing."""
    _of_stores.clear()
