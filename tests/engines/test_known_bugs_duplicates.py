"""Known bugs of other designs: duplicates that run, wait, meet or fail in the wrong way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest

import semel
from engines.facade import PATIENCE, Effect, Stop, World, never, wait_until
from semel import (
    ConcurrentRequest,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    events,
)
from semel.core.records import State
from semel.testing import FakeClock
from servers.redis import redis_cluster

HOLD = Policy(abandoned="hold")
IMPATIENT = Policy(wait_timeout=15)
"""Less than a lease: what is found locked is never waited for until the lease ends."""


def test_a_claim_that_arrives_after_another_caller_finished_runs_nothing(world):
    """Known bug 3: read "no result", then claim, and run again what was finished in between."""
    slow, fast = world.engine(), world.engine()
    finished, on_its_way = threading.Event(), threading.Event()

    def hold_up():
        on_its_way.set()
        finished.wait(PATIENCE)

    slow.store.before["claim"] = hold_up
    late = slow.start("k", never)
    assert on_its_way.wait(PATIENCE)
    assert fast.execute("k", Effect("first")) == "first"
    finished.set()
    assert late.result(PATIENCE) == "first"


def test_in_a_storm_over_many_engines_each_key_runs_once(world):
    """Known bug 3: the same, wherever the callers happen to meet."""
    engines = [world.engine() for _ in range(4)]
    effects = [Effect(number) for number in range(20)]
    calls = [
        (number, engine.start(f"k{number}", effect))
        for number, effect in enumerate(effects)
        for engine in engines
        for _ in range(2)
    ]
    assert all(call.result(PATIENCE) == number for number, call in calls)
    assert [effect.runs for effect in effects] == [1] * 20


def test_another_payload_is_a_mismatch_at_once_while_the_first_still_runs(world):
    """Known bug 7: the conflict is only seen after waiting for the first one."""
    engine, other = world.engine(), world.engine()
    effect = Effect().held()
    running = engine.start("k", effect, payload={"amount": 1})
    effect.wait_started()
    for each in (engine, other):
        with pytest.raises(PayloadMismatch):
            each.execute("k", never, payload={"amount": 2})
        assert each.told(events.Mismatched)
    assert not running.done()
    effect.release()
    assert running.result(PATIENCE) == "done"
    with pytest.raises(PayloadMismatch):
        other.execute("k", never, payload={"amount": 2})
    assert effect.runs == 1


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster() as servers:
        yield servers


def test_every_script_finds_its_keys_in_one_slot_whatever_braces_a_key_holds(kind, cluster):
    """Known bug 8: a user's braces scatter the keys of one script over a cluster."""
    keys = ["{a}", "{", "}", "}{", "{}", "{a}{b}", "a{b}c", "{a", "{{a}}", "plain"]
    with World(kind, cluster.url) as world:
        engine, other = world.engine(), world.engine()
        scope = f"{{{kind}}}"
        for key in keys:
            with pytest.raises(ValueError):
                engine.execute(key, Effect(raising=ValueError()), scope=scope)
            assert engine.execute(key, Effect(key), scope=scope) == key
            assert other.execute(key, never, scope=scope) == key


def test_a_message_is_not_acknowledged_as_done_while_another_handler_runs_it(world):
    """Known bug 10: the duplicate is acknowledged, the first one fails, the message is lost."""
    engine, other = world.engine(), world.engine()
    effect = Effect(raising=ValueError("no")).held()
    running = engine.start_consuming("m", effect)
    effect.wait_started()
    for each in (engine, other):
        with pytest.raises(ConcurrentRequest) as refused:
            each.consume("m", never)
        assert refused.value.retry_after > 0
    effect.release()
    with pytest.raises(ValueError):
        running.result(PATIENCE)
    assert other.consume("m", Effect())
    assert not engine.consume("m", never)


def interruptions(world):
    # The other two would end an event loop; what a cancelled task leaves is told elsewhere.
    return (KeyboardInterrupt, SystemExit, Stop) if world.name == "threads" else (Stop,)


