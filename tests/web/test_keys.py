"""Numbers 1 to 5 of the web rules: where a key comes from, and what it may look like."""

from __future__ import annotations

import json

import pytest

from web.client import Connection, head
from web.profiles import KEY_FIELD
from web.serve import MIDDLEWARES, STACKS

BODY = b'{"amount": 5}'
BAD_KEYS = {
    "empty": b"",
    "an empty string": b'""',
    "too long": b"k" * 256,
    "too long, quoted": b'"' + b"k" * 256 + b'"',
    "far too long": b"k" * 5000,
    "not ASCII": "schlüssel-s3cr3t".encode(),
    "not even text": b"s3cr3t\xff\xfekey",
    "a tab": b'"s3cr3t\tkey"',
    "DEL": b"s3cr3t\x7fkey",
    "a control character": b"s3cr3t\x01key",
    "a bad escape": rb'"s3cr3t\key"',
    "an escape without an end": b'"s3cr3t\\"',
    "no end of the string": b'"s3cr3t',
    "a quote inside": b's3cr3t"key',
    "a space inside": b"s3cr3t key",
    "a list": b'"s3cr3t-1", "s3cr3t-2"',
    "a raw list": b"s3cr3t-1,s3cr3t-2",
    "parameters without a name": b'"s3cr3t";=1',
    "parameters without an end": b'"s3cr3t";a="1',
}


@pytest.fixture
def stack(framework):
    return framework


def test_1_a_quoted_and_a_raw_key_are_the_same_key(on, key, run):
    first = on().post("/pay", key=f'"{key}"', body=BODY, run=run)
    again = on().post("/pay", key=key, body=BODY, run=run)
    padded = on().post("/pay", key=f"  {key}  ", body=BODY, run=run)
    assert first.status == 201
    assert not first.replayed
    assert again.replayed
    assert padded.replayed
    assert first.body == again.body == padded.body


def test_1_an_escaped_quote_belongs_to_the_key(on, key, run, folder):
    odd = rf'"{key} \"a\\b\""'
    first, again = (on().post("/pay", key=odd, run=run) for _ in range(2))
    assert again.replayed
    assert first.body == again.body
    other = on().post("/pay", key=rf'"{key} \"ab\""', run=run)
    assert not other.replayed
    assert folder.runs(run) == 2


def test_33_parameters_of_a_quoted_key_are_ignored_and_belong_to_a_raw_one(on, key, run, folder):
    first = on().post("/pay", key=f'"{key}"', run=run)
    again = on().post("/pay", key=f'"{key}";a=1; b="x"', run=run)
    assert (again.replayed, again.body) == (True, first.body)
    raw = on().post("/pay", key=f"{key};a=1", run=run)
    assert (raw.status, raw.replayed) == (201, False)
    assert on().post("/pay", key=f'"{key};a=1"', run=run).body == raw.body
    assert folder.runs(run) == 2


def test_1_the_longest_key_is_taken(on, key, run):
    longest = key.ljust(255, "k")
    assert on().post("/pay", key=longest, run=run).status == 201
    assert on().post("/pay", key=f'"{longest}"', run=run).replayed


def test_1_an_application_names_its_own_header(on, key, run, folder):
    client = on("own-header")
    own = [("X-Idempotency-Key", key)]
    first, again = (client.post("/pay", lines=own, run=run) for _ in range(2))
    assert first.body == again.body
    assert again.header("x-replay") == "true"
    assert client.post("/pay", key=key, run=run).body != first.body
    assert folder.runs(run) == 2


def test_1_strict_takes_only_the_quoted_form(on, key, run, folder):
    refused = on("strict").post("/pay", key=key, run=run)
    assert (refused.status, refused.code) == (400, "invalid_key")
    assert folder.runs(run) == 0
    assert on("strict").post("/pay", key=f'"{key}"', run=run).status == 201


