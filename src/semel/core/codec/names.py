"""Finds the class that a stored name means. A stored name never causes an import.

A name is looked for, in this order, among the classes of the hint, among the registered ones, and
in modules that are loaded. A class that has moved is found by its simple name if the hint knows
exactly one like it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard, cast

from semel.core.codec.hints import classes_in, full_name
from semel.core.refusal import Refused, type_name


class Registered(NamedTuple):
    """A class under a name of its own, with or without a way to write it."""

    name: str
    cls: type
    encode: Callable[[Any], object] | None
    decode: Callable[[Any], object] | None


REGISTERED_NAMES: dict[str, Registered] = {}
REGISTERED_CLASSES: dict[type, Registered] = {}


class Names:
    """What the class names in one stored value mean, given the hint."""

    def __init__(self, hint: object) -> None:
        self._hint = hint

    def of(self, cls: type, fits: Callable[[type], bool]) -> str:
        """Name a class, after making sure that the name leads back to it."""
        registered = REGISTERED_CLASSES.get(cls)
        name = full_name(cls) if registered is None else registered.name
        if self._lookup(name, fits) is not cls:
            raise Refused(
                f"{type_name(cls)} could not be found again by its name; define it in a module,"
                " pass returns=, or register it with semel.register_type"
            )
        return name

    def find(self, name: str, fits: Callable[[type], bool]) -> type:
        """Find the class of a stored name."""
        cls = self._lookup(name, fits)
        if cls is None:
            raise Refused(
                f"type {name.replace(':', '.')} is not known here: import it, or pass returns="
            )
        return cls

    def _lookup(self, name: str, fits: Callable[[type], bool]) -> type | None:
        return next((cls for cls in self._candidates(name) if fits(cls)), None)

    def _candidates(self, name: str) -> Iterator[type]:
        hinted = classes_in(self._hint)
        if name in hinted:
            yield hinted[name]
        if name in REGISTERED_NAMES:
            yield REGISTERED_NAMES[name].cls
        yield from _loaded(name)
        simple_name = name.rpartition(":")[2].rpartition(".")[2]
        moved = [cls for cls in hinted.values() if cls.__name__ == simple_name]
        if len(moved) == 1:
            yield moved[0]


def _loaded(name: str) -> Iterator[type]:
    """Walk the attributes that are there already; nothing is imported, no `__getattr__` runs."""
    module_name, _, qualname = name.partition(":")
    found: object = sys.modules.get(module_name)
    plain_name, bracket, _ = qualname.partition("[")
    for part in plain_name.split("."):
        found = _namespace(found).get(part)
    if not _is_class(found):
        return
    if not bracket:
        yield found
        return
    # A generic pydantic model: Page[Item] exists once somebody has written it.
    subclasses: list[type] = type.__subclasses__(found)
    yield from (cls for cls in subclasses if cls.__qualname__ == qualname)


def _is_class(value: object) -> TypeGuard[type]:
    # Not isinstance, which asks the object itself: a proxy would begin to load at that.
    return issubclass(type(value), type)


def _namespace(owner: object) -> Mapping[str, object]:
    # Not vars(), for the same reason: it would load a lazy module.
    if issubclass(type(owner), ModuleType):
        return cast("Mapping[str, object]", object.__getattribute__(owner, "__dict__"))
    if _is_class(owner):
        return cast("Mapping[str, object]", type.__getattribute__(owner, "__dict__"))
    return {}
