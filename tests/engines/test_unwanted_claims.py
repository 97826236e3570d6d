"""A claim that nobody wants is given back, at nobody's expense: not others', not the timer's."""

from __future__ import annotations

import asyncio
import time

import pytest

from engines.facade import MANY, Effect, never, wait_until
from semel import (
    AsyncIdempotency,
    AttemptsExhausted,
    PayloadMismatch,
    Policy,
    State,
    StoreUnavailable,
    current_attempt,
    events,
)
from semel.core.attempts import DOUBT_ROUNDS
from semel.core.records import Claimed, ClaimRequest, Encoded, Identity
from semel.stores.memory import AsyncMemoryStore
from semel.testing import Delay, LoseReply, Refuse

LOOSE = Policy(mismatch="replace")
HELD = Policy(abandoned="hold")
NOT_DONE = Policy(abandoned="hold", not_done=ValueError, lease=60)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The store is asked for a doubtful claim again and again, for half a minute: here faster."""
    monkeypatch.setattr("semel.core.attempts.SLOWEST_RETRY", 0.02)


def refuse_a_claim(engine, key, **options):
    """Let a claim fail in a way that leaves open whether it was applied."""
    engine.store.inject("claim", Refuse())
    with pytest.raises(StoreUnavailable):
        engine.execute(key, never, **options)


def refuse_a_reply(engine, key, **options):
    """Let a claim be applied, and its caller end without knowing."""
    engine.store.inject("claim", LoseReply())
    with pytest.raises(StoreUnavailable):
        engine.execute(key, never, **options)


def wait_given_back(engine):
    wait_until(lambda: not engine.engine.internals.leases._unsure)


def test_giving_back_never_replaces_a_newer_payload(world):
    doubtful, other = world.engine(), world.engine()
    refuse_a_claim(doubtful, "nick", payload="old", policy=LOOSE)
    assert other.execute("nick", lambda: "new", payload="new", policy=LOOSE) == "new"
    wait_given_back(doubtful)
    assert other.execute("nick", never, payload="new", policy=LOOSE) == "new"


def test_giving_back_never_takes_over_from_an_owner_that_was_only_paused(world):
    engine, owner, identity = world.engine(), b"paused owner", Identity("default", "k")
    engine.ask_store("claim", ClaimRequest(identity, owner, None, 0.05, 60.0))
    wait_until(lambda: engine.peek("k").abandoned)
    refuse_a_claim(engine, "k")
    wait_given_back(engine)
    assert engine.ask_store("complete", identity, owner, Encoded("json/1", b"1"), 60.0)


def test_giving_back_leaves_a_failure_as_it_is(memory_world):
    engine = memory_world.engine()
    with pytest.raises(ValueError, match="no"):
        engine.execute("k", Effect(raising=ValueError("no")))
    refuse_a_claim(engine, "k")
    wait_given_back(engine)
    assert engine.peek("k").number == 1


def test_a_cancelled_claim_is_given_back_once_the_store_is_there_again(memory_world):
    engine = memory_world.engine()
    engine.store.inject("fail", Refuse())

    engine.store.before["claim"] = interrupt
    with pytest.raises(Interrupted):
        engine.execute("k", never, policy=HELD)
    wait_until(lambda: engine.store.fired("fail"))
    wait_until(lambda: engine.peek("k").state is State.FAILED)
    assert engine.execute("k", lambda: "runs", policy=HELD) == "runs"


class Interrupted(BaseException):
    """Stands for whatever ends a caller before its function began."""


def interrupt():
    raise Interrupted


def test_claims_that_never_ran_do_not_use_up_the_attempts(memory_world):
    engine, limited = memory_world.engine(), Policy(max_attempts=1)
    fences = []
    for count in range(1, 4):
        refuse_a_reply(engine, "k", payload="x", policy=limited)
        wait_until(lambda count=count: engine.commands("fail") == count)
        wait_given_back(engine)
        record = engine.peek("k")
        assert (record.state, record.number) == (State.FAILED, 0)
        fences.append(record.fence)
    # Nothing ran for the payload either: another one may have the key.
    run = engine.run("k", lambda: "runs", payload="y", policy=limited)
    assert (run.value, run.attempt.number) == ("runs", 1)
    fences.append(run.attempt.fence)
    assert fences == sorted(set(fences))


def test_a_claim_that_never_ran_leaves_the_earlier_attempts_and_their_payload(memory_world):
    engine, retried = memory_world.engine(), Policy(failure="retryable", max_attempts=2)
    with pytest.raises(ValueError, match="no"):
        engine.execute("k", Effect(raising=ValueError("no")), payload="x", policy=retried)
    refuse_a_reply(engine, "k", payload="x", policy=retried)
    wait_until(lambda: engine.commands("fail") == 2)
    wait_given_back(engine)
    with pytest.raises(PayloadMismatch):
        engine.execute("k", never, payload="y", policy=retried)
    run = engine.run("k", lambda: "runs", payload="x", policy=retried)
    assert (run.value, run.attempt.number) == ("runs", 2)


def test_a_payload_that_replaces_another_has_all_its_attempts(memory_world):
    engine = memory_world.engine()
    loose = Policy(mismatch="replace", failure="retryable", max_attempts=2)
    for payload in ("old", "new"):
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                engine.execute("k", Effect(raising=ValueError("no")), payload=payload, policy=loose)
        with pytest.raises(AttemptsExhausted):
            engine.execute("k", never, payload=payload, policy=loose)


@pytest.mark.parametrize("in_the_way", ["a failure", "a success", "another payload"])
def test_a_claim_that_arrives_late_is_given_back_when_what_was_in_its_way_has_gone(
    memory_world, in_the_way
):
    engine, identity = memory_world.engine(), Identity("default", "k")
    if in_the_way == "a failure":
        with pytest.raises(ValueError, match="no"):
            engine.execute("k", Effect(raising=ValueError("no")), policy=NOT_DONE)
    elif in_the_way == "a success":
        engine.execute("k", lambda: "first", policy=NOT_DONE)
    else:
        engine.execute("k", lambda: "first", payload="other", policy=NOT_DONE)
    refuse_a_claim(engine, "k", payload="x", policy=NOT_DONE)
    (late,) = (call.requests[0] for call in engine.store.calls[-1:])
    asked = engine.commands("claim")
    wait_until(lambda: engine.commands("claim") > asked)  # it is looked for, and not found
    engine.ask_store("forget", identity)
    assert isinstance(engine.ask_store("claim", late), Claimed)
    wait_until(lambda: engine.peek("k").state is State.FAILED)
    assert engine.execute("k", lambda: "runs", payload="x", policy=NOT_DONE) == "runs"


def test_a_claim_that_never_arrives_is_not_looked_for_for_ever(memory_world):
    engine = memory_world.engine()
    engine.execute("k", lambda: "done")
    asked = engine.commands("claim")
    refuse_a_claim(engine, "k")
    wait_given_back(engine)
    assert engine.commands("claim") == asked + 1 + DOUBT_ROUNDS


def test_more_claims_in_doubt_than_can_be_remembered_are_left_to_their_leases(
    memory_world, monkeypatch
):
    engine = memory_world.engine()
    engine.execute("k", lambda: "done")
    monkeypatch.setattr("semel.core.attempts.MOST_DOUBTS", 0)
    engine.store.before["claim"] = interrupt
    asked = engine.commands("claim")
    with pytest.raises(Interrupted):
        engine.execute("k", never)
    wait_until(lambda: engine.commands("claim") > asked)
    assert not engine.engine.internals.leases._unsure


def test_a_closing_engine_gives_back_what_is_in_doubt(memory_world):
    engine, other = memory_world.engine(), memory_world.engine()
    refuse_a_claim(engine, "k", policy=HELD)
    engine.close()
    assert other.peek("k").state is State.FAILED


@pytest.fixture
def impatient(memory_world, monkeypatch):
    """An engine that leaves a save to its timer at once, and a timer that is soon there again."""
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.0)
    monkeypatch.setattr("semel.core.attempts.SLOWEST_RETRY", 0.05)
    return memory_world.engine(policy=Policy(lease=0.6))


def test_claims_in_doubt_do_not_keep_the_timer_from_renewing(impatient):
    def work():
        attempt = current_attempt()
        impatient.store.inject("claim", Refuse(), times=MANY)  # the timer meets some of them
        for key in range(6):
            with pytest.raises(StoreUnavailable):
                impatient.execute(f"k{key}", never)
        impatient.store.heal()
        impatient.store.inject("claim", Delay(0.2), times=6)
        while impatient.engine.internals.leases._unsure:
            assert not attempt.lost
            time.sleep(0.01)

    impatient.execute("long", work)
    assert impatient.store.fired("claim") >= 6
    assert not impatient.told(events.LostLease)


def test_results_to_be_saved_do_not_keep_the_timer_from_renewing(impatient):
    def work():
        attempt = current_attempt()
        impatient.store.inject("complete", Refuse(), times=MANY)  # the timer meets some of them
        for key in range(6):
            impatient.execute(f"k{key}", lambda: 1, policy=Policy(lease=60))
        impatient.store.heal()
        impatient.store.inject("complete", Delay(0.2), times=6)
        while len(impatient.engine.internals.leases) > 1:
            assert not attempt.lost
            time.sleep(0.01)

    impatient.execute("long", work)
    assert impatient.store.fired("complete") >= 6
    assert not impatient.told(events.LostLease)


def test_closing_asks_a_store_that_is_away_once_and_not_for_every_result(impatient):
    impatient.store.inject("complete", Refuse(), times=MANY)
    for key in range(20):
        impatient.execute(f"k{key}", lambda: 1, policy=Policy(lease=60))
    impatient._kind.finish(impatient.engine.internals.renewer.timer.stop)
    asked = impatient.commands("complete")
    impatient.close(timeout=0)
    assert impatient.commands("complete") == asked + 1


def test_a_call_left_behind_by_a_loop_ends_quietly():
    class Slow(AsyncMemoryStore):
        async def ask(self, request):
            await asyncio.sleep(60)
            return await super().ask(request)

    async def begin():
        async def runs() -> None:
            never()

        call = AsyncIdempotency(Slow()).execute("k", runs)
        call.send(None)
        return call

    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(begin())
    loop.close()
    left.close()


def test_a_claim_whose_giving_back_always_fails_is_not_renewed_for_ever(memory_world):
    engine, other = memory_world.engine(), memory_world.engine()
    engine.store.inject("claim", LoseReply())
    refused = Refuse(TypeError("fail() got an unexpected keyword argument"))
    engine.store.inject("fail", refused, times=MANY)
    with pytest.raises(StoreUnavailable):
        engine.execute("k", never, policy=Policy(lease=300))
    wait_until(lambda: engine.store.fired("fail") >= DOUBT_ROUNDS - 1)
    wait_given_back(engine)
    assert other.execute("k", lambda: "runs", policy=Policy(wait_timeout=60)) == "runs"
