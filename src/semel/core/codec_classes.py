"""Values as trees of plain data, and the classes of the objects in them.

A tree holds only what JSON and MessagePack tell apart by themselves. Everything else is tagged:
`{"$": tag, "v": ...}`. A dict of the user's that has a `$` key is tagged too, so that no value can
pass for a tag. How built-in types are tagged stands in `codec`, how classes are tagged here.

A stored name never causes an import. It is looked for, in this order, among the classes of the
hint, among the registered ones, and in modules that are loaded. A class that has moved is found by
its simple name if the hint knows exactly one like it.
"""

from __future__ import annotations

import enum
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, cast
from weakref import WeakKeyDictionary

import msgspec

from semel.core.optional import dataclass_fields, is_dataclass, is_pydantic_model
from semel.errors import SerializationError

Tree: TypeAlias = Any
"""None, bool, int, float, str, list or dict of trees (MessagePack: bytes too)."""


TAG: Final = "$"


VALUE: Final = "v"


TYPE = "t"


EXTRA = "x"


PRIVATE = "p"


FIELDS_SET = "set"


CUSTOM = "custom"


MAX_DEPTH: Final = 100
"""Levels a value may have; what was written shallow in the stack must be readable deep in it."""


_SHOWN_STEPS = 12


class Unsupported(Exception):
    """A part of a value cannot be stored or compared.

    Each container that the exception passes on its way out adds a step, so that the path to the
    part is made only for values that fail.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def inside(self, step: str) -> Unsupported:
        """Add the step that led here: `[0]`, `['a']` or `.name`."""
        self._steps.append(step)
        return self

    def as_error(self, root: str) -> SerializationError:
        """Make the error for the caller: the reason, and where it is, from `root` on."""
        steps = [*self._steps[: -_SHOWN_STEPS - 1 : -1]]
        if len(self._steps) > _SHOWN_STEPS:
            steps.append("...")
        return SerializationError(f"{self.reason} (at {root}{''.join(steps)})")


def type_name(cls: type) -> str:
    """Name a class as a person would write it: `Decimal`, `shop.orders.Receipt`."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def check_text(text: str) -> None:
    """Raise `Unsupported` for a string that UTF-8 cannot hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unsupported("a string with a lone surrogate is not text") from None


class Writer:
    """Makes the tree of one value."""

    __slots__ = ("_depth", "_formats", "hint")

    def __init__(self, formats: Mapping[type, WriteTree], hint: object) -> None:
        self.hint = hint
        self._formats = formats
        self._depth = 0

    def tree(self, value: object) -> Tree:
        """Turn a value of any known type into its tree."""
        if self._depth == MAX_DEPTH:
            raise Unsupported(
                f"the value is nested deeper than {MAX_DEPTH} levels, or contains itself"
            )
        self._depth += 1
        write = self._formats.get(type(value))
        tree = (self._formats[object] if write is None else write)(value, self)
        self._depth -= 1
        return tree

    def items(self, values: Iterable[object]) -> list[Tree]:
        """Turn each value into its tree."""
        trees: list[Tree] = []
        try:
            for value in values:
                trees.append(self.tree(value))  # noqa: PERF401 - its length is where it failed
        except Unsupported as unsupported:
            raise unsupported.inside(f"[{len(trees)}]") from None
        return trees

    def pairs(self, values: Mapping[Any, object]) -> list[Tree]:
        """Turn a mapping with any keys into a list of key and value, in order."""
        trees: list[Tree] = []
        for key, value in values.items():
            try:
                trees.append([self.tree(key), self.tree(value)])
            except Unsupported as unsupported:
                raise unsupported.inside(f"[{key!r}]") from None
        return trees

    def plain_dict(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Turn a mapping whose keys are all plain strings into a dict of trees."""
        trees: dict[str, Tree] = {}
        for key, value in values.items():
            try:
                check_text(key)
                trees[key] = self.tree(value)
            except Unsupported as unsupported:
                raise unsupported.inside(f"[{key!r}]") from None
        return trees

    def fields(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Turn the attributes of an object into a dict of trees."""
        trees: dict[str, Tree] = {}
        for name, value in values.items():
            try:
                trees[name] = self.tree(value)
            except Unsupported as unsupported:
                raise unsupported.inside(f".{name}") from None
        return trees


class Reader:
    """Makes the value of one tree."""

    __slots__ = ("_tags", "hint")

    def __init__(self, tags: Mapping[str, ReadTree], hint: object) -> None:
        self.hint = hint
        self._tags = tags

    def value(self, tree: Tree) -> Any:
        """Turn a tree back into the value it was made from."""
        if type(tree) is list:
            return [self.value(item) for item in tree]
        if type(tree) is not dict:
            return tree
        if TAG not in tree:
            return {key: self.value(item) for key, item in tree.items()}
        read = self._tags.get(tree[TAG])
        if read is None:
            raise Unsupported(f"the tag {tree[TAG]!r} is not known to this version of semel")
        return read(tree, self)

    def items(self, trees: Tree) -> list[Any]:
        """Turn a list of trees into a list of values."""
        return [self.value(tree) for tree in _expect(list, trees)]

    def pairs(self, trees: Tree) -> list[tuple[Any, Any]]:
        """Turn what `Writer.pairs` made into keys and values."""
        return [(self.value(key), self.value(item)) for key, item in _expect(list, trees)]

    def fields(self, trees: Tree) -> dict[str, Any]:
        """Turn a dict of trees into a dict of values; no key in it is a tag."""
        return {name: self.value(tree) for name, tree in _expect(dict, trees).items()}


def _expect(cls: type, tree: Tree) -> Any:
    if type(tree) is not cls:
        raise Unsupported(f"found {type(tree).__name__} where {cls.__name__} should be")
    return tree


WriteTree: TypeAlias = Callable[[Any, Writer], Tree]


ReadTree: TypeAlias = Callable[[dict[str, Tree], Reader], Any]


# --- classes whose objects are stored by their fields, under the name of the class --------


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


def _is_flag(cls: type) -> bool:
    return issubclass(cls, enum.Flag)


def _write_flag(value: enum.Flag, writer: Writer) -> dict[str, Tree]:
    return {VALUE: writer.tree(value._value_)}


def _read_flag(cls: type[enum.Flag], tree: dict[str, Tree], reader: Reader) -> object:
    stored = reader.value(tree[VALUE])
    flag = cls(stored)
    # A class may drop bits that it does not know, and Python 3.11.2 always does.
    if flag.value != stored:
        raise ValueError(f"{stored} is no value of {cls.__qualname__}")
    return flag


def _is_enum(cls: type) -> bool:
    return issubclass(cls, enum.Enum) and not _is_flag(cls)


def _write_enum(value: enum.Enum, _: Writer) -> dict[str, Tree]:
    # By name: the value of a member may be anything, its name is always a string.
    if type(value).__members__.get(value._name_) is not value:
        raise Unsupported(f"{type_name(type(value))} has no member called {value._name_}")
    return {VALUE: value._name_}


def _read_enum(cls: type[enum.Enum], tree: dict[str, Tree], _: Reader) -> object:
    return cls.__members__[tree[VALUE]]


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
        tree[EXTRA] = writer.fields(extra)
    return tree


def _read_dataclass(cls: type, tree: dict[str, Tree], reader: Reader) -> object:
    fields = {field.name: field for field in dataclass_fields(cls)}
    values = reader.fields(tree[VALUE])
    _complete(cls, values, fields, lambda name: _dataclass_default(fields[name]))
    values.update(reader.fields(tree.get(EXTRA, {})))
    made: object = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)  # a frozen class rejects its own
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
    ClassFormat("flag", _is_flag, _write_flag, _read_flag),
    ClassFormat("enum", _is_enum, _write_enum, _read_enum),
    ClassFormat("struct", _is_struct, _write_struct, _read_struct),
    ClassFormat("model", is_pydantic_model, _write_model, _read_model),
    ClassFormat("dataclass", _is_plain_dataclass, _write_dataclass, _read_dataclass),
    ClassFormat("namedtuple", _is_namedtuple, _write_namedtuple, _read_namedtuple),
)


def class_format_of(cls: type) -> ClassFormat | None:
    """Return the format of a class whose objects can be stored by their fields, else None."""
    return next((form for form in CLASS_FORMATS if form.fits(cls)), None)


def write_object(value: object, writer: Writer) -> Tree:
    """Write an object whose type has no format of its own."""
    cls = type(value)
    registered = REGISTERED_CLASSES.get(cls)
    if registered is not None and registered.encode is not None:
        body = writer.tree(registered.encode(value))
        return {TAG: CUSTOM, TYPE: registered.name, VALUE: body}
    form = class_format_of(cls)
    if form is None:
        raise Unsupported(
            f"{type_name(cls)} cannot be stored; return plain data or a data class, or teach the"
            " type with semel.register_type"
        )
    return {TAG: form.tag, TYPE: _name_of(cls, form.fits, writer.hint), **form.write(value, writer)}


def _reader_of(form: ClassFormat) -> ReadTree:
    return lambda tree, reader: form.read(
        _class_named(tree[TYPE], form.fits, reader.hint), tree, reader
    )


def _read_custom(tree: dict[str, Tree], reader: Reader) -> object:
    registered = REGISTERED_NAMES.get(tree[TYPE])
    if registered is None or registered.decode is None:
        raise Unsupported(f"type {tree[TYPE]} is not registered here: call semel.register_type")
    return registered.decode(reader.value(tree[VALUE]))


CLASS_READERS: dict[str, ReadTree] = {CUSTOM: _read_custom} | {
    form.tag: _reader_of(form) for form in CLASS_FORMATS
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
    return cls


def _lookup(name: str, fits: Callable[[type], bool], hint: object) -> type | None:
    return next((cls for cls in _candidates(name, hint) if fits(cls)), None)


def _candidates(name: str, hint: object) -> Iterator[type]:
    hinted = classes_in(hint)
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


def returned_by(function: Callable[..., object]) -> object:
    """Return the return annotation of a function, resolved; None without one that can be."""
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


def classes_in(hint: object) -> Mapping[str, type]:
    """Map names to classes: those that the hint speaks of, and those of their fields."""
    try:
        return _cached_classes_in(hint)
    except TypeError:  # a hint that cannot be hashed, like Annotated[int, []]
        return _classes_in(hint)


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
