"""The five verbs over sockets: what each answers, and every way in which a request can be wrong."""

from __future__ import annotations

import json
from itertools import count

import msgspec
import pytest

from semel import Idempotency
from semel.core.fingerprint import fingerprint
from semel.core.run_info import read
from semel.core.stored_answers import unpack_answer

OWNER = "0123456789abcdef01234567"
OTHER = "f" * 24
numbers = count(1)


@pytest.fixture
def key(request):
    """A key that no other test uses."""
    return f"{request.node.originalname}-{next(numbers)}"


@pytest.fixture(scope="module")
def engine(centre):
    """A Python engine on the service's own store."""
    with Idempotency(f"sqlite:///{centre.folder / 'semel.db'}") as engine:
        yield engine


def run(centre, scope, key, **more):
    """Start a key that nobody runs, and return the owner."""
    answer = centre.post("start", scope=scope, key=key, **more)
    assert answer.data["status"] == "run", answer
    return answer.data["owner"]


def problem(answer):
    """Check the form of a problem, and return its status and code."""
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    told = answer.data
    assert {"type", "title", "status", "detail", "code"} <= told.keys()
    assert told["status"] == answer.status
    assert told["type"] == "urn:semel:problem:" + told["code"].replace("_", "-")
    return answer.status, told["code"]


# --- one key from start to end -------------------------------------------------------------------


def test_one_attempt_from_start_to_finish(centre, key):
    started = centre.post("start", scope="orders", key=key, payload={"a": 1})
    assert started.status == 200
    assert started.headers["content-type"] == "application/json"
    assert started.headers["cache-control"] == "no-store"
    told = started.data
    assert {**told, "owner": 0, "fence": 0, "waited": 0} == {
        "status": "run",
        "owner": 0,
        "attempt": 1,
        "fence": 0,
        "takeover": False,
        "lease": 30.0,
        "renew_every": 10.0,
        "waited": 0,
    }
    assert len(bytes.fromhex(told["owner"])) == 12
    assert 0 <= told["waited"] < 30
    owner = told["owner"]
    renewed = centre.post("renew", scope="orders", key=key, owner=owner, lease=12)
    assert renewed.data == {"status": "renewed", "lease": 12.0, "renew_every": 4.0}
    finished = centre.post("finish", scope="orders", key=key, owner=owner, result={"id": 7})
    assert finished.data == {"status": "stored"}
    done = centre.post("start", scope="orders", key=key, payload={"a": 1})
    assert done.data == {"status": "done", "attempt": 1, "result": {"id": 7}}


def test_messagepack_in_and_out(centre, key):
    def post(verb, **fields):
        headers = {"Content-Type": "application/msgpack; charset=binary"}
        answer = centre.request("POST", f"/v1/{verb}", msgspec.msgpack.encode(fields), headers)
        assert answer.headers["content-type"] == "application/msgpack"
        return msgspec.msgpack.decode(answer.body)

    owner = post("start", scope="orders", key=key, payload=b"\x00")["owner"]
    assert (
        post("finish", scope="orders", key=key, owner=owner, result=b"\xff")["status"] == "stored"
    )
    assert post("start", scope="orders", key=key, payload=b"\x00") == {
        "status": "done",
        "attempt": 1,
        "result": "/w==",
        "lossy": True,
    }


def test_a_second_finish_is_stored_and_the_first_result_stays(centre, key):
    owner = run(centre, "orders", key)
    for result in (None, "another"):
        answer = centre.post("finish", scope="orders", key=key, owner=owner, result=result)
        assert answer.data == {"status": "stored"}
    assert centre.post("start", scope="orders", key=key).data["result"] is None


def test_the_same_owner_is_the_same_attempt(centre, key):
    first, second = (
        centre.post("start", scope="orders", key=key, owner=OWNER.upper()).data for _ in range(2)
    )
    assert first["owner"] == second["owner"] == OWNER
    assert (first["attempt"], first["fence"]) == (second["attempt"], second["fence"])
    assert first["attempt"] == 1
    other = centre.post("start", scope="orders", key=key, owner=OTHER)
    assert problem(other) == (409, "concurrent_request")


