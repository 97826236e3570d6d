"""One format for each built-in type, found by exact type: a subclass is another type.

A tag, once released, is read for ever; a changed format gets a new tag.
"""

from __future__ import annotations

import binascii
import datetime as dt
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from semel.core.codec.temporal import read_clock, write_clock
from semel.core.codec.walk import TAG, VALUE, Reader, ReadTree, Tree, Writer, WriteTree
from semel.core.refusal import Refused, check_text


class Format(NamedTuple):
    """How the values of one type are tagged: the body of the tag, written and read."""

    cls: type
    tag: str
    write: Callable[[Any, Writer], Tree]
    read: Callable[[Tree, Reader], Any]


def _write_base64(value: bytes | bytearray, _: Writer) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _read_base64(body: str) -> bytes:
    return binascii.a2b_base64(body, strict_mode=True)


def _write_defaultdict(value: defaultdict[Any, Any], writer: Writer) -> Tree:
    factory = value.default_factory
    if factory is None:
        return [None, writer.pairs(value)]
    for name, known in _FACTORIES.items():
        if factory is known:
            return [name, writer.pairs(value)]
    raise Refused("a defaultdict with a factory of your own cannot be stored; return a dict")


def _read_defaultdict(body: Tree, reader: Reader) -> defaultdict[Any, Any]:
    name, pairs = body
    return defaultdict(None if name is None else _FACTORIES[name], reader.pairs(pairs))


_FACTORIES: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {cls.__name__: cls for cls in (list, dict, set, tuple, str, int, float, bool)}
)


FORMATS = (
    Format(int, "int", lambda value, _: hex(value), lambda body, _: int(body, 16)),
    Format(float, "float", lambda value, _: repr(value), lambda body, _: float(body)),
    Format(
        complex,
        "complex",
        lambda value, writer: writer.items([value.real, value.imag]),
        lambda body, reader: complex(*reader.items(body)),
    ),
    Format(bytes, "bytes", _write_base64, lambda body, _: _read_base64(body)),
    Format(bytearray, "bytearray", _write_base64, lambda body, _: bytearray(_read_base64(body))),
    Format(Decimal, "decimal", lambda value, _: str(value), lambda body, _: Decimal(body)),
    Format(UUID, "uuid", lambda value, _: value.hex, lambda body, _: UUID(hex=body)),
    Format(
        dt.datetime,
        "datetime",
        lambda value, _: write_clock(value),
        lambda body, _: read_clock(dt.datetime, body),
    ),
    Format(
        dt.time,
        "time",
        lambda value, _: write_clock(value),
        lambda body, _: read_clock(dt.time, body),
    ),
    Format(
        dt.date,
        "date",
        lambda value, _: value.isoformat(),
        lambda body, _: dt.date.fromisoformat(body),
    ),
    Format(
        dt.timedelta,
        "timedelta",
        lambda value, _: [value.days, value.seconds, value.microseconds],
        lambda body, _: dt.timedelta(*body),
    ),
    Format(
        tuple,
        "tuple",
        lambda value, writer: writer.items(value),
        lambda body, reader: tuple(reader.items(body)),
    ),
    Format(
        set,
        "set",
        lambda value, writer: writer.items(value),
        lambda body, reader: set(reader.items(body)),
    ),
    Format(
        frozenset,
        "frozenset",
        lambda value, writer: writer.items(value),
        lambda body, reader: frozenset(reader.items(body)),
    ),
    Format(
        deque,
        "deque",
        lambda value, writer: [value.maxlen, writer.items(value)],
        lambda body, reader: deque(reader.items(body[1]), body[0]),
    ),
    Format(
        dict,
        "dict",
        lambda value, writer: writer.pairs(value),
        lambda body, reader: dict(reader.pairs(body)),
    ),
    Format(
        OrderedDict,
        "ordereddict",
        lambda value, writer: writer.pairs(value),
        lambda body, reader: OrderedDict(reader.pairs(body)),
    ),
    Format(defaultdict, "defaultdict", _write_defaultdict, _read_defaultdict),
    Format(msgspec.UnsetType, "unset", lambda _, __: None, lambda _, __: msgspec.UNSET),
)


def _tagged(form: Format) -> WriteTree:
    return lambda value, writer: {TAG: form.tag, VALUE: form.write(value, writer)}


def _untagged(form: Format) -> ReadTree:
    return lambda tree, reader: form.read(tree[VALUE], reader)


READERS: dict[str, ReadTree] = {form.tag: _untagged(form) for form in FORMATS}
_TAGGED: dict[type, WriteTree] = {form.cls: _tagged(form) for form in FORMATS}


# --- types that are plain, at least sometimes --------------------------------------------


def _as_is(value: object, _: Writer) -> Tree:
    return value


def _write_text(value: str, _: Writer) -> Tree:
    check_text(value)
    return value


def _write_int(value: int, writer: Writer) -> Tree:
    return value if _INT_MIN <= value <= _INT_MAX else _TAGGED[int](value, writer)


def _write_json_float(value: float, writer: Writer) -> Tree:
    return value if math.isfinite(value) else _TAGGED[float](value, writer)


def _write_list(value: list[object], writer: Writer) -> Tree:
    return writer.items(value)


def _write_dict(value: dict[Any, object], writer: Writer) -> Tree:
    if TAG in value or not _PLAIN_KEYS.issuperset(map(type, value)):
        return _TAGGED[dict](value, writer)
    return writer.plain_dict(value)


_PLAIN_KEYS = frozenset({str})

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
"""What MessagePack holds, and every JSON reader that knows 64-bit integers."""

JSON_WRITERS: dict[type, WriteTree] = {
    **_TAGGED,
    NoneType: _as_is,
    bool: _as_is,
    int: _write_int,
    float: _write_json_float,
    str: _write_text,
    list: _write_list,
    dict: _write_dict,
}

MSGPACK_WRITERS: dict[type, WriteTree] = {**JSON_WRITERS, float: _as_is, bytes: _as_is}
"""MessagePack has bytes, and floats that are not finite."""
