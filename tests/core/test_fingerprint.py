"""Equal payloads have equal fingerprints, different ones do not, and nothing is dropped."""

from __future__ import annotations

import datetime as dt
import enum
import subprocess
import sys
from collections import OrderedDict, UserDict, deque
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.fingerprint import _canonical_json, _careful_json, fingerprint
from semel.errors import SerializationError

NAN, INF = float("nan"), float("inf")


class MyStr(str):
    __slots__ = ()


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyDate(dt.date):
    pass


class MyDatetime(dt.datetime):
    pass


class MyBytes(bytes):
    pass


class Word(enum.StrEnum):
    YES = "yes"


class Level(enum.Enum):
    HIGH = 3


class Pair(NamedTuple):
    a: int
    b: object


@dataclass
class Order:
    b: object
    a: int = 1
    hidden: InitVar[int] = 0
    late: int = field(init=False)

    @cached_property
    def costly(self):
        return object()


class Packed(msgspec.Struct, tag="packed", rename="upper"):
    b: object
    a: int | msgspec.UnsetType = msgspec.UNSET


class Untagged(msgspec.Struct):
    b: object


class Model(pydantic.BaseModel):
    b: object
    a: int = 1


def order(b):
    made = Order(b)
    made.late = 5
    return made


NOON = (2026, 1, 2, 12, 0, 0, 5)

