from __future__ import annotations

import pytest

from http_rules.given import JSON, a_request
from semel.http.requests import content, digest, fingerprint

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
    form = of(multipart("b", PART, PART), ("content-type", FORM + "b"))
    assert form.hex() == "d3730d324552c5db7942bdb0aded1dfd"


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
    "written",
    [
        "multipart/form-data; boundary={}",
        'Multipart/Form-Data;BOUNDARY="{}"',
        "multipart/form-data; boundary={}; charset=utf-8",
        'multipart/related; type="text/xml"; boundary="{}"',
    ],
)
@pytest.mark.parametrize(
    ("before", "after"), [(b"", b""), (b"\r\n", b"\r\n"), (b"note\r\n", b"end")]
)
def test_a_retry_may_choose_another_boundary(written, before, after):
    def of_boundary(boundary, part=PART):
        body = before + multipart(boundary, part, PART) + after
        return of(body, ("content-type", written.format(boundary)))

    marks = ["abc", "----WebKitFormBoundary7MA4YWxk", "=_'()+", "0d7b8c-1f"]
    assert len({of_boundary(mark) for mark in marks}) == 1
    assert of_boundary("abc") != of_boundary("abc", OTHER)


def _hidden(boundary, value, end=b"\r\n"):
    """A form of one field, as the application may find it in any place of a body."""
    part = b'Content-Disposition: form-data; name="amount"' + end + end + value
    mark = b"--" + boundary
    return mark + end + part + end + mark + b"--" + end


DECOY = b"--A\r\n\r\nx\r\n--A--\r\n"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(kind, body, id=name)
        for name, kind, body in [
            ("another_name", FORM + "A; xboundary=B", lambda v: _hidden(b"B", v) + DECOY),
            ("before", "multipart/form-data; xboundary=A; boundary=B", lambda v: _hidden(b"B", v) + DECOY),
            ("after", "multipart/form-data; xboundary=A; boundary=B", lambda v: DECOY + _hidden(b"B", v)),
            ("two_boundaries", FORM + "A; boundary=B", lambda v: _hidden(b"B", v) + DECOY),
            ("in_quotes", 'multipart/form-data; x="; boundary=A"; boundary=B', lambda v: DECOY + _hidden(b"B", v)),
            ("continued", FORM + "A; boundary*0=B", lambda v: DECOY + _hidden(b"B", v)),
            ("before_the_first", FORM + "A", lambda v: b"\n" + _hidden(b"A", v, b"\n") + b"\r\n" + DECOY),
            ("after_the_last", FORM + "A", lambda v: DECOY + b"\n" + _hidden(b"A", v, b"\n")),
        ]
    ],
)  # fmt: skip
def test_no_choice_of_a_boundary_hides_a_byte(kind, body):
    content_type = ("content-type", kind)
    assert of(body(b"1"), content_type) != of(body(b"999"), content_type)


def test_a_content_type_of_many_boundaries_is_compared_as_it_is():
    many = b"multipart/form-data" + b"; boundary=x" * 5000
    assert content(many, b"--x\r\na\r\n--x--") == [many, b"--x\r\na\r\n--x--"]


@pytest.mark.parametrize("length", [1024, 1025])
def test_a_content_type_is_parsed_up_to_a_length(length):
    def of(boundary):
        kind = b"multipart/form-data; boundary=%b; a=" % boundary
        body = b"--%b\r\na\r\n--%b--" % (boundary, boundary)
        return content(kind + b"a" * (length - len(kind)), body)

    assert (of(b"x") == of(b"y")) is (length <= 1024)


def test_a_boundary_that_is_also_content_counts():
    # What is a field for a lenient parser under one boundary is text under the other.
    content = _hidden(b"A", b"5", b"\n")
    under_a = of(multipart("A", content), ("content-type", FORM + "A"))
    assert under_a != of(multipart("C", content), ("content-type", FORM + "C"))
    # Text that begins as the boundary does, and so follows its choice.
    text = "\r\n--{}5".format
    bodies = [multipart(mark, PART + text(mark).encode()) for mark in ("A", "C")]
    assert of(bodies[0], ("content-type", FORM + "A")) != of(
        bodies[1], ("content-type", FORM + "C")
    )


def test_the_case_of_a_boundary_counts():
    both = _hidden(b"a", b"1") + _hidden(b"A", b"999")
    assert of(both, ("content-type", FORM + "a")) != of(both, ("content-type", FORM + "A"))


def test_every_line_with_a_content_type_counts():
    first, body = ("content-type", FORM + "A"), multipart("A", PART)
    assert of(body, first) != of(body, first, ("content-type", FORM + "B"))


def test_parts_are_not_taken_for_a_body_that_has_no_boundary():
    piece = b"\r\n" + PART
    assert of(multipart("A", PART), ("content-type", FORM + "A")) != of(
        piece, ("content-type", "multipart/form-data")
    )


def test_what_stands_around_the_parts_is_not_taken_for_parts():
    kind = ("content-type", FORM + "A")
    around = multipart("A", PART)[:-2] + b"\r\nend"
    assert of(around, kind) != of(multipart("A", PART), kind)
    assert of(b"\r\n" + multipart("A", PART), kind) != of(multipart("A", b"", PART), kind)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FORM + "abc", b"no parts at all"),
        (FORM + "abc", multipart("abc", PART, PART).removesuffix(b"--\r\n")),
        ("multipart/form-data", multipart("abc", PART)),
    ],
)
def test_a_multipart_body_that_is_none_counts_as_its_bytes(kind, body):
    assert of(body, ("content-type", kind)) != of(body + b" ", ("content-type", kind))


def test_a_secret_makes_the_digest_its_own():
    request = a_request()
    digests = {fingerprint(request, b"5", secret) for secret in (None, b"one", b"two")}
    assert len(digests) == 3


def test_a_path_that_is_no_text_has_a_digest():
    assert of(path="/a\udcff") != of(path="/a")


def test_json_in_another_charset_is_another_body():
    """A framework may read other values in the same bytes."""
    body = b'{"to": "+AGE-"}'
    plain = content(b"application/json", body)
    assert content(b"application/json; charset=UTF-8", body) == plain
    assert content(b"application/json; charset=utf-7", body) != plain
