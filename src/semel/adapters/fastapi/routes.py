"""The routes of an application, as old and new versions of FastAPI list them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import fastapi.routing


def routes_of(routes: Any) -> Iterator[Any]:
    """Give the routes of endpoints, those of included routers with their whole paths."""
    return (route for route in _completed(routes) if getattr(route, "methods", None) is not None)


def all_routes_of(routes: Any) -> Iterator[Any]:
    """Give the routes of endpoints, those of mounted applications too."""
    yield from routes_of(routes)
    for route in _completed(routes):
        yield from all_routes_of(getattr(route, "routes", ()))


def _completed(routes: Any) -> Iterable[Any]:
    complete: Any = getattr(fastapi.routing, "iter_route_contexts", iter)
    return cast("Iterable[Any]", complete(routes))