def test_a_stale_finish_is_refused_and_changes_nothing(centre, key):
    stale = run(centre, "orders", key, lease=0.05)
    answer = centre.post("start", scope="orders", key=key, wait=25)
    assert (answer.data["takeover"], answer.data["attempt"]) == (True, 2)
    for verb, more in (("renew", {}), ("finish", {"result": 1}), ("fail", {})):
        refused = centre.post(verb, scope="orders", key=key, owner=stale, **more)
        assert problem(refused) == (409, "lease_lost")
        assert "retry-after" not in refused.headers
    current = answer.data["owner"]
    centre.post("finish", scope="orders", key=key, owner=current, result="the successor's")
    assert centre.post("start", scope="orders", key=key).data["result"] == "the successor's"


@pytest.mark.parametrize("verb", ["renew", "finish", "fail"])
def test_an_owner_of_nothing_has_lost_its_lease(centre, key, verb):
    more = {"result": 1} if verb == "finish" else {}
    answer = centre.post(verb, scope="orders", key=key, owner=OWNER, **more)
    assert problem(answer) == (409, "lease_lost")


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "fields", "recorded", "then"),
    [
        ("orders", {}, "forget", ("run", 2)),
        ("orders", {"outcome": "retryable"}, "retryable", ("run", 2)),
        ("orders", {"ran": False}, "forget", ("run", 1)),
        ("orders", {"outcome": "final"}, "final", "previous_failure"),
        ("orders", {"outcome": "unknown"}, "unknown", ("run", 2)),
        ("held", {}, "unknown", "outcome_unknown"),
        ("held", {"ran": False}, "forget", ("run", 1)),
        ("held", {"outcome": "forget"}, "forget", ("run", 2)),
        ("failing", {}, "final", "previous_failure"),
        ("once", {"outcome": "retryable"}, "retryable", "attempts_exhausted"),
        ("once", {"ran": False}, "forget", ("run", 1)),
    ],
)
def test_what_a_failure_does_to_the_key(  # noqa: PLR0917 - a row of the table
    centre, key, scope, fields, recorded, then
):
    owner = run(centre, scope, key, payload=1)
    error = {"type": "CardDeclined", "message": "no funds"}
    failed = centre.post("fail", scope=scope, key=key, owner=owner, error=error, **fields)
    assert failed.data == {"status": "recorded", "outcome": recorded}
    answer = centre.post("start", scope=scope, key=key, payload=1)
    if isinstance(then, tuple):
        assert (answer.data["status"], answer.data["attempt"]) == then
        return
    assert problem(answer) == (409, then)
    assert "retry-after" not in answer.headers
    if then == "previous_failure":
        assert answer.data["error"] == error


def test_a_retryable_failure_keeps_the_payload_and_forget_does_not(centre, key):
    owner = run(centre, "orders", key, payload=1)
    centre.post("fail", scope="orders", key=key, owner=owner, outcome="retryable")
    assert problem(centre.post("start", scope="orders", key=key, payload=2)) == (
        422,
        "payload_mismatch",
    )
    owner = run(centre, "orders", key, payload=1)
    centre.post("fail", scope="orders", key=key, owner=owner)
    run(centre, "orders", key, payload=2)


def test_a_parked_record_says_who_ran_it_and_why(centre, key, engine):
    owner = run(centre, "held", key, by="web-1")
    info = read(engine.peek(key, scope="held").run_info)
    assert (info.by, info.codec, info.ttl) == ("web-1", "json/1", 86400)
    centre.post("fail", scope="held", key=key, owner=owner, error={"type": "Timeout"})
    record = engine.peek(key, scope="held")
    assert record.abandoned
    assert read(record.run_info).why == "Timeout"


# --- duplicates ----------------------------------------------------------------------------------


