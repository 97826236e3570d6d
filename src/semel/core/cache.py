"""A bounded memory of finished operations, for keys that are asked for again and again.

This module remembers; time is an argument. It answers only what the store would answer too: a
finished record with the same fingerprint, for no longer than the record is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.core.records import Finished, Identity


class FinishedCache:
    """The most recently used finished operations: at most `size`, each for at most `longest`.

    `longest` bounds how long a record that was forgotten elsewhere is still answered here.
    """

    def __init__(self, size: int, longest: float) -> None:
        self._size = size
        self._longest = longest
        self._lock = Lock()
        self._entries: OrderedDict[Identity, tuple[bytes | None, Finished, float, int]] = (
            OrderedDict()
        )

    def emptied(self) -> FinishedCache:
        """Make another one of the same size, with nothing in it."""
        return FinishedCache(self._size, self._longest)

    def get(
        self, identity: Identity, fingerprint: bytes | None, now: float, generation: int = 0
    ) -> Finished | None:
        """Return a finished operation that this payload may be answered with.

        The generation of an identity changes when it is forgotten, by any engine on the store.
        """
        with self._lock:
            entry = self._entries.get(identity)
            if entry is None:
                return None
            known, finished, until, remembered = entry
            if until <= now or remembered != generation:
                del self._entries[identity]
                return None
            if known != fingerprint:
                return None  # The store judges payloads.
            self._entries.move_to_end(identity)
            return finished

    def add(
        self,
        identity: Identity,
        fingerprint: bytes | None,
        finished: Finished,
        now: float,
        generation: int = 0,
    ) -> None:
        """Remember a finished operation for as long as its record is kept."""
        with self._lock:
            self._entries[identity] = (
                fingerprint,
                finished,
                now + min(finished.remaining, self._longest),
                generation,
            )
            self._entries.move_to_end(identity)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def drop(self, identity: Identity) -> None:
        """Forget one operation."""
        with self._lock:
            self._entries.pop(identity, None)

    def clear(self) -> None:
        """Forget everything, with a lock of our own again (after a fork)."""
        self._lock = Lock()
        self._entries.clear()
