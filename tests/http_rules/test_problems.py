from __future__ import annotations

import json

import pytest

from semel import errors
from semel.core.records import Identity
from semel.errors import ConfigError, IdempotencyError
from semel.http import KeyMissing, parse_key, problem_response
from semel.http.problems import PROBLEMS, checked_wordings, problem, problem_of


def every_error():
    kinds = [IdempotencyError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return [kind for kind in dict.fromkeys(kinds) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_is_a_problem_with_its_own_status(kind):
    error = kind.__new__(kind)
    code, _ = problem_of(error)
    assert PROBLEMS[code].status == kind.http_status
    assert PROBLEMS[code].retry or not kind.retry_helps


def test_a_problem_is_rfc_9457_and_is_not_cached():
    answer = problem("payload_mismatch", {})
    told = json.loads(answer.body)
    assert answer.status == told["status"] == 422
    assert told["code"] == "payload_mismatch"
    assert told["type"] == "urn:semel:problem:payload-mismatch"
    assert told["title"]
    assert told["detail"]
    assert "instance" not in told, "it is about no record"
    lines = dict(answer.headers)
    assert lines[b"content-type"] == b"application/problem+json"
    assert lines[b"cache-control"] == b"no-store"
    assert lines[b"content-length"] == b"%d" % len(answer.body)
    assert b"retry-after" not in lines


@pytest.mark.parametrize(("seconds", "told"), [(0.2, b"1"), (1.0, b"1"), (2.5, b"3")])
def test_a_problem_that_passes_says_when_to_come_back_in_whole_seconds(seconds, told):
    answer = problem("concurrent_request", {}, retry_after=seconds)
    assert dict(answer.headers)[b"retry-after"] == told


def test_what_went_wrong_inside_is_not_told():
    secret = errors.StoreUnavailable("redis://user:password@db is away")
    assert problem_of(secret) == ("store_error", None)
    assert problem_of(errors.PreviousFailure("KeyError", "secret")) == ("previous_failure", None)


def test_the_message_of_a_policy_is_told():
    assert problem_of(errors.DuplicateRequest("paid already")) == (
        "duplicate_request",
        "paid already",
    )


@pytest.mark.parametrize("kind", [errors.ConcurrentRequest, errors.DuplicateRequest])
def test_the_detail_tells_neither_the_scope_nor_the_digest_of_a_key(kind):
    identity = Identity("acme/payments", "k")
    assert problem_of(errors.about(kind("paid already"), identity))[1] == "paid already"
    assert problem_of(errors.about(kind(), identity))[1] is None


def test_the_instance_of_a_problem_names_its_record():
    identity = Identity("acme/payments", "k")
    body = problem_response(errors.about(errors.PayloadMismatch(), identity)).body
    assert json.loads(body)["instance"] == f"urn:semel:key:{identity.key_digest}"
    assert "instance" not in json.loads(problem_response(errors.PayloadMismatch()).body)


def test_our_own_message_to_programmers_is_not_told_to_clients():
    assert problem_of(errors.ConcurrentRequest()) == ("concurrent_request", None)
    assert problem_of(errors.DuplicateRequest()) == ("duplicate_request", None)


def test_an_application_words_a_problem_its_own_way():
    words = checked_wordings(
        {"concurrent_request": {"status": 425, "title": "T", "detail": "D", "type": "urn:x"}}
    )
    answer = problem("concurrent_request", words, detail="ours")
    assert answer.status == 425
    assert json.loads(answer.body) == {
        "type": "urn:x",
        "title": "T",
        "status": 425,
        "detail": "D",
        "code": "concurrent_request",
    }


@pytest.mark.parametrize(
    "wordings",
    [{"nonsense": {}}, {"key_missing": {"status": "400"}}, {"key_missing": {"colour": "red"}}],
)
def test_a_wording_of_nothing_is_refused(wordings):
    with pytest.raises(ConfigError):
        checked_wordings(wordings)


# --- for endpoints that call the engine by hand ---------------------------------------------------


def test_an_error_becomes_the_parts_of_a_response():
    status, headers, body = problem_response(errors.PayloadMismatch())
    assert status == 422
    assert headers == {"Content-Type": "application/problem+json", "Cache-Control": "no-store"}
    assert json.loads(body)["code"] == "payload_mismatch"


def test_a_missing_key_is_the_same_problem_by_hand_as_in_the_integrations():
    with pytest.raises(KeyMissing) as caught:
        parse_key(None)
    assert problem_response(caught.value).body == problem("key_missing", {}).body


def test_an_error_after_which_a_retry_helps_says_when():
    error = errors.ConcurrentRequest("coupons are slow today")
    response = problem_response(error, retry_after=2.5)
    assert response.status == 409
    assert response.headers["Retry-After"] == "3"
    assert json.loads(response.body)["detail"] == "coupons are slow today"


def test_the_words_of_a_problem_response_may_be_the_application_s_own():
    words = {"key_missing": {"status": 428, "title": "Send a key"}}
    status, _, body = problem_response(KeyMissing("none"), problems=words)
    assert (status, json.loads(body)["title"]) == (428, "Send a key")
    with pytest.raises(ConfigError, match="no problem has the code 'key_mising'"):
        problem_response(KeyMissing("none"), problems={"key_mising": {}})


@pytest.mark.parametrize(
    ("error", "status", "traceback"),
    [
        (errors.StoreUnavailable("the server at 10.0.0.1 is away"), 503, False),
        (ConfigError("the table of records is missing"), 500, True),
    ],
)
def test_a_server_error_is_told_to_the_log_and_not_to_the_client(error, status, traceback, caplog):
    response = problem_response(error)
    assert response.status == status
    assert str(error) not in response.body.decode()
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) is traceback


def test_a_client_error_is_not_logged(caplog):
    problem_response(errors.InvalidKey("the key is empty"))
    assert caplog.records == []


def test_only_an_error_of_semel_is_a_problem():
    with pytest.raises(TypeError, match="not KeyError"):
        problem_response(KeyError("k"))
