"""Interrupted threads, at every step of a call.

What must hold: the interruption reaches the caller, no key stays locked, no effect is repeated.
"""

from __future__ import annotations

import pytest

from engines.facade import Effect, Stop, never
from semel import Idempotency, Policy, StoreUnavailable, events
from semel.core.codec import JsonCodec
from semel.core.records import Identity
from semel.engine.call import Call
from semel.stores.memory import MemoryStore
from semel.testing import FaultyStore, LoseReply, Refuse

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
    share, interruptions = idem._flights.share, [kind()]

    def interrupted(place, answer):
        if interruptions:
            raise interruptions.pop()
        share(place, answer)

    idem._flights.share = interrupted
    with pytest.raises(kind):
        idem.execute("k", Effect("saved"))
    assert len(idem._leases) == 0
    call = Call(Identity("default", "k"), None, idem._rules("default"))
    assert idem._flights.lead(call.place, call)


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