def test_another_payload_is_a_mismatch(centre, key):
    run(centre, "orders", key, payload={"amount": "10.00"})
    answer = centre.post("start", scope="orders", key=key, payload={"amount": "10.01"})
    assert problem(answer) == (422, "payload_mismatch")
    assert answer.data["superseded"] is False
    assert answer.data["instance"].startswith("urn:semel:key:")


def test_10_and_10_point_0_are_two_payloads(centre, key):
    for number, payload in enumerate(("10", "10.0")):
        body = f'{{"scope": "orders", "key": "{key}", "payload": {payload}}}'.encode()
        headers = {"Content-Type": "application/json"}
        answer = centre.request("POST", "/v1/start", body, headers)
        assert answer.data["code" if number else "status"] == ("run", "payload_mismatch")[number]


def test_a_replaced_payload_is_superseded(centre, key):
    owner = run(centre, "newest", key, payload=1)
    centre.post("finish", scope="newest", key=key, owner=owner, result=1)
    owner = run(centre, "newest", key, payload=2)
    answer = centre.post("start", scope="newest", key=key, payload=1)
    assert problem(answer) == (422, "payload_mismatch")
    assert answer.data["superseded"] is True


def test_a_fingerprint_stands_for_a_payload(centre, key, engine):
    run(centre, "orders", key, payload=[1])
    same = fingerprint([1]).hex()
    assert problem(centre.post("start", scope="orders", key=key, fingerprint=same))[0] == 409
    answer = centre.post("start", scope="orders", key=key, fingerprint="0" * 32)
    assert problem(answer)[0] == 422


def test_guard_mode_rejects_a_duplicate(centre, key):
    owner = run(centre, "guard", key)
    assert problem(centre.post("start", scope="guard", key=key)) == (409, "concurrent_request")
    waited = centre.post("start", scope="guard", key=key, wait=1)  # 0.3 s by its policy
    assert problem(waited) == (409, "concurrent_request")
    centre.post("finish", scope="guard", key=key, owner=owner, result=1)
    answer = centre.post("start", scope="guard", key=key)
    assert problem(answer) == (409, "duplicate_request")
    assert "retry-after" not in answer.headers


def test_a_policy_that_rejects_concurrent_calls_does_not_wait_and_has_its_own_words(centre, key):
    run(centre, "rejecting", key)
    answer = centre.post("start", scope="rejecting", key=key, wait=25)
    assert problem(answer) == (409, "concurrent_request")
    assert answer.data["detail"] == "one at a time, please"


def test_a_busy_key_says_when_its_lease_ends(centre, key):
    run(centre, "orders", key, lease=600)
    answer = centre.post("start", scope="orders", key=key)
    assert problem(answer) == (409, "concurrent_request")
    assert 1 <= int(answer.headers["retry-after"]) <= 600


def test_a_policy_that_compares_payloads_needs_one(centre, key):
    answer = centre.post("start", scope="paid", key=key)
    assert problem(answer) == (400, "invalid_request")
    assert answer.data["field"] == "payload"
    run(centre, "paid", key, fingerprint="0" * 32)


# --- results -------------------------------------------------------------------------------------


def finished(centre, scope, key, **outcome):
    owner = run(centre, scope, key)
    answer = centre.post("finish", scope=scope, key=key, owner=owner, **outcome)
    assert answer.status == 200, answer
    return answer.data


@pytest.mark.parametrize("scope", ["orders", "packed"])
@pytest.mark.parametrize(
    "result",
    [None, False, 0, 1.5, "ü", [], {}, {"$": "decimal", "v": "1.00"}, {"$": {"$": 1}}, 2**53 - 1],
)
def test_a_result_comes_back_as_it_was_sent(centre, key, scope, result):
    finished(centre, scope, key, result=result)
    again = centre.post("start", scope=scope, key=key).data
    assert again == {"status": "done", "attempt": 1, "result": result}


@pytest.mark.parametrize("result", [2**53, -(2**53), 2**70, 2**200])
def test_integers_beyond_those_of_javascript_come_back_as_text(centre, key, result):
    finished(centre, "orders", key, result=[result])
    again = centre.post("start", scope="orders", key=key).data
    assert (again["result"], again["lossy"]) == ([str(result)], True)


