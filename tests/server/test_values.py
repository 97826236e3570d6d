"""Stored results as plain data: each tag of the codecs, and what cannot be read."""

from __future__ import annotations

import datetime as dt
import enum
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest

from semel import register_type
from semel.core.codec import codec_named, omitted
from semel.core.codec_types import FORMATS
from semel.core.records import Encoded
from semel.core.stored_answers import StoredAnswer, pack_answer
from semel.errors import ResultUnavailable
from semel.server.values import plain
from semel.server.wire import Answered


class Color(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Decimal


@dataclass
class Order:
    id: int
    amount: Decimal


class Item(msgspec.Struct):
    name: str


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


register_type(Money, name="tests.Money", encode=lambda money: money.cents, decode=Money)

with_extra = Order(1, Decimal(2))
with_extra.note = "x"

EXAMPLES = {
    "int": (2**70, str(2**70)),
    "float": (float("-inf"), "-inf"),
    "complex": (1 + 2j, "(1+2j)"),
    "bytes": (b"\xff", "/w=="),
    "bytearray": (bytearray(b"\xff"), "/w=="),
    "decimal": (Decimal("1.00"), "1.00"),
    "uuid": (
        UUID("01234567-89ab-cdef-0123-456789abcdef"),
        "01234567-89ab-cdef-0123-456789abcdef",
    ),
    "datetime": (dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC), "2026-01-02T03:04:00+00:00"),
    "time": (dt.time(1, 2), "01:02:00"),
    "date": (dt.date(2026, 1, 2), "2026-01-02"),
    "timedelta": (dt.timedelta(days=1, microseconds=500_000), "86400.5"),
    "tuple": ((1, (2,)), [1, [2]]),
    "set": ({1}, [1]),
    "frozenset": (frozenset({"a"}), ["a"]),
    "deque": (deque([1], 5), [1]),
    "dict": ({1: "a", (Decimal("1.5")): "b"}, {"1": "a", "1.5": "b"}),
    "ordereddict": (OrderedDict(a=(1,)), {"a": [1]}),
    "defaultdict": (defaultdict(list, {"a": [1]}), {"a": [1]}),
    "unset": (msgspec.UNSET, None),
}
"""By tag: a value, and what others see of it."""

MORE = [
    (dt.datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Paris")), "2026-01-02T00:00:00[Europe/Paris]"),
    (dt.datetime(2026, 1, 2, fold=1), "2026-01-02T00:00:00"),  # noqa: DTZ001
    (dt.timedelta(days=-1), "-86400"),
    (dt.timedelta(0), "0"),
    ({(1, 2): 3}, [[[1, 2], 3]]),
    ({1: 2, "1": 3}, [[1, 2], ["1", 3]]),
    ({None: 1, True: 2}, {"null": 1, "true": 2}),
    (Color.RED, "RED"),
    (Flags.A | Flags.B, 3),
    (Point(1, Decimal(2)), {"x": 1, "y": "2"}),
    (Order(1, Decimal("2.50")), {"id": 1, "amount": "2.50"}),
    (with_extra, {"id": 1, "amount": "2", "note": "x"}),
    (Item("a"), {"name": "a"}),
    (Money(5), 5),
    ([2**53], [str(2**53)]),
    ({"a": [(1,)]}, {"a": [[1]]}),
]


def test_every_tag_has_an_example():
    assert {form.tag for form in FORMATS} == EXAMPLES.keys()


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize(("value", "seen"), [*EXAMPLES.values(), *MORE])
def test_a_tagged_value_is_plain_and_lossy(codec, value, seen):
    writer = codec_named(codec)
    found = plain(Encoded(writer.name, writer.encode(value, b"", None)))
    assert (found.value, found.lossy) == (seen, True)


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize(
    "value", [None, True, 0, -(2**53) + 1, 1.5, "ü", [1, [2]], {"a": {"b": 1}}, {"$": {"$": [1]}}]
)
def test_plain_data_loses_nothing(codec, value):
    writer = codec_named(codec)
    found = plain(Encoded(writer.name, writer.encode(value, b"", None)))
    assert (found.value, found.lossy) == (value, False)


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (None, "none is stored"),
        (omitted("too large"), "too large"),
        (Encoded("grpc/1", b"x"), "grpc/1"),
        (Encoded("mine/1", b"x"), "mine/1"),
        (Encoded("json/1", b"{"), "cannot be read"),
        (Encoded("json/1", b'{"$":"decimal"}'), "cannot be read"),
        (Encoded("json/1", b'{"$":"later","v":1}'), "cannot be read"),
        (Encoded("json/1", b'{"$":"uuid","v":1}'), "cannot be read"),
        (Encoded("json/1", b'{"$":"int","v":"z"}'), "cannot be read"),
        (Encoded("json/1", b'{"$":"deque","v":[]}'), "cannot be read"),
        (Encoded("json/1", b'{"$":"later","v":{},"t":"a.B","x":[1]}'), "cannot be read"),
        (Encoded("json/1", b'{"$":"timedelta","v":[1%s,0,0]}' % (b"0" * 400)), "cannot be read"),
        (Encoded("msgpack/1", b"\xc7\x01\x05a"), "cannot be read"),
        (Encoded("msgpack/1", b"\x81\xc0\x02"), "cannot be read"),
        (Encoded("http/1", b"x"), "cannot be read"),
        (Encoded("http/1", pack_answer(StoredAnswer(200, (), None))), "too large"),
    ],
)
def test_what_cannot_be_given_says_why(stored, why):
    with pytest.raises(ResultUnavailable, match=why):
        plain(stored)


def test_a_stored_response_loses_lines_that_may_not_be_given():
    lines = ((b"x-a", b"\xfc"), (b"set-cookie", b"s=1"))
    found = plain(Encoded("http/1", pack_answer(StoredAnswer(200, lines, b"\xff"))))
    assert found == Answered(200, [("x-a", "ü")], base64="/w==")
