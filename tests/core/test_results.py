"""From values to stored bytes and back; where that fails, the effect is done all the same."""

from __future__ import annotations

import os
from decimal import Decimal

import pytest

from semel.core.codec import JsonCodec, MsgpackCodec, decode_result, encode_result, omitted
from semel.core.encryption import EncryptedCodec
from semel.core.records import OMITTED, Encoded, Identity
from semel.errors import ResultUnavailable, SerializationError

KEY = Identity("orders", "42")
LIMIT = 1024
SEALED = EncryptedCodec(keys={"a": os.urandom(32)}, primary="a")


class Broken:
    """A codec that fails where it is told to, with any error."""

    name = "broken/1"

    def __init__(self, encoding=None, decoding=None):
        self.encoding = encoding
        self.decoding = decoding

    def encode(self, value, context, hint=None):
        if self.encoding is not None:
            raise self.encoding
        return b"bytes"

    def decode(self, data, context, hint=None):
        if self.decoding is not None:
            raise self.decoding
        return "value"


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec(), SEALED])
@pytest.mark.parametrize(
    "value", [1, 0, False, "", [], {}, None, (1, "a"), Decimal("1.10"), b"\x00\xff"]
)
def test_the_first_caller_gets_what_duplicates_will_get(codec, value):
    kept = encode_result(value, codec, KEY, None, LIMIT)
    replayed = decode_result(kept.encoded, KEY, None, JsonCodec(), {codec.name: codec})
    assert kept.problem is None
    assert kept.value == replayed == value
    assert type(kept.value) is type(replayed) is type(value)


def test_the_first_caller_gets_a_copy_of_its_own():
    value = {"items": [1]}
    kept = encode_result(value, JsonCodec(), KEY, None, LIMIT)
    assert kept.value == value
    assert kept.value is not value
    assert kept.value["items"] is not value["items"]


def unkept(value, codec, limit=LIMIT):
    kept = encode_result(value, codec, KEY, None, limit)
    assert kept.value is value, "the effect is done: its caller gets the value"
    assert kept.encoded == omitted(kept.problem)
    with pytest.raises(ResultUnavailable) as missing:
        decode_result(kept.encoded, KEY, None, JsonCodec(), {})
    assert missing.value.reason == kept.problem
    return kept.problem


def test_a_result_at_the_limit_is_kept_and_a_longer_one_is_not():
    assert encode_result("x" * 8, JsonCodec(), KEY, None, 10).problem is None
    assert unkept("x" * 9, JsonCodec(), 10) == "it has 11 bytes, the policy keeps at most 10"


def test_a_result_that_cannot_be_encoded_is_left_out_with_the_reason():
    assert "object cannot be stored" in unkept(object(), JsonCodec())


def test_any_error_of_a_codec_leaves_the_result_out():
    assert unkept("v", Broken(encoding=SerializationError("not today"))) == "not today"
    assert unkept("v", Broken(encoding=ZeroDivisionError("secret"))) == (
        "ZeroDivisionError while encoding str with the codec broken/1"
    )
    assert unkept("v", Broken(decoding=RecursionError("secret"))) == (
        "RecursionError while reading back str with the codec broken/1"
    )


@pytest.mark.parametrize("data", ["text", bytearray(b"bytes"), None])
def test_a_codec_that_gives_no_bytes_leaves_the_result_out(data):
    codec = Broken()
    codec.encode = lambda value, context, hint=None: data
    assert unkept("secret", codec) == (
        f"the codec broken/1 encoded it as {type(data).__name__}, not as bytes"
    )


def test_an_interruption_while_encoding_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        encode_result("v", Broken(encoding=KeyboardInterrupt()), KEY, None, LIMIT)


@pytest.mark.parametrize(
    ("stored", "codecs", "reason"),
    [
        (None, {}, "none is stored"),
        (Encoded(OMITTED, b"too long \xff"), {}, "too long \N{REPLACEMENT CHARACTER}"),
        (Encoded("pickle/1", b""), {}, "'pickle/1', which is not known here"),
        (Encoded("json/1", b"{"), {}, "cannot be read"),
        (
            Encoded("broken/1", b""),
            {"broken/1": Broken(decoding=ZeroDivisionError("secret"))},
            "ZeroDivisionError while reading it back",
        ),
    ],
)
def test_a_result_that_cannot_be_read_is_unavailable_and_says_why(stored, codecs, reason):
    with pytest.raises(ResultUnavailable) as missing:
        decode_result(stored, KEY, None, JsonCodec(), codecs)
    assert reason in missing.value.reason
    assert "secret" not in str(missing.value)


def test_a_result_of_another_record_cannot_be_read_where_the_codec_binds_it():
    kept = encode_result("card 4242", SEALED, KEY, None, LIMIT)
    assert b"4242" not in kept.encoded.data
    with pytest.raises(ResultUnavailable, match="could not be decrypted"):
        decode_result(kept.encoded, Identity("orders", "43"), None, SEALED, {})


@pytest.mark.parametrize("plain", [JsonCodec, MsgpackCodec])
def test_a_codec_made_of_a_plain_one_gets_the_context_again(plain):
    seen = []

    class Sealing(plain):
        def encode(self, value, context, hint=None):
            seen.append(context)
            return super().encode(value, context, hint)

        def decode(self, data, context, hint=None):
            seen.append(context)
            return super().decode(data, context, hint)

    codec = Sealing()
    kept = encode_result("v", codec, KEY, None, LIMIT)
    assert decode_result(kept.encoded, KEY, None, codec, {}) == "v"
    assert seen == [KEY.encoded] * 3
