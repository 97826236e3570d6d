"""Which class a stored name means, and that looking for it never imports or runs anything."""

from __future__ import annotations

import enum
import importlib.util
import sys
import typing
from dataclasses import dataclass
from types import GenericAlias, ModuleType

import msgspec
import pydantic
import pytest

from semel.core.codec import JsonCodec, MsgpackCodec, register_type, returned_by
from semel.core.codec_types import REGISTERED_CLASSES, REGISTERED_NAMES, named_by
from semel.errors import ConfigError, SerializationError

codec = JsonCodec()


def stored(tag: str, name: str, body: object) -> bytes:
    return msgspec.json.encode({"$": tag, "t": name, "v": body})


@pytest.fixture(autouse=True)
def registrations():
    """Forget what a test has registered."""
    names, classes = dict(REGISTERED_NAMES), dict(REGISTERED_CLASSES)
    yield
    for registry, before in ((REGISTERED_NAMES, names), (REGISTERED_CLASSES, classes)):
        registry.clear()
        registry.update(before)


@pytest.fixture
def module(request):
    """Put a module of any kind among the loaded ones."""
    made = []

    def load(name: str, kind: type = ModuleType, **content):
        loaded = kind(name)
        loaded.__dict__.update(content)
        sys.modules[name] = loaded
        made.append(name)
        return loaded

    yield load
    for name in made:
        del sys.modules[name]


@dataclass
class Point:
    x: int


class Outer:
    @dataclass
    class Inner:
        x: int


T = typing.TypeVar("T")


class Page(pydantic.BaseModel, typing.Generic[T]):
    items: list[T]


def local_class():
    @dataclass
    class Local:
        x: int

    return Local


# --- nothing is imported, nothing runs ---------------------------------------------------


@pytest.mark.parametrize("read", [codec, MsgpackCodec()], ids=lambda c: c.name)
def test_a_stored_name_never_causes_an_import(read, tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    tree = {"$": "dataclass", "t": "trap_module:Receipt", "v": {}}
    data = msgspec.json.encode(tree) if read is codec else msgspec.msgpack.encode(tree)
    with pytest.raises(
        SerializationError,
        match=r"type trap_module\.Receipt is not known here: import it, or pass returns=",
    ):
        read.decode(data, b"")
    assert "trap_module" not in sys.modules


def test_a_module_is_not_asked_for_what_it_would_have_to_make(module):
    asked = []
    module("hostile", __getattr__=asked.append)
    with pytest.raises(SerializationError, match="not known here"):
        codec.decode(stored("dataclass", "hostile:Receipt", {}), b"")
    assert asked == []


def test_a_lazy_module_stays_unloaded(tmp_path, monkeypatch):
    (tmp_path / "lazy_trap.py").write_text("raise SystemExit('loaded')\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazy_trap")
    lazy = importlib.util.module_from_spec(spec)
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy_trap", lazy)
    with pytest.raises(SerializationError, match="not known here"):
        codec.decode(stored("dataclass", "lazy_trap:Receipt", {}), b"")


def test_a_metaclass_is_not_asked_for_what_it_would_have_to_make(module):
    class Hostile(type):
        def __getattribute__(cls, name):
            raise SystemExit(name)

    module("nesting", Outer=Hostile("Outer", (), {}))
    with pytest.raises(SerializationError, match="not known here"):
        codec.decode(stored("dataclass", "nesting:Outer.Inner", {}), b"")


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("dataclass", "builtins:dict"),
        ("dataclass", "subprocess:Popen"),
        ("struct", f"{__name__}:Point"),
        ("enum", f"{__name__}:Point"),
        ("namedtuple", f"{__name__}:Point"),
        ("model", f"{__name__}:Point"),
        ("flag", f"{__name__}:Point"),
        ("dataclass", f"{__name__}:codec"),
        ("dataclass", f"{__name__}:codec.decode"),
        ("dataclass", f"{__name__}:Point.x.y"),
        ("dataclass", f"{__name__}:"),
        ("dataclass", f"{__name__}"),
        ("dataclass", ":"),
        ("dataclass", ""),
        ("model", f"{__name__}:Page[no.such]"),
    ],
)
def test_only_a_class_of_the_stored_kind_is_taken(tag, name):
    with pytest.raises(SerializationError, match="is not known here"):
        codec.decode(stored(tag, name, {}), b"")


def test_an_entry_among_the_modules_that_is_no_module_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "odd", object())
    with pytest.raises(SerializationError, match="not known here"):
        codec.decode(stored("dataclass", "odd:Receipt", {}), b"")


# --- loaded classes ----------------------------------------------------------------------


def test_a_loaded_class_is_found_by_module_and_name():
    assert codec.decode(stored("dataclass", f"{__name__}:Point", {"x": 1}), b"") == Point(1)
    assert codec.decode(codec.encode(Outer.Inner(1), b""), b"") == Outer.Inner(1)


