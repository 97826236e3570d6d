"""The way of one call where the store answers late, refuses, or cannot do everything."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
from msgspec.structs import replace

from engines.facade import MANY, PATIENCE, Effect, never, until, wait_until
from semel import (
    AsyncIdempotency,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    ValueRejected,
    current_attempt,
    events,
    testing,
)
from semel.core import attempts
from semel.core.records import State
from semel.stores.memory import AsyncMemoryStore
from semel.testing import Delay, Refuse

SHORT = Policy(lease=0.6)
SLOW = Delay(0.3)
"""More than a third of that lease."""


def test_a_claim_that_was_answered_late_is_made_again_before_the_function_runs(world):
    engine = world.engine()
    engine.store.inject("claim", SLOW)
    seen = []

    def looks():
        seen.append((engine.commands("claim"), current_attempt().number, current_attempt().lost))

    engine.execute("k", looks, policy=SHORT)
    assert seen == [(2, 1, False)]


def test_a_claim_that_was_answered_at_once_is_not(world):
    engine = world.engine()
    engine.execute("k", Effect())
    assert [call.verb for call in engine.store.calls] == ["claim", "complete"]


def test_a_claim_that_was_lost_before_its_late_answer_is_made_anew(world):
    engine, operator, removed = world.engine(), world.engine(), []
    engine.store.inject("claim", SLOW)

    def remove_before_the_next_claim():
        engine.store.before["claim"] = lambda: removed.append(operator.forget("k"))

    engine.store.before["claim"] = remove_before_the_next_claim
    assert engine.execute("k", Effect("after all"), policy=SHORT) == "after all"
    assert removed == [True]
    assert engine.commands("claim") == 2


def test_nothing_runs_when_a_late_claim_cannot_be_made_again(world):
    engine = world.engine()
    engine.store.inject("claim", SLOW)
    engine.store.inject("claim", Refuse())
    with pytest.raises(StoreUnavailable):
        engine.execute("k", never, policy=SHORT)
    assert engine.execute("k", Effect("later")) == "later"


def test_a_lease_that_begins_while_others_are_renewed_is_renewed_too(memory_world):
    engine = memory_world.engine(policy=SHORT)
    renewing, go_on = threading.Event(), threading.Event()
    engine.store.before["renew_many"] = lambda: renewing.set() or go_on.wait(PATIENCE)
    first, second = Effect(1).held(), Effect(2).held()
    calls = [engine.start("first", first)]
    assert renewing.wait(PATIENCE)
    calls.append(engine.start("second", second, policy=Policy(lease=0.3)))
    second.wait_started()
    go_on.set()

    def renewed():
        asks = (call.requests for call in tuple(engine.store.calls) if call.verb == "renew_many")
        return {ask.identity.key for some in asks for ask in some}

    wait_until(lambda: renewed() == {"first", "second"})
    first.release()
    second.release()
    assert [call.result(PATIENCE) for call in calls] == [1, 2]


def test_the_loss_of_a_lease_that_begins_while_a_renewal_hangs_is_told_meanwhile(memory_world):
    engine = memory_world.engine(policy=Policy(lease=1.0))
    go_on = threading.Event()
    engine.store.before["renew_many"] = lambda: go_on.wait(PATIENCE)
    effects = {key: Effect(key).held() for key in ("first", "second")}
    calls = []
    for key, effect in effects.items():  # the second begins when nothing is left to be told
        calls.append(engine.start(key, effect))
        effect.wait_started()
        wait_until(lambda key=key: key in {told.key for told in engine.told(events.LostLease)})
    assert not engine.commands("renew_many"), "the renewal has come back before"
    go_on.set()
    for effect in effects.values():
        effect.release()
    assert [call.result(PATIENCE) for call in calls] == ["first", "second"]


def test_one_failed_renewal_is_not_the_others(memory_world):
    engine = memory_world.engine(policy=SHORT)
    away = StoreUnavailable("its shard is away")

    def all_but_one(requests, answers):
        return [
            away if request.identity.key == "unlucky" else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    async def renewed_in_a_task(requests):
        return all_but_one(requests, await send(requests))

    def renewed(requests):
        return all_but_one(requests, send(requests))

    store = engine.store.store
    send = store.send
    store.send = renewed if memory_world.name == "threads" else renewed_in_a_task
    effects = {key: Effect(key).held() for key in ("unlucky", "lucky")}
    calls = [engine.start(key, effect) for key, effect in effects.items()]

    def renewals():
        asked = [call.requests for call in engine.store.calls if call.verb == "renew_many"]
        return sum(request.identity.key == "lucky" for requests in asked for request in requests)

    wait_until(lambda: renewals() >= 4)
    assert {told.key for told in engine.told(events.RenewalFailed)} == {"unlucky"}
    for effect in effects.values():
        effect.release()
    assert [call.result(PATIENCE) for call in calls] == ["unlucky", "lucky"]


def test_nothing_is_sent_for_leases_that_ended_while_others_were_renewed(memory_world, monkeypatch):
    monkeypatch.setattr(attempts, "CHUNK", 1)
    engine = memory_world.engine(policy=Policy(lease=3.0, failure="unknown"))
    renewing, go_on = threading.Event(), threading.Event()
    engine.store.before["renew_many"] = lambda: renewing.set() or go_on.wait(PATIENCE)
    effects = {"first": Effect().held(), "second": Effect(raising=ValueError()).held()}
    calls = {}
    for key, effect in effects.items():
        calls[key] = engine.start(key, effect)
        effect.wait_started()
    assert renewing.wait(PATIENCE)
    effects["second"].release()
    with pytest.raises(ValueError):
        calls["second"].result(PATIENCE)
    go_on.set()
    wait_until(lambda: engine.commands("renew_many") >= 2)
    effects["first"].release()
    assert calls["first"].result(PATIENCE) == "done"
    renewed = [call.requests for call in engine.store.calls if call.verb == "renew_many"]
    assert {tuple(ask.identity.key for ask in requests) for requests in renewed} == {("first",)}
    assert engine.commands("send") == 0, "nothing was sent for no lease"


def test_an_error_that_no_store_should_raise_at_a_renewal_is_one_failed_renewal(memory_world):
    engine = memory_world.engine(policy=SHORT)
    engine.store.inject("renew_many", Refuse(RuntimeError("a bug of the store")))
    effect = Effect().held()
    call = engine.start("k", effect)
    wait_until(lambda: engine.commands("renew_many") >= 2)
    effect.release()
    assert call.result(PATIENCE) == "done"
    assert ["a bug" in event.error for event in engine.told(events.RenewalFailed)] == [True]


def test_a_bypassed_call_asks_no_store_and_runs_each_time(memory_world):
    engine, effect = memory_world.engine(), Effect()
    with testing.bypass():
        assert engine.execute("k", effect) == engine.execute("k", effect) == "done"
        with pytest.raises(ValueError):
            engine.execute("k", Effect(raising=ValueError()))
    assert (effect.runs, engine.commands()) == (2, 0)


def test_an_interrupted_save_that_is_done_again_and_refused_ends_by_the_interruption(memory_world):
    class Interrupted(BaseException):
        """As Ctrl-C."""

    engine, operator = memory_world.engine(), memory_world.engine()
    engine.store.before["complete"] = lambda: operator.forget("k")
    engine.store.inject("complete", Refuse(Interrupted()))
    with pytest.raises(Interrupted):
        engine.execute("k", Effect())
    wait_until(lambda: engine.told(events.LostLease))
    assert operator.peek("k") is None


def test_a_claim_that_was_interrupted_though_it_was_never_given_leaves_nothing(memory_world):
    class Interrupted(BaseException):
        """As Ctrl-C."""

    engine, other = memory_world.engine(), memory_world.engine()
    effect = Effect("theirs").held()
    running = other.start("k", effect)
    effect.wait_started()
    engine.store.inject("claim", Refuse(Interrupted()))
    with pytest.raises(Interrupted):
        engine.execute("k", never)
    wait_until(lambda: engine.commands("claim") == 2)
    assert engine.peek("k").state is State.PROCESSING
    assert engine.commands("fail") == 0
    effect.release()
    assert running.result(PATIENCE) == engine.execute("k", never) == "theirs"


def test_a_result_that_was_lost_while_it_could_not_be_saved_is_told(memory_world, monkeypatch):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.05)
    engine, operator = memory_world.engine(), memory_world.engine()
    engine.store.inject("complete", Refuse(), times=3)
    assert engine.execute("k", Effect("paid")) == "paid"
    operator.forget("k")
    wait_until(lambda: engine.told(events.LostLease))
    assert not engine.told(events.ResultStoredLate)
    assert not engine.engine.internals.leases


async def test_a_sharer_that_was_cancelled_in_the_moment_of_the_answer_is_passed_over():
    async with AsyncIdempotency(AsyncMemoryStore()) as idem:
        go = asyncio.Event()

        async def waits():
            await go.wait()
            sharer.cancel()  # its waiter is still taken when the answer is given
            return "answer"

        leader = asyncio.create_task(idem.execute("k", waits))
        await asyncio.sleep(0)
        sharer = asyncio.create_task(idem.execute("k", waits))
        await until(lambda: any(idem.internals.shared_runs._leaders._waiting.values()))
        go.set()
        assert await leader == "answer"
        with pytest.raises(asyncio.CancelledError):
            await sharer


def test_an_attempt_that_lost_its_lease_may_stop_before_its_effect(world):
    engine, operator = world.engine(policy=Policy(lease=0.4)), world.engine()
    effects = []

    def careful():
        attempt = current_attempt()
        operator.forget("k")
        wait_until(lambda: attempt.lost)
        attempt.check()
        effects.append("too late")

    with pytest.raises(LeaseLost):
        engine.execute("k", careful)
    assert effects == []


@pytest.mark.parametrize(
    ("verb", "error"), [("complete", None), ("fail", ValueError("failed"))], ids=["save", "failure"]
)
def test_a_renewal_that_crosses_the_end_of_its_own_attempt_is_no_loss(world, verb, error):
    engine = world.engine(policy=Policy(lease=3.0))
    refused, go_on = threading.Event(), threading.Event()
    engine.store.after[verb] = lambda: go_on.wait(PATIENCE)  # stored, and not answered yet
    engine.store.after["renew_many"] = refused.set
    call = engine.start("k", Effect("done", raising=error))
    assert refused.wait(PATIENCE)
    wait_until(
        lambda: engine.engine.internals.leases.next_due() == math.inf
    )  # until the answer counts
    go_on.set()
    assert call.exception(PATIENCE) is error
    assert not engine.told(events.LostLease)
    assert len(engine.told(events.Ran if error is None else events.Failed)) == 1


class Renewal:
    """The next renewal of an engine, held on its way; it would lock the key for ten minutes."""

    def __init__(self, engine):
        self.on_its_way, self.go_on = threading.Event(), threading.Event()
        engine.store.before["renew_many"] = self._hold
        send = engine.store.send
        engine.store.send = lambda asks: send([replace(ask, lease=600.0) for ask in asks])

    def _hold(self):
        self.on_its_way.set()
        assert self.go_on.wait(PATIENCE)


def test_a_renewal_that_is_on_its_way_is_waited_for_before_an_attempt_is_parked(world):
    """Under hold: nobody knows the outcome, and the next caller hears that at once."""
    patient = Policy(lease=1.5, abandoned="hold", concurrent="reject", store_timeout=PATIENCE)
    engine, other = world.engine(policy=patient), world.engine(policy=patient)
    renewal = Renewal(engine)
    effect = Effect(raising=ValueError("nobody knows")).held()
    call = engine.start("k", effect)
    assert renewal.on_its_way.wait(PATIENCE)
    effect.release()
    wait_until(
        lambda: all(lease.stopped for lease in engine.engine.internals.leases._running.values())
    )
    assert engine.commands("renew") == 0
    renewal.go_on.set()
    with pytest.raises(ValueError, match="nobody knows"):
        call.result(PATIENCE)
    with pytest.raises(OutcomeUnknown):
        other.execute("k", never)


@pytest.mark.parametrize("fault", [None, Refuse()], ids=["", "and cannot be parked again"])
def test_a_renewal_that_hangs_while_an_attempt_is_parked_is_made_good_later(memory_world, fault):
    hurried = Policy(lease=1.5, abandoned="hold", concurrent="reject", store_timeout=0.1)
    engine, other = memory_world.engine(policy=hurried), memory_world.engine(policy=hurried)
    renewal = Renewal(engine)
    effect = Effect(raising=ValueError("nobody knows")).held()
    call = engine.start("k", effect)
    assert renewal.on_its_way.wait(PATIENCE)
    effect.release()
    with pytest.raises(ValueError, match="nobody knows"):
        call.result(PATIENCE)
    assert engine.peek("k").abandoned
    if fault is not None:
        engine.store.inject("renew", fault, times=2)  # the renewal, and the second parking
    renewal.go_on.set()
    wait_until(lambda: engine.commands("renew") == 2)
    if fault is not None:
        wait_until(lambda: engine.told(events.StoreFailed))
        return
    wait_until(lambda: engine.peek("k").abandoned)
    with pytest.raises(OutcomeUnknown):
        other.execute("k", never)


def test_an_end_that_the_store_rejects_even_without_the_result_is_given_up(memory_world):
    idem = memory_world.engine()
    idem.store.inject("complete", Refuse(ValueRejected("a trigger says no")), times=MANY)
    assert idem.execute("k", lambda: "paid", policy=Policy(lease=60)) == "paid"
    assert idem.commands("complete") == 2, "with its result, and without"
    (told,) = idem.told(events.ResultNotStored)
    assert "not tried again" in told.error
    assert not len(idem.engine.internals.leases), "nothing is renewed any more"


def test_a_late_end_that_the_store_rejects_even_without_the_result_is_given_up(
    memory_world, monkeypatch
):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", -1.0)
    idem = memory_world.engine()
    idem.store.inject("complete", Refuse())
    idem.store.inject("complete", Refuse(ValueRejected("a trigger says no")), times=MANY)
    assert idem.execute("k", lambda: "paid", policy=Policy(lease=60)) == "paid"
    assert len(idem.told(events.ResultNotStored)) == 1
    wait_until(lambda: "not tried again" in idem.told(events.ResultNotStored)[-1].error)
    assert not len(idem.engine.internals.leases)