def test_an_interrupted_function_leaves_no_locked_key(world):
    """Known bug 14: only Exception is handled, and Ctrl-C locks the key for its ttl."""
    engine, other = world.engine(), world.engine()
    for kind in interruptions(world):
        with pytest.raises(kind):
            engine.execute(kind.__name__, Effect(raising=kind()))
        outcome = other.run(kind.__name__, Effect("again"), policy=IMPATIENT)
        assert (outcome.value, outcome.attempt.number) == ("again", 2)


def test_an_interrupted_function_whose_effect_is_unknown_is_held(world):
    """Known bug 14: the same under hold, where nobody may guess."""
    engine, other = world.engine(), world.engine()
    for kind in interruptions(world):
        with pytest.raises(kind):
            engine.execute(kind.__name__, Effect(raising=kind()), policy=HOLD)
        with pytest.raises(OutcomeUnknown):
            other.execute(kind.__name__, never, policy=IMPATIENT)
        wait_until(lambda: engine.told(events.Parked))  # told once the store was


def test_an_interruption_that_proves_nothing_happened_frees_the_key_even_under_hold(world):
    """Known bug 14: the business may know better."""
    engine = world.engine(policy=Policy(abandoned="hold", not_done=(Stop,)))
    with pytest.raises(Stop):
        engine.execute("k", Effect(raising=Stop()))
    assert engine.execute("k", Effect("again"), policy=IMPATIENT) == "again"


@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["takeover", "hold"])
@pytest.mark.parametrize("fault", [semel.testing.Refuse, semel.testing.LoseReply])
def test_a_claim_that_was_interrupted_leaves_no_locked_key(world, fault, policy):
    """Known bug 14: interrupted between asking for the key and hearing that it is ours."""
    engine, other = world.engine(), world.engine()
    engine.store.inject("claim", fault(Stop()))
    with pytest.raises(Stop):
        engine.execute("k", never, policy=policy)
    assert engine.store.fired("claim") == 1
    assert other.execute("k", Effect("mine"), policy=IMPATIENT) == "mine"


def test_scopes_tenants_and_colons_never_make_two_operations_meet(world):
    """Known bug 15: "a:b" + "c" and "a" + "b:c" are one record."""
    engine = world.engine()
    pairs = [("a:b", "c"), ("a", "b:c"), ("tenant-1", "k"), ("tenant-2", "k"), ("K", "k")]
    for scope, key in pairs:
        assert engine.execute(key, Effect([scope, key]), scope=scope) == [scope, key]
    for scope, key in pairs:
        assert engine.execute(key, never, scope=scope) == [scope, key]


def test_derived_keys_of_two_scopes_differ_and_stay_the_same_on_every_attempt(world):
    """Known bug 15: the downstream calls of two operations are taken for one."""
    engine = world.engine()

    def fails_at_first():
        attempt = semel.current_attempt()
        seen.append(attempt.derive("capture"))
        if attempt.number == 1:
            raise ValueError

    derived = {}
    for scope in ("a", "b"):
        seen = []
        with pytest.raises(ValueError):
            engine.execute("k", fails_at_first, scope=scope)
        engine.execute("k", fails_at_first, scope=scope)
        derived[scope] = set(seen)
    assert [len(keys) for keys in derived.values()] == [1, 1]
    assert derived["a"] != derived["b"]


@pytest.mark.parametrize("method", ["execute", "consume"])
def test_a_key_used_again_inside_its_own_run_is_an_error_at_once(world, method):
    """Known bug 16: the call waits for itself for ever, or runs twice."""
    engine = world.engine()
    refused = []

    def again():
        with pytest.raises(NestedCall) as error:
            getattr(engine, method)("k", never)
        refused.append(error)
        return engine.execute("k2", lambda: getattr(engine, method)("k", never))

    with pytest.raises(NestedCall):
        engine.execute("k", again)
    assert len(refused) == 1
    assert engine.execute("k", Effect("free again")) == "free again"


def test_an_identical_retry_with_its_payload_is_accepted(world):
    """Known bug 18: the retry is compared with itself and refused."""
    engine, other = world.engine(), world.engine()
    order = {"items": [{"sku": "a", "n": 1}], "note": None}
    same_order = {"note": None, "items": [{"n": 1, "sku": "a"}]}
    payment = Policy.payment()
    with pytest.raises(ValueError):
        engine.execute(
            "k", Effect(raising=ValueError()), payload=order, policy=Policy(failure="retryable")
        )
    assert engine.execute("k", Effect("paid"), payload=order, policy=payment) == "paid"
    for payload in (order, same_order):
        assert other.execute("k", never, payload=payload, policy=payment) == "paid"