def test_a_generic_model_is_found_once_somebody_wrote_it():
    page = Page[Point](items=[Point(1)])
    back = codec.decode(codec.encode(page, b""), b"")
    assert type(back) is Page[Point]
    assert back == page


def test_a_local_class_is_refused_when_it_is_written():
    with pytest.raises(SerializationError, match=r"Local could not be found again.*returns="):
        codec.encode([local_class()(1)], b"")


def test_a_class_whose_name_means_another_one_is_refused():
    impostor = dataclass(type("Point", (), {"__annotations__": {"x": int}, "__module__": __name__}))
    with pytest.raises(SerializationError, match="could not be found again"):
        codec.encode(impostor(1), b"")


# --- hints -------------------------------------------------------------------------------

Local = local_class()


@dataclass
class Tree:
    children: list[Tree]
    leaf: Local | None = None


@dataclass
class Unresolvable:
    there: Local
    gone: NoSuchName  # noqa: F821 - a name that does not exist any more


class Wrapped(msgspec.Struct):
    inside: Local


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    inside: Local


class Tupled(typing.NamedTuple):
    inside: Local


Alias = typing.NewType("Alias", Local)


class TypeStatement:
    """What `type X = ...` makes from Python 3.12 on."""

    __value__ = list[Local]

    def __repr__(self) -> str:
        return "X"


@dataclass
class Box(typing.Generic[T]):
    content: T


@pytest.mark.parametrize(
    "hint",
    [
        Local,
        Local | None,
        typing.Optional[Local],  # noqa: UP045 - the old spelling must work too
        list[Local],
        dict[str, tuple[Local, ...]],
        typing.Annotated[Local, "note"],
        typing.Annotated[Local, []],
        Tree,
        Wrapped,
        Model,
        Tupled,
        Alias,
        TypeStatement(),
        Box[Local],
        typing.Callable[[int], Local],
    ],
)
def test_a_hint_leads_to_a_local_class(hint):
    data = codec.encode(Local(1), b"", hint)
    assert codec.decode(data, b"", hint) == Local(1)
    with pytest.raises(SerializationError, match="not known here"):
        codec.decode(data, b"")


def test_a_hint_that_cannot_be_resolved_does_no_harm():
    assert set(named_by(Unresolvable).classes.values()) == {Unresolvable}
    assert dict(named_by(None).classes) == {}
    assert codec.decode(codec.encode(Point(1), b"", "text"), b"", "text") == Point(1)


def test_a_hint_does_not_convert_what_was_stored():
    assert codec.decode(b'{"x":1}', b"", Point) == {"x": 1}


def test_a_class_that_moved_is_found_by_the_hint_if_there_is_one_like_it():
    data = stored("dataclass", "old.home:Point", {"x": 1})
    assert codec.decode(data, b"", Point) == Point(1)
    assert codec.decode(data, b"", list[Point]) == Point(1)
    twin = dataclass(type("Point", (), {"__annotations__": {"x": int}, "__module__": "another"}))
    with pytest.raises(SerializationError, match=r"old\.home\.Point is not known"):
        codec.decode(data, b"", Point | twin)


def test_the_return_annotation_is_the_hint():
    def plain() -> list[Point]: ...
    def without(): ...
    def nothing() -> None: ...
    def gone() -> NoSuchName: ...  # noqa: F821 - a name that does not exist any more
    def half(a: NoSuchName) -> Point: ...  # noqa: F821 - the same

    assert returned_by(plain) == list[Point]
    assert returned_by(without) is None
    assert returned_by(nothing) is None
    assert returned_by(gone) is None
    assert returned_by(half) is Point
    assert returned_by(object()) is None


class Shop:
    def sell(self) -> list[Point]:
        raise NotImplementedError

    def refund(self) -> NotMadeYet:  # noqa: F821 - that is the point
        raise NotImplementedError


def test_a_return_annotation_is_resolved_once(monkeypatch):
    shop = Shop()
    assert returned_by(shop.sell) == list[Point]
    monkeypatch.setattr(typing, "get_type_hints", None)
    assert returned_by(shop.sell) == list[Point]
    assert returned_by(Shop().sell) == list[Point]


def test_a_return_annotation_that_cannot_be_resolved_yet_is_tried_again(monkeypatch):
    assert returned_by(Shop().refund) is None
    monkeypatch.setitem(globals(), "NotMadeYet", Point)
    assert returned_by(Shop().refund) is Point


def test_what_can_be_called_need_not_be_hashable():
    class Unhashable:
        __annotations__ = {"return": "int"}
        __hash__ = None

        def __call__(self):
            raise NotImplementedError

    assert returned_by(Unhashable()) is int


