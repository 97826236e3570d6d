"""Stores that fail on purpose, and say what happened to them."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from datetime import timedelta

import pytest
from msgspec.structs import replace

from contract.reference_store import DictStore
from engines.facade import wait_until
from semel import Idempotency, Policy
from semel.core.records import (
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    GetRequest,
    Identity,
    PutRequest,
    RenewRequest,
    ScanRequest,
    State,
)
from semel.errors import ConfigError, StoreFull, StoreUnavailable
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import (
    AsyncFaultyStore,
    Call,
    Delay,
    FakeClock,
    FaultyStore,
    LoseReply,
    Refuse,
    StoreDriver,
)
from semel.testing.faults import VERBS

KEY = Identity("orders", "42")
ANNA = b"anna" * 3
RESULT = Encoded("json", b"1")
ASK = ClaimRequest(KEY, ANNA, None, lease=60.0, ttl=60.0)


@pytest.fixture(params=["threads", "asyncio"])
def faulty(request):
    if request.param == "threads":
        return FaultyStore(MemoryStore())
    return AsyncFaultyStore(AsyncMemoryStore())


@pytest.fixture
def driven(faulty):
    driver = StoreDriver(faulty)
    yield driver
    driver.close()


SENT = ("claim_many", "renew_many", "complete_many", "put_many")


def test_without_faults_every_verb_answers_as_the_store_below(faulty, driven):
    """The contract was kept by that one already: here it only matters that every call arrives."""
    other, error = Identity("orders", "43"), Encoded("failure", b"[]")
    bert, carl = b"bert" * 3, b"carl" * 3
    terms = {"retryable": True, "keep_fingerprint": True, "ttl": 60.0}
    clock = FakeClock()
    stores = (
        (MemoryStore(clock=clock), FaultyStore(MemoryStore(clock=clock)))
        if isinstance(faulty, FaultyStore)
        else (AsyncMemoryStore(clock=clock), AsyncFaultyStore(AsyncMemoryStore(clock=clock)))
    )
    calls = [
        ("claim", (ASK,), {}),
        ("renew", (KEY, ANNA, 5.0), {}),
        ("fail", (KEY, ANNA, error), terms),
        ("claim_many", ([replace(ASK, owner=carl), replace(ASK, identity=other, owner=bert)],), {}),
        ("renew_many", ([RenewRequest(other, bert, 0.0)],), {}),
        ("stuck", (), {}),
        ("adopt", (other, ANNA, 60.0), {}),
        ("complete", (KEY, carl, RESULT, 60.0), {}),
        ("complete_many", ([CompleteRequest(other, ANNA, RESULT, 60.0)],), {}),
        ("get", (KEY,), {}),
        ("get_many", ([KEY, other],), {}),
        ("touch", (KEY, 5.0), {}),
        ("scan", (), {}),
        ("counts", (), {}),
        ("forget", (KEY,), {}),
        ("forget_many", ([KEY, other],), {}),
        ("put", (KEY, RESULT, 0.5), {"owner": ANNA}),
        ("put_many", ([PutRequest(other, bert, RESULT, 0.5)],), {}),
        ("purge", (), {}),
    ]
    assert {verb.removesuffix("_many") for verb, _, _ in calls} == {*VERBS.values()}
    below, above = map(StoreDriver, stores)
    with closing(below), closing(above):
        for verb, args, named in calls:
            method = "send" if verb in SENT else verb
            answers = [getattr(each, method)(*args, **named) for each in (below, above)]
            assert answers[0] == answers[1], verb
            assert answers[0] not in (False, [False]), f"{verb} did nothing"
            clock.advance(1.0)
    assert [call.verb for call in stores[1].calls] == [verb for verb, _, _ in calls]


def test_a_refused_call_never_reaches_the_store(faulty, driven):
    faulty.inject("claim", Refuse())
    with pytest.raises(StoreUnavailable):
        driven.claim(ASK)
    assert driven.get(KEY) is None
    assert faulty.fired("claim") == 1
    assert isinstance(driven.claim(ASK), Claimed)


def test_a_lost_reply_hides_what_the_store_did(faulty, driven):
    driven.claim(ASK)
    faulty.inject("complete", LoseReply())
    with pytest.raises(StoreUnavailable):
        driven.complete(KEY, ANNA, RESULT, 60.0)
    record = driven.get(KEY)
    assert record is not None
    assert record.state is State.SUCCEEDED
    assert driven.complete(KEY, ANNA, RESULT, 60.0) is True


def test_a_fault_of_a_verb_hits_a_batch_that_has_it(faulty, driven):
    driven.claim(ASK)
    faulty.inject("renew", Refuse())
    faulty.inject("renew_many", LoseReply())
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            driven.send([RenewRequest(KEY, ANNA, 60.0)])
    assert driven.send([RenewRequest(KEY, ANNA, 60.0)]) == [True]
    assert (faulty.fired("renew"), faulty.fired("renew_many")) == (1, 1)


def test_a_fault_of_renew_hits_the_renewal_of_an_engine():
    store = FaultyStore(MemoryStore())
    with Idempotency(store, policy=Policy(lease=1)) as idem:
        store.inject("renew", Refuse())

        def work():
            wait_until(lambda: store.fired("renew"))

        idem.execute("order:1", work)
    assert store.fired("renew") == 1


def test_a_fault_happens_as_often_as_it_was_injected(faulty, driven):
    driven.claim(ASK)
    faulty.inject("renew", Refuse(), times=3)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            driven.renew(KEY, ANNA, 60.0)
    assert driven.renew(KEY, ANNA, 60.0) is True
    assert faulty.fired("renew") == 3


def test_faults_happen_in_the_order_they_were_injected(faulty, driven):
    faulty.inject("claim", Refuse(StoreFull("no room")))
    faulty.inject("claim", LoseReply())
    with pytest.raises(StoreFull):
        driven.claim(ASK)
    with pytest.raises(StoreUnavailable):
        driven.claim(ASK)
    assert isinstance(driven.claim(ASK), Claimed)


def test_a_healed_store_has_no_faults_left(faulty, driven):
    faulty.inject("claim", Refuse(), times=100)
    faulty.heal()
    assert isinstance(driven.claim(ASK), Claimed)
    assert faulty.fired("claim") == 0


def test_a_delayed_call_reaches_the_store_later(faulty, driven):
    faulty.inject("claim", Delay(0.05))
    before = time.monotonic()
    assert isinstance(driven.claim(ASK), Claimed)
    assert time.monotonic() - before >= 0.05
    assert faulty.fired("claim") == 1


async def test_a_delayed_call_does_not_stop_the_loop():
    store = AsyncFaultyStore(AsyncMemoryStore())
    store.inject("claim", Delay(0.05))
    claim = asyncio.create_task(store.claim(ASK))
    await asyncio.sleep(0)
    assert await store.get(KEY) is None
    assert isinstance(await claim, Claimed)


def test_every_call_is_recorded_with_the_fault_it_met(faulty, driven):
    fault = Refuse()
    driven.claim(ASK)
    faulty.inject("put", fault)
    with pytest.raises(StoreUnavailable):
        driven.put(KEY, RESULT, 60.0, owner=ANNA)
    assert faulty.calls == [
        Call("claim", (ASK,), None),
        Call("put", (PutRequest(KEY, ANNA, RESULT, 60.0),), fault, "put"),
    ]


def test_a_send_of_several_kinds_is_a_call_of_its_own(faulty, driven):
    faulty.inject("send", Refuse())
    with pytest.raises(StoreUnavailable):
        driven.send([ASK, GetRequest(KEY)])
    claimed, record = driven.send([ASK, GetRequest(Identity("orders", "absent"))])
    assert isinstance(claimed, Claimed)
    assert record is None
    assert [call.verb for call in faulty.calls] == ["send", "send"]


def test_batches_and_listings_fail_as_scripted_too(faulty, driven):
    faulty.inject("claim_many", LoseReply())
    faulty.inject("counts", Refuse())
    with pytest.raises(StoreUnavailable):
        driven.send([ASK])
    with pytest.raises(StoreUnavailable):
        driven.counts()
    assert driven.counts().processing == 1


def test_a_fault_of_a_verb_that_nobody_can_call_is_refused(faulty):
    with pytest.raises(
        ConfigError, match=r"'completed' .*: the verbs are adopt, adopt_many, claim, "
    ):
        faulty.inject("completed", Refuse())


def test_a_fault_of_a_verb_that_this_store_does_not_have_is_refused():
    store = FaultyStore(DictStore())
    with pytest.raises(ConfigError, match="'scan'"):
        store.inject("scan", Refuse())


def test_it_answers_what_its_store_answers_and_no_more():
    assert ScanRequest not in FaultyStore(MemoryStore()).unsupported
    assert ScanRequest in FaultyStore(DictStore()).unsupported
    with pytest.raises(ConfigError, match="DictStore does not support ScanRequest"):
        FaultyStore(DictStore()).scan()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Refuse, r"by calling its class: Refuse\(\.\.\.\)"),
        (Delay, r"by calling its class: Delay"),
        ("x", "a Refuse, LoseReply or Delay; got 'x'"),
        (StoreFull("no room"), r"a Refuse, LoseReply or Delay; got StoreFull"),
        (None, "got None"),
    ],
)
def test_what_is_no_fault_is_refused(faulty, driven, fault, words):
    with pytest.raises(ConfigError, match=words):
        faulty.inject("claim", fault)
    assert isinstance(driven.claim(ASK), Claimed)


@pytest.mark.parametrize("times", [0, -1, 1.5, True, "2", None])
def test_a_fault_that_never_happens_is_refused(faulty, times):
    with pytest.raises(ConfigError, match="times must be a whole number of 1 or more"):
        faulty.inject("claim", Refuse(), times=times)


def test_faults_are_counted_of_verbs_that_there_are(faulty):
    with pytest.raises(ConfigError, match=r"'clam' .*: the verbs are adopt, adopt_many, claim, "):
        faulty.fired("clam")


@pytest.mark.parametrize("kind", [Refuse, LoseReply])
def test_a_fault_raises_an_exception_and_nothing_else(kind):
    for error in ("no room", StoreFull, None):
        with pytest.raises(ConfigError, match=f"{kind.__name__} takes the exception to raise"):
            kind(error)


@pytest.mark.parametrize("seconds", [0, -1, "5", None])
def test_a_delay_takes_time(seconds):
    with pytest.raises(ConfigError, match="a delay must be"):
        Delay(seconds)


def test_a_delay_may_be_a_timedelta(faulty, driven):
    assert Delay(timedelta(minutes=1)) == Delay(60.0)
    faulty.inject("claim", Delay(timedelta(milliseconds=1)))
    assert isinstance(driven.claim(ASK), Claimed)


@pytest.mark.parametrize(
    ("kind", "opener"), [(FaultyStore, "open_store"), (AsyncFaultyStore, "open_async_store")]
)
@pytest.mark.parametrize("given", ["memory://", None, object(), MemoryStore])
def test_only_a_store_can_be_made_to_fail(kind, opener, given):
    with pytest.raises(ConfigError, match=rf"in front of a store, such as {opener}\(url\)"):
        kind(given)


def test_a_store_of_the_other_kind_is_told_its_place():
    with pytest.raises(ConfigError, match="AsyncMemoryStore is a store for asyncio: use AsyncF"):
        FaultyStore(AsyncMemoryStore())
    with pytest.raises(ConfigError, match="MemoryStore is a store for threads: use FaultyStore"):
        AsyncFaultyStore(MemoryStore())
