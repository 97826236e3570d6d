"""Calls of one process that share one running execution."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time

import pytest

from engines.facade import (
    MANY,
    PATIENCE,
    Effect,
    Stop,
    World,
    held_up,
    never,
    until,
    wait_until,
)
from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    DuplicateRequest,
    LeaseLost,
    PayloadMismatch,
    Policy,
    StoreUnavailable,
    WaitTimeout,
    events,
)
from semel.core.records import Finished, State
from semel.engine.colours import tasks, threads
from semel.engine.colours.leaders import LEAD, Forgets, Leaders, LeadersOfLoops
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import LoseReply, Refuse


@pytest.fixture
def world(memory_world):
    """What is shared never gets as far as a store, so one kind of it will do."""
    return memory_world


def running(engine, effect, key="k", **options):
    """Start a call and wait until it runs."""
    call = engine.start(key, effect.held(), **options)
    effect.wait_started()
    return call


def attached(engine, number, fn=never, **options):
    """Start calls that wait for the running one."""
    before = engine.sharers()
    calls = [engine.start("k", fn, **options) for _ in range(number)]
    wait_until(lambda: engine.sharers() == before + number)
    return calls


def test_a_thousand_duplicates_in_one_process_are_two_store_commands(world):
    # A long lease: a busy machine needs its time for a thousand threads, and a renewal would count.
    engine, effect = world.engine(policy=Policy(lease=3600)), Effect({"paid": [1]})
    calls = [running(engine, effect), *attached(engine, 999)]
    effect.release()
    results = [call.result(PATIENCE) for call in calls]
    assert all(result == {"paid": [1]} for result in results)
    assert len({id(result) for result in results}) == 1000, "each caller has a copy of its own"
    assert engine.commands() == 2
    assert effect.runs == 1
    assert len(engine.told(events.Replayed)) == 999


def test_a_failure_wakes_one_of_the_waiting_and_the_others_wait_for_it(world):
    engine, bad, good = world.engine(), Effect(raising=ValueError()), Effect("good").held()
    leader = running(engine, bad)
    waiting = attached(engine, 20, good)
    bad.release()
    with pytest.raises(ValueError):
        leader.result(PATIENCE)
    good.wait_started()
    assert engine.sharers() == 19
    assert engine.commands("claim") == 2
    good.release()
    assert {call.result(PATIENCE) for call in waiting} == {"good"}
    assert good.runs == 1
    assert engine.commands() == 4  # claim, fail, claim, complete


def test_when_all_fail_each_runs_once_one_after_the_other(world):
    engine = world.engine()
    effects = [Effect(raising=ValueError(number)) for number in range(10)]
    leader = running(engine, effects[0])
    waiting = [call for effect in effects[1:] for call in attached(engine, 1, effect)]
    effects[0].release()
    messages = [str(call.exception(PATIENCE)) for call in (leader, *waiting)]
    assert messages == [str(number) for number in range(10)], "each has the error of its own run"
    assert [effect.runs for effect in effects] == [1] * 10
    assert engine.commands("claim") == 10
    assert not engine.engine.internals.shared_runs._leaders._waiting, "nothing is left behind"


def test_another_payload_does_not_attach_and_is_a_mismatch_at_once(world):
    engine, effect = world.engine(), Effect()
    leader = running(engine, effect, payload=1)
    with pytest.raises(PayloadMismatch):
        engine.execute("k", never, payload=2)
    same = attached(engine, 1, payload=1)
    effect.release()
    assert leader.result(PATIENCE) == same[0].result(PATIENCE) == "done"


def test_a_consumer_neither_attaches_nor_is_attached_to(world):
    engine, effect = world.engine(), Effect("value")
    leader = running(engine, effect)
    with pytest.raises(ConcurrentRequest):
        engine.consume("k", never)
    effect.release()
    assert leader.result(PATIENCE) == "value"
    handling = Effect("dropped").held()
    consumer = engine.start_consuming("m", handling)
    handling.wait_started()
    waiting = engine.start("m", never)
    wait_until(lambda: engine.commands("claim") >= 5)  # it asks the store, again and again
    assert engine.sharers() == 0
    handling.release()
    assert consumer.result(PATIENCE) is True
    assert waiting.result(PATIENCE) is None


def test_a_caller_that_does_not_wait_never_attaches(world):
    engine, effect = world.engine(), Effect()
    leader = running(engine, effect)
    for _ in range(3):
        with pytest.raises(ConcurrentRequest):
            engine.execute("k", never, policy=Policy(concurrent="reject"))
    assert engine.commands("claim") == 4
    effect.release()
    assert leader.result(PATIENCE) == "done"


def test_each_sharer_waits_as_long_as_its_own_policy_says(world):
    engine, effect = world.engine(), Effect()
    leader = running(engine, effect)
    patient = attached(engine, 2)
    impatient = [engine.start("k", never, policy=Policy(wait_timeout=t)) for t in (0, 0.05, 0.1)]
    guarding = engine.start("k", never, policy=Policy(duplicate="reject", message="twice"))
    assert {type(call.exception(PATIENCE)) for call in impatient} == {WaitTimeout}
    with pytest.raises(ConcurrentRequest, match="twice"):
        guarding.result(PATIENCE)
    assert engine.sharers() == 2
    assert engine.commands("claim") == 1
    effect.release()
    assert {call.result(PATIENCE) for call in (leader, *patient)} == {"done"}


def test_a_sharer_that_was_made_leader_still_times_out(world):
    engine, other = world.engine(), world.engine()
    bad, elsewhere = Effect(raising=ValueError()), Effect("elsewhere")
    running(engine, bad)
    # The store has it run elsewhere by the time the sharer leads.
    engine.store.before["fail"] = lambda: other.forget("k") and running(other, elsewhere)
    limit = Policy(wait_timeout=1.0)
    sharer, follower = attached(engine, 1, policy=limit) + attached(engine, 1)
    bad.release()
    with pytest.raises(WaitTimeout):
        sharer.result(PATIENCE)
    elsewhere.release()
    assert follower.result(PATIENCE) == "elsewhere"


def test_a_sharer_that_times_out_never_takes_the_lead_with_it(world):
    engine, race = world.engine(), random.Random(1)
    for number in range(100):
        key = f"k{number}"
        bad, good = Effect(raising=ValueError()), Effect("good")
        leader = running(engine, bad, key)
        patient = engine.start(key, good)
        impatient = [
            engine.start(key, good, policy=Policy(wait_timeout=race.uniform(0.0, 0.01)))
            for _ in range(3)
        ]
        time.sleep(race.uniform(0.0, 0.01))
        bad.release()
        assert patient.result(PATIENCE) == "good"
        assert isinstance(leader.exception(PATIENCE), ValueError)
        assert {type(call.exception(PATIENCE)) for call in impatient} <= {WaitTimeout, type(None)}
        assert good.runs == 1
    assert not engine.engine.internals.shared_runs._leaders._waiting


@pytest.mark.parametrize("limit", [None, 60])
async def test_a_cancelled_sharer_never_takes_the_lead_with_it(limit):
    policy = Policy(wait_timeout=limit)
    async with AsyncIdempotency(AsyncMemoryStore()) as idem:

        async def once(steps, key):
            """Cancel the sharer that is next to lead, some steps after the leader was let go."""
            go, runs = asyncio.Event(), []

            async def fails():
                await go.wait()
                raise ValueError

            async def succeeds():
                runs.append(1)
                await asyncio.sleep(0)
                return "good"

            leader = asyncio.create_task(idem.execute(key, fails))
            await asyncio.sleep(0)
            first, second = (
                asyncio.create_task(idem.execute(key, succeeds, policy=policy)) for _ in range(2)
            )
            await until(
                lambda: sum(map(len, idem.internals.shared_runs._leaders._waiting.values())) == 2
            )
            go.set()
            for _ in range(steps):
                await asyncio.sleep(0)
            first.cancel()
            ends = await asyncio.wait_for(
                asyncio.gather(leader, first, second, return_exceptions=True), PATIENCE
            )
            assert isinstance(ends[0], ValueError)
            assert ends[2] == "good"
            return isinstance(ends[1], asyncio.CancelledError)

        cancelled = [await once(steps, f"k{steps}") for steps in range(20)]
        assert cancelled[0]
        assert not cancelled[-1], "every moment of the way was tried"
        assert not idem.internals.shared_runs._leaders._waiting


def test_a_guarding_sharer_is_rejected_after_the_success_of_the_other(world):
    engine, effect = world.engine(), Effect()
    leader = running(engine, effect)
    guard = Policy(duplicate="reject", wait_timeout=60, message="you did that")
    waiting = attached(engine, 3, policy=guard)
    effect.release()
    assert leader.result(PATIENCE) == "done"
    for call in waiting:
        with pytest.raises(DuplicateRequest, match="you did that"):
            call.result(PATIENCE)
    assert len(engine.told(events.RejectedDuplicate)) == 3
    assert engine.commands() == 2


def claim_that_fails(engine, error, fn, **options):
    """Calls that wait for one whose claim fails."""
    fail_now = threading.Event()
    engine.store.before["claim"] = lambda: fail_now.wait(PATIENCE)
    engine.store.inject("claim", Refuse(error))
    leader = engine.start("k", fn, **options)
    wait_until(lambda: not engine.store.before)
    calls = [leader, *attached(engine, 5, fn, **options)]
    fail_now.set()
    return calls


def test_an_error_of_the_store_is_told_to_every_sharer(world):
    engine = world.engine()
    calls = claim_that_fails(engine, StoreUnavailable("down"), never)
    for call in calls:
        with pytest.raises(StoreUnavailable, match="down"):
            call.result(PATIENCE)
    assert engine.commands() == 1
    assert engine.execute("k", Effect("up again")) == "up again"


def test_calls_that_run_unprotected_do_not_wait_for_each_other(world):
    engine, effect = world.engine(), Effect("unprotected").held()
    open_policy = Policy(store_error="open")
    calls = claim_that_fails(engine, StoreUnavailable("down"), effect, policy=open_policy)
    wait_until(lambda: effect.runs == 6)
    effect.release()
    assert {call.result(PATIENCE) for call in calls} == {"unprotected"}
    assert len(engine.told(events.RanUnprotected)) == 6
    failing = Effect(raising=ValueError("of the business"))
    engine.store.inject("claim", Refuse())
    with pytest.raises(ValueError, match="of the business"):
        engine.execute("k", failing, policy=open_policy)


def test_an_error_that_no_store_should_raise_wakes_the_next_call(world):
    engine, effect = world.engine(), Effect("good")
    leader, *waiting = claim_that_fails(engine, RuntimeError("a bug"), effect)
    with pytest.raises(RuntimeError, match="a bug"):
        leader.result(PATIENCE)
    assert {call.result(PATIENCE) for call in waiting} == {"good"}
    assert effect.runs == 1


def test_two_engines_on_one_store_object_share(world):
    engine = world.engine()
    twin, effect = world.engine_on(engine.store), Effect("shared")
    leader = running(engine, effect)
    waiting = attached(twin, 5)
    effect.release()
    assert {call.result(PATIENCE) for call in (leader, *waiting)} == {"shared"}
    assert engine.commands() == 2


def test_a_leader_that_lost_its_lease_wakes_one(world):
    engine, operator = world.engine(), world.engine()
    lost, effect = Effect("lost"), Effect("mine")
    leader = running(engine, lost)
    waiting = attached(engine, 5, effect)
    operator.forget("k")
    lost.release()
    with pytest.raises(LeaseLost):
        leader.result(PATIENCE)
    assert {call.result(PATIENCE) for call in waiting} == {"mine"}
    assert (lost.runs, effect.runs) == (1, 1)


def test_a_result_that_is_not_saved_yet_is_not_shared(world, monkeypatch):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.05)
    engine, effect = world.engine(), Effect("paid")
    engine.store.inject("complete", Refuse(), times=MANY)
    leader = running(engine, effect)
    waiting = attached(engine, 5)
    effect.release()
    assert leader.result(PATIENCE) == "paid"
    wait_until(lambda: engine.sharers() == 4 and engine.commands("claim") >= 3)
    engine.store.heal()
    assert {call.result(PATIENCE) for call in waiting} == {"paid"}
    assert effect.runs == 1


def test_attempts_that_wait_for_each_others_keys_end_by_the_lease(world):
    engine, met = world.engine(policy=Policy(lease=1.0)), threading.Barrier(2)

    def crossing(other_key):
        met.wait(PATIENCE)
        return engine.execute(other_key, never)

    calls = [
        engine.start(one, lambda other=other: crossing(other))
        for one, other in (("k1", "k2"), ("k2", "k1"))
    ]
    assert WaitTimeout in {type(call.exception(PATIENCE)) for call in calls}


def test_engines_on_two_loops_do_not_share_though_they_have_one_store():
    """A future of one loop must not be touched from another."""
    with World("asyncio", "memory://") as here, World("asyncio", "memory://") as there:
        engine = here.engine()
        other, effect = there.engine_on(engine.store), Effect("across")
        leader = running(engine, effect)
        waiting = other.start("k", never)
        wait_until(lambda: engine.commands("claim") >= 3)
        effect.release()
        assert leader.result(PATIENCE) == waiting.result(PATIENCE) == "across"


# --- the leaders themselves ------------------------------------------------------------------


class Loop:
    """Stands for an event loop."""


@pytest.mark.parametrize("module", [threads, tasks])
def test_flights_belong_to_a_store(module):
    loop = Loop()

    def leaders(store):
        if module is threads:
            return threads.shared_runs_of(store)._leaders
        guard = tasks.LoopGuard()
        shared = tasks.shared_runs_of(store, guard)
        guard.settle(loop)
        return shared._leaders

    store = MemoryStore()
    assert leaders(store) is leaders(store)
    assert leaders(store) is not leaders(MemoryStore())
    unreferable = ("a tuple", "cannot be referenced weakly")
    assert leaders(unreferable) is not leaders(unreferable)


def test_each_loop_has_flights_of_its_own():
    leaders, loop = LeadersOfLoops(), Loop()
    assert leaders.of(loop) is leaders.of(loop)
    assert leaders.of(loop) is not leaders.of(Loop())


FINISHED = Finished(State.SUCCEEDED, None, 1, 1, 60.0)


class Caller:
    """Stands for a call."""


@pytest.mark.parametrize(
    ("given", "next_given"), [("nothing", FINISHED), ("lead", LEAD), ("answer", FINISHED)]
)
def test_an_interrupted_thread_gives_back_what_it_was_just_given(monkeypatch, given, next_given):
    shared, waiting = threads.SharedRuns(Leaders()), threading.Event()
    interrupt, wait_at = iter([True]), threads.Waiter.wait
    callers = [Caller(), Caller(), Caller()]

    def wait(waiter, timeout):
        if next(interrupt, False):
            waiting.wait(PATIENCE)
            raise Stop
        return wait_at(waiter, timeout)

    monkeypatch.setattr(threads.Waiter, "wait", wait)
    assert shared.lead("place", callers[0])
    ends = {}

    def share(number):
        try:
            ends[number] = shared.join("place", callers[number], PATIENCE)
        except Stop:
            ends[number] = "stopped"

    sharers = [threading.Thread(target=share, args=(number,)) for number in (1, 2)]
    for number, sharer in enumerate(sharers, 1):
        sharer.start()
        wait_until(lambda n=number: len(shared._leaders._waiting["place"]) == n)
    if given == "lead":
        shared.pass_on("place", callers[0])
    elif given == "answer":
        shared.give(shared.end("place", FINISHED), FINISHED)
    waiting.set()
    sharers[0].join(PATIENCE)
    if given == "nothing":
        assert len(shared._leaders._waiting["place"]) == 1
        shared.give(shared.end("place", FINISHED), FINISHED)
    sharers[1].join(PATIENCE)
    assert ends == {1: "stopped", 2: next_given}


def test_a_thread_that_is_given_the_lead_in_the_moment_of_its_timeout_leads(monkeypatch):
    shared, leader, follower = threads.SharedRuns(Leaders()), Caller(), Caller()
    assert shared.lead("place", leader)
    leave = shared._leaders.leave

    def leave_too_late(place, waiter):
        shared.pass_on(place, leader)
        return leave(place, waiter)

    monkeypatch.setattr(shared._leaders, "leave", leave_too_late)
    assert shared.join("place", follower, 0.0) is LEAD


def test_seats_are_served_in_the_order_they_were_taken(world):
    engine, order = world.engine(), itertools.count()
    bad = Effect(raising=ValueError())
    leader = running(engine, bad)
    served = {}

    def serve(number):
        served[number] = next(order)
        raise ValueError

    waiting = [attached(engine, 1, lambda n=number: serve(n))[0] for number in range(10)]
    bad.release()
    for call in (leader, *waiting):
        assert isinstance(call.exception(PATIENCE), ValueError)
    assert served == {number: number for number in range(10)}


@pytest.mark.parametrize("by", ["forget", "marks", "another engine"])
def test_what_was_forgotten_is_not_shared_with_a_call_that_comes_after(world, by):
    engine = world.engine()
    saved = held_up(engine, "complete")
    first = engine.start("k", lambda: "forgotten")
    saved.wait()
    follower = attached(engine, 1)[0]
    if by == "forget":
        assert engine.forget("k")
    elif by == "marks":
        assert engine._kind.finish(engine.engine.marks.delete, "k")
    else:
        assert world.engine_on(engine.store).forget("k")
    after = engine.start("k", lambda: "new")
    assert after.result(PATIENCE) == "new"
    saved.open()
    # Those that asked before it was forgotten may still have it.
    assert [call.result(PATIENCE) for call in (first, follower)] == ["forgotten"] * 2
    assert engine.execute("k", never) == "new"


def test_calls_after_a_forget_share_one_execution_again(world):
    engine, effect = world.engine(), Effect("new")
    engine.execute("k", lambda: "old")
    engine.forget("k")
    first = running(engine, effect)
    others = attached(engine, 5)
    effect.release()
    assert {call.result(PATIENCE) for call in (first, *others)} == {"new"}


def test_more_identities_are_forgotten_than_are_remembered_one_by_one(monkeypatch):
    monkeypatch.setattr("semel.engine.colours.leaders.REMEMBERED_FORGETS", 2)
    forgets = Forgets()
    assert not forgets.any
    seen = {key: forgets.generation(key) for key in "abcd"}
    for key in "abc":
        forgets.add(key)
        assert forgets.generation(key) != seen[key]
        seen[key] = forgets.generation(key)
    assert forgets.any
    # Nobody shares too much: a generation may change too often, never too seldom.
    assert all(forgets.generation(key) >= seen[key] for key in "abcd")
    assert len(forgets._known[0]) <= 2


def test_a_lost_lease_does_not_say_that_nothing_was_stored(world):
    engine = world.engine()
    saved = held_up(engine, "complete")
    engine.store.inject("complete", LoseReply())
    call = engine.start("k", lambda: 1)
    saved.wait()
    engine.forget("k")
    saved.open()
    with pytest.raises(LeaseLost, match="its result is not kept"):
        call.result(PATIENCE)
