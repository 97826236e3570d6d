"""Two worker processes on one store: duplicates at both, one killed, one that comes back too late."""

from __future__ import annotations

import json
import signal
import time

import pytest

from web.profiles import LEASE
from web.workers import eventually, nothing_runs

BODY = b'{"amount": 5}'
STACKS = ["asgi", "wsgi", "django", "django-async"]
STORES = ["sqlite", "redis", "postgres"]


@pytest.fixture(params=STACKS)
def stack(request):
    return request.param


@pytest.fixture(scope="module")
def second_workers():
    return {}


@pytest.fixture
def second(stack, workers, second_workers):
    """Another worker of the stack, for all tests that do not kill it."""
    if stack not in second_workers:
        second_workers[stack] = workers.another(stack)
    return second_workers[stack]


@pytest.mark.parametrize("store", STORES)
def test_what_one_worker_did_the_other_replays(worker, second, shared_store, key, folder):
    told = {"key": key, "body": BODY, "run": key}
    first = worker.client("default", shared_store).post("/pay", **told)
    again = second.client("default", shared_store).post("/pay", **told)
    assert again.replayed
    assert again.body == first.body
    assert folder.runs(key) == 1


@pytest.mark.parametrize("store", STORES)
def test_a_storm_of_duplicates_at_both_runs_once(worker, second, shared_store, key, folder):
    clients = [one.client("wait", shared_store) for one in (worker, second)] * 8
    connections = [client.open("POST", "/pay", key=key, body=BODY, run=key) for client in clients]
    answers = [connection.answer() for connection in connections]
    assert {answer.status for answer in answers} == {201}
    assert len({answer.body for answer in answers}) == 1
    assert [answer.replayed for answer in answers].count(False) == 1
    assert folder.runs(key) == 1


@pytest.mark.parametrize("profile", ["short-lease", "hold"])
def test_a_killed_worker_leaves_its_request_to_the_others(workers, worker, key, folder, profile):
    """Taken over, or under hold not run again, when the lease of the dead is over."""
    victim = workers.another(worker.stack)
    told = {"key": key, "body": BODY, "run": key}
    doomed = victim.client(profile).open("POST", f"/wait/{key}", **told)
    eventually(lambda: folder.runs(key) == 1, "the handler to run")
    victim.kill()
    doomed.close()
    folder.open_gate(key)
    client = worker.client(profile)
    answer = client.post(f"/wait/{key}", **told)
    while answer.code == "concurrent_request":
        time.sleep(0.05)
        answer = client.post(f"/wait/{key}", **told)
    if profile == "hold":
        assert answer.code == "outcome_unknown"
        assert folder.runs(key) == 1
    else:
        assert (answer.status, answer.replayed) == (201, False)
        assert client.post(f"/wait/{key}", **told).body == answer.body
        assert folder.runs(key) == 2


def test_a_stale_owner_cannot_replace_the_answer_of_its_successor(worker, second, key, run, folder):
    told = {"key": key, "body": BODY, "run": run}
    stale = second.client("short-lease").open("POST", f"/wait/{key}", **told)
    eventually(lambda: folder.runs(run) == 1, "the handler to run")
    second.signal(signal.SIGSTOP)
    try:
        time.sleep(LEASE * 1.5)
        folder.open_gate(key)
        taken_over = worker.client("short-lease").post(f"/wait/{key}", **told)
    finally:
        second.signal(signal.SIGCONT)
    assert (taken_over.status, taken_over.replayed) == (201, False)
    late = stale.answer()
    assert (late.status, late.code) == (409, "lease_lost")
    assert int(late.header("retry-after")) >= 1
    again = second.client("short-lease").post(f"/wait/{key}", **told)
    assert again.replayed
    assert json.loads(again.body) == json.loads(taken_over.body)


@pytest.mark.parametrize("store", STORES)
def test_nothing_of_this_is_left_running(shared_store, engine_on):
    nothing_runs(engine_on(shared_store))
