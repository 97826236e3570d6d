from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import InvalidKey
from semel.http import KeyMissing, parse_key
from semel.http.requests import StoredKeys, check_key, key_of_lines, line_pattern, stored_key

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('"order-1"', "order-1"),
        ("order-1", "order-1"),
        ("  order-1\t", "order-1"),
        ('"a b"', "a b"),
        (r'"say \"hi\" \\o/"', r'say "hi" \o/'),
        ("a\\b;c=d==", "a\\b;c=d=="),
        ('"' + "k" * 255 + '"', "k" * 255),
        ('"' + r"\"" * 255 + '"', '"' * 255),
        ('"k";a=1', "k"),
        ('"k"; a="x;y,\\""; b;c=?1;d=%"%e4";*e=:cHJl:', "k"),
        ('"k;a=1"', "k;a=1"),
        ("k;a=1", "k;a=1"),
        ('"' + r"\"" * 255 + '";a=1', '"' * 255),
    ],
)
def test_a_key_is_a_quoted_string_or_the_same_text_raw(line, key):
    assert key_of_lines([line]) == key


def test_no_header_is_no_key():
    assert key_of_lines([]) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        '""',
        "k" * 256,
        '"' + "k" * 256 + '"',
        "k" * 1_000_000,
        "kä",
        '"kä"',
        "a\x00b",
        "a\x7fb",
        '"a\x01b"',
        r'"a\b"',
        '"a',
        'a"b',
        '"a"b',
        "a,b",
        '"a", "b"',
        '"a";b=1, "c"',
        '"a";',
        '"a" ;b=1',
        '"a";B=1',
        '"a";b=',
        '"a";b="c',
        '"";b=1',
        '"a"' + ";b=1" * 1_000_000,
        "a b",
    ],
)
def test_a_malformed_key_is_refused_and_never_repeated(line):
    with pytest.raises(InvalidKey) as refused:
        key_of_lines([line])
    shown = line.strip()[:20]
    assert len(shown) < 4 or shown not in str(refused.value)


def test_a_key_with_spaces_is_told_to_come_in_double_quotes():
    with pytest.raises(InvalidKey, match='in double quotes, as in "my key"'):
        key_of_lines(["order 1"])
    assert key_of_lines(['"my key"']) == "my key"


def test_two_lines_are_refused_even_if_they_agree():
    with pytest.raises(InvalidKey, match="once only"):
        key_of_lines(["a", "a"])


def test_strict_takes_only_the_quoted_form():
    assert key_of_lines(['"k"'], strict=True) == "k"
    assert key_of_lines(['"k";a=1'], strict=True) == "k"
    with pytest.raises(InvalidKey, match="quoted"):
        key_of_lines(["k"], strict=True)


@given(st.text(st.characters(max_codepoint=0xFF), max_size=20) | st.from_regex(r'"[ab\\"]{0,4}"?'))
def test_the_pattern_that_clients_are_told_agrees_with_what_is_taken(line):
    for strict in (False, True):
        told = re.search(line_pattern(strict=strict), line) is not None and not line.endswith("\n")
        try:
            taken = key_of_lines([line], strict=strict) is not None and line == line.strip(" \t")
        except InvalidKey:
            taken = False
        assert told == taken


@pytest.mark.parametrize("key", [7, None, b"k"])
def test_a_key_that_is_no_text_is_refused(key):
    with pytest.raises(InvalidKey, match="must be a string"):
        check_key(key)


def test_a_plain_key_is_stored_as_it_came():
    assert stored_key("order:1_a-b.c") == "order:1_a-b.c"


def test_a_long_one_becomes_a_digest_that_no_key_can_look_like():
    long = stored_key("k" * 255, tenant="ann")
    assert long.startswith("%~")
    assert len(long) <= 255
    assert stored_key(long) != long


