"""Numbers 11 to 14 of the web rules: whose key it is, and what makes two requests the same."""

from __future__ import annotations

import json

import pytest

from web.client import Connection, head
from web.profiles import SMALL

BODY = b'{"amount": 5}'


@pytest.fixture
def stack(framework):
    return framework


def as_user(name):
    return [("X-User", name)]


def test_11_two_tenants_with_one_key_have_two_records(on, key, run, folder):
    client = on("tenant")
    ann = client.post("/pay", key=key, body=BODY, lines=as_user("ann"), run=run)
    bob = client.post("/pay", key=key, body=BODY, lines=as_user("bob"), run=run)
    assert ann.body != bob.body
    assert not bob.replayed
    assert client.post("/pay", key=key, body=BODY, lines=as_user("ann"), run=run).body == ann.body
    assert folder.runs(run) == 2


def test_11_a_caller_that_nobody_knows_is_refused_not_shared(on, key, run, folder):
    for lines in ([], as_user("")):
        answer = on("tenant").post("/pay", key=key, body=BODY, lines=lines, run=run)
        assert (answer.status, answer.code) == (401, "identity_missing")
    assert folder.runs(run) == 0


def test_11_no_delimiter_moves_from_the_tenant_to_the_key(on, key, run, folder):
    pairs = [
        (f"a/{key}", "b"),
        ("a", f"{key}/b"),
        ("a/", f"{key}/b"),
        ("a%2F", key),
        ("a/", key),
        ("a", f"/{key}"),
    ]
    for tenant, one in pairs:
        answer = on("tenant").post("/pay", key=one, body=BODY, lines=as_user(tenant), run=run)
        assert (answer.status, answer.replayed) == (201, False), (tenant, one)
    assert folder.runs(run) == len(pairs)


def test_12_the_same_key_on_another_route_or_method_is_refused(on, key, run, folder):
    assert on().post("/pay", key=key, body=BODY, run=run).status == 201
    assert on().post("/refund", key=key, body=BODY, run=run).code == "payload_mismatch"
    assert on().ask("PATCH", "/pay", key=key, body=BODY, run=run).code == "payload_mismatch"
    assert folder.runs(run) == 1


def test_12_routes_have_records_of_their_own_on_request(on, key, run, folder):
    client = on("separate-routes")
    pay = client.post("/pay", key=key, body=BODY, run=run)
    refund = client.post("/refund", key=key, body=BODY, run=run)
    patched = client.ask("PATCH", "/pay", key=key, body=BODY, run=run)
    assert len({pay.body, refund.body, patched.body}) == 3
    assert client.post("/pay", key=key, body=BODY, run=run).body == pay.body
    assert client.post("/refund", key=key, body=BODY, run=run).body == refund.body
    assert folder.runs(run) == 3


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/pay?a=2", {}),
        ("/pay?a=1&a=1", {}),
        ("/pay?a=1", {"body": b'{"amount": 50}'}),
        ("/pay?a=1", {"body": b'{"amount": "5"}'}),
        ("/pay?a=1", {"body": b""}),
        ("/pay?a=1", {"content_type": "text/plain"}),
    ],
)
def test_13_whatever_the_request_says_is_compared(on, key, folder, target, said):
    told = {"key": key, "body": BODY, "run": key}
    assert on().post("/pay?a=1", **told).status == 201
    other = on().post(target, **{**told, **said})
    assert (other.status, other.code) == (422, "payload_mismatch")
    assert folder.runs(key) == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (b'{"a": 36893488147419103233}', b'{"a": 36893488147419103232}'),
        (b'{"a": 0.1}', b'{"a": 0.10000000000000001}'),
        (b'{"a": 1}', b'{"a": 1.0}'),
        (b'{"a": "\xc3\xa4"}', b'{"a": "a\xcc\x88"}'),
        (b'{"a": 1', b'{"a":1'),
    ],
)
def test_13_no_two_bodies_are_taken_for_one(on, key, run, one, two):
    assert on().post("/pay", key=key, body=one, run=run).status == 201
    assert on().post("/pay", key=key, body=two, run=run).code == "payload_mismatch"


def test_13_the_order_of_jsons_keys_does_not_matter(on, key, run):
    one = b'{"amount": 5, "to": {"name": "Ann", "iban": "DE02"}}'
    two = b'{ "to": {"iban": "DE02",\n"name": "\\u0041nn"}, "amount": 5 }'
    first = on().post("/pay", key=key, body=one, run=run)
    again = on().post(
        "/pay", key=key, body=two, content_type="application/JSON; charset=utf-8", run=run
    )
    assert again.replayed
    assert again.body == first.body


