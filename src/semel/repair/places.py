"""Finds the store behind what a caller has at hand: an engine, a store, a URL, or the settings.

Whoever opened a store closes it: what is opened here is closed here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from semel.aio import AsyncIdempotency
from semel.engine.setup import Setup
from semel.errors import ConfigError
from semel.stores.base import Scannable
from semel.sync import Idempotency


@contextmanager
def listing(place: Any) -> Iterator[Any]:
    """Give a store that lists its records; None = the one that the settings name."""
    if place is None or isinstance(place, str):
        with Idempotency(place) as engine:
            yield _store_of(engine)
    else:
        yield _store_of(place)


@asynccontextmanager
async def listing_async(place: Any) -> AsyncIterator[Any]:
    """`listing`, for asyncio."""
    if place is None or isinstance(place, str):
        async with AsyncIdempotency(place) as engine:
            yield _store_of(engine)
    else:
        yield _store_of(place)


def _store_of(place: Any) -> Any:
    store = place._store if isinstance(place, Setup) else place
    if not isinstance(store, Scannable):
        raise ConfigError(f"{type(store).__name__} cannot list its records")
    return store