SAME = [
    ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
    ((1, (2,)), [1, [2]]),
    ({1, 2, 3}, frozenset({3, 2, 1})),
    ({"a", 1, None}, frozenset({None, 1, "a"})),
    ({(1, "a"), (2, None)}, {(2, None), (1, "a")}),
    (OrderedDict(a=1, b=2), {"b": 2, "a": 1}),
    (MappingProxyType({"a": 1}), {"a": 1}),
    (UserDict(a=NAN), {"a": NAN}),
    (deque([1]), [1]),
    (range(3), [0, 1, 2]),
    (Pair(1, 2), [1, 2]),
    (Pair(1, NAN), [1, NAN]),
    (order([1]), {"a": 1, "b": [1], "late": 5}),
    (order(NAN), {"a": 1, "b": NAN, "late": 5}),
    (Packed(1), {"type": "packed", "B": 1}),
    (Packed(NAN), {"type": "packed", "B": NAN}),
    (Untagged(NAN), {"b": NAN}),
    (Packed(NAN, 2), {"type": "packed", "B": NAN, "A": 2}),
    (Model(b=[None]), {"a": 1, "b": [None]}),
    (Model(b=INF), {"a": 1, "b": INF}),
    ([MyStr("a"), MyInt(1), MyFloat(1.5)], ["a", 1, 1.5]),
    ({MyStr("a"): None}, {"a": None}),
    ({Word.YES: Level.HIGH}, {"yes": 3}),
    ([{Word.YES: Level.HIGH}, NAN], [{"yes": 3}, NAN]),
    (dt.datetime(*NOON, tzinfo=dt.UTC), "2026-01-02T12:00:00.000005Z"),
    (MyDatetime(*NOON, tzinfo=dt.UTC), dt.datetime(*NOON, tzinfo=dt.UTC)),
    (MyDate(2026, 1, 2), dt.date(2026, 1, 2)),
    (UUID(int=1), str(UUID(int=1))),
    (Decimal("1.50"), "1.50"),
    ({2: "b", 1: "a"}, {1: "a", 2: "b"}),
    (b"x", bytearray(b"x")),
    (b"x", memoryview(b"x")),
    ([MyBytes(b"x")], [b"x"]),
    ({frozenset({1}), frozenset({2})}, {frozenset({2}), frozenset({1})}),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_the_same_payload_has_the_same_fingerprint(left, right):
    assert fingerprint(left) == fingerprint(right)


DIFFERENT = [
    None,
    True,
    False,
    0,
    1,
    1.0,
    "1",
    "",
    "null",
    [],
    [None],
    [NAN],
    [INF],
    [-INF],
    ["nan"],
    {},
    {"a": None},
    {"a": NAN},
    {"a": INF},
    {"1": None},
    {1: None},
    {1.0: None},
    {None: None},
    {"None": None},
    NAN,
    INF,
    -INF,
    "nan",
    2**64,
    2**64 + 1,
    10**5000,
    10**5000 + 1,
    [10**700, None],
    b"",
    b"null",
    b"1",
    "eA==",
    b"x",
    "x",
    Decimal("1.5"),
    Decimal("1.50"),
    [[1, 2], [3]],
    [[1], [2, 3]],
    [1, 2, 3],
    {"a": {"b": 1}},
    {"a": 1, "b": 1},
    Packed(1),
]


def test_different_payloads_have_different_fingerprints():
    assert len({fingerprint(payload) for payload in DIFFERENT}) == len(DIFFERENT)


def test_every_kind_of_nan_is_told_from_null():
    signalling = msgspec.msgpack.decode(b"\xcb\x7f\xf4\x00\x00\x00\x00\x00\x01")
    assert fingerprint([signalling]) == fingerprint([NAN]) != fingerprint([None])


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(plain)
def test_the_fast_and_the_careful_way_agree(payload):
    assert _canonical_json(payload) == _careful_json(payload)


@given(plain, plain)
def test_fingerprints_are_equal_only_for_equal_json(left, right):
    assert (fingerprint(left) == fingerprint(right)) == (
        _canonical_json(left) == _canonical_json(right)
    )


GOLDEN = [
    (None, "d69cc6a58232eff0c7d46e39032ad3be"),
    ({"order": 42, "items": ["a", 1.5, None]}, "50f167ea5cd1edd7bdafb32bbe235089"),
    ({"a": NAN}, "9ce20272471c594896cc220a00158ec8"),
    ({1: 2}, "63565dd61d9305908dee0e70c8f536bf"),
    (b"raw", "885e62906af7a4a8302bfcf45af85731"),
]


@pytest.mark.parametrize(("payload", "expected"), GOLDEN, ids=ascii)
def test_a_fingerprint_is_what_it_always_was(payload, expected):
    assert fingerprint(payload).hex() == expected


def test_a_secret_makes_another_fingerprint():
    digests = {
        fingerprint(payload, secret) for payload in ("a", b"a") for secret in (None, b"k", b"other")
    }
    assert len(digests) == 6
    assert {len(digest) for digest in digests} == {16}
    assert fingerprint("a", b"k") == fingerprint("a", b"k")


def test_a_fingerprint_does_not_depend_on_the_process():
    code = (
        "from semel.core.fingerprint import fingerprint as f;"
        "print(f({frozenset({'a', 'b'}), frozenset({'c'}), frozenset()}).hex(), f({'x', 'y', 1}).hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(answers) == 1


def test_a_cached_property_does_not_change_the_fingerprint():
    payload = order(1)
    before = fingerprint(payload)
    assert payload.costly is not None
    assert fingerprint(payload) == before


def test_two_secrets_in_a_model_are_two_payloads_or_refused():
    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    with pytest.raises(SerializationError, match=r"SecretStr has no canonical form.*password"):
        fingerprint(Login(password="a"))


class Payment(pydantic.BaseModel):
    currency: str = "EUR"


class Card(Payment):
    amount: int


class Bill(pydantic.BaseModel):
    payment: Payment


class Excluding(pydantic.BaseModel):
    amount: int = pydantic.Field(exclude=True)


class Open(pydantic.BaseModel, extra="allow"):
    amount: int = pydantic.Field(alias="cents")


class WithAttrs:
    """As `attrs.define` makes a class, and as msgspec knows one."""

    __attrs_attrs__ = (SimpleNamespace(name="_amount"),)

    def __init__(self, amount):
        self._amount = amount


@dataclass
class Sheltering:
    held: object


class Lean(msgspec.Struct, omit_defaults=True):
    amount: str = "10"


@pytest.mark.parametrize(
    "bill",
    [
        lambda amount: Bill(payment=Card(amount=amount)),
        lambda amount: Excluding(amount=amount),
        lambda amount: Open(cents=1, amount=amount),
        lambda amount: Open(cents=amount, amount=1),
        WithAttrs,
        lambda amount: Sheltering([WithAttrs(amount)]),
    ],
    ids=["subclass", "excluded", "extra", "like an extra", "attrs", "attrs in a data class"],
)
def test_no_part_of_an_object_is_left_out(bill):
    assert fingerprint(bill(10)) == fingerprint(bill(10)) != fingerprint(bill(99_999))
    assert fingerprint([bill(10), None]) != fingerprint([bill(99_999), None])


def test_a_default_is_the_same_payload_whether_it_was_given_or_not():
    assert fingerprint(Lean()) == fingerprint(Lean(str(10)))


def test_a_cached_property_of_a_model_does_not_change_the_fingerprint():
    class Caching(pydantic.BaseModel):
        a: int

        @cached_property
        def costly(self):
            return object()

    payload = Caching(a=1)
    before = fingerprint(payload)
    assert payload.costly is not None
    assert fingerprint(payload) == before == fingerprint({"a": 1})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (object(), r"^object has no canonical form.*\(at payload\)"),
        ({"a": [1, object()]}, r"\(at payload\['a'\]\[1\]\)"),
        ({1: {"b": 1j}}, r"complex has no canonical form.*\(at payload\[1\]\['b'\]\)"),
        (order(object()), r"\(at payload\.b\)"),
        (Packed(object()), r"\(at payload\.b\)"),
        (["\ud800"], r"lone surrogate is not text \(at payload\[0\]\)"),
    ],
    ids=["bare", "in a dict", "in a dict in a dict", "in a data class", "in a struct", "surrogate"],
)
def test_a_payload_without_canonical_form_is_refused_with_its_place(payload, message):
    with pytest.raises(SerializationError, match=message):
        fingerprint(payload)


def test_a_payload_that_contains_itself_is_refused():
    loop: list[object] = [None]
    loop.append(loop)
    with pytest.raises(SerializationError, match="contains itself"):
        fingerprint(loop)


def test_an_error_of_the_payloads_own_class_becomes_ours():
    class Broken(UserDict):
        def items(self):
            raise KeyError("oh")

    with pytest.raises(SerializationError, match=r"the payload cannot be read: .*oh"):
        fingerprint(Broken())
