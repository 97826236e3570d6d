"""Decorators that would protect nothing, and integrations inside one another.

A decorator that protects nothing is reported as soon as the routes of an application are known:
otherwise the application would serve requests unprotected. Of integrations inside one another the
outermost one protects a request, and those further inside let it pass: a second one would find the
key taken by the first, and reject what it was to protect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from semel.core.attempts import current_attempt
from semel.core.records import Identity
from semel.errors import ConfigError, about
from semel.http.options import CHANGING

PROTECTED: Final = "semel.protected"
"""Is in the environ, or in the scope, of a request that is protected."""


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


def check_protected(decorated: Iterable[Decorated], routes: Iterable[Routed]) -> None:
    """Reject a decorator above that of its route, and one on a route of other changes."""
    taken: set[int] = set()  # by id: a function need not have a hash
    served: dict[int, set[str]] = {}
    for route in routes:
        taken.add(id(route.function))
        for layer in _layers(route.function):
            served.setdefault(id(layer), set()).update(route.methods)
    for each in decorated:
        name = name_of(each.given)
        methods = served.get(id(each.protected))
        if methods is None:
            if id(each.given) in taken:
                raise ConfigError(
                    f"{name} is not protected: its route took it before it was decorated; "
                    "put the route's own decorator above @idempotent"
                )
        # A class whose views are all decorated may have some that only read.
        elif methods.isdisjoint(each.methods) and not CHANGING.isdisjoint(methods):
            names = ", ".join(sorted(CHANGING & methods))
            raise ConfigError(
                f"{name} is not protected: it handles {names}, and methods= lists none of them"
            )


def name_of(function: Any) -> str:
    """Name a function for its author."""
    name: str = getattr(function, "__name__", repr(function))
    return name


def _layers(function: Any) -> Iterator[Any]:
    """Return a function, and those that other decorators have wrapped in it."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def owners_around(identity: Identity) -> set[bytes]:
    """Return the owners of the attempts around this call that claimed the same record."""
    owners, around = set(), current_attempt()
    while around is not None:
        if around.identity == identity:
            owners.add(around.owner)
        around = around.outer
    return owners


def claimed_outside(option: str, identity: Identity) -> ConfigError:
    """Say that an integration further outside has the record which this one was to write."""
    wrong = ConfigError(
        "this request is protected by another integration further outside, with the same store and "
        f"the same key as @idempotent({option}=...): give one of them another scope=, or "
        "exclude this path from the outer one (exclude=)"
    )
    return about(wrong, identity)
