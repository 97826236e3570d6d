"""Servers for the tests of gRPC: each kind in turn, on a store of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adapters.rpc.shop import KINDS, Server, Shop
from engines.facade import Driven, World


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    """Threads, asyncio, and plain handlers on asyncio."""
    return request.param


class Shops:
    """Opens servers, and closes them in the end."""

    def __init__(self, world: World, kind: str) -> None:
        self.world, self.kind = world, kind
        self._open: list[Server] = []

    def serve(
        self, *, engine: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Server, Shop, Driven]:
        """A server on an engine of its own."""
        made, shop = self.world.engine(**(engine or {})), Shop(self.kind)
        server = Server(self.world, shop, made.engine, **options)
        self._open.append(server)
        return server, shop, made

    def close(self) -> None:
        for server in self._open:
            server.close()


@pytest.fixture
def shops(kind: str) -> Iterator[Shops]:
    """Servers of each kind on a store in memory."""
    yield from _opened(kind, "memory://")


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def lasting_shops(request, kind: str) -> Iterator[Shops]:
    """Servers of each kind on each kind of lasting store."""
    yield from _opened(kind, request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def serve(shops: Shops) -> Callable[..., tuple[Server, Shop, Driven]]:
    return shops.serve


def _opened(kind: str, url: str) -> Iterator[Shops]:
    with World("threads" if kind == "threads" else "asyncio", url) as world:
        shops = Shops(world, kind)
        try:
            yield shops
        finally:
            shops.close()
