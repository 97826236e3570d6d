"""Which keys are acceptable, and how keys are made: from keys, arguments, templates.

The rules and the derivations are pure: the same input gives the same answer for ever, because a
key that is derived differently after an upgrade is a second execution. Only `KeyGenerator` reads
the clock and the system's randomness.
An error never repeats the key: it may be a secret, and it may be a megabyte long.
"""

from __future__ import annotations

import inspect
import os
import re
import string
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from enum import Enum
from inspect import Parameter
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

from semel.core.fingerprint import fingerprint
from semel.core.records import (
    MAX_KEY_LENGTH,
    check_text,
    first_bad_character,
    hex_digest,
    reject_audit_scope,
    text_fault,
)
from semel.errors import ConfigError, InvalidKey, SerializationError


class KeyRules:
    """Says whether a key may be used: printable, without whitespace, not empty, not too long.

    `pattern` is asked as well, for the whole key, after these rules.
    """

    __slots__ = ("max_length", "pattern")

    def __init__(
        self, pattern: str | re.Pattern[str] | None = None, max_length: int = MAX_KEY_LENGTH
    ) -> None:
        if not 1 <= max_length <= MAX_KEY_LENGTH:
            raise ConfigError(
                f"max_length of keys is between 1 and {MAX_KEY_LENGTH}, not {max_length}"
            )
        try:
            self.pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"the key pattern is not a regular expression: {error}") from error
        self.max_length = max_length

    def check(self, key: object) -> None:
        """Raise `InvalidKey` unless `key` may be used."""
        # The same as `check_text`, written out: this is asked for every call.
        if not (
            isinstance(key, str)
            and 0 < len(key) <= self.max_length
            and key.isprintable()
            and " " not in key
        ):
            raise InvalidKey(text_fault("key", key, self.max_length))
        if self.pattern is not None and self.pattern.fullmatch(key) is None:
            raise InvalidKey(
                f"the key does not match the pattern {self.pattern.pattern!r} of this application"
            )

    def check_scope(self, scope: object, what: str = "scope") -> None:
        """Raise `InvalidKey` unless `scope` may be used; the pattern is for keys alone.

        `what` is how the error calls it.
        """
        check_text(what, scope)
        reject_audit_scope(scope)


def check_plain(name: str, function: object) -> None:
    """Raise `ConfigError` for an async function, whose result would never be awaited."""
    called = (function, getattr(function, "__call__", None))  # noqa: B004 - of an object
    if any(map(inspect.iscoroutinefunction, called)):
        raise ConfigError(f"{name} must be a plain function, not an async one")


# --- keys from keys ----------------------------------------------------------------------

_ESCAPED_PART = str.maketrans({"%": "%25", ":": "%3A"})

_DIGEST_MARK = ":%-"
"""Stands before the digest of a shortened key; escaping writes only %25 and %3A, never this."""


def derive_key(key: str, part: str) -> str:
    """Return the key of one `part` of an operation, made from the `key` of the whole.

    Examples:
        >>> derive_key("req-001", "item-A")
        'req-001:item-A'

    `%` and `:` inside the part are escaped, so two different pairs never have the same key.
    """
    check_text("key", key)
    check_text("part of a derived key", part)
    whole = f"{key}:{part.translate(_ESCAPED_PART)}"
    if len(whole) <= MAX_KEY_LENGTH:
        return whole
    tail = _DIGEST_MARK + hex_digest(whole.encode())
    return whole[: MAX_KEY_LENGTH - len(tail)] + tail


# --- new keys ----------------------------------------------------------------------------

KeyStyle = Literal["time", "uuid"]

_UUID_LENGTH = 36
_STEP_BYTES = 7
_RANDOM_BITS = 62


