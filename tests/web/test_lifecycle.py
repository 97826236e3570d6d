"""Numbers 15 to 19 of the web rules: from the claim to the save."""

from __future__ import annotations

import time

import pytest

from semel import State
from web.client import Connection, head
from web.handlers import CHUNKS
from web.serve import STACKS
from web.workers import eventually

BODY = b'{"amount": 5}'


def test_15_the_answer_is_saved_before_its_last_byte_leaves(on, key, run, records):
    """Whoever has the whole answer finds it saved."""
    for number in range(5):
        on().post("/chunks", key=f"{key}-{number}", run=run)
        assert records.peek(f"{key}-{number}", scope="http").state is State.SUCCEEDED


def test_15_work_after_the_answer_does_not_hold_the_record(on, key, run, folder):
    gate = key
    first = on().open("POST", f"/after/{gate}", key=key, body=BODY, run=run)
    first.until(b"}")  # the whole body is here; the connection may end after the work
    assert folder.runs(f"after-{run}") == 0
    again = on().post(f"/after/{gate}", key=key, body=BODY, run=run)
    assert again.replayed
    folder.open_gate(gate)
    eventually(lambda: folder.runs(f"after-{run}") == 1, "the work after the answer")
    assert first.answer().body == again.body
    assert folder.runs(run) == 1


@pytest.mark.parametrize("status", [200, 204, 206])
def test_16_a_success_is_stored(on, key, run, folder, status):
    first, again = (on().post(f"/status/{status}", key=key, run=run) for _ in range(2))
    assert (first.status, again.status) == (status, status)
    assert again.replayed
    assert first.body == again.body
    assert first.header("x-number") == again.header("x-number")
    assert folder.runs(run) == 1


@pytest.mark.parametrize("status", [302, 404, 422, 503])
def test_16_everything_else_runs_again(on, key, run, folder, status):
    first, again = (on().post(f"/status/{status}", key=key, run=run) for _ in range(2))
    assert (first.status, again.status) == (status, status)
    assert first.body != again.body
    assert folder.runs(run) == 2
    assert on().post("/pay", key=key, run=run).status == 201, "the key is free for another request"


@pytest.mark.parametrize("status", [404, 422])
def test_16_a_function_of_the_status_stores_more(on, key, run, folder, status):
    first, again = (
        on("deterministic").post(f"/status/{status}", key=key, run=run) for _ in range(2)
    )
    assert (first.status, again.status) == (status, status)
    assert again.replayed
    assert first.body == again.body
    assert folder.runs(run) == 1


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429])
def test_16_answers_about_the_client_are_never_stored(on, key, run, folder, status):
    first, again = (
        on("deterministic").post(f"/status/{status}", key=key, run=run) for _ in range(2)
    )
    assert (first.status, again.status) == (status, status)
    assert not again.replayed
    assert folder.runs(run) == 2


def test_17_a_handler_that_raises_leaves_no_stuck_record(on, key, run, folder):
    assert on().post("/raise_once", key=key, run=run).status == 500
    again = on().post("/raise_once", key=key, run=run)
    assert (again.status, again.replayed) == (201, False)
    assert on().post("/raise_once", key=key, run=run).body == again.body
    assert folder.runs(run) == 2


@pytest.mark.parametrize("stack", ["asgi", "asgi-hypercorn", "wsgi"])
def test_17_an_error_page_from_inside_the_integration_frees_the_key_too(on, key, run, folder):
    for _ in range(2):
        answer = on().post("/raise_page", key=key, run=run)
        assert (answer.status, answer.body) == (500, b"the page of an error")
    assert folder.runs(run) == 2


def test_17_an_answer_that_breaks_off_frees_the_key(on, key, run, folder, records):
    for _ in range(2):
        on().open("POST", "/broken_chunks", key=key, run=run).raw()
    assert folder.runs(run) == 2
    record = records.peek(key, scope="http")
    assert record is None or record.state is not State.PROCESSING


def test_18_a_client_that_goes_away_changes_nothing(on, key, run, folder, records):
    leaving = on().open("POST", f"/wait/{key}", key=key, body=BODY, run=run)
    eventually(lambda: folder.runs(run) == 1, "the handler to run")
    leaving.leave()
    folder.open_gate(key)
    eventually(
        lambda: records.peek(key, scope="http").state is State.SUCCEEDED, "the answer to be saved"
    )
    again = on().post(f"/wait/{key}", key=key, body=BODY, run=run)
    assert (again.status, again.replayed) == (201, True)
    assert folder.runs(run) == 1


def test_18_a_client_that_goes_away_during_the_answer_changes_nothing(on, key, run, folder):
    on().open("POST", "/chunks", key=key, run=run).leave()
    again = on().post("/chunks", key=key, run=run)
    while again.code == "concurrent_request":
        time.sleep(0.02)
        again = on().post("/chunks", key=key, run=run)
    assert again.body == b"".join(CHUNKS)
    assert folder.runs(run) == 1


def test_18_a_client_that_goes_away_with_half_a_body_runs_nothing(on, key, run, folder, records):
    lines = [
        ("Host", on().host),
        ("X-Run", run),
        ("Idempotency-Key", key),
        ("Content-Type", "application/json"),
    ]
    for promise, body in (
        (("Content-Length", "100"), b'{"amount": '),
        (("Transfer-Encoding", "chunked"), b'b\r\n{"amount": \r\n'),
        (("Transfer-Encoding", "chunked"), b"b\r\n{"),
    ):
        cut = Connection(on().port).send(head("POST", "/pay", [*lines, promise]) + body)
        assert on().post("/pay", run=f"{run}-meanwhile").status == 201
        cut.leave()
    assert on().post("/pay", run=f"{run}-after").status == 201
    assert folder.runs(run) == 0
    assert records.peek(key, scope="http") is None


def test_19_a_handler_longer_than_its_lease_runs_once(workers, key, run, folder):
    """On all stacks at the same time: it takes a while."""
    clients = {name: workers.first(name).client("short-lease") for name in STACKS}
    told = {name: {"key": f"{key}-{name}", "body": BODY, "run": f"{run}-{name}"} for name in STACKS}
    firsts = {name: clients[name].open("POST", "/long", **told[name]) for name in STACKS}
    for name in STACKS:
        eventually(lambda ran=f"{run}-{name}": folder.runs(ran) == 1, "the handler to run")
    for name, client in clients.items():
        again = client.post("/long", **told[name])
        while again.status == 409:
            time.sleep(0.05)
            again = client.post("/long", **told[name])
        assert again.replayed, name
        assert firsts[name].answer().body == again.body, name
        assert folder.runs(f"{run}-{name}") == 1, name


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "proxy"])  # it runs elsewhere
def test_the_attempt_is_current_while_the_handler_runs(on, key, run):
    told = on().post("/attempt", key=key, run=run)
    assert told.json["key"] == key
    assert on().post("/attempt", run=run).json is None
