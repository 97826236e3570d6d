"""The core of the web rules on Redis and PostgreSQL; the other files have all of it on SQLite."""

from __future__ import annotations

import pytest

from web.handlers import CHUNKS
from web.profiles import SMALL
from web.serve import STACKS
from web.workers import eventually, nothing_runs

BODY, OTHER_BODY = b'{"amount": 5}', b'{"amount": 6}'


@pytest.fixture
def stack(framework):
    return framework


@pytest.fixture(params=["redis", "postgres"])
def store(request):
    return request.param


@pytest.fixture
def at(on, shared_store):
    """Speak to the worker under a profile, on the store of this test."""
    return lambda profile="default": on(profile, shared_store)


def test_7_16_20_a_duplicate_gets_the_same_and_another_payload_nothing(at, key, run, folder):
    first = at().post("/pay", key=key, body=BODY, run=run)
    again = at().post("/pay", key=f'"{key}"', body=BODY, run=run)
    assert (first.status, again.status, again.replayed) == (201, 201, True)
    assert first.body == again.body
    assert at().post("/pay", key=key, body=OTHER_BODY, run=run).code == "payload_mismatch"
    assert folder.runs(run) == 1


def test_6_18_a_running_request_is_busy_and_survives_its_client(at, key, run, folder):
    told = {"key": key, "body": BODY, "run": run}
    leaving = at().open("POST", f"/wait/{key}", **told)
    eventually(lambda: folder.runs(run) == 1, "the handler to run")
    assert at().post(f"/wait/{key}", **told).code == "concurrent_request"
    assert at().post(f"/wait/{key}", **{**told, "body": b"{}"}).code == "payload_mismatch"
    leaving.leave()
    waiting = at("wait").open("POST", f"/wait/{key}", **told)
    folder.open_gate(key)
    answer = waiting.answer()
    assert (answer.status, answer.replayed) == (201, True)
    assert folder.runs(run) == 1


def test_9_10_17_guard_hold_and_failures(at, key, run, folder):
    assert at("guard").post("/pay", key=f"{key}-guard", run=run).status == 201
    assert at("guard").post("/pay", key=f"{key}-guard", run=run).code == "duplicate_request"
    assert at("hold").post("/raise", key=f"{key}-hold", run=run).status == 500
    assert at("hold").post("/raise", key=f"{key}-hold", run=run).code == "outcome_unknown"
    assert folder.runs(run) == 2
    assert at().post("/status/503", key=key, run=run).status == 503
    assert at().post("/pay", key=key, run=run).status == 201


def test_11_12_tenants_and_routes(at, key, run, folder):
    for user in ("ann", "bob"):
        told = {"key": key, "lines": [("X-User", user)], "run": run}
        assert not at("tenant").post("/pay", **told).replayed
        assert at("tenant").post("/pay", **told).replayed
    assert not at("separate-routes").post("/pay", key=key, run=run).replayed
    assert not at("separate-routes").post("/refund", key=key, run=run).replayed
    assert at("separate-routes").post("/pay", key=key, run=run).replayed
    assert folder.runs(run) == 4


def test_20_22_24_bytes_streams_and_sizes(at, key, run, folder):
    body = bytes(range(256))
    for path, sent, expected in (
        ("/echo", body, body),
        ("/chunks", b"", b"".join(CHUNKS)),
        ("/empty", b"", b""),
        ("/large/900000", b"", b"x" * 900_000),
    ):
        told = {"key": key + path.split("/")[1], "body": sent, "content_type": "x/y", "run": run}
        first, again = (at().post(path, **told) for _ in range(2))
        assert first.body == again.body == expected
        assert again.replayed
    told = {"key": f"{key}-omitted", "run": run}
    assert len(at("small").post("/large_chunks/9", **told).body) > SMALL
    assert at("small").post("/large_chunks/9", **told).code == "result_omitted"
    assert folder.runs(run) == 5


def test_19_a_handler_longer_than_its_lease_runs_once(workers, shared_store, key, run, folder):
    """On all stacks at the same time: it takes a while."""
    clients = {name: workers.first(name).client("short-lease", shared_store) for name in STACKS}
    told = {name: {"key": f"{key}-{name}", "body": BODY, "run": f"{run}-{name}"} for name in STACKS}
    firsts = {name: clients[name].open("POST", "/long", **told[name]) for name in STACKS}
    answers = {name: first.answer() for name, first in firsts.items()}
    for name, client in clients.items():
        again = client.post("/long", **told[name])
        assert again.replayed, name
        assert again.body == answers[name].body, name
        assert folder.runs(f"{run}-{name}") == 1, name


def test_nothing_of_this_is_left_running(shared_store, engine_on):
    nothing_runs(engine_on(shared_store))