class KeyGenerator:
    """Creates keys without a store, each with the name `app` in front if you pass it.

    Examples:
        >>> KeyGenerator("shop").new()
        'shop-...'

    The `style` "time" is UUID version 7: it sorts by time, which keeps indexes small.
    The style "uuid" is UUID version 4, which is random.
    """

    __slots__ = ("_last", "_make", "_prefix")

    def __init__(self, app: str | None = None, style: KeyStyle = "time") -> None:
        if app is not None:
            check_text("app name", app, MAX_KEY_LENGTH - _UUID_LENGTH - len("-"))
        makers = {"time": self._time_ordered, "uuid": uuid.uuid4}
        if style not in makers:
            raise ConfigError(f"the style of new keys is one of {', '.join(makers)}, not {style!r}")
        self._make = makers[style]
        self._prefix = "" if app is None else f"{app}-"
        self._last = 0

    def new(self) -> str:
        """Return a new, unique key."""
        return f"{self._prefix}{self._make()}"

    def _time_ordered(self) -> uuid.UUID:
        # 48 bits of milliseconds and 12 bits of their fraction (RFC 9562, method 3), then random.
        stamp = time.time_ns() * 4096 // 1_000_000
        value = (stamp << _RANDOM_BITS) | (int.from_bytes(os.urandom(8)) >> (64 - _RANDOM_BITS))
        if value <= self._last:
            # The same instant, or the clock went back. A random step keeps the order and keeps
            # threads (there is no lock that a fork could leave closed) and forks apart.
            value = self._last + 1 + int.from_bytes(os.urandom(_STEP_BYTES))
        self._last = value
        milliseconds = value >> (12 + _RANDOM_BITS)
        fraction = (value >> _RANDOM_BITS) & 0xFFF
        random = value & ((1 << _RANDOM_BITS) - 1)
        return uuid.UUID(
            int=(milliseconds << 80) | (7 << 76) | (fraction << 64) | (0b10 << 62) | random
        )


_generator = KeyGenerator()


def new_key(app: str | None = None) -> str:
    """Return a new key that sorts by time, with the application's name `app` in front if passed.

    Examples:
        >>> new_key("shop")
        'shop-...'
    """
    if app is None:
        return _generator.new()
    return KeyGenerator(app).new()


# --- keys from the arguments of a call ---------------------------------------------------


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_NOTHING: dict[object, object] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}
"""What a call without further arguments gives to `*args` and `**kwargs`."""


