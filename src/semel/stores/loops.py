"""A store for asyncio belongs to one event loop: its connections cannot follow to another."""

from __future__ import annotations

import asyncio

from semel.errors import ConfigError


def only_loop(first: asyncio.AbstractEventLoop | None, place: str) -> asyncio.AbstractEventLoop:
    """Give the loop that runs; refuse it if the store at this place was used on another before."""
    running = asyncio.get_running_loop()
    if first is not None and first is not running:
        raise ConfigError(f"the store at {place} belongs to another event loop; open one per loop")
    return running
