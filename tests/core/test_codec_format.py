"""The stored formats stay readable: a change here is a new format with a new name."""

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
import pydantic
import pytest

from core.exact import exactly_equal
from semel.core.codec import JsonCodec, MsgpackCodec, codec_named, decoder_for
from semel.errors import ConfigError, SerializationError


@dataclass
class Point:
    x: int


class Pair(NamedTuple):
    a: int
    b: int


class Order(msgspec.Struct):
    n: int


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    sku: str
    n: int = 1
    _p: int = 2


class Colour(enum.Enum):
    RED = 1


class Access(enum.Flag):
    R = 1
    W = 2


HERE = __name__

JSON_FORMATS = [
    (None, "null"),
    ({"a": [1, 2.5, True, "x"]}, '{"a":[1,2.5,true,"x"]}'),
    (18446744073709551615, "18446744073709551615"),
    (2**64, '{"$":"int","v":"0x10000000000000000"}'),
    (-(2**64), '{"$":"int","v":"-0x10000000000000000"}'),
    (float("nan"), '{"$":"float","v":"nan"}'),
    (float("-inf"), '{"$":"float","v":"-inf"}'),
    (1 + 2j, '{"$":"complex","v":[1.0,2.0]}'),
    (b"\x00\xff", '{"$":"bytes","v":"AP8="}'),
    (bytearray(b"a"), '{"$":"bytearray","v":"YQ=="}'),
    (Decimal("1.50"), '{"$":"decimal","v":"1.50"}'),
    (UUID(int=1), '{"$":"uuid","v":"00000000000000000000000000000001"}'),
    (
        dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        '{"$":"datetime","v":"2026-01-02T03:04:05.000006+00:00"}',
    ),
    (
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Vienna")),
        '{"$":"datetime","v":["2026-10-25T02:30:00",1,"Europe/Vienna"]}',
    ),
    (dt.time(1, 2, fold=1), '{"$":"time","v":["01:02:00",1,null]}'),
    (dt.date(2026, 1, 2), '{"$":"date","v":"2026-01-02"}'),
    (dt.timedelta(-1, 2, 3), '{"$":"timedelta","v":[-1,2,3]}'),
    ((1, (2,)), '{"$":"tuple","v":[1,{"$":"tuple","v":[2]}]}'),
    ({1}, '{"$":"set","v":[1]}'),
    (frozenset({1}), '{"$":"frozenset","v":[1]}'),
    (deque([1], 2), '{"$":"deque","v":[2,[1]]}'),
    ({"$": 1}, '{"$":"dict","v":[["$",1]]}'),
    ({1: 2}, '{"$":"dict","v":[[1,2]]}'),
    (OrderedDict(a=1), '{"$":"ordereddict","v":[["a",1]]}'),
    (defaultdict(list, a=[]), '{"$":"defaultdict","v":["list",[["a",[]]]]}'),
    (msgspec.UNSET, '{"$":"unset","v":null}'),
    (Colour.RED, f'{{"$":"enum","t":"{HERE}:Colour","v":"RED"}}'),
    (Access.R | Access.W, f'{{"$":"flag","t":"{HERE}:Access","v":3}}'),
    (Pair(1, 2), f'{{"$":"namedtuple","t":"{HERE}:Pair","v":{{"a":1,"b":2}}}}'),
    (Order(1), f'{{"$":"struct","t":"{HERE}:Order","v":{{"n":1}}}}'),
    (Point(1), f'{{"$":"dataclass","t":"{HERE}:Point","v":{{"x":1}}}}'),
    (
        Item(sku="a", z=3),
        f'{{"$":"model","t":"{HERE}:Item","v":{{"sku":"a","n":1}},"set":["sku","z"],"x":{{"z":3}},"p":{{"_p":2}}}}',
    ),
]


@pytest.mark.parametrize(
    ("value", "text"), JSON_FORMATS, ids=[ascii(v)[:30] for v, _ in JSON_FORMATS]
)
def test_the_json_format_is_what_it_always_was(value, text):
    codec = JsonCodec()
    assert codec.encode(value, b"").decode() == text
    assert exactly_equal(codec.decode(text.encode(), b""), value)


MSGPACK_FORMATS = [
    (b"\x00\xff", "c40200ff"),
    (float("inf"), "cb7ff0000000000000"),
    (bytearray(b"a"), "82a124a9627974656172726179a176a459513d3d"),
    ((1, b"a"), "82a124a57475706c65a1769201c40161"),
    (2**64, "82a124a3696e74a176b330783130303030303030303030303030303030"),
]


@pytest.mark.parametrize(
    ("value", "data"), MSGPACK_FORMATS, ids=[ascii(v)[:30] for v, _ in MSGPACK_FORMATS]
)
def test_the_msgpack_format_is_what_it_always_was(value, data):
    codec = MsgpackCodec()
    assert codec.encode(value, b"").hex() == data
    assert exactly_equal(codec.decode(bytes.fromhex(data), b""), value)


def test_plain_json_of_another_writer_is_read_as_it_is():
    assert JsonCodec().decode(b' { "a" : [ 1 ] } ', b"") == {"a": [1]}


def test_a_policy_names_its_codec_shortly():
    assert codec_named("json").name == "json/1"
    assert codec_named("msgpack").name == "msgpack/1"
    with pytest.raises(ConfigError, match="no codec is called 'pickle'; known: json, msgpack"):
        codec_named("pickle")


def test_a_result_is_read_by_the_codec_that_wrote_it():
    own = MsgpackCodec()
    assert isinstance(decoder_for("json/1", {}), JsonCodec)
    assert isinstance(decoder_for("msgpack/1", {}), MsgpackCodec)
    assert decoder_for("own/3", {"own/3": own}) is own
    assert decoder_for("json/1", {"json/1": own}) is own
    with pytest.raises(SerializationError, match="written by the codec 'json/2'"):
        decoder_for("json/2", {})
