"""`memory://`: records in one process, for tests, development and programs that run alone.

`memory://?max_records=10000&evict=finished` sets its bounds. Each opening makes a store of its
own; engines share records by sharing the store object.
"""

from __future__ import annotations

from typing import Any

from semel.errors import ConfigError
from semel.stores.memory.aio import AsyncMemoryStore
from semel.stores.memory.store import MemoryStore
from semel.stores.urls import merge_options, refuse_in_url, split_url

__all__ = ["AsyncMemoryStore", "MemoryStore", "open_async_store", "open_store"]

OPTIONS = frozenset({"max_records", "evict", "clock"})


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> MemoryStore:
    """Open a store for threads.

    Prefix and timeout have nothing to act on: no other program sees the records, no call waits.
    """
    del prefix, timeout
    return MemoryStore(**_arguments(url, options))


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncMemoryStore:
    """Open a store for asyncio; see `open_store`."""
    del prefix, timeout
    return AsyncMemoryStore(**_arguments(url, options))


def _arguments(url: str, options: dict[str, Any]) -> dict[str, Any]:
    address, in_url = split_url(url)
    if address not in {"", "/"}:
        raise ConfigError(f"memory:// has no address; got {address!r}")
    refuse_in_url(in_url, clock="a function")
    return merge_options("memory", in_url, options, OPTIONS)
