"""How the values of each type are written into a tree, and read back: built-in types, and classes.

Built-in types are found by their exact type, for a subclass is another type. Objects of classes are
stored by their fields, under the name of their class. A stored name never causes an import. It is
looked for, in this order, among the classes of the hint, among the registered ones, and in modules
that are loaded. A class that has moved is found by its simple name if the hint knows exactly one
like it. What is found counts only if the hint speaks of it, of a base class of it, or of anything
(`Named.permits`): a stored name must not choose among all classes of a program. Inside an object
whose class only a base class permits, the hint speaks of that class and its fields too.

A tag, once released, is read for ever; a changed format gets a new tag.
"""

from __future__ import annotations

import binascii
import datetime as dt
import enum
import sys
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property, lru_cache
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeGuard, TypeVar, cast
from uuid import UUID

import msgspec

from semel.core.optional import dataclass_fields, is_dataclass, is_pydantic_model, zone_key
from semel.errors import SerializationError

if TYPE_CHECKING:
    from semel.core.codec import Reader, Writer


Tree: TypeAlias = Any
"""None, bool, int, float, str, list or dict of trees (MessagePack: bytes too)."""


TAG: Final = "$"


VALUE: Final = "v"


TYPE = "t"


EXTRA = "x"


PRIVATE = "p"


FIELDS_SET = "set"


CUSTOM = "custom"


WriteTree: TypeAlias = "Callable[[Any, Writer], Tree]"


ReadTree: TypeAlias = "Callable[[dict[str, Tree], Reader], Any]"


_SHOWN_STEPS = 12


def outlined(text: str, outline: str | None = None) -> SerializationError:
    """Make an error whose text, or else its `outline`, quotes no value.

    It names types and fields, which code defines.
    """
    error = SerializationError(text)
    error.outline = text if outline is None else outline
    return error


class Unsupported(Exception):
    """A part of a value cannot be stored or compared.

    Each container that the exception passes on its way out adds a step, so that the path to the
    part is made only for values that fail.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[tuple[str, str]] = []

    def inside(self, step: str, outline: str | None = None) -> Unsupported:
        """Add the step that led here: `[0]` or `.name`; `outline` is shown where it must not be."""
        self._steps.append((step, step if outline is None else outline))
        return self

    def inside_key(self, key: object) -> Unsupported:
        """Add the key of a dict, `['a']`; it is part of the value."""
        return self.inside(f"[{key!r}]", "[...]")

    def as_error(self, root: str) -> SerializationError:
        """Make the error for the caller: the reason, and where it is, from `root` on."""
        steps = [*self._steps[: -_SHOWN_STEPS - 1 : -1]]
        if len(self._steps) > _SHOWN_STEPS:
            steps.append(("...", "..."))
        shown, outline = ("".join(way) for way in zip((root, root), *steps, strict=True))
        return outlined(f"{self.reason} (at {shown})", f"{self.reason} (at {outline})")


def type_name(cls: type) -> str:
    """Name a class as a person would write it: `Decimal`, `shop.orders.Receipt`."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


# --- built-in types -----------------------------------------------------------------------


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


Clock = TypeVar("Clock", dt.datetime, dt.time)


def _write_clock(value: dt.datetime | dt.time, _: Writer) -> str | list[Any]:
    """Write a datetime or time as its ISO text, or as [text, fold, zone name]."""
    key = zone_key(value.tzinfo)
    if key is not None:
        return [value.replace(tzinfo=None).isoformat(), value.fold, key]
    text = value.isoformat()
    if value.tzinfo is not None:
        _check_offset(value, text)
    return [text, value.fold, None] if value.fold else text


def _check_offset(value: dt.datetime | dt.time, text: str) -> None:
    """Let any zone pass as its offset, but only where the value read back is equal."""
    restored = type(value).fromisoformat(text)
    offset = value.utcoffset()
    if offset is None or restored.utcoffset() != offset or restored != value:
        raise Unsupported(
            f"a {type(value).__name__} in a {type_name(type(value.tzinfo))} zone cannot be stored"
            " exactly; use zoneinfo or datetime.timezone"
        )


def _read_clock(cls: type[Clock], body: str | list[Any]) -> Clock:
    """Read what `_write_clock` wrote."""
    if isinstance(body, str):
        return cls.fromisoformat(body)
    text, fold, key = body
    value = cls.fromisoformat(text).replace(fold=fold)
    if key is None:
        return value
    from zoneinfo import ZoneInfo  # noqa: PLC0415 - only values with a zone need it

    return value.replace(tzinfo=ZoneInfo(key))


def _write_defaultdict(value: defaultdict[Any, Any], writer: Writer) -> Tree:
    factory = value.default_factory
    if factory is None:
        return [None, writer.pairs(value)]
    for name, known in _FACTORIES.items():
        if factory is known:
            return [name, writer.pairs(value)]
    raise Unsupported("a defaultdict with a factory of your own cannot be stored; return a dict")


