"""A client's clock is an hour off.

| fault | expected |
|---|---|
| 11 client clock an hour off, either way | no change |
| 11 ... on SQLite, where the client's clock is the store's | ahead: leases end early; behind: late takeover only |

Children read a wall clock that is wrong from before their first import.
"""

from __future__ import annotations

import time

import pytest

from engines.facade import Effect, World, never
from semel import ConcurrentRequest, Policy
from semel.core.records import State

pytestmark = pytest.mark.usefixtures("not_measured")

fault = pytest.mark.fault

HOUR = 3600.0
EITHER_WAY = pytest.mark.parametrize("clock", [HOUR, -HOUR], ids=["ahead", "behind"])
REFUSING = {"concurrent": "reject"}


@pytest.fixture
def redis_world(kind, redis_url):
    with World(kind, redis_url) as world:
        yield world


@pytest.fixture
def sqlite_world(kind, sqlite_url):
    with World(kind, sqlite_url) as world:
        yield world


@fault(11)
@EITHER_WAY
def test_a_live_lease_on_redis_is_live_to_a_client_whose_clock_is_wrong(
    redis_world, kind, operation, ledger, clock
):
    effect = Effect().held()
    running = redis_world.engine().start("k", effect)
    effect.wait_started()
    with operation(
        kind=kind, url=redis_world.url, steps=["effect"], policy=REFUSING, clock=clock
    ) as it:
        assert it.outcome() == {"error": "ConcurrentRequest"}
    effect.release()
    assert running.result() == "done"
    with operation(kind=kind, url=redis_world.url, steps=["effect"], clock=clock) as it:
        assert it.outcome() == {"result": "done", "replayed": True, "number": 1}
    assert ledger.entries() == []


@fault(11)
@EITHER_WAY
def test_a_lease_on_redis_that_a_client_with_a_wrong_clock_took_ends_when_it_should(
    redis_world, kind, operation, ledger, clock
):
    engine = redis_world.engine()
    policy = {"lease": 0.4}
    with operation(
        kind=kind, url=redis_world.url, steps=["effect", "wait"], policy=policy, clock=clock
    ) as it:
        it.hear("waiting")
        with pytest.raises(ConcurrentRequest) as told:
            engine.execute("k", never, policy=Policy(**REFUSING))
        assert 0 < told.value.retry_after <= 0.4
        it.kill()
    assert engine.execute("k", ledger.effect()) == "done here"
    assert [entry.number for entry in ledger.entries()] == [1, 2]


@fault(11)
@EITHER_WAY
def test_a_result_on_redis_that_a_client_with_a_wrong_clock_stored_is_kept_for_its_ttl(
    redis_world, kind, operation, clock
):
    with operation(
        kind=kind, url=redis_world.url, steps=[], policy={"ttl": 600}, clock=clock
    ) as it:
        result = it.hear("result")
    engine = redis_world.engine()
    assert engine.execute("k", never) == result
    assert 540 < engine.peek("k").remaining <= 600


@fault(11)
@EITHER_WAY
def test_a_memory_store_does_not_notice_that_the_wall_clock_jumped(kind, monkeypatch, clock):
    with World(kind, "memory://") as world:
        engine = world.engine()
        effect = Effect().held()
        running = engine.start("k", effect)
        effect.wait_started()
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + clock)
        with pytest.raises(ConcurrentRequest) as told:
            world.engine().execute("k", never, policy=Policy(**REFUSING))
        assert 0 < told.value.retry_after <= 30
        effect.release()
        assert running.result() == "done"
        assert world.engine().execute("k", never) == "done"


@fault(11)
def test_on_sqlite_a_client_an_hour_ahead_takes_over_early_and_the_owner_is_told(
    sqlite_world, kind, operation, ledger
):
    first = {"kind": kind, "url": sqlite_world.url, "steps": ["effect", "wait"]}
    with operation(**first) as owner:
        owner.hear("waiting")
        with operation(**first | {"clock": HOUR, "steps": ["effect"]}) as early:
            assert early.outcome()["number"] == 2
        owner.go()
        assert owner.outcome() == {"error": "LeaseLost"}
    assert [entry.number for entry in ledger.entries()] == [1, 2]


@fault(11)
def test_on_sqlite_a_client_an_hour_behind_only_takes_over_late(
    sqlite_world, kind, operation, ledger
):
    orders = {"kind": kind, "url": sqlite_world.url, "policy": {"lease": 0.2} | REFUSING}
    with operation(**orders, steps=["effect", "wait"]) as owner:
        owner.hear("waiting")
        owner.kill()
    time.sleep(0.3)
    engine = sqlite_world.engine()
    assert engine.peek("k").abandoned
    with operation(**orders, steps=["effect"], clock=-HOUR) as late:
        assert late.outcome() == {"error": "ConcurrentRequest"}
    assert engine.peek("k").state is State.PROCESSING
    assert len(ledger.entries()) == 1
