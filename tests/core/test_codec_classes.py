"""Classes with fields: restored as they were, without running their code."""

from __future__ import annotations

import enum
import typing
from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from functools import cached_property

import msgspec
import pydantic
import pytest

from core.exact import exactly_equal
from semel.core.codec import JsonCodec, MsgpackCodec
from semel.errors import SerializationError

CODECS = [JsonCodec(), MsgpackCodec()]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def round_trip(codec, value, hint=None):
    return codec.decode(codec.encode(value, b"", hint), b"", hint)


class Colour(enum.Enum):
    RED = (1, 0, 0)
    BLUE = (0, 0, 1)
    AZURE = (0, 0, 1)  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag, boundary=enum.KEEP):
    ONE = 1


class Renamed(enum.Enum):
    A = 1

    @property
    def name(self):
        return "something else"


Item = typing.TypeVar("Item")


@dataclass
class Listing(typing.Generic[Item]):
    items: list[Item]
    total: int


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    number: str
    total: Decimal
    lines: tuple[Point, ...] = ()


@dataclass
class Doubling:
    value: int
    factor: InitVar[int]
    runs: int = field(init=False, default=0)
    label: str = field(init=False)

    def __post_init__(self, factor):
        self.value *= factor
        self.runs += 1
        self.label = f"x{factor}"
        self.not_a_field = [factor]

    @cached_property
    def costly(self):
        return object()


@dataclass(init=False)
class OwnConstructor:
    x: int

    def __init__(self):
        self.x = 7


class Grandchild(Point):
    """Inherits its fields, and is no data class by its own decorator."""


class Pair(typing.NamedTuple):
    left: int
    right: object = None


Plain = namedtuple("Plain", "a b")  # noqa: PYI024 - the old kind must work too


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order", rename="camel"):
    order_id: int
    note: str | msgspec.UnsetType = msgspec.UNSET


class Packed(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    a: int
    b: list[Order] = []

    def __post_init__(self):
        self.a += 1


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    sku: str
    price: Decimal = Decimal("1.0")
    tags: list[str] = pydantic.Field(default_factory=list, alias="labels")
    _seen: int = pydantic.PrivateAttr(default=3)

    @cached_property
    def costly(self):
        return object()


T = typing.TypeVar("T")


class Page(pydantic.BaseModel, typing.Generic[T]):
    items: list[T]


class Tags(pydantic.RootModel[list[str]]):
    pass


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def add_one(cls, n):
        return n + 1


@pydantic.dataclasses.dataclass
class Checked:
    n: int


def item(**extra):
    made = Item(sku="a", **extra)
    made._seen = 9
    return made


@each_codec
@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Colour.AZURE,
        Level.LOW,
        Word.YES,
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        Bits(9),
        Renamed.A,
        Point(1),
        Receipt("r", Decimal("1.50"), (Point(1, 2),)),
        Doubling(2, factor=3),
        OwnConstructor(),
        Grandchild(1, 2),
        Pair(1, (2, Pair(3))),
        Plain(1, "b"),
        Order(order_id=1),
        Order(order_id=1, note="n"),
        Packed(1, [Order(order_id=2)]),
        item(),
        item(labels=["x"], more={"$": (1, 2)}),
        Page[int](items=[1]),
        Page[Item](items=[item()]),
        Tags(["a"]),
        Strict(n=1),
        Checked(n=1),
        {Level.LOW: [Colour.RED], Pair(1): {Access.READ}},
    ],
    ids=repr,
)
def test_objects_come_back_equal_in_value_and_type(codec, value):
    back = round_trip(codec, value)
    assert exactly_equal(back, value)
    assert back == value


@each_codec
def test_an_enumeration_member_is_the_same_object(codec):
    assert round_trip(codec, Colour.RED) is Colour.RED


@each_codec
def test_no_constructor_or_validator_runs_again(codec):
    back = round_trip(codec, Doubling(2, factor=3))
    assert (back.value, back.runs, back.label, back.not_a_field) == (6, 1, "x3", [3])
    assert round_trip(codec, Strict(n=1)).n == 2
    assert round_trip(codec, Packed(1)).a == 2


@each_codec
def test_a_cached_property_is_not_part_of_the_value(codec):
    for value in (Doubling(2, factor=3), item()):
        assert value.costly is not None
        assert "costly" not in vars(round_trip(codec, value))


@each_codec
def test_a_model_knows_which_fields_were_set(codec):
    assert round_trip(codec, Item(sku="a")).model_fields_set == {"sku"}
    assert round_trip(codec, Item(sku="a", labels=[])).model_fields_set == {"sku", "tags"}


@dataclass
class Holder:
    what: object