def _read_defaultdict(body: Tree, reader: Reader) -> defaultdict[Any, Any]:
    name, pairs = body
    return defaultdict(None if name is None else _FACTORIES[name], reader.pairs(pairs))


_FACTORIES: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {cls.__name__: cls for cls in (list, dict, set, tuple, str, int, float, bool)}
)


def _write_items(values: Iterable[object], writer: Writer) -> Tree:
    return writer.items(values)


def _write_pairs(values: Mapping[Any, object], writer: Writer) -> Tree:
    return writer.pairs(values)


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
    Format(dt.datetime, "datetime", _write_clock, lambda body, _: _read_clock(dt.datetime, body)),
    Format(dt.time, "time", _write_clock, lambda body, _: _read_clock(dt.time, body)),
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
    Format(tuple, "tuple", _write_items, lambda body, reader: tuple(reader.items(body))),
    Format(set, "set", _write_items, lambda body, reader: set(reader.items(body))),
    Format(
        frozenset, "frozenset", _write_items, lambda body, reader: frozenset(reader.items(body))
    ),
    Format(
        deque,
        "deque",
        lambda value, writer: [value.maxlen, writer.items(value)],
        lambda body, reader: deque(reader.items(body[1]), body[0]),
    ),
    Format(dict, "dict", _write_pairs, lambda body, reader: dict(reader.pairs(body))),
    Format(
        OrderedDict,
        "ordereddict",
        _write_pairs,
        lambda body, reader: OrderedDict(reader.pairs(body)),
    ),
    Format(defaultdict, "defaultdict", _write_defaultdict, _read_defaultdict),
    Format(msgspec.UnsetType, "unset", lambda _, __: None, lambda _, __: msgspec.UNSET),
)


def _tagged(form: Format) -> WriteTree:
    return lambda value, writer: {TAG: form.tag, VALUE: form.write(value, writer)}


def _untagged(form: Format) -> ReadTree:
    return lambda tree, reader: form.read(tree[VALUE], reader)


TAGGED: dict[type, WriteTree] = {form.cls: _tagged(form) for form in FORMATS}


# --- classes whose objects are stored by their fields -------------------------------------


class ClassFormat(NamedTuple):
    """One kind of class: how to know it, and how its objects are written and read.

    Reading restores what was there: no validator, `__init__` or `__post_init__` runs (but a
    Struct's, which cannot be made in another way). A field that the class has got since then takes
    its default; a field that it has lost makes the value unreadable.
    """

    tag: str
    fits: Callable[[type], bool]
    write: Callable[[Any, Writer], dict[str, Tree]]
    read: Callable[[Any, dict[str, Tree], Reader], object]


def _write_flag(value: enum.Flag, writer: Writer) -> dict[str, Tree]:
    return {VALUE: writer.tree(value._value_)}


def _read_flag(cls: type[enum.Flag], tree: dict[str, Tree], reader: Reader) -> object:
    stored = reader.value(tree[VALUE])
    flag = cls(stored)
    # A class may drop bits that it does not know, and Python 3.11.2 always does.
    if flag.value != stored:
        raise ValueError(f"{stored} is no value of {cls.__qualname__}")
    return flag


def _write_enum(value: enum.Enum, _: Writer) -> dict[str, Tree]:
    # By name: the value of a member may be anything, its name is always a string.
    if type(value).__members__.get(value._name_) is not value:
        raise Unsupported(f"{type_name(type(value))} has no member for its value")
    return {VALUE: value._name_}


def _read_enum(cls: type[enum.Enum], tree: dict[str, Tree], _: Reader) -> object:
    return cls.__members__[tree[VALUE]]


def _write_namedtuple(value: Any, writer: Writer) -> dict[str, Tree]:
    return {VALUE: writer.fields(dict(zip(value._fields, value, strict=True)))}


def _read_namedtuple(cls: Any, tree: dict[str, Tree], reader: Reader) -> object:
    values = reader.fields(tree[VALUE])
    _complete(cls, values, cls._fields, cls._field_defaults.__getitem__)
    return cls._make(values[name] for name in cls._fields)


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
            raise Unsupported(f"{type_name(cls)} has no value").inside(f".{field.name}")
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
        tree[EXTRA] = writer.plain_dict(extra)  # names that no class declares are data
    return tree


