"""Encrypted results: unreadable without the key, useless under another identity."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.codec import MsgpackCodec
from semel.core.encryption import EncryptedCodec
from semel.errors import ConfigError, SerializationError

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
HERE = b"6:orders:42"


def codec(**keys):
    """A codec whose last key is the primary one."""
    return EncryptedCodec(keys=keys, primary=[*keys][-1])


@given(st.none() | st.integers() | st.text() | st.tuples(st.binary(), st.decimals(allow_nan=False)))
def test_a_result_comes_back_under_its_own_identity(value):
    assert codec(a=OLD).decode(codec(a=OLD).encode(value, HERE), HERE) == value


@pytest.mark.parametrize("length", [16, 24, 32])
def test_every_aes_key_length_works(length):
    both = codec(a=OLD[:length])
    assert both.decode(both.encode("x", HERE), HERE) == "x"


def test_the_inner_codec_is_part_of_the_name():
    assert codec(a=OLD).name == "aesgcm/1+json/1"
    packed = EncryptedCodec(MsgpackCodec(), keys={"a": OLD}, primary="a")
    assert packed.name == "aesgcm/1+msgpack/1"
    assert packed.decode(packed.encode((1, b"x"), HERE), HERE) == (1, b"x")


def test_the_stored_bytes_hold_nothing_of_the_value():
    data = codec(a=OLD).encode({"card": "4111111111111111"}, HERE)
    assert b"4111" not in data
    assert b"card" not in data


def test_two_encryptions_of_one_value_differ():
    same = codec(a=OLD)
    assert same.encode("x", HERE) != same.encode("x", HERE)


def test_the_hint_reaches_the_inner_codec():
    local = type("Local", (Exception,), {})
    with pytest.raises(SerializationError, match="cannot be stored"):
        codec(a=OLD).encode(local(), HERE, local)


def test_the_stored_format_is_what_it_always_was():
    key_id, nonce = "0161", "000102030405060708090a0b"
    sealed = "3c20a67aac81e021f933e2eeccdcbbffddb313c4aa89627506b0d46fa1"
    data = bytes.fromhex(key_id + nonce + sealed)
    assert codec(a=OLD).decode(data, HERE) == {"paid": True}


def test_a_result_moved_to_another_record_is_refused():
    data = codec(a=OLD).encode("x", HERE)
    with pytest.raises(SerializationError, match="could not be decrypted"):
        codec(a=OLD).decode(data, b"6:orders:43")


def test_a_result_passed_off_as_another_codecs_is_refused():
    data = codec(a=OLD).encode(1, HERE)
    with pytest.raises(SerializationError, match="could not be decrypted"):
        EncryptedCodec(MsgpackCodec(), keys={"a": OLD}, primary="a").decode(data, HERE)


def test_a_result_passed_off_as_another_keys_is_refused():
    data = codec(a=OLD).encode(1, HERE)
    with pytest.raises(SerializationError, match="could not be decrypted"):
        codec(a=OLD, b=OLD).decode(data.replace(b"\x01a", b"\x01b", 1), HERE)


def test_another_key_under_the_same_id_is_refused():
    with pytest.raises(SerializationError, match="could not be decrypted"):
        codec(a=NEW).decode(codec(a=OLD).encode(1, HERE), HERE)


def test_keys_can_be_rotated():
    before, during, after = codec(old=OLD), codec(old=OLD, new=NEW), codec(new=NEW)
    written_before, written_during = before.encode(1, HERE), during.encode(2, HERE)
    assert during.decode(written_before, HERE) == 1
    assert after.decode(written_during, HERE) == 2
    with pytest.raises(SerializationError, match="a key not known here"):
        after.decode(written_before, HERE)


@given(st.integers(0, 200), st.integers(1, 255))
def test_one_changed_byte_anywhere_is_noticed(position, change):
    data = bytearray(codec(a=OLD).encode("x" * 40, HERE))
    data[position % len(data)] ^= change
    with pytest.raises(SerializationError):
        codec(a=OLD).decode(bytes(data), HERE)


def test_cut_bytes_are_refused():
    data = codec(a=OLD).encode("x", HERE)
    for length in range(len(data)):
        with pytest.raises(SerializationError):
            codec(a=OLD).decode(data[:length], HERE)


def test_errors_and_representations_keep_the_secrets():
    data = codec(a=OLD).encode("x", HERE)
    with pytest.raises(SerializationError) as caught:
        codec(a=OLD).decode(data, b"elsewhere")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert repr(codec(a=OLD)) == "EncryptedCodec('aesgcm/1+json/1')"


@pytest.mark.parametrize(
    ("keys", "primary", "message"),
    [
        ({"a": b"short"}, "a", "key 'a' has 5 bytes; AES takes 16, 24 or 32"),
        ({"a": "k" * 32}, "a", "key 'a' must be bytes, not str"),
        ({"a": OLD}, "b", "the primary key 'b' is not among the keys"),
        ({}, "a", "the primary key 'a' is not among the keys"),
        ({"": OLD}, "", "a key id has 1 to 255 bytes; got 0"),
        ({"k" * 256: OLD}, "k", "a key id has 1 to 255 bytes; got 256"),
    ],
)
def test_wrong_keys_are_refused_at_once(keys, primary, message):
    with pytest.raises(ConfigError, match=message):
        EncryptedCodec(keys=keys, primary=primary)


def test_without_cryptography_the_error_says_what_to_install(monkeypatch):
    for name in [*sys.modules]:
        if name.startswith("cryptography"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'semel\[encryption\]'"):
        codec(a=OLD)


def test_semel_alone_loads_neither_cryptography_nor_pydantic():
    code = "import sys, semel.core.codec, semel.core.fingerprint; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert not {"cryptography", "pydantic"} & set(loaded.stdout.split())
