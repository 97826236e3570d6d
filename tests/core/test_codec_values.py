"""Built-in types: what is read back is what was written, in value and type."""

from __future__ import annotations

import datetime as dt
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.exact import describe, exactly_equal
from semel.core.codec import MAX_DEPTH, JsonCodec, MsgpackCodec
from semel.errors import SerializationError

CODECS = [JsonCodec(), MsgpackCodec()]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def round_trip(codec, value, hint=None):
    return codec.decode(codec.encode(value, b"", hint), b"", hint)


fixed_offsets = st.integers(-86399, 86399).map(lambda s: dt.timezone(dt.timedelta(seconds=s)))
zones = st.sampled_from([ZoneInfo("UTC"), ZoneInfo("Europe/Vienna"), ZoneInfo("America/New_York")])
folds = st.integers(0, 1)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.decimals(allow_nan=False),  # a signalling nan cannot be a key; see the edges
    st.uuids(),
    st.dates(),
    st.timedeltas(),
    st.builds(
        lambda value, fold: value.replace(fold=fold),
        st.datetimes(timezones=st.none() | fixed_offsets | zones),
        folds,
    ),
    st.builds(
        lambda value, zone, fold: value.replace(tzinfo=zone, fold=fold),
        st.times(),
        st.none() | fixed_offsets | zones,
        folds,
    ),
)
hashables = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    scalars | st.binary().map(bytearray) | st.sets(hashables, max_size=3) | hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$", "v"]), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashables, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.just(3))
    ),
    max_leaves=12,
)


@each_codec
@given(value=values)
def test_every_value_comes_back_equal_in_value_and_type(codec, value):
    assert exactly_equal(round_trip(codec, value), value)


@each_codec
@pytest.mark.parametrize(
    "value",
    [
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        10**5000,
        -0.0,
        5e-324,
        Decimal("-0E+3"),
        Decimal("sNaN123"),
        Decimal("-Infinity"),
        UUID(int=0),
        "",
        "\0",
        "ünï😀",
        b"",
        {},
        {"$": "tuple", "v": [1]},
        {"$": {"$": {}}},
        {"v": {"$": None}},
        {True: 1, "True": 2, 2: 3, 2.5: 4, None: 5, (1, 2): 6},
        defaultdict(None, a=1),
        deque([1, 2], maxlen=2),
        msgspec.UNSET,
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Vienna")),
        dt.datetime(2026, 3, 29, 2, 30, tzinfo=ZoneInfo("Europe/Vienna")),
        dt.datetime(1, 1, 1, fold=1),  # noqa: DTZ001 - naive on purpose
        dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1, microseconds=1))),
        dt.time(1, 2, 3, tzinfo=ZoneInfo("Europe/Vienna")),
        dt.timedelta.min,
        dt.timedelta.max,
    ],
    ids=lambda value: hex(value)[:20] if type(value) is int else ascii(value)[:40],
)
def test_edges_come_back_exactly(codec, value):
    assert exactly_equal(round_trip(codec, value), value)


@each_codec
def test_the_order_of_a_dict_is_kept(codec):
    assert list(round_trip(codec, {"b": 1, "a": 2})) == ["b", "a"]
    assert list(round_trip(codec, {2: 1, 1: 2})) == [2, 1]


def test_the_comparison_of_these_tests_tells_types_apart():
    for left, right in [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({1}, frozenset({1}))]:
        assert describe(left) != describe(right)


class OtherLibrarysZone(dt.tzinfo):
    """Like dateutil's and pytz's: neither zoneinfo nor datetime.timezone."""

    def __init__(self, offset):
        self.offset = offset

    def utcoffset(self, when):
        return self.offset

    def dst(self, when):
        return None

    def tzname(self, when):
        return "other"


@each_codec
def test_a_zone_of_another_library_becomes_its_offset(codec):
    when = dt.datetime(2026, 1, 1, tzinfo=OtherLibrarysZone(dt.timedelta(hours=2)))
    back = round_trip(codec, when)
    assert back == when
    assert back.tzinfo == dt.timezone(dt.timedelta(hours=2))


@each_codec
@pytest.mark.parametrize(
    "zone",
    [OtherLibrarysZone(None), dt.timezone(dt.timedelta(microseconds=1))],
    ids=["no offset", "an offset that Python does not read back"],
)
def test_a_zone_that_would_not_come_back_is_refused(codec, zone):
    with pytest.raises(SerializationError, match="zone cannot be stored exactly"):
        codec.encode(dt.time(1, 2, tzinfo=zone), b"")


class MyInt(int):
    pass


class MyDict(dict):
    pass


class MyStr(str):
    __slots__ = ()


class MyDatetime(dt.datetime):
    pass


@each_codec
@pytest.mark.parametrize(
    "value",
    [
        MyInt(1),
        MyDict(a=1),
        MyStr("a"),
        MyDatetime(2026, 1, 1),
        Path("a"),
        Counter("a"),
        object(),
        int,
        len,
        ...,
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_a_type_that_is_not_known_is_refused_and_not_flattened(codec, value):
    with pytest.raises(
        SerializationError, match=r"cannot be stored.*register_type.*at result\['a'\]\[1\]"
    ):
        codec.encode({"a": [0, value]}, b"")


@each_codec
def test_a_subclass_as_a_key_is_refused(codec):
    with pytest.raises(SerializationError, match=r"MyStr cannot be stored.*at result\['a'\]"):
        codec.encode({MyStr("a"): 1}, b"")


@each_codec
@pytest.mark.parametrize("value", ["a\ud800", {"\ud800": 1}, {"a": 1, 2: "\ud800"}], ids=ascii)
def test_a_lone_surrogate_is_refused(codec, value):
    with pytest.raises(SerializationError, match="lone surrogate"):
        codec.encode(value, b"")


@each_codec
def test_a_defaultdict_with_a_factory_of_ones_own_is_refused(codec):
    with pytest.raises(SerializationError, match="factory of your own"):
        codec.encode(defaultdict(lambda: 1), b"")


def nested(levels, wrap):
    value = None
    for _ in range(levels):
        value = wrap(value)
    return value


@each_codec
@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}], ids=["list", "tuple", "dict"]
)
def test_the_deepest_value_that_is_written_can_be_read(codec, wrap):
    assert round_trip(codec, nested(MAX_DEPTH - 1, wrap)) == nested(MAX_DEPTH - 1, wrap)
    with pytest.raises(SerializationError, match="deeper than 99 levels") as caught:
        codec.encode(nested(MAX_DEPTH, wrap), b"")
    assert len(str(caught.value)) < 250


@each_codec
def test_a_value_that_contains_itself_is_refused(codec):
    loop: list[object] = []
    loop.append({"again": loop})
    with pytest.raises(SerializationError, match="contains itself"):
        codec.encode(loop, b"")