def _read_dataclass(cls: type, tree: dict[str, Tree], reader: Reader) -> object:
    fields = {field.name: field for field in dataclass_fields(cls)}
    values = reader.fields(tree[VALUE])
    _complete(cls, values, fields, lambda name: _dataclass_default(fields[name]))
    made: object = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)  # a frozen class rejects its own
    if EXTRA in tree:
        made.__dict__.update(reader.fields(tree[EXTRA]))  # as it was there: no property is set
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
    """Fill fields that the class has got since, in place; reject those that it has lost."""
    for name in values:
        if name not in fields:
            raise Unsupported(f"{type_name(cls)} has no field {name!r} any more")
    for name in fields:
        if name not in values:
            try:
                values[name] = default(name)
            except LookupError:
                raise Unsupported(
                    f"{type_name(cls)} has a new field {name!r} without a default"
                ) from None


CLASS_FORMATS = (
    ClassFormat("flag", lambda cls: issubclass(cls, enum.Flag), _write_flag, _read_flag),
    ClassFormat(
        "enum",
        lambda cls: issubclass(cls, enum.Enum) and not issubclass(cls, enum.Flag),
        _write_enum,
        _read_enum,
    ),
    ClassFormat("struct", lambda cls: issubclass(cls, msgspec.Struct), _write_struct, _read_struct),
    ClassFormat("model", is_pydantic_model, _write_model, _read_model),
    ClassFormat("dataclass", _is_plain_dataclass, _write_dataclass, _read_dataclass),
    ClassFormat(
        "namedtuple",
        lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"),
        _write_namedtuple,
        _read_namedtuple,
    ),
)


def class_format_of(cls: type) -> ClassFormat | None:
    """Return the format of a class whose objects can be stored by their fields, else None."""
    return next((form for form in CLASS_FORMATS if form.fits(cls)), None)


def write_object(value: object, writer: Writer) -> Tree:
    """Write an object whose type has no format of its own."""
    cls = type(value)
    registered = REGISTERED_CLASSES.get(cls)
    if registered is not None and registered.encode is not None:
        _check_named(cls, writer.hint)
        body = writer.tree(registered.encode(value))
        return {TAG: CUSTOM, TYPE: registered.name, VALUE: body}
    form = class_format_of(cls)
    if form is None:
        raise Unsupported(
            f"{type_name(cls)} cannot be stored; return plain data or a data class, or register the"
            " type with semel.register_type"
        )
    name = _name_of(cls, form.fits, writer.hint)
    return {TAG: form.tag, TYPE: name, **form.write(value, writer.inside(cls))}


def _reader_of(form: ClassFormat) -> ReadTree:
    def read(tree: dict[str, Tree], reader: Reader) -> object:
        cls = _class_named(tree[TYPE], form.fits, reader.hint)
        return form.read(cls, tree, reader.inside(cls))

    return read


def _read_custom(tree: dict[str, Tree], reader: Reader) -> object:
    registered = REGISTERED_NAMES.get(tree[TYPE])
    if registered is None or registered.decode is None:
        raise Unsupported(f"type {tree[TYPE]} is not registered here: call semel.register_type")
    _check_named(registered.cls, reader.hint)
    return registered.decode(reader.value(tree[VALUE]))


READERS: Final[dict[str, ReadTree]] = {
    **{form.tag: _untagged(form) for form in FORMATS},
    **{form.tag: _reader_of(form) for form in CLASS_FORMATS},
    CUSTOM: _read_custom,
}


# --- which class a stored name means ------------------------------------------------------


class Registered(NamedTuple):
    """A class under a name of its own, with or without a way to write it."""

    name: str
    cls: type
    encode: Callable[[Any], object] | None
    decode: Callable[[Any], object] | None


REGISTERED_NAMES: dict[str, Registered] = {}


REGISTERED_CLASSES: dict[type, Registered] = {}


