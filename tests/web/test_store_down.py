"""Number 8 of the web rules: the store goes away before the claim, and before the save."""

from __future__ import annotations

import pytest

from semel.core.records import Identity
from servers.proxy import proxy_to
from web.serve import STACKS
from web.workers import eventually

BODY = b'{"amount": 5}'


@pytest.fixture(scope="module")
def line(redis_of_this_worker, folder):
    """The way from the workers to a Redis, which tests cut."""
    with proxy_to(redis_of_this_worker.port) as proxy:
        folder.add_store("cut", proxy.url)
        yield proxy


@pytest.fixture
def down(line):
    """Cut the line until the test is over."""

    def cut():
        line.refusing = True
        line.cut_all()

    yield cut
    line.refusing = False


@pytest.fixture
def everywhere(line, workers, key, folder):
    """Ask every stack at the same time, each under its own key: what fails takes a while."""

    def ask(target, profile="default", key=key):
        def told(name):
            return {"key": f"{key}-{name}", "body": BODY, "run": f"{key}-{name}"}

        clients = {name: workers.first(name).client(profile, "cut") for name in STACKS}
        return {name: one.open("POST", target, **told(name)) for name, one in clients.items()}

    return ask


def answers(connections):
    return {name: connection.answer() for name, connection in connections.items()}


def runs(folder, key):
    return [folder.runs(f"{key}-{name}") for name in STACKS]


ONCE = [1] * len(STACKS)


def test_8_without_its_store_a_request_with_a_key_does_not_run(everywhere, down, line, key, folder):
    assert {answer.status for answer in answers(everywhere("/pay", key="before")).values()} == {201}
    down()
    for name, answer in answers(everywhere("/pay")).items():
        assert (answer.status, answer.code) == (503, "store_error"), name
        digest = Identity("http", f"{key}-{name}").key_digest
        assert answer.json["instance"] == f"urn:semel:key:{digest}"
        assert int(answer.header("retry-after")) >= 1
        assert b"127.0.0.1" not in answer.body
    assert sum(runs(folder, key)) == 0
    line.refusing = False

    def all_paid():
        # A claim whose answer was lost is given back first; for that moment the key is taken.
        found = {answer.status for answer in answers(everywhere("/pay")).values()}
        assert found <= {201, 409}
        return found == {201}

    eventually(all_paid, "the claims in doubt to be given back")
    assert runs(folder, key) == ONCE


def test_8_without_its_store_a_request_without_a_key_runs(on, line, down):
    down()
    assert on("default", "cut").post("/pay", body=BODY).status == 201


def test_8_an_application_may_choose_to_run_without_its_store(everywhere, down, key, folder):
    down()
    for name, answer in answers(everywhere("/pay", "fail-open")).items():
        assert (answer.status, answer.replayed) == (201, False), name
    assert runs(folder, key) == ONCE


def test_8_a_store_that_is_down_at_the_save_costs_nobody_the_answer(
    everywhere, down, line, key, folder
):
    firsts = everywhere(f"/wait/{key}")
    eventually(lambda: runs(folder, key) == ONCE, "the handlers to run")
    down()
    folder.open_gate(key)
    for name, answer in answers(firsts).items():
        assert answer.status == 201, name
    line.refusing = False
    for name, again in answers(everywhere(f"/wait/{key}")).items():
        assert again.replayed or again.code == "concurrent_request", name
    assert runs(folder, key) == ONCE
