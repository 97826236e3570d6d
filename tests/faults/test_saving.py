"""The store cannot be told how a function ended.

| fault | expected |
|---|---|
| 27 store down at complete | the caller gets its result; retried; the key is not freed |
| 36 releasing fails | the original exception reaches the caller; the lease ends by itself |

Redis has no free connection, stands still (SIGSTOP) or is cut off by a proxy; an SQLite file is
locked by another connection; a memory store cannot be out of reach, so its calls are refused.
"""

from __future__ import annotations

import signal

import pytest

from engines.facade import MANY, PATIENCE, Effect, World, never, wait_until
from faults.outages import short_of_time
from semel import ConcurrentRequest, Policy, events
from semel.core.records import State
from semel.testing import Refuse
from servers.proxy import proxy_to

fault = pytest.mark.fault

REFUSING = Policy(concurrent="reject")


@pytest.fixture
def impatient(monkeypatch):
    """Let a call hand its result over to the timer sooner."""
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.3)


def start_held(engine, policy=None):
    effect = Effect().held()
    running = engine.start("k", effect, policy=policy)
    effect.wait_started()
    return effect, running


@fault(27)
def test_a_result_that_cannot_be_stored_reaches_its_caller_and_is_stored_later(
    outage, shared, impatient
):
    engine, other = outage.engine, shared.engine()
    effect, running = start_held(engine)
    with outage.during():
        effect.release()
        assert running.result(PATIENCE) == "done"
        assert engine.told(events.ResultNotStored)
        with pytest.raises(ConcurrentRequest):  # the key is not freed
            other.execute("k", never, policy=REFUSING)
    wait_until(lambda: engine.told(events.ResultStoredLate))
    assert other.execute("k", never) == "done"
    assert effect.runs == 1


@fault(27)
def test_a_result_that_redis_stood_still_for_is_stored_when_it_wakes_up(
    kind, own_server, impatient
):
    with World(kind, own_server.url) as world, short_of_time(world) as engine:
        effect, running = start_held(engine)
        own_server.process.send_signal(signal.SIGSTOP)
        effect.release()
        assert running.result(PATIENCE) == "done"
        assert engine.told(events.ResultNotStored)
        own_server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: engine.told(events.ResultStoredLate))
        assert world.engine().execute("k", never) == "done"
        assert effect.runs == 1


@fault(27)
def test_a_store_that_refuses_results_is_asked_again_until_it_takes_them(world, impatient):
    engine = world.engine()
    engine.store.inject("complete", Refuse(), times=MANY)
    assert engine.execute("k", Effect()) == "done"
    assert engine.store.fired("complete") >= 2
    assert engine.told(events.ResultNotStored)
    assert world.engine().peek("k").state is State.PROCESSING
    engine.store.heal()
    wait_until(lambda: engine.told(events.ResultStoredLate))
    assert world.engine().execute("k", never) == "done"


@fault(27)
def test_close_stores_what_could_not_be_stored_before(world, impatient):
    engine = world.engine()
    engine.store.inject("complete", Refuse(), times=MANY)
    assert engine.execute("k", Effect()) == "done"
    assert engine.told(events.ResultNotStored)
    engine.store.heal()
    engine.close()
    assert world.engine().execute("k", never) == "done"


@fault(27)
def test_a_result_that_could_not_be_stored_in_time_does_not_touch_its_successor(world, impatient):
    engine, successor = world.engine(), world.engine()
    engine.store.inject("complete", Refuse(), times=MANY)
    engine.break_renewals()
    assert engine.execute("k", Effect(), policy=Policy(lease=0.5)) == "done"
    assert successor.execute("k", Effect("by the successor")) == "by the successor"
    engine.store.heal()
    wait_until(lambda: not len(engine.engine.internals.leases))
    assert not engine.told(events.ResultStoredLate)
    assert engine.execute("k", never) == "by the successor"


# --- in exception handling --------------------------------------------------------------------


@fault(36)
def test_an_exception_reaches_its_caller_although_the_key_cannot_be_released(world):
    engine, other = world.engine(), world.engine()
    engine.store.inject("fail", Refuse(), times=MANY)
    with pytest.raises(ZeroDivisionError, match="the original"):
        engine.execute(
            "k", Effect(raising=ZeroDivisionError("the original")), policy=Policy(lease=0.4)
        )
    assert engine.store.fired("fail") >= 1
    assert [event.verb for event in engine.told(events.StoreFailed)] == ["fail"]
    outcome = other.run("k", Effect("next"))  # when the lease has ended by itself
    assert (outcome.value, outcome.attempt.number) == ("next", 2)


@fault(36)
def test_an_exception_reaches_its_caller_although_redis_is_cut_off(
    kind, redis_of_this_worker, redis_url
):
    with (
        proxy_to(redis_of_this_worker.port) as proxy,
        World(kind, proxy.url) as world,
        short_of_time(world) as engine,
    ):

        def work():
            proxy.refusing = True
            proxy.cut_all()
            raise ZeroDivisionError("the original")

        with pytest.raises(ZeroDivisionError, match="the original"):
            engine.execute("cut-off", work, policy=Policy(lease=0.4))
        assert proxy.refused >= 1
        proxy.refusing = False
        outcome = engine.run("cut-off", Effect("next"))
        assert (outcome.value, outcome.attempt.number) == ("next", 2)
