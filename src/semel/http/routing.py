"""Which rules hold for a request: by its method, by paths in and out, by routes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from re import Pattern
from typing import Any, Final, TypeAlias

from semel.core.policy import Rules
from semel.errors import ConfigError
from semel.events import logger
from semel.http.options import DoorOptions, PathPattern, Route, chosen, known_options, path_matcher
from semel.http.rulebook import Rulebook

Matcher: TypeAlias = Callable[[str], object]

WATCHED: Final = 100
"""After this many requests, each pattern of `include` that has matched none of them is logged."""
_REMEMBERED: Final = 1024
"""How many paths have their rules remembered; an application may have endlessly many."""
_LONGEST: Final = 256
"""The longest path that is remembered, in characters; a client may send one of any length."""

_LAYERS: Final = 16
"""How many leading parts of a root may be layers; a proxy may let a client write the root."""


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
        self._unmatched: dict[str, Matcher] = {}
        """Patterns of `include` that matched nothing so far, while the first requests are watched.

        Only those: what they name is unprotected if they are wrong. A path that is excluded, or has
        options of its own, may just be rare.
        """
        self._watched = count(1)
        self._include = None if include is None else _matchers("include", include)
        if self._include is not None:
            self._unmatched = dict(zip(map(_written, include or ()), self._include, strict=True))
        self._exclude = _matchers("exclude", exclude)
        for route in routes:
            if not isinstance(route, Route):
                raise ConfigError(f"routes must be Route objects, not {type(route).__name__}")
        self._rulebooks: list[tuple[Matcher, Rulebook]] = [
            (matcher, Rulebook(chosen({**options, **route.options}), resolved, key_pattern))
            for route, matcher in zip(
                routes, _matchers("routes", [route.pattern for route in routes]), strict=True
            )
        ]
        self._default = Rulebook(chosen(options), resolved, key_pattern)
        books = [self._default, *(book for _, book in self._rulebooks)]
        self._methods = frozenset(method for book in books for method in book.choices.methods)
        self._known: dict[tuple[str, str, str], Rulebook | None] = {}

    def find(self, method: str, path: str, root: str = "") -> Rulebook | None:
        """Give the rules for a request; None = it is none of ours.

        A method counts in any case: `post` is a POST to Flask and to Django. `root` is where the
        application is mounted (`root_path`, `SCRIPT_NAME`); `path` may have it or not.
        """
        try:
            return self._known[method, path, root]
        except KeyError:
            paths = _views(root.rstrip("/"), path)
            rulebook = self._find(method.upper(), paths)
        if self._unmatched and method.upper() in self._methods:
            self._watch(paths)  # each of the first requests: none is remembered yet
        elif len(self._known) < _REMEMBERED and len(method) + len(path) + len(root) <= _LONGEST:
            self._known[method, path, root] = rulebook
        return rulebook

    def _find(self, method: str, paths: tuple[str, ...]) -> Rulebook | None:
        if self._include is not None and not _any(self._include, paths):
            return None
        if _any(self._exclude, paths):
            return None
        rulebook = next(
            (book for matcher, book in self._rulebooks if _any([matcher], paths)), self._default
        )
        return rulebook if method in rulebook.choices.methods else None

    def _watch(self, paths: tuple[str, ...]) -> None:
        """Warn, once, of patterns that match nothing: what they name may be unprotected."""
        for name, matcher in [*self._unmatched.items()]:
            if _any([matcher], paths):
                self._unmatched.pop(name, None)
        if next(self._watched) == WATCHED:
            unmatched, self._unmatched = self._unmatched, {}
            for name in unmatched:
                logger.warning(
                    "include: the pattern %r matched none of the first %d requests with a method "
                    "that is protected; a pattern is compared with the whole path, and with the "
                    "path below each mount (root_path, SCRIPT_NAME)",
                    name,
                    WATCHED,
                )


def _matchers(option: str, patterns: Sequence[PathPattern]) -> list[Matcher]:
    if isinstance(patterns, str):
        raise ConfigError(f"{option} must be a sequence of patterns, not the text {patterns!r}")
    return [path_matcher(pattern) for pattern in patterns]


def _written(pattern: PathPattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _views(root: str, path: str) -> tuple[str, ...]:
    """Give the path as each layer sees it, from the client to the mounted application.

    A server and the mounts inside it add up to one root; which of them added what is not known. So
    each part of it may be the outer one: behind `/v1/m` those are `/v1/m/pay`, `/m/pay` and `/pay`.
    Servers and frameworks disagree, too, whether `path` has the root (ASGI wants it there), or only
    the part that a mount added.
    """
    names = [name for name in root.split("/") if name]
    if not names:
        return (path,)
    roots = ["".join(f"/{name}" for name in names[first:]) for first in range(len(names))[:_LAYERS]]
    found = next((each for each in (root, *roots) if f"{path}/".startswith(f"{each}/")), "")
    rest = path[len(found) :]
    rests = (rest,) if found in {root, roots[0]} else (path, rest)
    views = (f"{each}{below}" or "/" for below in rests for each in (*roots, ""))
    return tuple(dict.fromkeys((path, *views)))


def _any(matchers: Sequence[Matcher], paths: tuple[str, ...]) -> bool:
    return any(matches(path) for matches in matchers for path in paths)