def test_a_raw_tag_is_no_decimal_for_python(centre, key, engine):
    finished(centre, "orders", key, result={"$": "decimal", "v": "1.00"})
    assert engine.execute(key, lambda: 0, scope="orders") == {"$": "decimal", "v": "1.00"}


def test_python_gets_what_another_language_stored_and_the_other_way_round(centre, key, engine):
    finished(centre, "orders", key, result={"id": 7})
    assert engine.execute(key, lambda: 0, scope="orders") == {"id": 7}
    engine.execute(f"{key}-2", lambda: (1, b"x"), scope="orders")
    again = centre.post("start", scope="orders", key=f"{key}-2").data
    assert (again["result"], again["lossy"]) == ([1, "eA=="], True)


def test_a_result_that_is_too_large_is_omitted(centre, key):
    assert "at most 20" in finished(centre, "small", key, result="x" * 100)["omitted"]
    answer = centre.post("start", scope="small", key=key)
    assert problem(answer) == (409, "result_unavailable")


def test_a_response_that_is_too_large_is_omitted(centre, key):
    told = finished(centre, "small", key, response={"status": 200, "body": "x" * 100})
    assert "at most 20" in told["omitted"]
    assert problem(centre.post("start", scope="small", key=key)) == (409, "result_unavailable")


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        ({"status": 201}, {"status": 201, "headers": [], "body": ""}),
        (
            {"status": 200, "headers": [["X-Id", " 7 "], ["x-id", "8"]], "body": "ü"},
            {"status": 200, "headers": [["x-id", "7"], ["x-id", "8"]], "body": "ü"},
        ),
        (
            {"status": 200, "base64": "/w=="},
            {"status": 200, "headers": [], "base64": "/w=="},
        ),
        (
            {
                "status": 500,
                "headers": [["Set-Cookie", "a=1"], ["Connection", "x-a"], ["x-a", "1"]],
            },
            {"status": 500, "headers": [], "body": ""},
        ),
    ],
)
def test_a_response_is_given_as_it_was_stored(centre, key, sent, given):
    finished(centre, "orders", key, response=sent)
    again = centre.post("start", scope="orders", key=key).data
    assert again == {"status": "done", "attempt": 1, "response": given}


def test_a_stored_response_is_one_of_our_web_integrations(centre, key, engine):
    finished(centre, "orders", key, response={"status": 201, "headers": [["a", "b"]], "body": "x"})
    stored = engine.peek(key, scope="orders")
    assert stored.outcome.codec == "http/1"
    answer = unpack_answer(stored.outcome.data)
    assert (answer.status, answer.headers, answer.body) == (201, ((b"a", b"b"),), b"x")


@pytest.mark.parametrize(
    "response",
    [
        {"status": 101},
        {"status": 199},
        {"status": 600},
        {"status": 429},
        {"status": 401},
        {"status": "200"},
        {"status": True},
        {},
        {"status": 200, "body": "a", "base64": "YQ=="},
        {"status": 200, "base64": "!"},
        {"status": 200, "base64": "ü"},
        {"status": 200, "headers": [["€", "1"]]},
        {"status": 200, "headers": [["a"]]},
        {"status": 200, "headers": {"a": "b"}},
        {"status": 204, "body": "x"},
        {"status": 200, "more": 1},
        [],
    ],
)
def test_a_response_that_cannot_be_stored_is_a_400_and_the_attempt_still_runs(
    centre, key, response
):
    owner = run(centre, "orders", key)
    answer = centre.post("finish", scope="orders", key=key, owner=owner, response=response)
    assert problem(answer) == (400, "invalid_request")
    assert answer.data["field"] == "response"
    assert centre.post("renew", scope="orders", key=key, owner=owner).status == 200


# --- keys ----------------------------------------------------------------------------------------


