"""Compares two values in value and type, all the way down; nan is equal to nan here."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
from decimal import Decimal

import msgspec
import pydantic


def exactly_equal(left: object, right: object) -> bool:
    return describe(left) == describe(right)


def describe(value: object) -> object:
    """A value as nested tuples that are equal only for the same types and contents."""
    return (type(value), _content(value))


def _content(value) -> object:
    match value:
        case enum.Enum():
            return value.name, value.value
        case float():
            return "nan" if math.isnan(value) else (value, math.copysign(1, value))
        case complex():
            return describe(value.real), describe(value.imag)
        case Decimal():
            return value.as_tuple()
        case dt.datetime() | dt.time():
            zone = value.tzinfo
            return value.replace(tzinfo=None), value.fold, zone, getattr(zone, "key", None)
        case dict():
            default = getattr(value, "default_factory", None)
            return default, tuple((describe(k), describe(v)) for k, v in value.items())
        case set() | frozenset():
            return frozenset(describe(item) for item in value)
        case list() | tuple():
            return tuple(describe(item) for item in value)
        case pydantic.BaseModel():
            state = value.__getstate__()
            return {name: describe(part) for name, part in state.items()}
        case msgspec.Struct():
            return {name: describe(getattr(value, name)) for name in value.__struct_fields__}
        case _ if dataclasses.is_dataclass(value):
            return {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        case _ if hasattr(value, "maxlen"):
            return value.maxlen, tuple(describe(item) for item in value)
        case _:
            return value