@given(
    st.tuples(PRINTABLE, st.none() | st.text(min_size=1), st.none() | st.text(min_size=1)),
    st.tuples(PRINTABLE, st.none() | st.text(min_size=1), st.none() | st.text(min_size=1)),
)
def test_different_callers_routes_and_keys_never_meet(one, other):
    texts = stored_key(*one), stored_key(*other)
    assert (texts[0] == texts[1]) == (one == other)
    for text in texts:
        assert 0 < len(text) <= 255
        assert text.isprintable()
        assert " " not in text


PARTS = st.tuples(PRINTABLE, st.none() | st.text(min_size=1), st.none() | st.text(min_size=1))


@given(PARTS, PARTS)
def test_a_stored_key_is_found_by_whatever_is_known_of_it(one, other):
    key, tenant, route = one
    stored = stored_key(key, tenant, route)
    assert StoredKeys(key, tenant, route).match(stored)
    if not stored.startswith("%~"):
        for known in ((key,), (key, tenant), (key, None, route)):
            assert StoredKeys(*known).match(stored)
        assert StoredKeys(other[0]).match(stored) == (other[0] == key)
        if other[1] is not None:
            assert StoredKeys(key, other[1]).match(stored) == (other[1] == tenant)
        if other[2] is not None:
            assert StoredKeys(key, None, other[2]).match(stored) == (other[2] == route)


def test_a_digest_is_found_only_with_all_that_it_was_made_of():
    stored = stored_key("k" * 255, "ann", "POST /pay")
    assert StoredKeys("k" * 255, "ann", "POST /pay").match(stored)
    for known in ((), ("ann",), ("bob", "POST /pay"), (None, "POST /pay")):
        assert not StoredKeys("k" * 255, *known).match(stored)


def test_a_separator_inside_a_name_does_not_move_a_key_to_somebody_else():
    assert (
        len(
            {
                stored_key("b/c", "a"),
                stored_key("c", "a/b"),
                stored_key("a/b/c"),
                stored_key("c", "a", "b"),
            }
        )
        == 4
    )


# --- for endpoints that call the engine by hand ---------------------------------------------------


@pytest.mark.parametrize(
    "header", ["order-1", '"order-1"', ' "order-1" ', '"order-1";v=2', ["order-1"], ('"order-1"',)]
)
def test_the_quoted_and_the_raw_form_of_a_header_are_one_key(header):
    assert parse_key(header) == "order-1"


def test_a_key_with_quotes_and_spaces_is_read_from_its_quoted_form():
    assert parse_key(r'"say \"hi\", now"') == 'say "hi", now'


@pytest.mark.parametrize("header", [None, [], ()])
def test_a_missing_header_has_an_error_of_its_own(header):
    with pytest.raises(KeyMissing, match="needs an idempotency key") as raised:
        parse_key(header)
    assert (raised.value.code, raised.value.http_status) == ("key_missing", 400)
    assert isinstance(raised.value, InvalidKey)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("", "empty"),
        ('""', "empty"),
        ("two words", "in double quotes"),
        ("one,two", "in double quotes"),
        ('"not closed', "in double quotes"),
        (["a", "a"], "once only"),
        ("k" * 256, "longer than 255"),
        ("schlüssel", "plain word of ASCII"),
        (b"order-1", "must be a string, not bytes"),
        ([b"order-1"], "must be a string, not bytes"),
        (3, "must be a string, not int"),
        (0, "must be a string, not int"),
        ([3], "must be a string, not int"),
    ],
)
def test_what_is_not_one_key_is_refused_and_never_repeated(header, told):
    with pytest.raises(InvalidKey, match=told) as raised:
        parse_key(header)
    assert raised.value.code == "invalid_key"
    assert "schlüssel" not in str(raised.value)
    assert "order-1" not in str(raised.value)


def test_a_strict_parser_takes_only_the_quoted_form():
    assert parse_key('"order-1"', strict=True) == "order-1"
    with pytest.raises(InvalidKey, match="quoted string"):
        parse_key("order-1", strict=True)