def test_2_a_bad_key_is_refused_and_never_repeated(on, run, folder, worker):
    """The server itself may refuse the bytes; what comes as far as the integration is a problem."""
    ours = 0
    for why, bad in BAD_KEYS.items():
        answer = on().post("/pay", key=bad, run=run)
        assert answer.status == 400, why
        assert b"s3cr3t" not in answer.body, why
        ours += answer.code == "invalid_key"
    assert ours >= len(BAD_KEYS) - 4
    assert folder.runs(run) == 0
    assert "s3cr3t" not in worker.log()


def test_2_several_lines_of_keys_are_refused(on, key, run, folder):
    twice = [("Idempotency-Key", key), ("idempotency-key", key)]
    answer = on().post("/pay", lines=twice, run=run)
    assert (answer.status, answer.code) == (400, "invalid_key")
    assert folder.runs(run) == 0


def test_3_without_a_key_a_request_passes(on, run, folder):
    first, again = (on().post("/pay", body=BODY, run=run) for _ in range(2))
    assert (first.status, again.status) == (201, 201)
    assert first.body != again.body
    assert folder.runs(run) == 2


def test_3_a_required_key_that_is_missing_is_refused(on, run, folder):
    answer = on("required").post("/pay", body=BODY, run=run)
    assert (answer.status, answer.code) == (400, "key_missing")
    assert folder.runs(run) == 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT"])
def test_4_other_methods_are_not_intercepted(on, key, run, folder, method):
    for told in ({"key": key}, {"key": key}, {}):
        answer = on("required").open(method, "/pay", run=run, **told).raw()
        assert answer.startswith(b"HTTP/1.1 201")
    assert folder.runs(run) == 3


def test_4_patch_is_protected(on, key, run):
    first, again = (on().ask("PATCH", "/pay", key=key, run=run) for _ in range(2))
    assert again.replayed
    assert first.body == again.body


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_4_put_and_delete_are_protected_on_request(on, key, run, method):
    first, again = (on("more-methods").ask(method, "/pay", key=key, run=run) for _ in range(2))
    assert again.replayed
    assert first.body == again.body


@pytest.mark.parametrize("stack", STACKS)
def test_26_a_method_in_lower_case_is_protected_or_refused(on, stack, key, run, folder):
    """Some servers refuse it, or write it in capitals; no handler may run unprotected."""
    without = on("required").ask("post", "/pay", run=run)
    assert 400 <= without.status < 500
    assert folder.runs(run) == 0
    if stack in {"asgi", "asgi-hypercorn", "wsgi", "flask", "django-async"}:
        assert without.code == "key_missing"
        first = on("required").ask("post", "/pay", key=key, run=run)
        for method in ("post", "POST"):
            again = on("required").ask(method, "/pay", key=key, run=run)
            assert (again.replayed, again.body) == (True, first.body)
        assert folder.runs(run) == 1


@pytest.mark.parametrize("stack", ["asgi-hypercorn"])
def test_4_a_websocket_passes_through(on, key):
    shaking = [
        ("Host", "required.sqlite"),
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ]
    connection = Connection(on().port).send(head("GET", "/pay", shaking))
    assert connection.until(b"\r\n\r\n").startswith(b"HTTP/1.1 101")
    connection.close()


def test_5_a_key_may_come_from_the_query(on, key, run):
    target = f"/pay?idempotency_key={key}"
    first, again = (on("query").post(target, run=run) for _ in range(2))
    assert again.replayed
    assert first.body == again.body


@pytest.mark.parametrize(
    "query", ["idempotency_key=", "idempotency_key=a&idempotency_key=a", "idempotency_key=%C3%A4"]
)
def test_5_a_bad_key_in_the_query_is_refused(on, run, folder, query):
    answer = on("query").post(f"/pay?{query}", run=run)
    assert (answer.status, answer.code) == (400, "invalid_key")
    assert folder.runs(run) == 0


def test_5_a_key_may_come_from_a_field_of_the_body(on, key, run):
    outer, inner = KEY_FIELD.split(".")
    body = json.dumps({outer: {inner: key}, "amount": 5}).encode()
    first, again = (on("field").post("/pay", body=body, run=run) for _ in range(2))
    assert again.replayed
    assert first.body == again.body


