"""Real reasons why one engine cannot reach its store while others can."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from engines.facade import Driven, World
from servers.proxy import proxy_to


class Outage(NamedTuple):
    """An engine, and a block during which it cannot reach its store."""

    engine: Driven
    during: Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def write_locked(world: World) -> Iterator[Outage]:
    """Another connection has the write lock for longer than the store waits."""

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        path = world.url.removeprefix("sqlite:///")
        with contextlib.closing(
            sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        ) as holder:
            holder.execute("BEGIN IMMEDIATE")
            yield

    store = world.kind.open_store(world.url, timeout=0.1)
    with _engine_on(world, store, store.close) as engine:
        yield Outage(engine, locked)


@contextlib.contextmanager
def cut_off(world: World) -> Iterator[Outage]:
    """The network between this engine and its server is down."""
    with proxy_to(urlsplit(world.url).port) as proxy:

        @contextlib.contextmanager
        def down() -> Iterator[None]:
            proxy.refusing = True
            proxy.cut_all()
            try:
                yield
                assert proxy.refused  # the fault really fired
            finally:
                proxy.refusing = False

        store = world.kind.open_store(proxy.url, timeout=0.2)
        with _engine_on(world, store, store.close) as engine:
            yield Outage(engine, down)


@contextlib.contextmanager
def short_of_time(world: World) -> Iterator[Driven]:
    """An engine whose store answers within a fifth of a second, or not at all."""
    store = world.kind.open_store(world.url, timeout=0.2)
    with _engine_on(world, store, store.close) as engine:
        yield engine


@contextlib.contextmanager
def _engine_on(world: World, store: Any, close: Callable[[], Any]) -> Iterator[Driven]:
    engine = world.engine_on(world.kind.steered(store))
    try:
        yield engine
    finally:
        engine.close()
        world.kind.finish(close)
