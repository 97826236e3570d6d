from __future__ import annotations

import pytest

from http_rules.given import JSON, a_request
from semel.http.fingerprints import digest, fingerprint

FORM = "multipart/form-data; boundary="


def of(body=b"", *lines, **request):
    return fingerprint(a_request(*lines, **request), body)


def multipart(boundary, *parts):
    mark = b"--" + boundary.encode()
    return b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"


PART = b'Content-Disposition: form-data; name="amount"\r\n\r\n5'
OTHER = b'Content-Disposition: form-data; name="amount"\r\n\r\n6'


def test_the_format_is_held():
    assert of(b'{"b":1,"a":[1.50]}', JSON).hex() == "e0ba31b0a2af1f6b9efff25f9e00a4eb"
    assert of(b"\x00raw", query=b"a=1").hex() == "02f2a55fc9d71f0792ea2b079ebecf40"


@pytest.mark.parametrize(
    "other",
    [
        {"method": "PATCH"},
        {"path": "/pay2"},
        {"query": b"a=1"},
    ],
)
def test_method_path_and_query_count(other):
    assert of(b"x") != of(b"x", **other)


def test_the_content_type_counts():
    assert of(b"x", ("content-type", "text/plain")) != of(b"x", ("content-type", "text/html"))


def test_no_part_can_be_pushed_into_its_neighbour():
    assert of(b"x", path="/ab", query=b"c") != of(b"x", path="/a", query=b"bc")
    assert digest((b"a", b"")) != digest((b"", b"a")) != digest((b"a",))


def test_the_order_of_json_keys_does_not_count():
    assert of(b'{"a": 1, "b": {"c": 2, "d": 3}}', JSON) == of(b'{"b":{"d":3,"c":2},"a":1}', JSON)
    assert of(b"[1,2]", JSON) != of(b"[2,1]", JSON)


def test_a_vendor_type_is_json_too():
    kind = ("content-type", "application/vnd.shop+json; charset=utf-8")
    assert of(b'{"a":1,"b":2}', kind) == of(b'{"b":2,"a":1}', kind)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"0.1", b"0.10000000000000001"),
        (b"1", b"1.0"),
        (b"123456789012345678901234567890", b"123456789012345678901234567891"),
        (b'{"a":0.1}', b'{"a":"0.1"}'),
    ],
)
def test_numbers_that_may_be_two_amounts_are_two_payloads(one, other):
    assert of(one, JSON) != of(other, JSON)


@pytest.mark.parametrize("broken", [b"{", b'"\\ud800"', b"\xff", b"[" * 100_000])
def test_what_is_not_json_counts_as_its_bytes(broken):
    assert of(broken, JSON) == of(broken, JSON) != of(broken + b" ", JSON)


def test_the_boundary_of_a_multipart_body_does_not_count():
    first = of(multipart("abc", PART), ("content-type", FORM + "abc"))
    again = of(multipart("xyz", PART), ("content-type", FORM + '"xyz"'))
    assert first == again
    assert first != of(multipart("abc", OTHER), ("content-type", FORM + "abc"))
    assert first != of(multipart("abc", PART, PART), ("content-type", FORM + "abc"))


@pytest.mark.parametrize(
    ("kind", "body"),
    [(FORM + "abc", b"no parts at all"), ("multipart/form-data", multipart("abc", PART))],
)
def test_a_multipart_body_that_is_none_counts_as_its_bytes(kind, body):
    assert of(body, ("content-type", kind)) != of(body + b" ", ("content-type", kind))


def test_a_secret_makes_the_digest_its_own():
    request = a_request()
    digests = {fingerprint(request, b"5", secret) for secret in (None, b"one", b"two")}
    assert len(digests) == 3


def test_a_path_that_is_no_text_has_a_digest():
    assert of(path="/a\udcff") != of(path="/a")
