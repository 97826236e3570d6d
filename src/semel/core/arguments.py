"""Reads a function's arguments out of a call, without calling it.

This module binds. What it needs of the signature is worked out once, at decoration, because
`Signature.bind` on each call costs more than all the rest of a replay from memory. It is asked
only for calls that are wrong (it words the TypeError) or that fill `*args` or `**kwargs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeAlias

from semel.core.fingerprint import fingerprint
from semel.errors import ConfigError

Getter: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Takes the `args` and `kwargs` of a call, gives the value of one parameter."""

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Arguments:
    """The parameters of one function, ready to be read from any call of it."""

    __slots__ = (
        "_by_keyword",
        "_by_position",
        "_defaults",
        "_function_name",
        "_signature",
        "_starred",
        "names",
    )

    def __init__(self, function_name: str, signature: inspect.Signature) -> None:
        parameters = signature.parameters
        self.names = tuple(parameters)
        self._function_name = function_name
        self._signature = signature
        self._by_position = tuple(n for n, p in parameters.items() if p.kind in _BY_POSITION)
        self._by_keyword = frozenset(n for n, p in parameters.items() if p.kind in _BY_KEYWORD)
        self._starred = any(p.kind in _STARRED for p in parameters.values())
        self._defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Arguments:
        """Read the signature of a function, once."""
        name = getattr(function, "__qualname__", type(function).__name__)
        try:
            return cls(name, inspect.signature(function))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the parameters of {name} cannot be read: {error}") from error

    def getter(self, name: str) -> Getter:
        """Compile the reading of one parameter: by position, by keyword, or its default."""
        if name not in self.names:
            raise ConfigError(
                f"{self._function_name} has no argument {name!r}; it has: {', '.join(self.names)}"
            )
        position = self._by_position.index(name) if name in self._by_position else None
        keyword = name in self._by_keyword
        defaults, bind = self._defaults, self._bind_slowly

        def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if position is not None and position < len(args):
                return args[position]
            if keyword and name in kwargs:
                return kwargs[name]
            if name in defaults:
                return defaults[name]
            return bind(args, kwargs)[name]

        return get

    def mapping(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, skip_first: bool = False
    ) -> dict[str, Any]:
        """Give all values by name, in the order of the signature, defaults included.

        `skip_first` leaves out the first parameter: `self` and `cls` are no part of what is asked.
        """
        bound = self._bind_quickly(args, kwargs)
        if bound is None:
            bound = self._bind_slowly(args, kwargs)
        if skip_first:
            first = self.names[0]
            if first in self._by_position:
                del bound[first]
            else:  # def method(*args): the instance is the first of them
                bound[first] = bound[first][1:]
        return bound

    def _bind_quickly(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        if self._starred or len(args) > len(self._by_position):
            return None
        given = dict(zip(self._by_position, args, strict=False))
        if not (kwargs.keys() <= self._by_keyword and given.keys().isdisjoint(kwargs)):
            return None
        values = {**self._defaults, **given, **kwargs}
        if len(values) < len(self.names):
            return None
        return {name: values[name] for name in self.names}

    def _bind_slowly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._function_name}() {error}") from None
        bound.apply_defaults()
        return bound.arguments


def digest_key(arguments: Mapping[str, Any]) -> str:
    """Make a key of all the arguments, for functions that were given none."""
    return f"args-{fingerprint(arguments).hex()}"
