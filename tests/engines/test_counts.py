"""What a call costs its store, counted there: 2 for a first execution, 1 for a replay, and 2 for a
thousand duplicates in one process.

Redis counts the scripts it was asked to run (INFO commandstats), SQLite tells every statement. What
connecting takes is not counted.
"""

from __future__ import annotations

import time

import pytest

from engines.facade import PATIENCE, Effect, World, never, wait_until
from semel import Policy
from semel.stores import listening
from stores.sqlite_helpers import Statements

DUPLICATES = 1000


def work() -> str:
    time.sleep(0.5)
    return "done"


class Busy:
    """Takes half a second, and as long as it takes all the others to come."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.runs = 0

    def __call__(self) -> str:
        self.runs += 1
        if self.runs == 1:
            wait_until(lambda: self.engine.sharers() == DUPLICATES - 1)
        return work()


def storm(engine) -> None:
    busy = Busy(engine)
    # A long lease: a busy machine needs its time for all of them, and a renewal would count.
    policy = Policy(lease=3600)
    calls = [engine.start("storm", busy, policy=policy) for _ in range(DUPLICATES)]
    assert {call.result(PATIENCE) for call in calls} == {"done"}
    assert busy.runs == 1


# --- Redis ------------------------------------------------------------------------------------


@pytest.fixture
def on_redis(kind, redis_url):
    with World(kind, redis_url) as world:
        engine = world.engine()
        engine.execute("first", lambda: None)  # connects, and teaches the server the scripts
        yield engine


@pytest.fixture
def scripts_run(on_redis, redis_of_this_worker):
    before = redis_of_this_worker.calls("evalsha", "eval")
    return lambda: redis_of_this_worker.calls("evalsha", "eval") - before


def test_on_redis_a_first_execution_is_two_calls_and_a_replay_is_one(on_redis, scripts_run):
    assert on_redis.execute("k", work) == "done"
    assert scripts_run() == 2
    assert on_redis.execute("k", never) == "done"
    assert scripts_run() == 3


def test_on_redis_a_thousand_duplicates_in_one_process_are_two_calls(on_redis, scripts_run):
    storm(on_redis)
    assert scripts_run() == 2


def test_on_redis_a_thousand_duplicates_in_four_processes_are_eleven_calls(
    kind, redis_url, redis_of_this_worker, monkeypatch
):
    monkeypatch.setattr(listening, "SOON", PATIENCE)  # a busy machine may take long to connect
    monkeypatch.setattr(listening, "SAFETY", 2 * PATIENCE)  # and to start a thousand calls
    pauses = []
    pause = listening.Waiter.pause
    monkeypatch.setattr(
        listening.Waiter,
        "pause",
        lambda watch, planned: pauses.append(0) or pause(watch, planned),
    )
    with World(kind, redis_url) as world:
        first, *others = [world.engine() for _ in range(4)]  # each with a store of its own
        for engine in (first, *others):
            engine.execute("first", lambda: None)
        before = redis_of_this_worker.calls("evalsha", "eval")
        effect = Effect().held()
        policy = Policy(lease=3600)  # a renewal would count
        calls = [first.start("storm", effect, policy=policy) for _ in range(DUPLICATES // 4)]
        effect.wait_started()
        for engine in others:
            calls += [engine.start("storm", never, policy=policy) for _ in range(DUPLICATES // 4)]
        # Each of the others has asked, subscribed and asked again; the rest waits for its leader.
        wait_until(lambda: len(pauses) == 6)
        wait_until(lambda: first.sharers() == DUPLICATES // 4 - 1)
        wait_until(lambda: all(each.sharers() == DUPLICATES // 4 - 1 for each in others))
        effect.release()
        assert {call.result(PATIENCE) for call in calls} == {"done"}
        assert effect.runs == 1
        assert redis_of_this_worker.calls("evalsha", "eval") - before == 11


# --- SQLite -----------------------------------------------------------------------------------


@pytest.fixture
def statements():
    return Statements()


@pytest.fixture
def on_sqlite(kind, sqlite_url, statements):
    with World(kind, sqlite_url) as world:
        store = world.kind.open_store(sqlite_url, trace=statements)
        engine = world.engine_on(world.kind.steered(store))
        engine.execute("first", lambda: None)
        statements.seen.clear()
        yield engine
        world.kind.finish(store.close)


def test_on_sqlite_a_first_execution_is_two_transactions_and_a_replay_is_one_read(
    on_sqlite, statements
):
    assert on_sqlite.execute("k", work) == "done"
    assert statements.seen["BEGIN"] == statements.seen["COMMIT"] == 2
    statements.seen.clear()
    assert on_sqlite.execute("k", never) == "done"
    assert dict(statements.seen) == {"SELECT": 1}


def test_on_sqlite_a_thousand_duplicates_in_one_process_are_two_transactions(on_sqlite, statements):
    storm(on_sqlite)
    assert statements.seen["BEGIN"] == statements.seen["COMMIT"] == 2