def test_new_keys_are_new(centre):
    assert len(centre.post("keys").data["keys"]) == 1
    keys = centre.post("keys", count=1000, app="shop").data["keys"]
    assert len(set(keys)) == 1000
    assert all(each.startswith("shop-") for each in keys)
    assert keys == sorted(keys)


# --- requests that are wrong ---------------------------------------------------------------------

VALID = {
    "start": {"scope": "wrong", "key": "k"},
    "renew": {"scope": "wrong", "key": "k", "owner": OWNER},
    "finish": {"scope": "wrong", "key": "k", "owner": OWNER, "result": 1},
    "fail": {"scope": "wrong", "key": "k", "owner": OWNER},
    "keys": {},
}


def deep(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("verb", "changes", "code", "field"),
    [
        ("start", {"scope": ""}, "invalid_key", "scope"),
        ("start", {"scope": "a b"}, "invalid_key", "scope"),
        ("start", {"scope": "semel.audit"}, "invalid_key", "scope"),
        ("finish", {"scope": "semel.audit"}, "invalid_key", "scope"),
        ("start", {"key": ""}, "invalid_key", "key"),
        ("start", {"key": "a\n"}, "invalid_key", "key"),
        ("start", {"key": "k" * 256}, "invalid_key", "key"),
        ("start", {"key": "k" * 1_000_000}, "invalid_key", "key"),
        ("renew", {"key": "k" * 256}, "invalid_key", "key"),
        ("start", {"key": 5}, "invalid_request", "key"),
        ("start", {"key": None}, "invalid_request", "key"),
        ("start", {"key": ...}, "invalid_request", "key"),
        ("start", {"scope": ...}, "invalid_request", "scope"),
        ("start", {"extra": 1}, "invalid_request", "extra"),
        ("start", {"not a name": 1}, "invalid_request", "body"),
        ("start", {"wait": -1}, "invalid_request", "wait"),
        ("start", {"wait": 26}, "invalid_request", "wait"),
        ("start", {"wait": "1"}, "invalid_request", "wait"),
        ("start", {"wait": float("inf")}, "invalid_request", "body"),
        ("start", {"wait": True}, "invalid_request", "wait"),
        ("start", {"lease": -1}, "invalid_request", "lease"),
        ("start", {"lease": 0}, "invalid_request", "lease"),
        ("start", {"lease": 0.04}, "invalid_request", "lease"),
        ("start", {"lease": 86401}, "invalid_request", "lease"),
        ("start", {"lease": float("nan")}, "invalid_request", "body"),
        ("renew", {"lease": -1}, "invalid_request", "lease"),
        ("start", {"owner": "0" * 23}, "invalid_request", "owner"),
        ("start", {"owner": "0" * 26}, "invalid_request", "owner"),
        ("start", {"owner": "g" * 24}, "invalid_request", "owner"),
        ("start", {"owner": "0" * 24 + "\n"}, "invalid_request", "owner"),
        ("renew", {"owner": ...}, "invalid_request", "owner"),
        ("start", {"fingerprint": "0" * 31}, "invalid_request", "fingerprint"),
        ("start", {"fingerprint": "0" * 32, "payload": 1}, "invalid_request", "fingerprint"),
        ("start", {"by": "x" * 201}, "invalid_request", "by"),
        ("start", {"payload": deep(65)}, "invalid_request", "payload"),
        ("finish", {"result": deep(65)}, "invalid_request", "result"),
        ("start", {"payload": deep(600)}, "invalid_request", None),
        ("finish", {"result": ...}, "invalid_request", "result"),
        ("finish", {"response": {"status": 200}}, "invalid_request", "result"),
        ("fail", {"outcome": "perhaps"}, "invalid_request", "outcome"),
        ("fail", {"outcome": "unknown", "ran": False}, "invalid_request", "outcome"),
        ("fail", {"ran": 0}, "invalid_request", "ran"),
        ("fail", {"error": "text"}, "invalid_request", "error"),
        ("fail", {"error": {"type": "x" * 201}}, "invalid_request", "error"),
        ("fail", {"error": {"secret": 1}}, "invalid_request", "error"),
        ("keys", {"count": 0}, "invalid_request", "count"),
        ("keys", {"count": 1001}, "invalid_request", "count"),
        ("keys", {"count": 1.5}, "invalid_request", "count"),
        ("keys", {"app": ""}, "invalid_request", "app"),
        ("keys", {"app": "a b"}, "invalid_request", "app"),
        ("keys", {"app": "x" * 201}, "invalid_request", "app"),
    ],
)
def test_a_field_that_is_wrong_is_named(  # noqa: PLR0917 - a row of the table
    centre, engine, verb, changes, code, field
):
    fields = {name: value for name, value in (VALID[verb] | changes).items() if value is not ...}
    answer = centre.post(verb, **fields)
    assert problem(answer) == (400, code)
    assert field is None or answer.data["field"] == field
    assert len(answer.body) < 1000
    assert not list(engine.records(scope="wrong"))


