"""Numbers 6 to 10 of the web rules: the answers that are the integration's own."""

from __future__ import annotations

import json

import pytest

from semel.cli import main
from semel.core.records import Identity
from web.profiles import MESSAGE
from web.workers import eventually

BODY, OTHER_BODY = b'{"amount": 5}', b'{"amount": 6}'


@pytest.fixture
def stack(framework):
    return framework


def assert_problem(answer, status, code, key=None):
    """It has the form of RFC 9457; about a record (that of `key`), it says which one."""
    assert (answer.status, answer.code) == (status, code)
    assert answer.header("cache-control") == "no-store"
    assert answer.header("content-length") == str(len(answer.body))
    told = answer.json
    instance = {} if key is None else {"instance": instance_of(key)}
    assert set(told) == {"type", "title", "status", "detail", "code", *instance}
    assert told | instance == told
    assert told["status"] == status
    assert told["type"] == f"urn:semel:problem:{code.replace('_', '-')}"
    assert told["title"]
    assert told["detail"]


def instance_of(key, scope="http"):
    return f"urn:semel:key:{Identity(scope, key).key_digest}"


@pytest.fixture
def running(on, folder, key, run):
    """A request that runs until its gate is opened: the connection that will have its answer."""

    def begin(profile="default", body=BODY):
        connection = on(profile).open("POST", f"/wait/{key}", key=key, body=body, run=run)
        eventually(lambda: folder.runs(run) > 0, "the handler to run")
        return connection

    return begin


def test_6_a_duplicate_of_a_running_request_is_told_to_come_again(on, running, key, run, folder):
    first = running()
    busy = on().post(f"/wait/{key}", key=key, body=BODY, run=run)
    assert_problem(busy, 409, "concurrent_request", key)
    assert int(busy.header("retry-after")) >= 1
    folder.open_gate(key)
    answer = first.answer()
    again = on().post(f"/wait/{key}", key=key, body=BODY, run=run)
    assert again.replayed
    assert answer.body == again.body
    assert folder.runs(run) == 1


def test_6_a_duplicate_may_wait_for_the_result(on, running, key, run, folder):
    first = running("wait")
    waiting = on("wait").open("POST", f"/wait/{key}", key=key, body=BODY, run=run)
    folder.open_gate(key)
    answer, again = first.answer(), waiting.answer()
    assert (answer.status, again.status) == (201, 201)
    assert answer.body == again.body
    assert again.replayed
    assert folder.runs(run) == 1


def test_6_a_duplicate_waits_no_longer_than_it_may(on, running, key, run, folder):
    first = running("impatient")
    late = on("impatient").post(f"/wait/{key}", key=key, body=BODY, run=run)
    assert_problem(late, 409, "wait_timeout", key)
    assert late.header("retry-after") == "8"
    folder.open_gate(key)
    assert first.answer().status == 201


def test_7_another_payload_is_refused_and_changes_nothing(on, key, run, folder):
    first = on().post("/pay", key=key, body=BODY, run=run)
    assert_problem(
        on().post("/pay", key=key, body=OTHER_BODY, run=run), 422, "payload_mismatch", key
    )
    again = on().post("/pay", key=key, body=BODY, run=run)
    assert again.replayed
    assert again.body == first.body
    assert folder.runs(run) == 1


def test_7_another_payload_is_refused_also_while_the_first_runs(on, running, key, run, folder):
    first = running()
    other = on().post(f"/wait/{key}", key=key, body=OTHER_BODY, run=run)
    assert_problem(other, 422, "payload_mismatch", key)
    folder.open_gate(key)
    assert first.answer().status == 201
    assert on().post(f"/wait/{key}", key=key, body=BODY, run=run).replayed


def test_9_a_guarded_duplicate_gets_the_message_of_the_application(on, key, run, folder):
    assert on("guard").post("/pay", key=key, body=BODY, run=run).status == 201
    duplicate = on("guard").post("/pay", key=key, body=BODY, run=run)
    assert_problem(duplicate, 409, "duplicate_request", key)
    assert duplicate.json["detail"] == MESSAGE
    assert on("guard").post("/pay", key=key, body=OTHER_BODY, run=run).status == 422
    assert folder.runs(run) == 1


def test_9_a_guarded_duplicate_of_a_running_request_gets_it_too(on, running, key, run, folder):
    first = running("guard")
    duplicate = on("guard").post(f"/wait/{key}", key=key, body=BODY, run=run)
    assert_problem(duplicate, 409, "concurrent_request", key)
    assert duplicate.json["detail"] == MESSAGE
    folder.open_gate(key)
    assert first.answer().status == 201


def test_10_under_hold_an_outcome_that_nobody_knows_is_not_tried_again(
    on, key, run, folder, records
):
    assert on("hold").post("/raise_once", key=key, run=run).status == 500
    duplicate = on("hold").post("/raise_once", key=key, run=run)
    assert_problem(duplicate, 409, "outcome_unknown", key)
    assert folder.runs(run) == 1
    assert records.peek(key, scope="http").abandoned


def test_10_an_answer_of_the_server_error_kind_may_park_the_key(on, key, run, folder):
    assert on("doubtful").post("/status/502", key=key, run=run).status == 502
    assert_problem(
        on("doubtful").post("/status/502", key=key, run=run), 409, "outcome_unknown", key
    )
    assert folder.runs(run) == 1


def test_10_a_final_failure_is_told_again(on, key, run, folder):
    assert on("final").post("/raise_once", key=key, run=run).status == 500
    assert_problem(on("final").post("/raise_once", key=key, run=run), 409, "previous_failure", key)
    assert folder.runs(run) == 1


def test_the_record_of_a_tenant_s_route_is_named_as_it_is_stored(on, key, run, records):
    ann = [("X-User", "ann")]
    assert on("tenant").post("/pay", key=key, body=BODY, run=run, lines=ann).status == 201
    other = on("tenant").post("/pay", key=key, body=OTHER_BODY, run=run, lines=ann)
    assert other.json["instance"] == instance_of(f"ann/{key}")
    assert records.peek(f"ann/{key}", scope="http") is not None
    assert on("separate-routes").post("/pay", key=key, body=BODY, run=run).status == 201
    other = on("separate-routes").post("/pay", key=key, body=OTHER_BODY, run=run)
    assert other.json["instance"] == instance_of(f"@POST%20%2Fpay/{key}")


def test_what_a_client_reports_leads_to_the_record(on, key, run, folder, capsys):
    ann = [("X-User", "ann")]
    first = on("tenant").post("/pay", key=key, body=BODY, run=run, lines=ann)
    other = on("tenant").post("/pay", key=key, body=OTHER_BODY, run=run, lines=ann)
    assert (first.status, other.status) == (201, 422)
    for reported in (other.json["instance"], key):
        assert main(["--url", folder.store("sqlite"), "find", reported, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["scope"], found["key"]) == ("http", f"ann/{key}")


def test_an_application_words_its_problems(on, run):
    answer = on("worded").post("/pay", run=run)
    assert answer.status == 428
    assert answer.json == {
        "type": "https://shop.example/problems/no-key",
        "title": "No key",
        "status": 428,
        "detail": "Send a key, please.",
        "code": "key_missing",
    }


def test_every_problem_that_needs_no_store_has_the_same_form(on, run):
    assert_problem(on("required").post("/pay", run=run), 400, "key_missing")
    assert_problem(on().post("/pay", key="a b", run=run), 400, "invalid_key")
    assert_problem(on("tenant").post("/pay", key="k", run=run), 401, "identity_missing")
