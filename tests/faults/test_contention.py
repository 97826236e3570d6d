"""Several callers want the same key.

| fault | expected |
|---|---|
| 17 two first calls at once | one runs; the other waits, replays or is told busy |
| 18 100 waiters, the owner fails | exactly one runs next |
| 19 other payload, while running and after | mismatch both times, nothing executed, record unchanged |
| 31 wake-up message lost | polling finds it |
| 37 nested call with the same key | immediate error |
| 42 two attempts wait for each other's keys | both end with WaitTimeout by the lease |
"""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from engines.facade import PATIENCE, Effect, World, never, wait_until
from semel import (
    ConcurrentRequest,
    NestedCall,
    PayloadMismatch,
    Policy,
    WaitTimeout,
    events,
)

fault = pytest.mark.fault

REFUSING = Policy(concurrent="reject")


def polled(engine, times: int = 2) -> bool:
    """The engine was told "busy" and has asked again."""
    return engine.commands("claim") >= times


@fault(17)
def test_of_two_first_calls_one_runs_and_the_other_waits_for_its_result(world):
    first, second = world.engine(), world.engine()
    effect = Effect().held()
    running = first.start("k", effect)
    effect.wait_started()
    waiting = second.start("k", never)
    wait_until(lambda: polled(second))
    assert not waiting.done()
    effect.release()
    assert running.result(PATIENCE) == waiting.result(PATIENCE) == "done"
    assert effect.runs == 1
    assert [event.waited for event in second.told(events.Replayed)] == [True]


@fault(17)
def test_of_two_first_calls_the_one_that_does_not_wait_is_told_busy(world):
    first, second = world.engine(), world.engine()
    effect = Effect().held()
    running = first.start("k", effect)
    effect.wait_started()
    with pytest.raises(ConcurrentRequest) as told:
        second.execute("k", never, policy=REFUSING)
    assert 0 < told.value.retry_after <= 30
    effect.release()
    assert running.result(PATIENCE) == second.execute("k", never) == "done"


@fault(17)
def test_first_calls_that_race_for_many_keys_run_each_once(world):
    engines = [world.engine(), world.engine()]
    keys = [f"k{number}" for number in range(20)]
    effects = {key: Effect(key) for key in keys}
    calls = [(key, engine.start(key, effects[key])) for key in keys for engine in engines]
    assert all(call.result(PATIENCE) == key for key, call in calls)
    assert [effect.runs for effect in effects.values()] == [1] * len(keys)
    ran = [event for engine in engines for event in engine.told(events.Ran)]
    assert len(ran) == len(keys)


@fault(18)
def test_when_the_owner_fails_exactly_one_of_a_hundred_waiters_runs_next(world):
    here, elsewhere = world.engine(), world.engine()
    failing = Effect(raising=ValueError("no")).held()
    owner = here.start("k", failing)
    failing.wait_started()
    effect = Effect().held()
    waiters = [engine.start("k", effect) for engine in (here, elsewhere) for _ in range(50)]
    wait_until(lambda: here.sharers() + elsewhere.sharers() == 50 + 49 and polled(elsewhere))
    failing.release()
    with pytest.raises(ValueError):
        owner.result(PATIENCE)
    effect.wait_started()
    asked = here.commands("claim") + elsewhere.commands("claim")
    wait_until(lambda: here.commands("claim") + elsewhere.commands("claim") > asked + 1)
    assert effect.runs == 1
    assert not any(waiter.done() for waiter in waiters)
    effect.release()
    assert {waiter.result(PATIENCE) for waiter in waiters} == {"done"}
    assert (failing.runs, effect.runs) == (1, 1)


