from __future__ import annotations

import pickle
from http import HTTPStatus

import msgspec
import pytest

from semel.core.stored_answers import AnswerCodec, StoredAnswer, pack_answer, unpack_answer
from semel.errors import ConfigError, SerializationError
from semel.http.storing import (
    Answer,
    StoredRule,
    is_event_stream,
    kept_lines,
    replay,
)


class Awaited:
    """An object that is called like an `async def` function."""

    async def __call__(self, status):
        return status == 404


class Later:
    """What would have to be awaited."""

    def __await__(self):
        yield

    def __repr__(self):
        return "Later()"


class Uninspected:
    """A function that shows no signature, as some that are written in C."""

    __signature__ = "none"

    def __init__(self, statuses):
        self._statuses = statuses

    def __call__(self, *given):
        (status,) = given
        return status in self._statuses


ANSWER = StoredAnswer(201, ((b"x-a", b"1"), (b"x-a", b"2, 3")), b"\x00body")


@pytest.mark.parametrize(
    ("status", "kept"),
    [
        (200, "store"),
        (299, "store"),
        (303, "forget"),
        (404, "forget"),
        (422, "forget"),
        (500, "failure"),
    ],
)
def test_only_2xx_is_stored_unless_the_application_says_more(status, kept):
    assert StoredRule.of(None).decide(status) == kept


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429])
def test_answers_about_the_client_are_never_stored(status):
    assert StoredRule.of(lambda _: True).decide(status) == "forget"
    assert StoredRule.of(lambda _: "unknown").decide(status) == "forget"


@pytest.mark.parametrize(
    ("chosen", "status", "kept"),
    [
        (True, 404, "store"),
        (False, 200, "forget"),
        (False, 502, "failure"),
        ("unknown", 500, "unknown"),
    ],
)
def test_a_function_says_which_statuses_are_stored(chosen, status, kept):
    assert StoredRule.of(lambda _: chosen).decide(status) == kept


def test_a_function_that_raises_is_told_of_and_leaves_the_default(caplog):
    def broken(status):
        raise KeyError(status)

    assert StoredRule.of(broken).decide(200) == "store"
    assert StoredRule.of(broken).decide(404) == "forget"
    assert "stored= raised for status" in caplog.text


@pytest.mark.parametrize("given", ["unkown", "no"])
def test_a_function_that_decides_by_another_word_leaves_the_default(given, caplog):
    rule = StoredRule.of(lambda _: given)
    assert [rule.decide(status) for status in (200, 302, 500)] == ["store", "forget", "failure"]
    assert f"must return True, False or 'unknown', not {given!r}" in caplog.text


def test_a_function_whose_decision_has_to_be_awaited_leaves_the_default(caplog):
    rule = StoredRule.of(lambda _: Later())
    assert [rule.decide(status) for status in (200, 302)] == ["store", "forget"]
    assert "must return True, False or 'unknown', not Later" in caplog.text


