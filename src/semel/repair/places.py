"""Finds the store behind what a caller has at hand: an engine, a store, a URL, or the settings.

Whoever opened a store closes it: what is opened here is closed here. Repair looks at what others
have written. A store that can only be empty, because it is of this process or because opening it
would make it, is refused by its URL: it would look healthy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from semel.aio import AsyncIdempotency
from semel.core.settings import Settings, load_settings
from semel.engine.setup import Setup
from semel.errors import ConfigError
from semel.stores.base import Scannable
from semel.stores.urls import split_url
from semel.sync import Idempotency


@contextmanager
def listing(place: Any) -> Iterator[Any]:
    """Give a store that lists its records; None = the one that the settings name."""
    check_place(place)
    if place is None or isinstance(place, str):
        with Idempotency(place) as engine:
            yield _store_of(engine)
    else:
        yield _store_of(place)


@asynccontextmanager
async def listing_async(place: Any) -> AsyncIterator[Any]:
    """`listing`, for asyncio."""
    check_place(place)
    if place is None or isinstance(place, str):
        async with AsyncIdempotency(place) as engine:
            yield _store_of(engine)
    else:
        yield _store_of(place)


def check_place(place: Any) -> None:
    """Refuse a URL, or one of the settings, behind which nothing can be; objects are taken."""
    if isinstance(place, str):
        refuse_what_can_only_be_empty(load_settings(url=place))
    elif place is None:
        refuse_what_can_only_be_empty(load_settings())


def refuse_what_can_only_be_empty(settings: Settings) -> None:
    """Refuse what an engine of these settings would find empty whatever others have written."""
    for url in (settings.url, settings.behind):
        if url is not None:
            refuse_memory(url)
            _refuse_a_missing_file(url)


def refuse_memory(url: str) -> None:
    """Refuse a store that no other process can have written to."""
    if url.startswith("memory:"):
        raise ConfigError(
            "memory:// is of one process: nothing of another's can be seen. In the same process, "
            "give its engine or its store"
        )


def _refuse_a_missing_file(url: str) -> None:
    if url.startswith("sqlite:///"):
        address, _ = split_url(url)
        path = Path(address[1:])
        if not path.exists():
            raise ConfigError(
                f"there is no SQLite database {path.absolute()}: is the path right? The first call "
                "of a program makes it, or semel migrate"
            )


def _store_of(place: Any) -> Any:
    store = place._store if isinstance(place, Setup) else place
    if not isinstance(store, Scannable):
        raise ConfigError(f"{type(store).__name__} cannot list its records")
    return store
