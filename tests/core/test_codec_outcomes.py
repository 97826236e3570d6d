"""Failures, and successes without a value: writing them never fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.codec import (
    decode_failure,
    encode_failure,
    most_attempts,
    omission_reason,
    omitted,
)
from semel.core.records import FAILURE, OMITTED, Encoded
from semel.errors import SerializationError


class CardDeclined(Exception):
    pass


class Broken(Exception):
    def __str__(self):
        raise ValueError


class Shouting(str):
    __slots__ = ()

    def __getitem__(self, index):
        raise IndexError

    def encode(self, *args):
        raise UnicodeError


class Odd(Exception):
    def __str__(self):
        return Shouting("odd")


def test_a_failure_keeps_its_type_and_message():
    assert decode_failure(encode_failure(ValueError("no"))) == ("ValueError", "no")
    assert decode_failure(encode_failure(CardDeclined("no"))) == ("CardDeclined", "no")
    assert decode_failure(encode_failure(KeyboardInterrupt())) == ("KeyboardInterrupt", "")


def test_the_format_of_a_failure_is_what_it_always_was():
    assert encode_failure(ValueError('"no"')) == Encoded(FAILURE, b'["ValueError","\\"no\\""]')


@pytest.mark.parametrize(("most", "kept"), [(None, None), (3, 3), (2**70, None)])
def test_a_failure_keeps_how_many_attempts_its_policy_allows(most, kept):
    stored = encode_failure(ValueError("no"), most)
    assert most_attempts(stored) == kept
    assert decode_failure(stored) == ("ValueError", "no")


def test_a_long_message_is_cut():
    assert decode_failure(encode_failure(ValueError("x" * 5000)))[1] == "x" * 1000


@given(st.text(st.characters(codec=None), max_size=20))
def test_any_message_can_be_kept(message):
    _, kept = decode_failure(encode_failure(ValueError(message)))
    assert kept == message.encode(errors="replace").decode()


def test_a_message_that_cannot_be_read_does_not_hide_the_failure():
    assert decode_failure(encode_failure(Broken()))[1] == "(its message could not be read)"
    assert decode_failure(encode_failure(Odd()))[1] == "odd"
    nameless = type("Nameless", (Exception,), {"__module__": None})
    assert decode_failure(encode_failure(nameless("x"))) == ("Nameless", "x")


@pytest.mark.parametrize("data", [b"", b"[1,2]", b'["a"]', b"\xff", b'["\xff","a"]'])
def test_an_unreadable_failure_is_an_error_of_ours(data):
    with pytest.raises(SerializationError, match="failure cannot be read"):
        decode_failure(Encoded(FAILURE, data))


def test_an_omitted_value_says_why():
    stored = omitted("it is too \ud800 large")
    assert stored.codec == OMITTED
    assert omission_reason(stored) == "it is too ? large"
    assert omission_reason(Encoded(OMITTED, b"\xff")) == "\ufffd"