def full_name(cls: type) -> str:
    """Name a class so that module and qualified name can be told apart: `shop.orders:Receipt`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _name_of(cls: type, fits: Callable[[type], bool], hint: object) -> str:
    """Name a class, after making sure that the name leads back to it."""
    registered = REGISTERED_CLASSES.get(cls)
    name = full_name(cls) if registered is None else registered.name
    _check_named(cls, hint)
    if _lookup(name, fits, hint) is not cls:
        raise Unsupported(
            f"{type_name(cls)} could not be found again by its name; define it in a module,"
            " pass returns=, or register it with semel.register_type"
        )
    return name


def _class_named(name: str, fits: Callable[[type], bool], hint: object) -> type:
    cls = _lookup(name, fits, hint)
    if cls is None:
        raise Unsupported(
            f"type {name.replace(':', '.')} is not known here: import it, or pass returns="
        )
    _check_named(cls, hint)
    return cls


def _check_named(cls: type, hint: object) -> None:
    """Raise `Unsupported` for a class that the hint does not speak of."""
    if hint is not None and not named_by(hint).permits(cls):
        raise Unsupported(
            f"{type_name(cls)} is none of the types that returns= or the return annotation names; "
            "name it there, or a base class of it"
        )


def _lookup(name: str, fits: Callable[[type], bool], hint: object) -> type | None:
    return next((cls for cls in _candidates(name, hint) if fits(cls)), None)


def _candidates(name: str, hint: object) -> Iterator[type]:
    hinted = named_by(hint).classes
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


# --- which classes a type hint speaks of --------------------------------------------------


class Named(NamedTuple):
    """What a hint says about the classes of a value."""

    classes: Mapping[str, type]
    """Those that it speaks of and those of their fields, by name."""
    anything: bool
    """Whether some part of the value may be of any class: `Any`, a bare `list`, and their like."""

    def permits(self, cls: type) -> bool:
        """Return whether an object of this class may be part of the value."""
        return self.anything or any(full_name(base) in self.classes for base in cls.__mro__)


def named_by(hint: object) -> Named:
    """Return the classes that the hint speaks of, and those of their fields."""
    try:
        return _cached_named_by(hint)
    except TypeError:  # a hint that cannot be hashed, like Annotated[int, []]
        return _named_by(hint)


class Inside(NamedTuple):
    """The hint for the fields of an object whose class only a base class permits."""

    hint: object
    cls: type


def hint_inside(cls: type, hint: object) -> object:
    """Return the hint for the fields of an object of this class, which the hint permits."""
    if hint is None:
        return None
    named = named_by(hint)
    return hint if named.anything or full_name(cls) in named.classes else Inside(hint, cls)


class _Part(NamedTuple):
    """A part of a hint that is still to be looked at."""

    hint: object
    has_arguments: bool = False
    bound: bool = False
    """Whether what a type variable in it stands for is said where its class or alias is named."""


def _named_by(hint: object) -> Named:
    found: dict[str, type] = {}
    anything = False
    todo = [_Part(hint)]
    while todo:
        part, has_arguments, bound = todo.pop()
        if isinstance(part, type) and typing.get_origin(part) is None:
            anything |= not has_arguments and _holds_anything(part)
            if full_name(part) not in found:
                found[full_name(part)] = part
                todo.extend(_Part(each, bound=True) for each in _field_hints(part))
        elif not (bound and isinstance(part, TypeVar)):
            parts = [*_parts(part)]
            anything |= not parts and part not in _NO_CLASSES
            todo.extend(each._replace(bound=bound or each.bound) for each in parts)
    return Named(found, anything)


_cached_named_by = lru_cache(maxsize=256)(_named_by)

_NO_CLASSES: Final = (None, ..., typing.Never, typing.NoReturn)


def _holds_anything(cls: Any) -> bool:
    """Whether a class, named alone, says nothing about what its objects hold, or are."""
    if cls in (object, Any) or getattr(cls, "_is_protocol", False):
        return True
    if getattr(cls, "__parameters__", ()):  # a generic class
        return True
    return (
        issubclass(cls, Iterable)
        and not issubclass(cls, (str, bytes, bytearray))
        and class_format_of(cls) is None
        and not typing.is_typeddict(cls)
    )


def _parts(hint: object) -> Iterator[_Part]:
    """Open a hint that is no class: Optional, Union, list[X], Annotated, an alias, a NewType, T."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, Inside):
        arguments = (hint.hint, hint.cls)
    elif isinstance(hint, TypeVar):
        arguments = hint.__constraints__ or (hint.__bound__ or Any,)
    elif origin is typing.Literal:
        arguments = tuple({type(each) for each in arguments})
    elif origin is typing.Annotated:
        arguments = arguments[:1]  # what follows is no type
    elif isinstance(origin, type):
        yield _Part(origin, bool(arguments))
    for each in arguments:
        yield from map(_Part, each if isinstance(each, list) else [each])
    for name in ("__value__", "__supertype__"):
        inner = getattr(hint, name, None)
        if inner is not None:
            yield _Part(inner, bound=bool(arguments))


def _field_hints(cls: Any) -> list[object]:
    if is_pydantic_model(cls):
        extra = [Any] if cls.model_config.get("extra") == "allow" else []
        annotated = _annotations(cls) if cls.__private_attributes__ else {}
        private = [annotated.get(name, Any) for name in cls.__private_attributes__]
        return [*extra, *private, *(field.annotation for field in cls.model_fields.values())]
    bases = [  # Page[Order], of which Order is a part
        base
        for base in getattr(cls, "__orig_bases__", ())
        if typing.get_origin(base) not in (None, typing.Generic, typing.Protocol)
    ]
    return [*bases, *_annotations(cls).values()]


def _annotations(cls: type) -> Mapping[str, object]:
    try:
        return typing.get_type_hints(cls)
    except Exception:  # noqa: BLE001 - evaluates the user's text; a name may not exist any more
        return cast("Mapping[str, object]", vars(cls).get("__annotations__", {}))
