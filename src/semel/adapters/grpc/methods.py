"""Which rules hold for a method: those of its own, of its service, or of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from re import Pattern
from typing import Any, Final

from semel.adapters.grpc.options import MethodRule, checked_rules, chosen
from semel.adapters.grpc.rulebook import MethodBook
from semel.core.policy import Rules
from semel.errors import ConfigError

_REMEMBERED: Final = 1024
"""Methods whose rules are remembered; a generic handler may take endlessly many."""


class MethodBooks:
    """Finds the rules of a method."""

    def __init__(
        self,
        resolved: Callable[..., Rules],
        key_pattern: Pattern[str] | None = None,
        *,
        methods: Mapping[str, MethodRule] | None = None,
        **options: Any,
    ) -> None:
        self._resolved, self._pattern = resolved, key_pattern
        self._rules = checked_rules({} if methods is None else methods)
        self._default = chosen(options)
        self._choices = {
            name: chosen({**options, **rule.options}) for name, rule in self._rules.items()
        }
        self._books: dict[str, MethodBook | None] = {}
        self.choices = (self._default, *self._choices.values())
        """Every set of options that a method may have."""
        for choices in self.choices:  # what the engine cannot do is told of now
            MethodBook("", choices, resolved)

    def find(self, method: str) -> MethodBook | None:
        """Give the rules of a method; None = it is none of ours."""
        try:
            return self._books[method]
        except KeyError:
            book = self._find(method)
        if len(self._books) < _REMEMBERED:
            self._books[method] = book
        return book

    def check(self, method: str, *, streaming: bool) -> MethodBook | None:
        """Give the rules for a call; None = it passes. A stream that needs a key is an error."""
        book = self.find(method)
        if book is None or not streaming:
            return book
        if book.choices.required:
            raise ConfigError(
                f"{method} is a stream, which cannot be replayed, but its key is required: "
                f"write methods={{{method!r}: MethodRule(off=True)}}"
            )
        return None

    def _find(self, method: str) -> MethodBook | None:
        service = method.rpartition("/")[0]
        name = next((name for name in (method, f"{service}/*") if name in self._rules), None)
        if name is None:
            return MethodBook(method, self._default, self._resolved, self._pattern)
        if self._rules[name].off:
            return None
        return MethodBook(method, self._choices[name], self._resolved, self._pattern)
