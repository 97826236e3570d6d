"""A store for asyncio belongs to one event loop: its connections cannot follow to another."""

from __future__ import annotations

import asyncio

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
