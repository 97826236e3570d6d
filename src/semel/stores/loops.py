"""A store for asyncio belongs to one event loop: its connections cannot follow to another."""

from __future__ import annotations

import asyncio
from queue import Empty

from semel.errors import ConfigError


def running_loop() -> asyncio.AbstractEventLoop:
    """Give the loop of asyncio that runs here, or say that semel needs one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "AsyncIdempotency runs on asyncio, and no event loop of asyncio is running here; under "
            "trio use an Idempotency in threads, as in `await trio.to_thread.run_sync(...)`"
        ) from None


def only_loop(first: asyncio.AbstractEventLoop | None, place: str) -> asyncio.AbstractEventLoop:
    """Give the loop that runs; refuse it if the store at this place was used on another before."""
    running = running_loop()
    if first is not None and first is not running:
        raise ConfigError(f"the store at {place} belongs to another event loop; open one per loop")
    return running


def has_ended(first: asyncio.AbstractEventLoop | None, place: str) -> bool:
    """Whether the loop of a store is gone, and what was open on it; refuse one that is not."""
    if first is None or first is asyncio.get_running_loop():
        return False
    if not first.is_closed():
        raise ConfigError(f"the store at {place} belongs to another event loop; close it there")
    return True


class AsyncPlaces:
    """A limited number of places for tasks, taken and given back as `places.Places` are."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def get(
        self,
        *,
        block: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109 - as a queue for threads has it
    ) -> object:
        """Take a place; raises `queue.Empty`."""
        if self._free.locked():  # else there is no need for a timer
            if not block:
                raise Empty
            try:
                async with asyncio.timeout(timeout):
                    await self._free.acquire()
            except TimeoutError:
                raise Empty from None
        else:
            await self._free.acquire()
        return self

    def give(self, _place: object) -> None:
        """Give a place back."""
        self._free.release()
