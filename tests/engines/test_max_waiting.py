"""How many calls of an engine may wait for others: none is refused unless `max_waiting` is set."""

from __future__ import annotations

import pytest

from engines.facade import PATIENCE, Effect, World, held_up, never, wait_until
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    Policy,
    StoreUnavailable,
    TooManyWaiting,
    events,
)
from semel.testing import Refuse

LASTING = Policy(lease=3600)
"""No renewal comes while a test counts what the store is asked."""


@pytest.fixture
def world(memory_world):
    return memory_world


def running(engine, effect, key="k", **options):
    call = engine.start(key, effect.held(), **options)
    effect.wait_started()
    return call


def attached(engine, number, key="k"):
    """Start calls that wait for the running one of their process."""
    before = engine.sharers()
    calls = [engine.start(key, never) for _ in range(number)]
    wait_until(lambda: engine.sharers() == before + number)
    return calls


def test_beyond_the_bound_a_duplicate_is_rejected_and_the_others_go_on_waiting(world):
    engine, effect = world.engine(max_waiting=2, policy=LASTING), Effect("paid")
    first = running(engine, effect)
    waiting = attached(engine, 2)
    for _ in range(3):
        with pytest.raises(TooManyWaiting, match="max_waiting") as refused:
            engine.execute("k", never)
        assert refused.value.retry_after > 3000, "it says how long the lease lasts"
    assert len(engine.told(events.RejectedBusy)) == 3
    effect.release()
    assert [call.result(PATIENCE) for call in (first, *waiting)] == ["paid"] * 3
    assert engine.execute("k", never) == "paid"


def test_the_bound_is_for_all_keys_of_one_engine(world):
    engine, another = world.engine(max_waiting=1), world.engine(max_waiting=1)
    effects = Effect(1), Effect(2)
    calls = [running(engine, effect, f"k{effect.result}") for effect in effects]
    calls += attached(engine, 1, "k1")
    with pytest.raises(TooManyWaiting):
        engine.execute("k2", never)
    calls.append(another.start("k2", never))
    wait_until(lambda: another.commands("claim") >= 2)  # it was told "busy", and asks again
    for effect in effects:
        effect.release()
    assert [call.result(PATIENCE) for call in calls] == [1, 2, 1, 2]


def test_a_call_that_waits_for_another_process_counts_too(sqlite_url, kind):
    with World(kind, sqlite_url) as world:
        here, there, effect = world.engine(max_waiting=1), world.engine(), Effect("paid")
        first = running(there, effect)
        leader = here.start("k", never)
        wait_until(lambda: here.commands("claim") >= 2)  # it was told "busy", and asks again
        for _ in range(2):
            with pytest.raises(TooManyWaiting):
                here.execute("k", never)
        effect.release()
        assert first.result(PATIENCE) == leader.result(PATIENCE) == "paid"


def test_with_a_bound_of_zero_nobody_waits_for_another_process(sqlite_url, kind):
    with World(kind, sqlite_url) as world:
        here, there, effect = world.engine(max_waiting=0), world.engine(), Effect("paid")
        first = running(there, effect)
        with pytest.raises(TooManyWaiting):
            here.execute("k", never)
        effect.release()
        assert first.result(PATIENCE) == "paid"
        assert here.execute("k", never) == "paid"


def test_a_call_that_may_not_wait_still_gets_a_result_that_is_stored(world):
    engine = world.engine(max_waiting=0)
    engine.execute("k", lambda: "paid")
    gate = held_up(engine, "claim")
    first = engine.start("k", never)
    gate.wait()
    assert engine.execute("k", never) == "paid"
    gate.open()
    assert first.result(PATIENCE) == "paid"


def test_an_error_of_a_call_that_may_not_wait_does_not_reach_those_that_do(world):
    engine, effect = world.engine(max_waiting=1), Effect("paid")
    first = running(engine, effect)
    waiting = attached(engine, 1)
    engine.store.inject("claim", Refuse())
    with pytest.raises(StoreUnavailable):
        engine.execute("k", never)
    effect.release()
    assert [call.result(PATIENCE) for call in (first, *waiting)] == ["paid"] * 2


def test_a_call_that_has_stopped_waiting_makes_room_for_the_next(world):
    engine, effect = world.engine(max_waiting=1), Effect("paid")
    first = running(engine, effect)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            engine.execute("k", never, policy=Policy(wait_timeout=0.01))
    effect.release()
    assert first.result(PATIENCE) == "paid"


def test_a_waiting_call_that_takes_over_after_a_failure_counts_no_longer(world):
    engine, bad, good = world.engine(max_waiting=1), Effect(raising=ValueError()), Effect("good")
    first = running(engine, bad)
    second = engine.start("k", good.held())
    wait_until(lambda: engine.sharers() == 1)
    bad.release()
    with pytest.raises(ValueError):
        first.result(PATIENCE)
    good.wait_started()
    third = attached(engine, 1)
    good.release()
    assert [call.result(PATIENCE) for call in (second, *third)] == ["good"] * 2


@pytest.mark.parametrize("server", ["postgres", "mysql"])
def test_outside_a_transaction_waiting_calls_hold_no_connection(request, kind, server):
    url = request.getfixturevalue(f"{server}_url")
    with World(kind, url, max_size=1) as world:
        here, there, effect = world.engine(), world.engine(), Effect("paid")
        calls = [running(here, effect), *attached(here, 15)]
        calls += [there.start("k", never) for _ in range(15)]
        wait_until(lambda: there.sharers() == 14)
        assert here.execute("other", lambda: 1) == 1
        assert there.execute("another", lambda: 2) == 2
        effect.release()
        assert [call.result(PATIENCE) for call in calls] == ["paid"] * 31


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Idempotency, AsyncIdempotency])
@pytest.mark.parametrize("wrong", [-1, True, 1.5, "two", "", ()])
def test_a_wrong_bound_is_refused_at_once(engine, wrong):
    with pytest.raises(ConfigError, match="max_waiting: must be a whole number of 0 or more"):
        engine("memory://", max_waiting=wrong)


def test_it_is_no_field_of_a_policy():
    with pytest.raises(TypeError, match="max_waiting"):
        Policy(max_waiting=3)  # type: ignore[call-arg]


def test_a_variable_sets_it_and_the_code_wins(monkeypatch, world):
    monkeypatch.setenv("SEMEL_MAX_WAITING", "0")
    effect = Effect("paid")
    bounded, free = world.engine(), world.engine(max_waiting=None)
    first = running(bounded, effect)
    with pytest.raises(TooManyWaiting):
        bounded.execute("k", never)
    second = free.start("k", never)
    effect.release()
    assert [call.result(PATIENCE) for call in (first, second)] == ["paid"] * 2