@pytest.mark.parametrize("levels", [1, 64])
def test_values_may_have_64_levels(centre, key, levels):
    owner = run(centre, "orders", key, payload=deep(levels))
    answer = centre.post("finish", scope="orders", key=key, owner=owner, result=deep(levels))
    assert answer.data == {"status": "stored"}
    again = centre.post("start", scope="orders", key=key, payload=deep(levels))
    assert again.data["result"] == deep(levels)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff",
        b'{"scope": "wrong", "key": "\xff"}',
        b'{"scope": "wrong", "key": "\\ud800"}',
        b'{"scope": "wrong", "key": "k", "wait": NaN}',
        b'{"scope": "wrong", "key": "k"} trailing',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_object_of_the_verb(centre, engine, body):
    answer = centre.request("POST", "/v1/start", body, {"Content-Type": "application/json"})
    assert problem(answer) == (400, "invalid_request")
    assert answer.data["field"] == "body"
    assert not list(engine.records(scope="wrong"))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({1: 2}, "payload"),
        ([{b"a": 1}], "payload"),
        (float("inf"), "payload"),
        ([float("nan")], "payload"),
        (msgspec.msgpack.Ext(5, b"x"), "payload"),
        (msgspec.Raw(b"\xd6\xff\x00\x00\x00\x00"), "payload"),  # a time
    ],
)
def test_what_only_messagepack_can_say_is_no_value(centre, value, field):
    body = msgspec.msgpack.encode({"scope": "wrong", "key": "k", "payload": value})
    answer = centre.request("POST", "/v1/start", body, {"Content-Type": "application/msgpack"})
    assert problem(answer) == (400, "invalid_request")
    assert answer.data["field"] == field


@pytest.mark.parametrize(
    ("name", "number"), [("wait", "nan"), ("wait", "inf"), ("lease", "nan"), ("lease", "inf")]
)
def test_numbers_that_are_not_finite_are_refused(centre, name, number):
    body = msgspec.msgpack.encode({"scope": "wrong", "key": "k", name: float(number)})
    answer = centre.request("POST", "/v1/start", body, {"Content-Type": "application/msgpack"})
    assert problem(answer) == (400, "invalid_request")
    assert answer.data["field"] == name


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_other_content_types_are_refused(centre, engine, headers):
    body = json.dumps(VALID["start"]).encode()
    answer = centre.request("POST", "/v1/start", body, headers)
    assert problem(answer) == (415, "unsupported_media_type")
    assert not list(engine.records(scope="wrong"))


def test_a_body_above_4_mb_is_too_large(centre, engine):
    most = 4 * 1024 * 1024
    headers = {"Content-Type": "application/json"}
    start = b'{"scope": "wrong", "key": "k", "payload": "'
    body = start + b"x" * (most - len(start)) + b'"}'
    assert problem(centre.request("POST", "/v1/start", body, headers)) == (413, "body_too_large")
    fits = body.replace(b"xxxx", b"", 1)[: most - 2] + b'"}'
    assert problem(centre.request("POST", "/v1/renew", fits, headers)) == (400, "invalid_request")
    assert not list(engine.records(scope="wrong"))