@pytest.mark.parametrize("body", [b"{}", b'{"payment": {"reference": null}}', b"{"])
def test_5_a_body_without_the_field_is_refused(on, run, folder, body):
    answer = on("field").post("/pay", body=body, run=run)
    assert (answer.status, answer.code) == (400, "invalid_key")
    assert folder.runs(run) == 0


FORM = "application/x-www-form-urlencoded"


def test_5_a_key_may_come_from_a_field_of_a_form(on, key, run):
    told = {"body": b"amount=5&reference=" + key.encode(), "content_type": FORM, "run": run}
    first, again = (on("form").post("/pay", **told) for _ in range(2))
    assert again.replayed
    assert first.body == again.body


OTHER_FORMATS = [
    ("field", FORM),
    ("field", None),
    ("fields", FORM),
    ("form", "application/json"),
    ("form", None),
]


@pytest.mark.parametrize("chosen", OTHER_FORMATS)
def test_5_a_client_does_not_choose_in_which_format_a_field_is_looked_for(
    on, key, run, folder, chosen
):
    profile, kind = chosen
    body = b'{"payment": {"reference": "SAVE50"}, "x": "&payment=1&reference=%s&"}' % key.encode()
    answer = on(profile).post("/pay", key=key, body=body, content_type=kind, run=run)
    assert (answer.status, answer.code) == (415, "unsupported_media_type")
    needed = FORM if profile == "form" else "application/json"
    assert f"must have the content type {needed}." in answer.body.decode()
    assert folder.runs(run) == 0


def test_5_a_key_may_come_from_a_function_of_the_request(on, key, run):
    order = [("X-Order", key)]
    first, again = (on("function").post("/pay", lines=order, run=run) for _ in range(2))
    assert again.replayed
    assert first.body == again.body
    assert on("function").post("/pay", run=run).status == 201, "None = no key: it passes"


def test_5_the_first_source_in_the_order_decides(on, key, run):
    """By default the header goes before the query; under the profile `order` a function before both."""
    target = f"/pay?idempotency_key={key}-query"
    told = {"key": f"{key}-header", "lines": [("X-Order", f"{key}-function")], "run": run}
    first = on("order").post(target, **told)
    assert on("order").post(target, lines=told["lines"], run=run).body == first.body
    plain = on("query").post(target, key=f"{key}-header-1", run=run)
    assert on("query").post(target, key=f"{key}-header-1", run=run).body == plain.body
    assert not on("query").post(target, key=f"{key}-header-2", run=run).replayed


@pytest.mark.parametrize("stack", MIDDLEWARES)
def test_25_excluded_paths_need_no_key(on, run):
    client = on("exclude")
    assert client.post("/pay", run=run).code == "key_missing"
    assert client.post("/login", run=run).status == 201
    assert client.post("/status/202", run=run).status == 202


@pytest.mark.parametrize("stack", MIDDLEWARES)
def test_25_only_included_paths_need_a_key(on, run):
    client = on("include")
    assert client.post("/pay", run=run).code == "key_missing"
    assert client.post("/refund", run=run).code == "key_missing"
    assert client.post("/private", run=run).status == 201


@pytest.mark.parametrize("stack", MIDDLEWARES)
def test_5_a_route_has_rules_of_its_own(on, key, run):
    client = on("routes")
    assert client.post("/pay", run=run).code == "key_missing"
    assert client.post("/refund", run=run).status == 201
    assert client.post("/refund", key=key, run=run).status == 201
    assert client.post("/refund", key=key, run=run).code == "duplicate_request"


@pytest.mark.parametrize("stack", MIDDLEWARES)
@pytest.mark.parametrize("profile", ["include", "exclude", "routes"])
def test_25_no_spelling_of_a_path_leads_past_the_patterns(on, run, folder, profile):
    client = on(profile)
    newline = client.post("/pay%0A", run=run)
    assert (newline.status, newline.code) == (400, "invalid_path")
    for spelling in ("//pay", "/pay/", "/%2Fpay", "/pay%2F"):
        client.post(spelling, run=run)
    assert folder.runs(run) == 0
