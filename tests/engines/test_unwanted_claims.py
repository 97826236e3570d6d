"""A claim that nobody wants is given back, at nobody's expense: not others', not the timer's."""

from __future__ import annotations

import asyncio
import time

import pytest

from engines.facade import MANY, Effect, never, wait_until
from semel import AsyncIdempotency, Policy, State, StoreUnavailable, current_attempt, events
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.stores.memory import AsyncMemoryStore
from semel.testing import Delay, Refuse

LOOSE = Policy(mismatch="replace")
HELD = Policy(abandoned="hold")


def refuse_a_claim(engine, key, **options):
    """Let a claim fail in a way that leaves open whether it was applied."""
    engine.store.inject("claim", Refuse())
    with pytest.raises(StoreUnavailable):
        engine.execute(key, never, **options)


def wait_given_back(engine):
    wait_until(lambda: not engine.engine._leases._unsure)


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

    class Interrupted(BaseException):
        pass

    def interrupt():
        raise Interrupted

    engine.store.before["claim"] = interrupt
    with pytest.raises(Interrupted):
        engine.execute("k", never, policy=HELD)
    wait_until(lambda: engine.store.fired("fail"))
    wait_until(lambda: engine.peek("k").state is State.FAILED)
    assert engine.execute("k", lambda: "runs", policy=HELD) == "runs"


def test_a_closing_engine_gives_back_what_is_in_doubt(memory_world):
    engine, other = memory_world.engine(), memory_world.engine()
    refuse_a_claim(engine, "k", policy=HELD)
    engine.close()
    assert other.peek("k").state is State.FAILED


@pytest.fixture
def impatient(memory_world, monkeypatch):
    """An engine that leaves a save to its timer at once, and a timer that is soon there again."""
    monkeypatch.setattr("semel.engine.call.SAVE_PATIENCE", 0.0)
    monkeypatch.setattr("semel.core.leases.SLOWEST_RETRY", 0.05)
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
        while impatient.engine._leases._unsure:
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
        while len(impatient.engine._leases) > 1:
            assert not attempt.lost
            time.sleep(0.01)

    impatient.execute("long", work)
    assert impatient.store.fired("complete") >= 6
    assert not impatient.told(events.LostLease)


def test_closing_asks_a_store_that_is_away_once_and_not_for_every_result(impatient):
    impatient.store.inject("complete", Refuse(), times=MANY)
    for key in range(20):
        impatient.execute(f"k{key}", lambda: 1, policy=Policy(lease=60))
    impatient._kind.finish(impatient.engine._timer.stop)
    asked = impatient.commands("complete")
    impatient.close(timeout=0)
    assert impatient.commands("complete") == asked + 1


def test_a_call_left_behind_by_a_loop_ends_quietly():
    class Slow(AsyncMemoryStore):
        async def claim(self, ask):
            await asyncio.sleep(60)
            return await super().claim(ask)

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