@fault(19)
def test_another_payload_is_a_mismatch_while_the_first_runs_and_after(world):
    first, second = world.engine(), world.engine()

    def refused_and_unchanged():
        before = first.peek("k")
        for engine in (first, second):
            with pytest.raises(PayloadMismatch):
                engine.execute("k", never, payload={"amount": 2})
            with pytest.raises(PayloadMismatch):
                engine.consume("k", never, payload={"amount": 2})
        after = first.peek("k")
        assert replace(after, now=before.now) == before

    effect = Effect().held()
    running = first.start("k", effect, payload={"amount": 1})
    effect.wait_started()
    refused_and_unchanged()
    effect.release()
    assert running.result(PATIENCE) == "done"
    refused_and_unchanged()
    assert second.execute("k", never, payload={"amount": 1}) == "done"
    assert effect.runs == 1
    assert second.told(events.Mismatched)


@fault(31)
def test_a_waiter_that_nothing_wakes_up_finds_the_result_by_asking(world, monkeypatch):
    owner, waiter = world.engine(), world.engine()
    for engine in (owner, waiter):
        monkeypatch.setattr(engine.store, "watch", lambda _: None)  # nobody can be woken
    effect = Effect().held()
    running = owner.start("k", effect)
    effect.wait_started()
    waiting = waiter.start("k", never)
    wait_until(lambda: polled(waiter, 3))
    effect.release()
    assert waiting.result(PATIENCE) == running.result(PATIENCE) == "done"


@fault(31)
def test_a_waiter_that_nothing_wakes_up_finds_a_dead_owner_by_asking(
    shared, kind, operation, ledger
):
    engine = shared.engine()
    with operation(kind=kind, url=shared.url, steps=["wait"], policy={"lease": 0.4}) as it:
        it.hear("waiting")
        waiting = engine.start("k", ledger.effect())
        wait_until(lambda: polled(engine))
        it.kill()  # nobody is left who could wake anyone
    assert waiting.result(PATIENCE) == "done here"
    assert [entry.number for entry in ledger.entries()] == [2]


@fault(37)
def test_an_attempt_that_asks_for_its_own_key_is_told_at_once(world):
    engine = world.engine()
    again = world.engine_on(engine.store)
    told = []

    def outer():
        for one in (engine, again):
            for method in (one.execute, one.consume):
                with pytest.raises(NestedCall):
                    method("k", never)
                told.append(method)
        return "outer"

    before = engine.commands("claim")
    assert engine.execute("k", outer) == "outer"
    assert len(told) == 4
    assert engine.commands("claim") - before == 1  # the store was not even asked


@fault(42)
def test_two_attempts_that_wait_for_each_other_both_give_up_by_the_lease(world):
    engines = [world.engine(), world.engine()]
    policy = Policy(lease=0.6)
    both_run, both_gave_up = threading.Barrier(2, timeout=PATIENCE), threading.Barrier(2)
    gave_up = []

    def outer(engine, other_key):
        def run():
            both_run.wait()
            try:
                engine.execute(other_key, never, policy=policy)
            except WaitTimeout as error:
                gave_up.append(error)
            both_gave_up.wait(PATIENCE)
            return "free again"

        return run

    calls = [
        engines[0].start("k1", outer(engines[0], "k2"), policy=policy),
        engines[1].start("k2", outer(engines[1], "k1"), policy=policy),
    ]
    assert [call.result(PATIENCE) for call in calls] == ["free again"] * 2
    assert len(gave_up) == 2
    assert all(polled(engine) for engine in engines), "they did not wait for each other"


@fault(42)
def test_two_attempts_of_one_process_that_wait_for_each_other_both_give_up(kind):
    """They share executions, and must not wait in each other's row for ever."""
    with World(kind, "memory://") as world:
        engine = world.engine()
        policy = Policy(lease=0.6)
        both_run, both_gave_up = threading.Barrier(2, timeout=PATIENCE), threading.Barrier(2)

        def outer(other_key):
            def run():
                both_run.wait()
                with pytest.raises(WaitTimeout):
                    engine.execute(other_key, never, policy=policy)
                both_gave_up.wait(PATIENCE)

            return run

        calls = [
            engine.start(mine, outer(other), policy=policy)
            for mine, other in (("k1", "k2"), ("k2", "k1"))
        ]
        for call in calls:
            call.result(PATIENCE)