def test_a_class_as_annotation_needs_no_resolving(monkeypatch):
    monkeypatch.setattr(typing, "get_type_hints", None)

    def sold():
        raise NotImplementedError

    sold.__annotations__ = {"return": Point}
    assert returned_by(sold) is Point
    sold.__annotations__ = {"return": type(None)}
    assert returned_by(sold) is None


# --- registered types --------------------------------------------------------------------


class Money:
    def __init__(self, cents):
        self.cents = cents

    def __eq__(self, other):
        return type(other) is Money and other.cents == self.cents

    def __hash__(self):
        return hash(self.cents)


def test_any_class_can_be_taught():
    register_type(Money, encode=lambda money: (money.cents,), decode=lambda body: Money(*body))
    value = {Money(1): [Money(2)]}
    assert codec.decode(codec.encode(value, b""), b"") == value


def test_a_registered_local_class_is_found_under_its_name():
    cls = register_type(local_class(), name="local/1")
    data = codec.encode(cls(1), b"")
    assert b'"local/1"' in data
    assert codec.decode(data, b"") == cls(1)


def test_the_last_name_is_written_and_all_are_read():
    register_type(Point, name="old")
    old = codec.encode(Point(1), b"")
    register_type(Point, name="new")
    assert b'"new"' in codec.encode(Point(1), b"")
    assert codec.decode(old, b"") == Point(1)


def test_a_value_of_a_type_that_is_not_registered_any_more_is_unreadable():
    register_type(Money, name="money", encode=lambda m: m.cents, decode=Money)
    data = codec.encode(Money(1), b"")
    del REGISTERED_NAMES["money"]
    with pytest.raises(SerializationError, match=r"type money is not registered here"):
        codec.decode(data, b"")
    register_type(local_class(), name="money")
    with pytest.raises(SerializationError, match=r"type money is not registered here"):
        codec.decode(data, b"")


def test_an_error_in_a_registered_function_becomes_ours():
    register_type(Money, encode=lambda m: 1 / 0, decode=Money)
    with pytest.raises(SerializationError, match="ZeroDivisionError"):
        codec.encode(Money(1), b"")


@pytest.mark.parametrize("step", ["encode", "decode"])
def test_what_an_error_in_a_registered_function_quotes_is_not_told(step):
    def fail(quoted):
        raise ValueError(f"a bad number: {quoted}")

    encode = fail if step == "encode" else (lambda money: money.cents)
    register_type(Money, name="money", encode=encode, decode=fail)
    with pytest.raises(SerializationError, match=f"ValueError while it was {step}d$"):
        codec.decode(codec.encode(Money(4111), b""), b"")


def test_a_name_belongs_to_one_class():
    register_type(Point, name="taken")
    register_type(Point, name="taken")
    reloaded = dataclass(type("Point", (), {"__annotations__": {"x": int}, "__module__": __name__}))
    register_type(reloaded, name="taken")
    with pytest.raises(ConfigError, match=r"the name taken belongs to .*Point"):
        register_type(Outer.Inner, name="taken")


class Small(enum.IntEnum):
    A = 1


def test_a_registration_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="dict has a format already"):
        register_type(dict, encode=list, decode=dict)
    with pytest.raises(ConfigError, match="together"):
        register_type(Money, encode=lambda m: m.cents)
    with pytest.raises(ConfigError, match="together"):
        register_type(Money, decode=Money)
    with pytest.raises(ConfigError, match="give encode and decode"):
        register_type(Money)
    assert register_type(Small) is Small


# --- a hint says which classes may be read -------------------------------------------------------


ran: list[object] = []


@dataclass
class Job:
    name: str

    @property
    def command(self):
        return None

    @command.setter
    def command(self, value):
        ran.append(value)


class Hooked(msgspec.Struct):
    url: str

    def __post_init__(self):
        ran.append(self.url)


class Shape(msgspec.Struct):
    pass


class Circle(Shape):
    r: int


Item = typing.TypeVar("Item")


@dataclass
class Sheet(typing.Generic[Item]):
    items: list[Item]


class PointSheet(Sheet[Point]):
    pass


class Drawing(typing.TypedDict):
    at: Point


@dataclass
class Line:
    start: Point
    more: typing.Optional[Line] = None  # noqa: UP045 - a text that has to be resolved


class Colour(enum.Enum):
    RED = 1


Distance = typing.NewType("Distance", Point)


class Framed(Shape):
    at: Point
    colour: Colour
    inner: Shape | None = None


class Secretive(pydantic.BaseModel):
    _at: Point = pydantic.PrivateAttr(default_factory=lambda: Point(1))
    _untold = pydantic.PrivateAttr(default=1)


class Telling(pydantic.BaseModel):
    _at: Point = pydantic.PrivateAttr(default_factory=lambda: Point(1))


class Roomy(pydantic.BaseModel, extra="allow"):
    pass


