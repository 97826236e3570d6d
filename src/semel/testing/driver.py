"""Drives a store of either kind, and its clock, by plain calls, so that one test text proves both.

A store for threads is called as it is. The answers of a store for asyncio are awaited on one event
loop that belongs to the driver: such a store is bound to the loop that first used it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from semel.core.policy import Duration, seconds
from semel.core.records import Request
from semel.errors import StoreError
from semel.stores.base import AsyncStore, Store

T = TypeVar("T")


class StoreDriver(Store):
    """Drives a `store` of either kind as a `Store` for threads."""

    def __init__(self, store: Store | AsyncStore) -> None:
        # An async store answers the same requests with awaitables, which `_finish` resolves.
        self._store = cast("Store", store)
        self._runner = asyncio.Runner()
        self._is_async = isinstance(store, AsyncStore)
        self.unsupported = store.unsupported

    def offers(self, kind: type[Request[Any]]) -> bool:
        """Return whether the store supports requests of a `kind`, such as `AdoptRequest`."""
        return kind not in self.unsupported

    def ask(self, request: Request[T]) -> T:
        """Drive `ask`."""
        return self._finish(self._store.ask(request))

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Drive `send`."""
        return self._finish(self._store.send(requests))

    def close(self) -> None:
        """Close the store, and the loop it ran on."""
        try:
            closing: object = self._store.close()
            self._finish(closing)
        finally:
            self._runner.close()

    def race(self, requests: Sequence[Request[T]], *, apart: float = 0.0) -> list[T]:
        """Send all `requests` at the same moment, each from its own thread or task.

        Each begins `apart` seconds after the one before it.
        """
        if self._is_async:
            return self._runner.run(self._gather(requests, apart))
        ready = threading.Barrier(len(requests))

        def send(place: int) -> T:
            ready.wait()
            time.sleep(place * apart)
            return self._store.ask(requests[place])

        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(send, range(len(requests))))

    async def _gather(self, requests: Sequence[Request[T]], apart: float) -> list[T]:
        async def send(place: int) -> T:
            await asyncio.sleep(place * apart)
            return await cast("Awaitable[T]", self._store.ask(requests[place]))

        return await asyncio.gather(*map(send, range(len(requests))))

    def _finish(self, answer: T) -> T:
        if inspect.isawaitable(answer):
            return cast("T", self._runner.run(_awaited(answer)))
        return answer


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer


START = 1_700_000_000.0
"""An ordinary moment, so that fences and dates look as they do in production."""


class FakeClock:
    """A clock from `start` on that only `advance` moves: `MemoryStore(clock=FakeClock())`.

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
        """Return the time."""
        return self._now

    def advance(self, by: Duration) -> None:
        """Move the clock forward `by` so many seconds, or a timedelta."""
        self._move(seconds("the time that passes", by, zero=True))

    def set_back(self, by: Duration) -> None:
        """Move the clock back `by` so many seconds, as when a person sets it."""
        self._move(-seconds("what the clock is set back by", by))

    def _move(self, by: float) -> None:
        with self._lock:
            self._now += by