@each_codec
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Holder([object()]), r"result\.what\[0\]"),
        (Pair(1, object()), r"result\.right"),
        (Order(order_id=object()), r"result\.order_id"),
        (item(more=object()), r"result\['more'\]"),
        ({(1, 2): Holder(object())}, r"result\[\(1, 2\)\]\.what"),
    ],
)
def test_the_error_says_where_the_part_is_that_cannot_be_stored(codec, value, path):
    with pytest.raises(SerializationError, match=rf"object cannot be stored.*\(at {path}\)"):
        codec.encode(value, b"")


@dataclass
class Mapped(dict):
    x: int = 0


@dataclass
class Failure(Exception):
    x: int = 0


@pytest.mark.parametrize("value", [Mapped(1), Failure(1)], ids=["dict", "exception"])
def test_a_data_class_that_is_also_a_container_is_refused(value):
    with pytest.raises(SerializationError, match="cannot be stored"):
        JsonCodec().encode(value, b"")


def test_a_field_without_a_value_is_refused():
    unset = Doubling(2, factor=3)
    del unset.label
    with pytest.raises(SerializationError, match=r"Doubling has no value \(at result\.label\)"):
        JsonCodec().encode(unset, b"")


def test_an_invented_enumeration_member_is_refused():
    stranger = object.__new__(Colour)
    stranger._name_ = "GREEN"
    stranger._value_ = (0, 1, 0)
    with pytest.raises(SerializationError, match="Colour has no member for its value"):
        JsonCodec().encode(stranger, b"")


def test_an_error_of_the_users_class_becomes_ours():
    broken = Item.model_construct(sku="a")
    del broken.__pydantic_fields_set__
    with pytest.raises(SerializationError, match="the result cannot be stored"):
        JsonCodec().encode(broken, b"")


# --- classes that changed since the value was stored -------------------------------------

OLD_AND_NEW = {
    "dataclass": (
        lambda: dataclass(type("Thing", (), {"__annotations__": {"a": int}})),
        lambda: dataclass(
            type(
                "Thing",
                (),
                {
                    "__annotations__": {"a": int, "b": int, "c": list},
                    "b": 2,
                    "c": field(default_factory=list),
                },
            )
        ),
    ),
    "namedtuple": (
        lambda: namedtuple("Thing", "a"),  # noqa: PYI024 - made at run time
        lambda: namedtuple("Thing", "a b c", defaults=(2, [])),  # noqa: PYI024 - the same
    ),
    "struct": (
        lambda: msgspec.defstruct("Thing", [("a", int)]),
        lambda: msgspec.defstruct("Thing", [("a", int), ("b", int, 2), ("c", list, [])]),
    ),
    "model": (
        lambda: pydantic.create_model("Thing", a=(int, ...)),
        lambda: pydantic.create_model(
            "Thing", a=(int, ...), b=(int, 2), c=(list, pydantic.Field(default_factory=list))
        ),
    ),
}


@pytest.fixture(params=OLD_AND_NEW)
def old_and_new(request):
    old, new = (make() for make in OLD_AND_NEW[request.param])
    for cls in (old, new):
        cls.__module__ = "somewhere"
        cls.__qualname__ = "Thing"
    return old, new


def test_a_field_added_later_takes_its_default(old_and_new):
    old, new = old_and_new
    data = JsonCodec().encode(old(a=1), b"", old)
    assert JsonCodec().decode(data, b"", new) == new(a=1, b=2, c=[])


def test_a_field_removed_later_makes_the_value_unreadable(old_and_new):
    old, new = old_and_new
    data = JsonCodec().encode(new(a=1), b"", new)
    with pytest.raises(SerializationError, match="cannot be read") as caught:
        JsonCodec().decode(data, b"", old)
    assert "b" in str(caught.value.__cause__ or caught.value)


def test_a_field_added_later_without_a_default_makes_the_value_unreadable(old_and_new):
    old, _ = old_and_new
    emptied = JsonCodec().encode(old(a=1), b"", old).replace(b'"a":1', b"")
    with pytest.raises(SerializationError, match=r"cannot be read.*a"):
        JsonCodec().decode(emptied, b"", old)


@each_codec
@pytest.mark.parametrize(
    "hint", [Listing[Colour], Listing, None], ids=["of its items", "plain", "none"]
)
@pytest.mark.parametrize("make", [Listing, Listing[Colour]], ids=["plain", "of its items"])
def test_a_generic_data_class_is_restored_however_it_was_made(codec, make, hint):
    page = make([Colour.RED], total=1)
    restored = round_trip(codec, page, hint)
    assert restored == page
    assert type(restored) is Listing
    assert vars(restored) == {"items": [Colour.RED], "total": 1}
