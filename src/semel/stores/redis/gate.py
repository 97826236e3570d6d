"""Lets as many callers in as there are connections; the others wait, for a bounded time.

redis-py's own pools refuse the caller that finds every connection in use (only one of its four
pool kinds can wait), so a burst would fail instead of queueing. A gate stands in front of every
client that semel opened itself.
"""

from __future__ import annotations

from queue import Empty
from typing import Any

from semel.errors import StoreUnavailable
from semel.stores.places import Place, Places


class Gate(Places):
    """Takes and gives places: one for each exchange with the server."""

    def __init__(self, places: int, timeout: float, where: str) -> None:
        super().__init__(places)
        self._timeout = timeout
        self._where = where

    def take(self) -> Place:
        """Wait for a place; the caller returns it with `give`."""
        try:
            return self.get(timeout=self._timeout)
        except Empty:
            raise _full(self._places, self._timeout, self._where) from None


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