class TwoSheets(Sheet[Item]):
    more: list[Item]


class GenericStatement:
    """What `type X[Item] = list[Item]` makes from Python 3.12 on."""

    __value__ = list[Item]


Shaped = typing.TypeVar("Shaped", bound=Shape)
PointOrInt = typing.TypeVar("PointOrInt", Point, int)


def name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


CLOSED = [
    Point, Point | None, list[Point], dict[str, Point], tuple[Point, ...], typing.Annotated[Point, "x"], Line,
    Shape, Sheet[Point], PointSheet, Drawing, Distance, Colour, typing.Literal[Colour.RED], int, str | None,
    typing.Callable[[Point], int], typing.Never, Shaped, list[PointOrInt], TwoSheets[Point], Telling,
    GenericAlias(GenericStatement(), (Point,)),
]  # fmt: skip
OPEN = [
    None, typing.Any, object, list, dict, list, dict[str, typing.Any], list[object], Sheet, Point | list,
    typing.Sequence, typing.SupportsInt, Item, list[Item], Sheet[Item], Secretive, Roomy, "Point", typing.Optional["Nowhere"],  # noqa: F821 - that is the case
]  # fmt: skip


@pytest.mark.parametrize("hint", CLOSED)
def test_a_class_that_a_hint_does_not_speak_of_is_neither_read_nor_written(hint):
    ran.clear()
    forged = [
        stored("dataclass", name_of(Job), {"name": "x"}),
        stored("struct", name_of(Hooked), {"url": "http://evil"}),
    ]
    for data in forged:
        with pytest.raises(SerializationError, match="is none of the types that returns="):
            codec.decode(data, b"", hint)
    with pytest.raises(SerializationError, match="is none of the types that returns="):
        codec.encode([Job("x")], b"", hint)
    assert ran == []


@pytest.mark.parametrize("hint", OPEN)
def test_a_hint_that_speaks_of_anything_lets_every_class_pass(hint):
    data = codec.encode({"job": Job("x")}, b"", hint)
    assert codec.decode(data, b"", hint) == {"job": Job("x")}


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Point, Point(1)),
        (Line, Line(Point(1), Line(Point(2)))),
        (Shape, Circle(2)),
        (list[Shape] | None, [Circle(1), Shape()]),
        (Shape, Framed(Point(1), Colour.RED, Framed(Point(2), Colour.RED))),
        (Shaped, Framed(Point(1), Colour.RED)),
        (list[PointOrInt], [Point(1), 2]),
        (Item, Point(1)),
        (Telling, Telling()),
        (Roomy, Roomy(at=Point(1))),
        (Sheet[Point], Sheet([Point(1)])),
        (Sheet[Sheet[Point]], Sheet([Sheet([Point(1)])])),
        (PointSheet, PointSheet([Point(1)])),
        (Drawing, {"at": Point(1)}),
        (Distance, Point(1)),
        (typing.Literal[Colour.RED], Colour.RED),
        (typing.Annotated[dict[str, Point], []], {"a": Point(1)}),
    ],
)
def test_what_a_hint_speaks_of_is_stored_with_its_fields_and_subclasses(hint, value):
    assert codec.decode(codec.encode(value, b"", hint), b"", hint) == value


def test_what_a_subclass_holds_is_read_in_its_own_fields_only():
    framed = Framed(Point(1), Colour.RED)
    data = codec.encode([framed, Point(1)], b"")
    with pytest.raises(SerializationError, match=r"Point is none of the types that returns="):
        codec.decode(data, b"", list[Shape])
    with pytest.raises(SerializationError, match=r"Point is none of .*\(at result\[1\]\)"):
        codec.encode([framed, Point(1)], b"", list[Shape])


def test_a_registered_class_needs_to_be_named_by_a_hint_too():
    class Money:
        def __init__(self, cents):
            self.cents = cents

    register_type(Money, name="named.Money", encode=lambda money: money.cents, decode=Money)
    data = codec.encode(Money(5), b"")
    assert codec.decode(data, b"").cents == 5
    assert codec.decode(data, b"", Money | None).cents == 5
    with pytest.raises(SerializationError, match=r"Money is none of the types that returns="):
        codec.decode(data, b"", Point)
    with pytest.raises(SerializationError, match=r"Money is none of the types that returns="):
        codec.encode(Money(5), b"", Point)


@pytest.mark.parametrize("extra", [{"command": "rm -rf"}, {"__class__": "str"}])
def test_no_property_is_set_by_names_that_a_class_does_not_declare(extra):
    ran.clear()
    tree = {"$": "dataclass", "t": name_of(Job), "v": {"name": "x"}, "x": extra}
    made = codec.decode(msgspec.json.encode(tree), b"")
    assert type(made) is Job
    assert made.name == "x"
    assert ran == []
