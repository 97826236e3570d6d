"""The kinds of classes whose objects are stored field by field, under the name of their class.

Reading restores what was there: no validator, `__init__` or `__post_init__` runs (but a Struct's,
which cannot be made in another way). A field that the class has got since then takes its default;
a field that it has lost makes the value unreadable.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from semel.core.codec.names import REGISTERED_CLASSES, REGISTERED_NAMES
from semel.core.codec.walk import TAG, VALUE, Reader, ReadTree, Tree, Writer
from semel.core.foreign import dataclass_fields, is_dataclass, is_pydantic_model
from semel.core.refusal import Refused, type_name

TYPE = "t"
EXTRA = "x"
PRIVATE = "p"
FIELDS_SET = "set"


class Kind(NamedTuple):
    """One kind of class: how to know it, and how its objects are written and read."""

    tag: str
    fits: Callable[[type], bool]
    write: Callable[[Any, Writer], dict[str, Tree]]
    read: Callable[[Any, dict[str, Tree], Reader], object]


# --- enumerations ------------------------------------------------------------------------


def _is_flag(cls: type) -> bool:
    return issubclass(cls, enum.Flag)


def _write_flag(value: enum.Flag, writer: Writer) -> dict[str, Tree]:
    return {VALUE: writer.tree(value._value_)}


def _read_flag(cls: type[enum.Flag], tree: dict[str, Tree], reader: Reader) -> object:
    return cls(reader.value(tree[VALUE]))


def _is_enum(cls: type) -> bool:
    return issubclass(cls, enum.Enum) and not _is_flag(cls)


def _write_enum(value: enum.Enum, _: Writer) -> dict[str, Tree]:
    # By name: the value of a member may be anything, its name is always a string.
    if type(value).__members__.get(value._name_) is not value:
        raise Refused(f"{type_name(type(value))} has no member called {value._name_}")
    return {VALUE: value._name_}


def _read_enum(cls: type[enum.Enum], tree: dict[str, Tree], _: Reader) -> object:
    return cls.__members__[tree[VALUE]]


# --- objects with fields -----------------------------------------------------------------


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _write_namedtuple(value: Any, writer: Writer) -> dict[str, Tree]:
    return {VALUE: writer.fields(dict(zip(value._fields, value, strict=True)))}


def _read_namedtuple(cls: Any, tree: dict[str, Tree], reader: Reader) -> object:
    values = reader.fields(tree[VALUE])
    _complete(cls, values, cls._fields, cls._field_defaults.__getitem__)
    return cls._make(values[name] for name in cls._fields)


def _is_struct(cls: type) -> bool:
    return issubclass(cls, msgspec.Struct)


def _write_struct(value: msgspec.Struct, writer: Writer) -> dict[str, Tree]:
    names = value.__struct_fields__
    return {VALUE: writer.fields({name: getattr(value, name) for name in names})}


def _read_struct(cls: type[msgspec.Struct], tree: dict[str, Tree], reader: Reader) -> object:
    values = reader.fields(tree[VALUE])
    made = cls(**values)
    for name, value in values.items():  # what __post_init__ may have changed once more
        msgspec.structs.force_setattr(made, name, value)
    return made


def _is_plain_dataclass(cls: type) -> bool:
    # A data class that is also a dict or an exception holds more than its fields.
    return is_dataclass(cls) and all(
        base is object or base.__module__ != "builtins" for base in cls.__mro__
    )


_OF_TYPING = "__orig_class__"
"""What `Page[Order](...)` leaves in the object: how the class was written there, no value."""


def _write_dataclass(value: object, writer: Writer) -> dict[str, Tree]:
    cls = type(value)
    values = {}
    for field in dataclass_fields(cls):
        if not hasattr(value, field.name):
            raise Refused(f"{type_name(cls)} has no value").inside(f".{field.name}")
        values[field.name] = getattr(value, field.name)
    tree: dict[str, Tree] = {VALUE: writer.fields(values)}
    extra = {
        name: item
        for name, item in getattr(value, "__dict__", {}).items()
        if name not in values
        and name != _OF_TYPING
        and not isinstance(getattr(cls, name, None), cached_property)
    }
    if extra:
        tree[EXTRA] = writer.fields(extra)
    return tree


def _read_dataclass(cls: type, tree: dict[str, Tree], reader: Reader) -> object:
    fields = {field.name: field for field in dataclass_fields(cls)}
    values = reader.fields(tree[VALUE])
    _complete(cls, values, fields, lambda name: _dataclass_default(fields[name]))
    values.update(reader.fields(tree.get(EXTRA, {})))
    made: object = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)  # a frozen class refuses its own
    return made


def _dataclass_default(field: Any) -> object:
    from dataclasses import MISSING  # noqa: PLC0415 - `import semel` must not pay for it

    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise LookupError
    return field.default


def _write_model(value: Any, writer: Writer) -> dict[str, Tree]:
    state = value.__getstate__()
    names = type(value).model_fields
    # A model keeps its cached properties among its fields.
    values = {name: item for name, item in state["__dict__"].items() if name in names}
    tree: dict[str, Tree] = {
        VALUE: writer.fields(values),
        FIELDS_SET: sorted(state["__pydantic_fields_set__"]),
    }
    extra, private = state.get("__pydantic_extra__"), state.get("__pydantic_private__")
    if extra is not None:
        tree[EXTRA] = writer.plain_dict(extra)
    if private is not None:
        tree[PRIVATE] = writer.fields(private)
    return tree


def _read_model(cls: Any, tree: dict[str, Tree], reader: Reader) -> object:
    values = reader.fields(tree[VALUE])
    _complete(cls, values, cls.model_fields, lambda name: _model_default(cls.model_fields[name]))
    made = cls.__new__(cls)
    made.__setstate__(
        {
            "__dict__": values,
            "__pydantic_fields_set__": set(tree[FIELDS_SET]),
            "__pydantic_extra__": reader.fields(tree[EXTRA]) if EXTRA in tree else None,
            "__pydantic_private__": reader.fields(tree[PRIVATE]) if PRIVATE in tree else None,
        }
    )
    return made


def _model_default(field: Any) -> object:
    if field.is_required():
        raise LookupError
    return field.get_default(call_default_factory=True)


def _complete(
    cls: type, values: dict[str, Any], fields: Any, default: Callable[[str], object]
) -> None:
    """Fill fields that the class has got since, in place; refuse those that it has lost."""
    for name in values:
        if name not in fields:
            raise Refused(f"{type_name(cls)} has no field {name!r} any more")
    for name in fields:
        if name not in values:
            try:
                values[name] = default(name)
            except LookupError:
                raise Refused(
                    f"{type_name(cls)} has a new field {name!r} without a default"
                ) from None


KINDS = (
    Kind("flag", _is_flag, _write_flag, _read_flag),
    Kind("enum", _is_enum, _write_enum, _read_enum),
    Kind("struct", _is_struct, _write_struct, _read_struct),
    Kind("model", is_pydantic_model, _write_model, _read_model),
    Kind("dataclass", _is_plain_dataclass, _write_dataclass, _read_dataclass),
    Kind("namedtuple", _is_namedtuple, _write_namedtuple, _read_namedtuple),
)


def kind_of(cls: type) -> Kind | None:
    """Give the kind of a class, if it is one that can be stored by its fields."""
    return next((kind for kind in KINDS if kind.fits(cls)), None)


def write_object(value: object, writer: Writer) -> Tree:
    """Write an object whose type has no format of its own."""
    cls = type(value)
    registered = REGISTERED_CLASSES.get(cls)
    if registered is not None and registered.encode is not None:
        body = writer.tree(registered.encode(value))
        return {TAG: CUSTOM, TYPE: registered.name, VALUE: body}
    kind = kind_of(cls)
    if kind is None:
        raise Refused(
            f"{type_name(cls)} cannot be stored; return plain data or a data class, or teach the"
            " type with semel.register_type"
        )
    return {TAG: kind.tag, TYPE: writer.names.of(cls, kind.fits), **kind.write(value, writer)}


def _reader_of(kind: Kind) -> ReadTree:
    return lambda tree, reader: kind.read(reader.names.find(tree[TYPE], kind.fits), tree, reader)


def _read_custom(tree: dict[str, Tree], reader: Reader) -> object:
    registered = REGISTERED_NAMES.get(tree[TYPE])
    if registered is None or registered.decode is None:
        raise Refused(f"type {tree[TYPE]} is not registered here: call semel.register_type")
    return registered.decode(reader.value(tree[VALUE]))


CUSTOM = "custom"
READERS: dict[str, ReadTree] = {CUSTOM: _read_custom} | {k.tag: _reader_of(k) for k in KINDS}
