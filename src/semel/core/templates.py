"""Key templates: `"order:{order.id}"` over the arguments of a call.

This module reads values and writes text. A template is checked whole when it is compiled, at
decoration; what only a call can show is an `InvalidKey` before anything runs. Two laws:

    different texts make different keys   (separators inside values are escaped)
    a key never depends on chance         (only types with a stable text are accepted)

Names with a leading underscore are refused: a template reads data, not the inside of objects.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from enum import Enum
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from semel.core.arguments import Getter
from semel.core.keys import first_bad_character
from semel.errors import ConfigError, InvalidKey

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

    def text(self, value: Any) -> str:
        """Follow the path from the argument's value and write what is found there."""
        try:
            for step in self.steps:
                value = step(value)
        except Exception as error:  # a property may raise anything; no key, so nothing may run
            raise InvalidKey(
                f"the key needs {{{self.path}}}, reading it raised {type(error).__name__}"
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

    __slots__ = ("_escapes", "_fields", "_literals", "names")

    def __init__(
        self, literals: Sequence[str], fields: Sequence[Field], escapes: Mapping[int, str]
    ) -> None:
        self._literals = tuple(literals)
        self._fields = tuple(fields)
        self._escapes = escapes
        self.names = tuple(dict.fromkeys(field.root for field in fields))

    def render(self, lookup: Callable[[str], Any]) -> str:
        """Write the key; `lookup` gives the value of an argument by its name."""
        pieces = [self._literals[0]]
        for field, literal in zip(self._fields, self._literals[1:], strict=True):
            text = field.text(lookup(field.root))
            pieces += (text.translate(self._escapes) if self._escapes else text, literal)
        return "".join(pieces)

    def bind(self, getter: Callable[[str], Getter]) -> Callable[..., str]:
        """Make a function of a call's `args` and `kwargs`; `getter` is that of `Arguments`."""
        getters = {name: getter(name) for name in self.names}

        def key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
            return self.render(lambda name: getters[name](args, kwargs))

        return key


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
        raise ValueError(f"there is no argument {root!r}; there are: {', '.join(parameters)}")
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