class Arguments:
    """The parameters of one function, ready to be read from any call of it, without calling it.

    What is needed of the signature is worked out once, at decoration, because `Signature.bind` on
    each call costs more than all the rest of a replay from memory. It is asked only for calls that
    are wrong (it words the TypeError) or that fill `*args` or `**kwargs`.
    """

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
        self._starred = any(p.kind in _NOTHING for p in parameters.values())
        self._defaults = {
            n: _NOTHING.get(p.kind, p.default)
            for n, p in parameters.items()
            if p.kind in _NOTHING or p.default is not p.empty
        }

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Arguments:
        """Read the signature of a function, once."""
        name = getattr(function, "__qualname__", type(function).__name__)
        try:
            return cls(name, inspect.signature(function))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the parameters of {name} cannot be read: {error}") from error

    def mapping(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all values by name, in the order of the signature, defaults included."""
        bound = self._bind_quickly(args, kwargs)
        return self._bind_slowly(args, kwargs) if bound is None else bound

    def without_defaults(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out what is at its default: to add a parameter that has one changes no call."""
        return {name: value for name, value in values.items() if not self._is_default(name, value)}

    def _is_default(self, name: str, value: object) -> bool:
        default = self._defaults.get(name, Parameter.empty)
        if value is default or type(value) is not type(default):
            return value is default
        try:  # not ==, by which (1,) is (True,), and which a class may define as it likes
            return fingerprint(value) == fingerprint(default)
        except SerializationError:
            return False

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


# --- keys from templates: `"order:{order.id}"` over the arguments of a call ---------------
#
# A template is checked whole when it is compiled, at decoration; what only a call can show is an
# `InvalidKey` before anything runs. Two laws:
#
#     different texts make different keys   (separators inside values are escaped)
#     a key never depends on chance         (only types with a stable text are accepted)
#
# Names with a leading underscore are rejected: a template reads data, not the inside of objects.


Step: TypeAlias = Callable[[Any], Any]

_PATH = re.compile(r"(?P<root>[^\W\d]\w*)(?P<steps>(?:\.\w+|\[[^\[\]]+\])*)")
_STEP = re.compile(r"\.(?P<attribute>\w+)|\[(?P<item>[^\[\]]+)\]")


class Field(NamedTuple):
    """One `{...}` of a template."""

    path: str
    """As it was written, for error messages."""
    root: str
    """The argument it starts from."""
    steps: tuple[Step, ...]
    spec: str

    @property
    def whole(self) -> bool:
        """Whether the key has the argument's whole value, neither a part of it nor a rounding."""
        return not self.steps and not self.spec

    def text(self, value: Any) -> str:
        """Follow the path from the argument's value and write what is found there."""
        try:
            for step in self.steps:
                value = step(value)
        except Exception as error:  # a property may raise anything; no key, so nothing may run
            raise InvalidKey(
                f"the key needs {{{self.path}}}, but reading it raised {type(error).__name__}"
            ) from error
        if isinstance(value, Enum):
            value = value.value
        if value is None:
            raise InvalidKey(f"the key needs {{{self.path}}}, which is None")
        if not isinstance(value, (str, int, UUID, Decimal, date)):
            raise InvalidKey(
                f"{{{self.path}}} is of type {type(value).__name__}, which has no stable text; "
                "use a str, int, bool, UUID, Decimal, Enum, date or datetime"
            )
        return self._write(value)

    def _write(self, value: str | int | UUID | Decimal | date) -> str:
        try:
            if self.spec == "" and isinstance(value, date):
                text = value.isoformat()
            else:
                text = format(value, self.spec)
        except (TypeError, ValueError) as error:
            raise InvalidKey(
                f"{{{self.path}}} is of type {type(value).__name__} and cannot be written "
                f"with the format {self.spec!r}"
            ) from error
        if text == "":
            raise InvalidKey(f"the key needs {{{self.path}}}, which is empty")
        return text


class Template:
    """A compiled template; `compile_template` makes it."""

    __slots__ = ("_escapes", "_fields", "_literals", "whole_arguments")

    def __init__(
        self, literals: Sequence[str], fields: Sequence[Field], escapes: Mapping[int, str]
    ) -> None:
        self._literals = tuple(literals)
        self._fields = tuple(fields)
        self._escapes = escapes
        self.whole_arguments = frozenset(field.root for field in fields if field.whole)
        """The arguments that no two calls with the same key can differ in."""

    def render(self, lookup: Callable[[str], Any]) -> str:
        """Write the key; `lookup` returns the value of an argument by its name."""
        pieces = [self._literals[0]]
        for field, literal in zip(self._fields, self._literals[1:], strict=True):
            text = field.text(lookup(field.root))
            pieces += (text.translate(self._escapes) if self._escapes else text, literal)
        return "".join(pieces)


def compile_template(text: str, parameters: Sequence[str]) -> Template:
    """Check a template against the names of a function's parameters, once."""
    try:
        return _compile(text, parameters)
    except ValueError as error:
        raise ConfigError(f"the key template {text!r} is wrong: {error}") from error


def _compile(text: str, parameters: Sequence[str]) -> Template:
    literals = [""]  # always one more than there are fields
    fields: list[Field] = []
    for literal, path, spec, conversion in string.Formatter().parse(text):
        literals[-1] += literal
        if path is None:  # the text after the last field, or an escaped brace
            continue
        if conversion is not None:
            raise ValueError(f"conversions such as !{conversion} are not supported")
        fields.append(_field(path, spec or "", parameters))
        literals.append("")
    if not fields:
        raise ValueError("it has no {field}, so every call would have the same key")
    if first_bad_character("".join(literals)) is not None:
        raise ValueError("keys hold no whitespace and only printable characters")
    return Template(literals, fields, _escapes(literals[1:-1]))


def _field(path: str, spec: str, parameters: Sequence[str]) -> Field:
    parsed = _PATH.fullmatch(path)
    if parsed is None:
        raise ValueError(
            f"{{{path}}} is not the name of an argument, followed by .name or [item] if needed"
        )
    root = parsed["root"]
    steps = list(_STEP.finditer(parsed["steps"]))
    if any(name.startswith("_") for name in (root, *(s["attribute"] or s["item"] for s in steps))):
        raise ValueError(f"{{{path}}} reads a private name")
    if root not in parameters:
        known = f"there are: {', '.join(parameters)}" if parameters else "there are none"
        raise ValueError(f"there is no argument {root!r}; {known}")
    if "{" in spec:
        raise ValueError(f"the format of {{{path}}} holds a field of its own")
    return Field(path, root, tuple(map(_step, steps)), spec)


def _step(parsed: re.Match[str]) -> Step:
    attribute, item = parsed["attribute"], parsed["item"]
    if attribute is None:
        return itemgetter(int(item) if item.isdecimal() else item)

    def read(value: Any) -> Any:
        return value[attribute] if isinstance(value, Mapping) else getattr(value, attribute)

    return read


def _escapes(separators: Sequence[str]) -> dict[int, str]:
    """Percent-escape what stands between fields, so that it marks the end of each value.

    Letters, digits and "%" are what escapes are written with, so none of them can be the mark.
    A template with one field has no separators: its values are kept as they are.
    """
    marks = {"%"} if separators else set()
    for separator in separators:
        found = {char for char in separator if not char.isalnum() and char != "%"}
        if not found:
            raise ValueError("between two fields there must be a separator such as : or -")
        marks |= found
    return {ord(mark): "".join(f"%{byte:02X}" for byte in mark.encode()) for mark in marks}
