"""Decorators that would protect nothing: told of as soon as the routes of an application are known.

Nobody hears of them otherwise: the application answers as if all were well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from semel.errors import ConfigError


class Decorated(NamedTuple):
    """A function that was decorated."""

    given: Any
    protected: Any
    methods: frozenset[str]
    """The methods whose requests are protected."""


class Routed(NamedTuple):
    """A function that answers requests of some methods."""

    function: Any
    methods: Iterable[str]


def refuse_unprotected(decorated: Iterable[Decorated], routes: Iterable[Routed]) -> None:
    """Refuse a decorator above that of its route, and one on a route of other methods."""
    served: dict[int, set[str]] = {}  # by id: a function need not have a hash
    for route in routes:
        served.setdefault(id(route.function), set()).update(route.methods)
    for each in decorated:
        name = getattr(each.given, "__name__", repr(each.given))
        methods = served.get(id(each.protected))
        if methods is None:
            if id(each.given) in served:
                raise ConfigError(
                    f"{name} is not protected: its route took it before it was decorated; "
                    "the route's own decorator goes above @idempotent"
                )
        elif methods.isdisjoint(each.methods):
            told = ", ".join(sorted(methods))
            raise ConfigError(
                f"{name} is not protected: it answers {told}, and methods= names none of them"
            )
