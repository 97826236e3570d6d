"""Collects the classes that a type hint speaks of, by walking it and the fields of its classes."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from semel.core.foreign import is_pydantic_model


def classes_in(hint: object) -> Mapping[str, type]:
    """Map the name of every class that the hint reaches to the class."""
    try:
        return _cached_classes_in(hint)
    except TypeError:  # a hint that cannot be hashed, like Annotated[int, []]
        return _classes_in(hint)


def returned_by(function: Callable[..., object]) -> object:
    """Give the return annotation of a function, resolved; None when it has none or cannot be."""
    annotation = getattr(function, "__annotations__", {}).get("return")
    if annotation is None or type(annotation) is type:
        return None if annotation is type(None) else annotation
    plain = getattr(function, "__func__", function)  # a bound method is another one each time
    if plain.__class__ is FunctionType and plain in _resolved:
        return _resolved[plain]
    try:
        resolved = _resolve(annotation, getattr(function, "__globals__", {}))
    except Exception:  # noqa: BLE001 - evaluates the user's text; without a hint we still work
        return None
    if plain.__class__ is FunctionType:  # anything else need not be hashable
        _resolved[plain] = resolved
    return resolved


_resolved: WeakKeyDictionary[object, object] = WeakKeyDictionary()
"""Return annotations, by function. What cannot be resolved yet is tried again by the next call."""


def _resolve(annotation: object, names: dict[str, Any]) -> object:
    # Only this one annotation: a parameter that cannot be resolved must not hide it.
    alone = SimpleNamespace(__annotations__={"return": annotation})
    resolved = typing.get_type_hints(alone, names)["return"]
    return None if resolved is type(None) else resolved


def full_name(cls: type) -> str:
    """Name a class so that module and qualified name can be told apart: `shop.orders:Receipt`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _classes_in(hint: object) -> Mapping[str, type]:
    found: dict[str, type] = {}
    todo = [hint]
    while todo:
        part = todo.pop()
        if not isinstance(part, type) or typing.get_origin(part) is not None:
            todo.extend(_parts(part))
        elif full_name(part) not in found:
            found[full_name(part)] = part
            todo.extend(_field_hints(part))
    return found


_cached_classes_in = lru_cache(maxsize=256)(_classes_in)


def _parts(hint: object) -> Iterator[object]:
    """Open a hint that is no class: Optional, Union, list[X], Annotated, an alias, a NewType."""
    origin = typing.get_origin(hint)
    if origin is not None:
        yield origin
        yield from typing.get_args(hint)
    for name in ("__value__", "__supertype__"):
        inner = getattr(hint, name, None)
        if inner is not None:
            yield inner


def _field_hints(cls: Any) -> list[object]:
    if is_pydantic_model(cls):
        return [field.annotation for field in cls.model_fields.values()]
    try:
        return list(typing.get_type_hints(cls).values())
    except Exception:  # noqa: BLE001 - evaluates the user's text; a name may not exist any more
        return list(vars(cls).get("__annotations__", {}).values())
