"""Which rules hold for a request: by its method, by paths in and out, by routes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from re import Pattern
from typing import Any, Final

from semel.core.policy import Rules
from semel.errors import ConfigError
from semel.http.checking import known_options
from semel.http.options import DoorOptions, PathPattern, Route, chosen, path_matcher
from semel.http.rulebook import Rulebook

_REMEMBERED: Final = 1024
"""Paths whose rules are remembered; an application may have endlessly many."""
_LONGEST: Final = 256
"""Characters of a path that is remembered; a client may send one of any length."""


class Routing:
    """Finds the rulebook of a request."""

    def __init__(
        self,
        *,
        include: Sequence[PathPattern] | None = None,
        exclude: Sequence[PathPattern] = (),
        routes: Sequence[Route] = (),
        resolved: Callable[..., Rules],
        key_pattern: Pattern[str] | None = None,
        **options: Any,
    ) -> None:
        known_options(options, (*DoorOptions.__annotations__, "include", "exclude", "routes"))
        self._include = None if include is None else _matchers("include", include)
        self._exclude = _matchers("exclude", exclude)
        for route in routes:
            if not isinstance(route, Route):
                raise ConfigError(f"routes must be Route objects, not {type(route).__name__}")
        self._rulebooks: list[tuple[Callable[[str], object], Rulebook]] = [
            (route.matches, Rulebook(chosen({**options, **route.options}), resolved, key_pattern))
            for route in routes
        ]
        self._default = Rulebook(chosen(options), resolved, key_pattern)
        self._known: dict[tuple[str, str], Rulebook | None] = {}

    def find(self, method: str, path: str) -> Rulebook | None:
        """Give the rules for a request; None = it is none of ours.

        A method counts in any case: `post` is a POST to Flask and to Django.
        """
        try:
            return self._known[method, path]
        except KeyError:
            rulebook = self._find(method, path)
        if len(self._known) < _REMEMBERED and len(method) + len(path) <= _LONGEST:
            self._known[method, path] = rulebook
        return rulebook

    def _find(self, method: str, path: str) -> Rulebook | None:
        if self._include is not None and not _any(self._include, path):
            return None
        if _any(self._exclude, path):
            return None
        rulebook = next((book for matches, book in self._rulebooks if matches(path)), self._default)
        return rulebook if method.upper() in rulebook.choices.methods else None


def _any(matchers: list[Callable[[str], object]], path: str) -> bool:
    return any(matches(path) for matches in matchers)


def _matchers(option: str, patterns: Sequence[PathPattern]) -> list[Callable[[str], object]]:
    if isinstance(patterns, str):
        raise ConfigError(f"{option} must be a sequence of patterns, not the text {patterns!r}")
    return [path_matcher(pattern) for pattern in patterns]
