"""Damaged, foreign and hostile bytes: a SerializationError, and nothing else."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.codec import JsonCodec, MsgpackCodec
from semel.core.codec_types import READERS
from semel.errors import SerializationError

HERE = __name__
CODECS = {JsonCodec(): msgspec.json.encode, MsgpackCodec(): msgspec.msgpack.encode}
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@dataclass
class Point:
    x: int


class Pair(NamedTuple):
    a: int


class Order(msgspec.Struct):
    n: int


class Item(pydantic.BaseModel):
    n: int = 1


class Colour(enum.Enum):
    RED = 1


class Conforming(enum.Flag, boundary=enum.CONFORM):
    READ = 1


class Access(enum.Flag):
    R = 1


def read(codec, data):
    """Decode; the only error there may be is ours."""
    try:
        codec.decode(data, b"")
    except SerializationError:
        return False
    return True


@each_codec
@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(codec, data):
    read(codec, data)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"1e999", b"1 2", b"[" * 100_000], ids=lambda d: repr(d[:6])
)
def test_damaged_json_is_refused(data):
    with pytest.raises(SerializationError, match="cannot be read"):
        JsonCodec().decode(data, b"")


@pytest.mark.parametrize(
    "data", [b"", b"\x91", b"\xc1", b"\x01\x02", b"\x91" * 100_000], ids=lambda d: repr(d[:6])
)
def test_damaged_msgpack_is_refused(data):
    with pytest.raises(SerializationError, match="cannot be read"):
        MsgpackCodec().decode(data, b"")


bodies = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "v", "t", "x", "n", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
class_names = st.sampled_from(
    [f"{HERE}:{name}" for name in ("Point", "Pair", "Order", "Item", "Colour", "Access", "CODECS")]
    + ["", ":"]
)
tagged = st.fixed_dictionaries(
    {"$": st.sampled_from([*READERS, "unknown"]) | bodies},
    optional={"v": bodies, "t": class_names | bodies, "x": bodies, "p": bodies, "set": bodies},
)


@each_codec
@given(tree=tagged)
def test_any_tag_with_any_body_is_read_or_refused(codec, tree):
    read(codec, CODECS[codec](tree))


@each_codec
@pytest.mark.parametrize(
    "tree",
    [
        {"$": "nonsense", "v": 1},
        {"$": ["tuple"], "v": []},
        {"$": "tuple"},
        {"$": "tuple", "v": "ab"},
        {"$": "dict", "v": {"a": 1}},
        {"$": "dict", "v": [[[], 1]]},
        {"$": "set", "v": [[]]},
        {"$": "bytes", "v": "a b"},
        {"$": "int", "v": "1_g"},
        {"$": "decimal", "v": "one"},
        {"$": "uuid", "v": "1"},
        {"$": "datetime", "v": ["2026-01-01", 0, "../../etc/passwd"]},
        {"$": "datetime", "v": ["2026-01-01", 0, "No/Where"]},
        {"$": "defaultdict", "v": ["eval", []]},
        {"$": "dataclass", "t": f"{HERE}:Point", "v": [1]},
        {"$": "dataclass", "t": 5, "v": {}},
        {"$": "enum", "t": f"{HERE}:Colour", "v": "GREEN"},
        {"$": "flag", "t": f"{HERE}:Access", "v": 8},
        {"$": "flag", "t": f"{HERE}:Conforming", "v": 8},  # that class would read it as 0
        {"$": "custom", "t": "nobody", "v": 1},
    ],
    ids=str,
)
def test_a_tag_that_makes_no_sense_is_refused(codec, tree):
    with pytest.raises(SerializationError, match="the stored result cannot be read"):
        codec.decode(CODECS[codec](tree), b"")


def test_a_tag_of_a_newer_version_is_named():
    with pytest.raises(SerializationError, match="the tag 'matrix' is not known to this version"):
        JsonCodec().decode(b'[{"$":"matrix","v":1}]', b"")


def test_a_foreign_extension_is_refused():
    with pytest.raises(SerializationError, match="extension 5"):
        MsgpackCodec().decode(b"\xd4\x05a", b"")