def test_13_only_the_chosen_fields_are_compared(on, key, run):
    def paying(amount, iban, note):
        said = {"amount": amount, "to": {"iban": iban}, "note": note}
        return on("fields").post("/pay", key=key, body=json.dumps(said).encode(), run=run)

    first = paying(5, "DE02", "first try")
    assert paying(5, "DE02", "second try").body == first.body
    assert paying(6, "DE02", "first try").code == "payload_mismatch"
    assert paying(5, "DE03", "first try").code == "payload_mismatch"


def test_13_a_function_chooses_what_is_compared(on, key, run):
    client = on("payload-function")
    first = client.post("/pay", key=key, body=b"12345", content_type="text/plain", run=run)
    assert (
        client.post("/pay", key=key, body=b"54321", content_type="text/plain", run=run).body
        == first.body
    )
    assert client.post("/pay", key=key, body=b"1", content_type="text/plain", run=run).status == 422


def test_13_a_secret_makes_another_digest(on, key, run, records):
    on("secret").post("/pay", key=key, body=BODY, run=run)
    on().post("/pay", key=f"{key}-plain", body=BODY, run=run)
    keyed = records.peek(key, scope="http")
    plain = records.peek(f"{key}-plain", scope="http")
    assert len(keyed.fingerprint) == len(plain.fingerprint) == 16
    assert keyed.fingerprint != plain.fingerprint
    assert on("secret").post("/pay", key=key, body=BODY, run=run).replayed


def _form(boundary, amount=b"5", content=b"\x00\xff\r\nraw"):
    mark = b"--" + boundary.encode()
    parts = [
        b'Content-Disposition: form-data; name="amount"\r\n\r\n' + amount,
        b'Content-Disposition: form-data; name="file"; filename="a.bin"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content,
    ]
    body = b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"
    return {"body": body, "content_type": f"multipart/form-data; boundary={boundary}"}


def test_14_a_form_is_the_same_whatever_its_boundary(on, key, run, folder):
    first = on().post("/pay", key=key, run=run, **_form("one-boundary"))
    again = on().post("/pay", key=key, run=run, **_form("another-boundary"))
    assert first.status == 201
    assert again.replayed
    assert again.body == first.body
    for other in (_form("third", amount=b"6"), _form("third", content=b"\x00\xff\r\nraW")):
        assert on().post("/pay", key=key, run=run, **other).code == "payload_mismatch"
    assert folder.runs(run) == 1


@pytest.mark.parametrize(
    "written",
    ["xboundary=decoy; boundary=real", "boundary=decoy; boundary=real", "boundary=real; x=decoy"],
)
def test_14_no_boundary_hides_a_form_beside_another_one(on, key, run, folder, written):
    def form(amount):
        body = _form("real", amount)["body"] + b"\r\n--decoy\r\n\r\nx\r\n--decoy--\r\n"
        return {"body": body, "content_type": f"multipart/form-data; {written}"}

    assert on().post("/pay", key=key, run=run, **form(b"5")).status == 201
    assert on().post("/pay", key=key, run=run, **form(b"5")).replayed
    assert on().post("/pay", key=key, run=run, **form(b"999")).code == "payload_mismatch"
    assert folder.runs(run) == 1


def test_22_a_body_above_the_cap_is_refused_before_the_claim(on, key, run, folder, records):
    refused = on("small").post("/pay", key=key, body=b"x" * (SMALL + 1), run=run)
    assert (refused.status, refused.code) == (413, "body_too_large")
    assert records.peek(key, scope="http") is None
    exact = b"x" * SMALL
    assert on("small").post("/echo", key=key, body=exact, run=run).body == exact
    assert folder.runs(run) == 1


def test_22_chunks_are_counted_too(on, key, run, folder):
    half = b"x" * (SMALL // 2)
    refused = on("small").post("/pay", key=key, chunks=[half, half, b"x"], run=run)
    assert (refused.status, refused.code) == (413, "body_too_large")
    assert folder.runs(run) == 0
    answer = on("small").post("/echo", key=key, chunks=[half, half], run=run)
    assert answer.body == half + half
    assert on("small").post("/echo", key=key, body=half + half, run=run).replayed


def test_22_a_body_in_broken_chunks_runs_nothing(on, key, folder):
    lines = [("Host", on().host), ("X-Run", key), ("Idempotency-Key", key)]
    lines += [("Connection", "close"), ("Transfer-Encoding", "chunked")]
    broken = b"5\r\n12345\r\nzz\r\n12345\r\n0\r\n\r\n"
    assert Connection(on().port).send(head("POST", "/pay", lines) + broken).answer().status == 400
    assert folder.runs(key) == 0
    assert on().post("/pay", key=key, run=key).status == 201


def test_22_a_body_that_was_read_for_its_key_is_there_for_the_handler(on, key, run):
    body = b'{"payment": {"reference": "%s"}}' % key.encode()
    assert on("field").post("/echo", body=body, run=run).body == body
    plain = on().post("/echo", body=body, run=run)
    assert plain.body == body