def test_of_a_hundred_waiters_exactly_one_runs_next_when_the_owner_fails(world):
    """Known bug 19: all of them run."""
    engines = [world.engine(), world.engine()]
    bad, good = Effect(raising=ValueError("no")).held(), Effect("yes")
    owner = engines[0].start("k", bad)
    bad.wait_started()
    waiting = [engine.start("k", good) for engine in engines for _ in range(50)]
    wait_until(lambda: [engine.sharers() for engine in engines] == [50, 49])
    bad.release()
    with pytest.raises(ValueError):
        owner.result(PATIENCE)
    assert {call.result(PATIENCE) for call in waiting} == {"yes"}
    assert (bad.runs, good.runs) == (1, 1)


def test_an_expired_record_means_the_first_request_again(world):
    """Known bug 21: at the edge of its time a record is neither there nor gone."""
    engine = world.engine(policy=Policy(ttl=0.3))
    effect = Effect()
    deadline = time.monotonic() + PATIENCE
    numbers = set()
    while effect.runs < 3 and time.monotonic() < deadline:
        numbers.add(engine.run("k", effect).attempt.number)
    assert effect.runs == 3
    assert numbers == {1}, "each life of a record begins with its first attempt"


def test_a_record_is_kept_until_its_last_moment_and_not_beyond(kind):
    """Known bug 21: exactly at the edge, on a clock that can be stopped there."""
    clock = FakeClock()
    with World(kind, "memory://") as world:
        world._stores.append(world.kind.open_store("memory://", clock=clock))
        engine = world.engine(policy=Policy(ttl=60))
        assert engine.execute("k", Effect("first")) == "first"
        clock.advance(59.999)
        assert engine.execute("k", never) == "first"
        clock.advance(0.001)
        assert engine.execute("k", Effect("second")) == "second"


def test_a_key_that_the_local_cache_answers_again_and_again_expires_too(world):
    """Known bug 21: every replay from a cache makes the answer younger."""
    engine = world.engine(policy=Policy(ttl=0.3), cache=10)
    effect = Effect()
    deadline = time.monotonic() + PATIENCE
    while effect.runs < 2 and time.monotonic() < deadline:
        assert engine.execute("k", effect) == "done"
    assert effect.runs == 2
    assert len(engine.told(events.Replayed)) > engine.commands("claim"), "the cache was used"


def test_a_failed_task_that_is_retried_under_its_own_id_runs(world):
    """Known bug 22: the retry is taken for a duplicate and acknowledged."""
    worker, another_worker = world.engine(), world.engine()
    for failing in range(3):
        with pytest.raises(ValueError):
            worker.consume("task-id", Effect(raising=ValueError(failing)))
    assert another_worker.consume("task-id", Effect())
    assert not worker.consume("task-id", never)


def test_a_task_that_failed_for_good_is_not_run_again_and_not_called_done(world):
    """Known bug 22: the other way round, when the failure was recorded as final."""
    engine, other = world.engine(), world.engine()
    with pytest.raises(ValueError):
        engine.consume("task-id", Effect(raising=ValueError("bad")), policy=Policy(failure="final"))
    for method in (other.consume, other.execute):
        with pytest.raises(PreviousFailure, match="bad"):
            method("task-id", never)
    assert other.peek("task-id").state is State.FAILED


def test_waiters_with_a_time_limit_return_by_it(world):
    """Known bug 19: no waiter hangs because others wait too."""
    engine, other = world.engine(), world.engine()
    effect = Effect().held()
    running = engine.start("k", effect)
    effect.wait_started()
    limit = Policy(wait_timeout=0.2)
    calls = [each.start("k", never, policy=limit) for each in (engine, other) for _ in range(10)]
    assert not wait(calls, PATIENCE).not_done
    assert {type(call.exception()) for call in calls} == {semel.WaitTimeout}
    effect.release()
    assert running.result(PATIENCE) == "done"