def test_a_chunked_body_above_4_mb_is_too_large(centre):
    connection = centre.connection()
    chunks = (b"x" * 65536 for _ in range(80))
    connection.request(
        "POST", "/v1/start", chunks, {"Content-Type": "application/json"}, encode_chunked=True
    )
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["code"] == "body_too_large"
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", (404, "not_found")),
        ("POST", "/v1/nothing", (404, "not_found")),
        ("POST", "/v1/start/", (404, "not_found")),
        ("GET", "/v1/start", (405, "method_not_allowed")),
        ("PUT", "/v1/start", (405, "method_not_allowed")),
        ("POST", "/live", (405, "method_not_allowed")),
    ],
)
def test_unknown_paths_and_methods(centre, method, path, expected):
    answer = centre.request(method, path)
    assert problem(answer) == expected
    assert ("allow" in answer.headers) == (expected[0] == 405)


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "lease", "fits"),
    [
        ("bounded.pay", 5, True),
        ("bounded.pay", 600, True),
        ("bounded.pay", 4.9, False),
        ("bounded.pay", 601, False),
        ("bounded.short", 2, True),
        ("bounded.short", 5, False),
        ("bounded.short.more", 4, False),
        ("bounded.short.more", 5, True),
        ("other", 0.05, True),
        ("other", 86400, True),
    ],
)
def test_a_scope_bounds_the_leases_that_clients_may_ask_for(centre, key, scope, lease, fits):
    answer = centre.post("start", scope=scope, key=key, lease=lease)
    if fits:
        assert answer.data["lease"] == lease
        return
    assert problem(answer) == (400, "invalid_request")
    assert answer.data["field"] == "lease"
    owner = run(centre, scope, key)
    assert centre.post("renew", scope=scope, key=key, owner=owner, lease=lease).status == 400


def test_without_a_word_the_lease_is_that_of_the_policy(centre, key):
    answer = centre.post("start", scope="bounded.short", key=key).data
    assert (answer["lease"], answer["renew_every"]) == (1.0, 1 / 3)
    owner = answer["owner"]
    renewed = centre.post("renew", scope="bounded.short", key=key, owner=owner).data
    assert renewed["lease"] == 1.0


# --- what needs no token ---------------------------------------------------------------------------


def test_the_front_page_says_what_it_is(centre):
    answer = centre.get("/")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"POST /v1/start" in answer.body


def test_live_and_ready(centre):
    assert centre.get("/live").data == {"status": "live"}
    for _ in range(2):  # the second within the second for which the first counts
        assert centre.get("/ready").data == {"status": "ready"}


def test_metrics_count_what_became_of_requests(centre, key):
    run(centre, "orders", key)
    centre.post("start", scope="orders", key=key)
    text = centre.get("/metrics").body.decode()
    assert 'semel_service_requests_total{verb="start",code="ok"}' in text
    assert 'semel_service_requests_total{verb="start",code="concurrent_request"}' in text
    assert 'semel_service_seconds_bucket{verb="start",le="+Inf"}' in text
    assert "semel_service_waiting 0\n" in text
    assert key not in text


def test_a_foreign_host_is_refused_without_tokens(centre, engine):
    headers = {"Content-Type": "application/json", "Host": "evil.example"}
    body = json.dumps(VALID["start"]).encode()
    assert problem(centre.request("POST", "/v1/start", body, headers)) == (403, "forbidden")
    for host in ("", "127.0.0.1.evil.example", "evil@localhost", "[::2]", "10.0.0.1:8600"):
        assert problem(centre.request("GET", "/live", None, {"Host": host}))[0] == 403
    for host in ("localhost:8600", "LOCALHOST", "127.0.0.1", "127.1.2.3:1", "[::1]:8600"):
        assert centre.request("GET", "/live", None, {"Host": host}).status == 200
    assert not list(engine.records(scope="wrong"))
