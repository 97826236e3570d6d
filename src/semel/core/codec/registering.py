"""Teaches semel a type of yours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from semel.core.codec.formats import JSON_WRITERS
from semel.core.codec.hints import full_name
from semel.core.codec.kinds import kind_of
from semel.core.codec.names import REGISTERED_CLASSES, REGISTERED_NAMES, Registered
from semel.core.refusal import type_name
from semel.errors import ConfigError

T = TypeVar("T")


def register_type(
    cls: type[T],
    *,
    name: str | None = None,
    encode: Callable[[T], object] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Make the class `cls` storable: `encode` turns its objects into storable data, `decode` back.

    `name` is the stored name of the class, else its module and name. Data classes, Structs,
    pydantic models, enumerations and named tuples need neither function; for them it fixes the
    stored name, so that the class may move. A class may have old names too: the last
    one given is written, all are read. Returns the class, so that it works as a decorator.

    Examples:
        >>> class Money:
        ...     def __init__(self, cents: int) -> None:
        ...         self.cents = cents
        >>> Money = register_type(
        ...     Money, name="shop.Money", encode=lambda money: money.cents, decode=Money
        ... )
    """
    if cls in JSON_WRITERS:
        raise ConfigError(f"{type_name(cls)} has a format already")
    if (encode is None) != (decode is None):
        raise ConfigError("register_type needs encode and decode together, or neither")
    if encode is None and kind_of(cls) is None:
        raise ConfigError(f"{type_name(cls)} has no fields semel knows of: give encode and decode")
    registered = Registered(full_name(cls) if name is None else name, cls, encode, decode)
    known = REGISTERED_NAMES.get(registered.name)
    # The same full name is the same class after a reload.
    if known is not None and full_name(known.cls) != full_name(cls):
        raise ConfigError(f"the name {registered.name} belongs to {type_name(known.cls)}")
    REGISTERED_NAMES[registered.name] = REGISTERED_CLASSES[cls] = registered
    return cls
