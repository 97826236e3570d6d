"""Class methods that hand out what they wrap bound to the class, on every Python.

From 3.13 on, `classmethod` no longer does: `Till.open` would be a plain method around a function
decorated by `once`, whose `run` or `key_for` never learn the class. Nobody tells an object that a
`classmethod` wraps it, so the body of its class gets one more name while it runs: Python calls its
`__set_name__` when the class is made, which puts the class methods right and removes the name.
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from typing import Any, TypeVar, cast

D = TypeVar("D")

NAME = "__semel_once__"
"""With underscores on both sides, a name that enums and models leave alone."""


def bound_in_class_methods(decorated: D, qualified_name: str) -> D:
    """Let a `classmethod` around this object hand it out bound, if a class body is running."""
    body = _class_body(qualified_name.rpartition(".")[0])
    if body is not None:
        body.setdefault(NAME, _ClassIsMade()).decorated.append(decorated)
    return decorated


def _class_body(owner: str) -> MutableMapping[str, Any] | None:
    """Find the names of the class body that is being run for this class."""
    frame = inspect.currentframe() if owner and not owner.endswith("<locals>") else None
    while frame is not None:
        code = frame.f_code
        if code.co_qualname == owner and not code.co_flags & inspect.CO_OPTIMIZED:
            return cast("MutableMapping[str, Any]", frame.f_locals)
        frame = frame.f_back
    return None


class _ClassIsMade:
    """Told by Python when the class whose body holds it is made."""

    def __init__(self) -> None:
        self.decorated: list[object] = []

    def __set_name__(self, owner: type, name: str) -> None:
        # Past the metaclass, which may have its own idea of new attributes.
        type.__delattr__(owner, name)
        for attribute, value in tuple(vars(owner).items()):
            if isinstance(value, classmethod) and any(
                value.__func__ is each for each in self.decorated
            ):
                type.__setattr__(owner, attribute, _BindingClassMethod(value.__func__))


class _BindingClassMethod(classmethod):  # type: ignore[type-arg]  # of anything
    """Binds what it wraps, as classmethod itself did before Python 3.13."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return cast("Any", self.__func__).__get__(type(instance) if owner is None else owner)
