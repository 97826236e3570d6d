"""Interrupted threads, at every step of a call.

What must hold: the interruption reaches the caller, no key stays locked, no effect is repeated.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

import aiosqlite
import pytest
from msgspec import UNSET

from engines.facade import Effect, Stop, never, wait_until
from semel import (
    AsyncIdempotency,
    Idempotency,
    Policy,
    StoreUnavailable,
    events,
    open_store,
)
from semel.core.attempts import Attempt
from semel.core.codec import JsonCodec
from semel.core.records import Identity
from semel.core.run_info import read
from semel.engine.setup import Call
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FaultyStore, LoseReply, Refuse

HOLD = Policy(abandoned="hold")
TAKEOVER = Policy()
IMPATIENT = Policy(wait_timeout=15)
"""Less than a lease: what is found locked is never waited for until the lease ends."""


@pytest.fixture
def threaded():
    store = FaultyStore(MemoryStore())
    with Idempotency(store) as idem:
        yield store, idem


INTERRUPTIONS = [KeyboardInterrupt, SystemExit, Stop]


class TimeLimit(Exception):
    """What a worker's handler of signals raises in the middle of anything (Celery's, for one)."""


class InterruptedOnce(JsonCodec):
    """A codec in whose work a thread is interrupted, the first time."""

    name = "interrupted/1"

    def __init__(self, kind):
        self._kinds = [kind]

    def encode(self, value, context, hint=None):
        if self._kinds:
            raise self._kinds.pop()
        return super().encode(value, context, hint)


@pytest.mark.parametrize("policy", [TAKEOVER, HOLD], ids=["takeover", "hold"])
@pytest.mark.parametrize("fault", [Refuse, LoseReply])
@pytest.mark.parametrize("kind", [*INTERRUPTIONS, TimeLimit])
def test_a_thread_interrupted_in_its_claim_leaves_the_key_free(threaded, kind, fault, policy):
    store, idem = threaded
    store.inject("claim", fault(kind()))
    with pytest.raises(kind):
        idem.execute("k", never, policy=policy)
    assert store.fired("claim") == 1
    assert idem.execute("k", Effect("free"), policy=IMPATIENT) == "free"


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), RuntimeError("a bug of the store")])
def test_a_thread_that_cannot_give_its_claim_back_still_ends_by_its_interruption(threaded, error):
    store, idem = threaded
    store.inject("claim", LoseReply(KeyboardInterrupt()))
    store.inject("claim", Refuse(error))
    with pytest.raises(KeyboardInterrupt):
        idem.execute("k", never)
    assert store.fired("claim") == 2


@pytest.mark.parametrize("fault", [Refuse, LoseReply])
@pytest.mark.parametrize("kind", INTERRUPTIONS)
def test_a_thread_interrupted_in_its_save_leaves_the_result(threaded, kind, fault):
    store, idem = threaded
    store.inject("complete", fault(kind()))
    with pytest.raises(kind):
        idem.execute("k", Effect("saved"))
    assert store.fired("complete") == 1
    assert idem.execute("k", never) == "saved"


@pytest.mark.parametrize("kind", INTERRUPTIONS)
def test_a_thread_interrupted_while_it_encodes_its_result_leaves_the_result(threaded, kind):
    _, idem = threaded
    policy = Policy(codec=InterruptedOnce(kind))
    with pytest.raises(kind):
        idem.execute("k", Effect("saved"), policy=policy)
    assert idem.execute("k", never, policy=policy) == "saved"


@pytest.mark.parametrize("kind", INTERRUPTIONS)
def test_a_thread_interrupted_while_it_shares_its_result_lets_nobody_wait(threaded, kind):
    _, idem = threaded
    end, interruptions = idem.internals.shared_runs.end, [kind()]

    def interrupted(place, answer):
        if interruptions:
            raise interruptions.pop()
        return end(place, answer)

    idem.internals.shared_runs.end = interrupted
    with pytest.raises(kind):
        idem.execute("k", Effect("saved"))
    assert len(idem.internals.leases) == 0
    call = Call(Identity("default", "k"), None, idem.internals.setup.rules("default"))
    assert idem.internals.shared_runs.lead((call.identity, None, 0), call)


@pytest.mark.parametrize("fault", [Refuse, LoseReply])
@pytest.mark.parametrize("kind", INTERRUPTIONS)
def test_a_thread_interrupted_while_it_records_a_failure_leaves_the_key_free(threaded, kind, fault):
    store, idem = threaded
    store.inject("fail", fault(kind()))
    with pytest.raises(kind):
        idem.execute("k", Effect(raising=ValueError()))
    assert idem.execute("k", Effect("free"), policy=IMPATIENT) == "free"


def test_an_interruption_reaches_the_caller_though_the_store_is_down(memory_world):
    engine = memory_world.engine()
    engine.store.inject("fail", Refuse())
    with pytest.raises(Stop):
        engine.execute("k", Effect(raising=Stop()))
    engine.close()
    assert [event.verb for event in engine.told(events.StoreFailed)] == ["fail"]


# --- an exception at a step between two others -----------------------------------------------------


def strike_once(monkeypatch, owner, name):
    """Let the next call of a method raise, as a signal handler may; then it is as before."""
    method = getattr(owner, name)

    def struck(*args, **kwargs):
        monkeypatch.setattr(owner, name, method)
        raise TimeLimit

    monkeypatch.setattr(owner, name, struck)


def test_struck_between_the_function_and_the_save_the_result_is_saved(memory_world, monkeypatch):
    engine = memory_world.engine()
    strike_once(monkeypatch, Attempt, "__exit__")
    with pytest.raises(TimeLimit):
        engine.execute("k", Effect("paid"))
    assert engine.execute("k", never, policy=IMPATIENT) == "paid"


def test_struck_before_the_function_begins_the_key_is_free(memory_world, monkeypatch):
    engine = memory_world.engine()
    strike_once(monkeypatch, Attempt, "__enter__")
    with pytest.raises(TimeLimit):
        engine.execute("k", never, policy=HOLD)
    assert engine.execute("k", Effect("free"), policy=IMPATIENT) == "free"


def test_struck_before_a_failure_is_recorded_it_is_recorded(memory_world, monkeypatch):
    engine = memory_world.engine()
    strike_once(monkeypatch, engine.engine.internals, "failed")
    with pytest.raises(TimeLimit):
        engine.execute("k", Effect(raising=ValueError()))
    assert engine.execute("k", Effect("free"), policy=IMPATIENT) == "free"


def test_struck_in_the_store_a_failure_is_recorded_all_the_same(memory_world):
    engine = memory_world.engine()
    engine.store.inject("fail", Refuse(TimeLimit()))
    with pytest.raises(ValueError, match="its own"):
        engine.execute("k", Effect(raising=ValueError("its own")))
    assert engine.store.fired("fail") == 1
    assert engine.execute("k", Effect("free"), policy=IMPATIENT) == "free"


def test_what_is_struck_before_its_function_begins_is_neither_parked_nor_announced(
    memory_world, monkeypatch
):
    engine = memory_world.engine()
    strike_once(monkeypatch, Attempt, "__enter__")
    with pytest.raises(TimeLimit):
        engine.execute("k", never, policy=HOLD)
    engine.close()
    assert not engine.told(events.Parked)
    assert engine.commands("renew") == 0


@pytest.mark.parametrize("failure", ["final", "retryable", "forget", "unknown"])
def test_struck_after_a_failure_was_recorded_it_stays_recorded(memory_world, monkeypatch, failure):
    engine = memory_world.engine()
    leases = []
    work = Effect(raising=ValueError())

    def failing():
        leases.extend(engine.engine.internals.leases.running())
        work()

    strike_once(monkeypatch, engine.engine.internals, "_pass_on")
    with pytest.raises(TimeLimit):
        engine.execute("k", failing, policy=Policy(failure=failure))
    engine.close()
    assert [lease.failure for lease in leases] == [failure]
    assert engine.commands("renew" if failure == "unknown" else "fail") == 1
    assert len(engine.told(events.Parked if failure == "unknown" else events.Failed)) == 1
    assert not engine.told(events.LostLease)


def test_struck_after_its_result_was_left_to_the_timer_only_the_timer_saves_it(
    memory_world, monkeypatch
):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", -1.0)
    engine = memory_world.engine(policy=Policy(lease=3))
    engine.store.inject("complete", Refuse())
    strike_once(monkeypatch, engine.engine.internals, "_pass_on")
    with pytest.raises(TimeLimit):
        engine.execute("k", Effect("paid"))
    wait_until(lambda: engine.told(events.ResultStoredLate))
    assert not engine.told(events.Ran)
    assert engine.commands("complete") == 2, "the call's own, and the timer's"
    assert engine.execute("k", never) == "paid"


def test_struck_inside_the_codec_the_result_is_saved_before_the_caller_ends(memory_world):
    engine = memory_world.engine()
    policy = Policy(codec=InterruptedOnce(TimeLimit))
    with pytest.raises(TimeLimit):
        engine.execute("k", Effect("paid"), policy=policy)
    assert not engine.told(events.ResultOmitted)
    assert engine.execute("k", never, policy=policy) == "paid"


def test_struck_while_a_result_is_read_the_caller_gets_the_exception(memory_world, monkeypatch):
    engine = memory_world.engine()
    assert engine.execute("k", Effect("paid")) == "paid"
    strike_once(monkeypatch, JsonCodec, "decode")
    with pytest.raises(TimeLimit):
        engine.execute("k", never)
    assert engine.execute("k", never) == "paid"


def test_struck_while_the_result_of_a_mark_is_encoded_nothing_is_marked():
    with Idempotency("memory://", policy=Policy(codec=InterruptedOnce(TimeLimit))) as idem:
        with pytest.raises(TimeLimit):
            idem.marks.set_result("k", 1)
        assert not idem.marks.check("k")


@pytest.mark.parametrize("step", ["__enter__", "__exit__"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_struck_at_the_edge_of_a_block_by_hand_the_key_is_not_stuck(monkeypatch, step, error):
    with Idempotency("memory://") as idem:
        strike_once(monkeypatch, Attempt, step)

        def by_hand():
            with idem.attempt("k") as attempt:
                attempt.result = "paid"
                if error is not None:
                    raise error

        with pytest.raises(TimeLimit):
            by_hand()
        free = step == "__enter__" or error is not None
        assert idem.execute("k", lambda: "free", policy=IMPATIENT) == ("free" if free else "paid")


@pytest.mark.parametrize("step", ["__enter__", "__exit__"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
async def test_so_it_is_with_a_task(monkeypatch, step, error):
    async def free():
        return "free"

    async with AsyncIdempotency("memory://") as idem:
        strike_once(monkeypatch, Attempt, step)

        async def by_hand():
            async with idem.attempt("k") as attempt:
                attempt.result = "paid"
                if error is not None:
                    raise error

        with pytest.raises(TimeLimit):
            await by_hand()
        gone = step == "__enter__" or error is not None
        assert await idem.execute("k", free, policy=IMPATIENT) == ("free" if gone else "paid")


def abandon(idem):
    """A call that ends without saying so: its thread was struck while it cleaned up, too."""
    return idem.internals.setup.call("k", "default", UNSET, idem.internals.setup.rules("default"))


@pytest.mark.parametrize("end", ["released", "lost", "refused"])
def test_the_lease_of_a_call_that_is_gone_is_released_by_the_timer(end):
    told, store = [], FaultyStore(MemoryStore())
    with Idempotency(store, hooks=[told.append]) as idem:
        idem.internals.begin(abandon(idem))
        if end == "lost":
            idem.forget("k")
        if end == "refused":
            store.inject("renew", Refuse())
        idem.internals.renewer.tick()
        assert len(idem.internals.leases) == 0
        kinds = {"released": events.Parked, "lost": events.LostLease, "refused": events.StoreFailed}
        assert [type(event) for event in told] == [kinds[end]]
        if end == "released":
            assert idem.peek("k").abandoned
            assert read(idem.peek("k").run_info).why == told[0].error == "interrupted"


@pytest.mark.parametrize("end", ["released", "lost", "refused"])
async def test_so_is_that_of_a_task(end):
    told, store = [], AsyncFaultyStore(AsyncMemoryStore())
    async with AsyncIdempotency(store, hooks=[told.append]) as idem:
        await idem.internals.begin(abandon(idem))
        if end == "lost":
            await idem.forget("k")
        if end == "refused":
            store.inject("renew", Refuse())
        await idem.internals.renewer.tick()
        assert len(idem.internals.leases) == 0
        kinds = {"released": events.Parked, "lost": events.LostLease, "refused": events.StoreFailed}
        assert [type(event) for event in told] == [kinds[end]]
        if end == "released":
            record = await idem.peek("k")
            assert read(record.run_info).why == told[0].error == "interrupted"


def test_a_thread_struck_while_it_begins_to_listen_leaves_the_listener(redis_url, monkeypatch):
    store = open_store(redis_url)
    watch = store.watch(Identity("default", "k"))
    strike_once(monkeypatch, watch._listener, "add")
    with pytest.raises(TimeLimit), watch:
        never()
    assert not watch._listener.subscriptions
    store.close()


def test_struck_while_a_transaction_encodes_its_result_nothing_is_written(sqlite_url):
    policy = Policy(codec=InterruptedOnce(TimeLimit))
    with (
        Idempotency(sqlite_url) as idem,
        closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as db,
    ):
        idem.execute("first", Effect())  # makes the table
        db.execute("BEGIN")
        with (
            pytest.raises(TimeLimit),
            idem.transaction(db, "k", policy=policy) as attempt,
        ):
            attempt.result = "paid"
        db.execute("COMMIT")
        assert idem.peek("k") is None, "it was undone with the block's savepoint"


async def test_struck_while_an_async_transaction_encodes_its_result_nothing_is_written(sqlite_url):
    async def nothing():
        pass

    policy = Policy(codec=InterruptedOnce(TimeLimit))
    path = sqlite_url.removeprefix("sqlite:///")
    async with (
        AsyncIdempotency(sqlite_url) as idem,
        aiosqlite.connect(path, isolation_level=None) as db,
    ):
        await idem.execute("first", nothing)
        await db.execute("BEGIN")
        with pytest.raises(TimeLimit):
            async with idem.transaction(db, "k", policy=policy) as attempt:
                attempt.result = "paid"
        await db.execute("COMMIT")
        assert await idem.peek("k") is None