@pytest.mark.parametrize("stored", [303, [303, 404], {303, 404}, (HTTPStatus.SEE_OTHER,)])
def test_statuses_that_are_named_are_stored_beside_2xx(stored):
    rule = StoredRule.of(stored)
    assert [rule.decide(status) for status in (201, 303)] == ["store", "store"]
    assert [rule.decide(status) for status in (302, 307, 409)] == ["forget"] * 3


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (302, "of the redirects only 303 can be named.*login page.*headers.get"),
        ([303, 301], "stored=301: of the redirects only 303"),
        ({307}, "stored=307"),
        ([308], "stored=308"),
        ([200, 303], "stored=200: every 2xx is stored"),
        ([401], "stored=401: this status is never stored"),
        ([429], "stored=429: this status is never stored"),
        ([304], "stored=304: this is not the status of a complete"),
        ([100], "stored=100: this is not the status"),
        ([600], "stored=600: this is not the status"),
        (["303"], r"statuses that are stored beside 2xx, such as \[303\].*got '303'"),
        ("303", "got '303'"),
        ("", "got ''"),
        (Awaited(), "stored must be a plain function"),
        (True, "got True"),
        (3.5, "got 3.5"),
        (lambda: True, "function of the status, or of status and headers"),
        (lambda status, headers, body: True, "function of the status, or of status and headers"),
        (lambda status, *, headers: True, "function of the status, or of status and headers"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_reason(stored, told):
    with pytest.raises(ConfigError, match=told):
        StoredRule.of(stored)


def test_a_function_gets_the_headers_if_it_wants_them():
    def by_location(status, headers):
        return (status, headers.get("Location"), headers.get("X-None")) == (302, "/thanks", None)

    rule = StoredRule.of(by_location)
    assert rule.decide(302, [(b"location", b"/thanks")]) == "store"
    assert rule.decide(302, [(b"location", b"/login")]) == "forget"
    assert rule.decide(302) == "forget"


def test_a_function_gets_the_headers_if_it_names_them_even_with_a_default():
    def no_login(status, headers=None):
        return headers is not None and headers.get("Location") != "/login"

    rule = StoredRule.of(no_login)
    assert rule.sees_headers
    assert rule.decide(302, [(b"location", b"/login")]) == "forget"
    assert rule.decide(302, [(b"location", b"/thanks")]) == "store"


@pytest.mark.parametrize(
    "function",
    [
        lambda status, *, headers=None: headers is None and status == 404,
        lambda status, more=None: more is None and status == 404,
        lambda *given: given == (404,),
        {404}.__contains__,
        Uninspected({404}),
    ],
)
def test_a_function_that_takes_the_status_alone_gets_no_more(function):
    assert StoredRule.of(function).decide(404) == "store"
    assert StoredRule.of(function).decide(409) == "forget"


@pytest.mark.parametrize(
    "name",
    [
        "Set-Cookie",
        "AUTHORIZATION",
        "WWW-Authenticate",
        "Proxy-Authorization",
        "Date",
        "Content-Length",
        "Transfer-Encoding",
        "Keep-Alive",
        "Access-Control-Allow-Origin",
        "X-Csrf-Token",
        "Session-Token",
        "Token",
        "X-CSRFToken",
        "X-CSRF",
        "Refresh_Token",
        "X-Token-Of-Session",
        "Authentication-Info",
        "Proxy-Authentication-Info",
        "Set_Cookie",
        "X-Mine",
    ],
)
def test_secret_and_passing_header_lines_are_left_out(name):
    lines = [(b"Location", b"/1"), (name.encode(), b"secret")]
    assert kept_lines(lines, frozenset({b"x-mine"})) == ((b"Location", b"/1"),)


def test_lines_that_belong_to_the_connection_are_left_out():
    lines = [(b"Connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"x-kept", b"2")]
    assert kept_lines(lines, frozenset()) == ((b"x-kept", b"2"),)


@pytest.mark.parametrize(
    "line",
    [
        (b"x-a", b"1\r\nset-cookie: a=1"),
        (b"x-a", b"1\n"),
        (b"x-a", b"\x00"),
        (b"x-a\r\nx-b", b"1"),
        (b"x a", b"1"),
        (b"", b"1"),
        (b"x\xff", b"1"),
    ],
)
def test_what_is_no_header_line_is_left_out(line):
    kept = (b"x-kept", b"caf\xe9\t1")
    assert kept_lines([line, kept], frozenset()) == (kept,)


def test_an_answer_comes_back_as_it_was_stored():
    assert unpack_answer(pack_answer(ANSWER)) == ANSWER
    assert unpack_answer(pack_answer(StoredAnswer(200, (), None))) == StoredAnswer(200, (), None)


def test_an_answer_of_another_version_is_told_by_its_number():
    with pytest.raises(SerializationError, match=r"cannot be read: .*2"):
        unpack_answer(msgspec.msgpack.encode([2, 200, [], b""]))


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", pickle.dumps({"status": 200}), "text", None, b"\x94\x02\xcc\xc8\x90\xc0"],
)
def test_garbage_in_the_place_of_an_answer_is_a_typed_error(garbage):
    with pytest.raises(SerializationError, match="stored response"):
        unpack_answer(garbage)


def test_a_replay_has_the_lines_unsplit_in_order_and_its_marker():
    answer = replay(Answer(ANSWER.status, ANSWER.headers, ANSWER.body), b"Idempotent-Replayed")
    assert answer.status == 201
    assert answer.body == b"\x00body"
    assert answer.headers == (
        (b"x-a", b"1"),
        (b"x-a", b"2, 3"),
        (b"content-length", b"5"),
        (b"Idempotent-Replayed", b"true"),
    )


def test_a_replay_without_a_body_does_not_tell_a_length():
    assert replay(Answer(204, (), b""), b"r").headers == ((b"r", b"true"),)


def test_an_event_stream_is_known_by_its_type_alone():
    assert is_event_stream([(b"Content-Type", b"Text/Event-Stream; charset=utf-8")])
    assert not is_event_stream([(b"content-type", b"text/plain"), (b"x", b"text/event-stream")])


def test_the_codec_takes_bytes_only_and_leaves_them_alone():
    codec = AnswerCodec()
    assert codec.decode(codec.encode(b"x", b""), b"") == b"x"
    with pytest.raises(SerializationError, match="as bytes"):
        codec.encode("x", b"")
