"""A person decides about one record."""

from __future__ import annotations

from datetime import timedelta

import pytest

from engines.facade import World, never
from repair.conftest import Repairs
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    InvalidKey,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    ValueRejected,
)
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.repair import Failed, Overtaken, Resolved, Succeeded, Unknown, settle, settle_async


def decide(repairs, key, resolution, **options):
    function = settle if repairs.world.name == "threads" else settle_async
    return repairs.do(function, repairs.engine.engine, key, resolution, scope="orders", **options)


def test_a_person_says_that_it_succeeded(repairs):
    repairs.abandon("a")
    told = []
    decision = decide(repairs, "a", Succeeded([1, 2]), name="anna", audit=told.append)
    assert isinstance(decision, Resolved)
    assert decision.by.startswith("anna@")
    assert told == repairs.told(Resolved) == [decision]
    assert repairs.engine.execute("a", never, scope="orders") == [1, 2]


def test_a_person_says_that_it_failed(repairs):
    repairs.abandon("a")
    assert isinstance(decide(repairs, "a", Failed("not at the bank", False)), Resolved)
    with pytest.raises(PreviousFailure, match="not at the bank"):
        repairs.engine.execute("a", never, scope="orders")


@pytest.mark.parametrize(
    "resolution", [Succeeded(1), Failed("no", False), Failed("no", True)], ids=repr
)
def test_a_person_may_say_how_long_the_outcome_is_kept(memory_workshop, resolution):
    identity = memory_workshop.abandon("a")
    decide(memory_workshop, "a", resolution, ttl=timedelta(days=7))
    assert 604_000 < memory_workshop.record(identity).remaining <= 604_800
    identity = memory_workshop.abandon("b")
    decide(memory_workshop, "b", resolution)
    assert memory_workshop.record(identity).remaining <= 86_400
    with pytest.raises(ConfigError, match=r"^ttl must be"):
        decide(memory_workshop, "a", resolution, ttl=0)


@pytest.mark.parametrize("resolution", [Succeeded(1), Failed("no", False)], ids=repr)
def test_a_decision_says_until_when_its_outcome_is_kept(repairs, resolution):
    identity = repairs.abandon("a")
    decision = decide(repairs, "a", resolution, ttl=timedelta(days=7))
    record = repairs.record(identity)
    assert decision.kept_until - decision.at == 604_800
    assert abs(decision.kept_until - record.expires_at) < 60


def unaware(world, **options):
    """An engine of another program: it knows no policy of the attempts that it finds."""
    repairs = Repairs(world)
    repairs.engine = world.engine(**options)
    return repairs


@pytest.fixture
def world(kind):
    with World(kind, "memory://") as world:
        yield world


@pytest.mark.parametrize("resolution", [Succeeded(1), Failed("no", False)], ids=repr)
@pytest.mark.parametrize("policy", [None, Policy(ttl=7200)])
def test_a_held_attempt_needs_a_ttl_where_nobody_names_its_scope(world, policy, resolution):
    repairs = unaware(world, policy=policy, scopes={"other": Policy.payment()})
    identity = repairs.abandon("a")
    before = repairs.record(identity)
    with pytest.raises(ConfigError, match="ttl") as refused:
        decide(repairs, "a", resolution)
    assert (refused.value.scope, refused.value.key_digest) == ("orders", identity.digest.hex())
    assert repairs.record(identity).owner == before.owner
    assert isinstance(decide(repairs, "a", resolution, ttl=600), Resolved)


@pytest.mark.parametrize(
    "options", [{"scopes": {"orders": Policy.payment()}}, {"policy": Policy.payment()}], ids=repr
)
def test_an_engine_that_knows_the_policy_needs_no_ttl(world, options):
    repairs = unaware(world, **options)
    identity = repairs.abandon("a")
    assert isinstance(decide(repairs, "a", Succeeded(1)), Resolved)
    assert repairs.record(identity).remaining > 2 * 86_400


def test_what_may_run_again_and_what_is_not_held_need_no_ttl(world):
    repairs = unaware(world)
    repairs.abandon("a")
    assert isinstance(decide(repairs, "a", Failed("never sent", True)), Resolved)
    repairs.abandon("b", hold=False)
    assert isinstance(decide(repairs, "b", Succeeded(1)), Resolved)


@pytest.mark.parametrize("retryable", [True, False])
def test_a_failure_that_was_decided_still_refuses_another_payload(repairs, retryable):
    def sent():
        raise OSError("no answer")

    engine = repairs.engine
    with pytest.raises(OSError, match="no answer"):
        engine.execute("a", sent, scope="orders", payload={"amount": 5})
    decide(repairs, "a", Failed("not at the bank", retryable))
    with pytest.raises(PayloadMismatch):
        engine.execute("a", never, scope="orders", payload={"amount": 6})
    if retryable:
        assert engine.execute("a", lambda: "ran", scope="orders", payload={"amount": 5}) == "ran"


def test_there_must_be_something_to_decide(repairs):
    assert decide(repairs, "a", Succeeded(1)) is None
    running = Identity("orders", "b")
    repairs.store("claim", ClaimRequest(running, bytes(12), None, 600.0, 600.0))
    assert decide(repairs, "b", Succeeded(1)) is None
    assert repairs.record(running).owner == bytes(12)


def test_a_person_can_be_overtaken(memory_workshop):
    identity = memory_workshop.abandon("a")

    def overtake():
        owner = memory_workshop.record(identity).owner
        memory_workshop.store("renew", identity, owner, 0.0)
        memory_workshop.store("adopt", identity, bytes(12), 600.0)
        memory_workshop.store("complete", identity, bytes(12), Encoded("json/1", b"2"), 600.0)

    memory_workshop.engine.store.before["complete"] = overtake
    assert isinstance(decide(memory_workshop, "a", Succeeded(1)), Overtaken)
    assert memory_workshop.engine.execute("a", never, scope="orders") == 2


def test_a_person_who_comes_second_decides_nothing(memory_workshop):
    identity = memory_workshop.abandon("a")

    def adopted():
        memory_workshop.store("adopt", identity, bytes(12), 600.0)

    memory_workshop.engine.store.before["adopt"] = adopted
    assert decide(memory_workshop, "a", Succeeded(1)) is None
    assert memory_workshop.record(identity).owner == bytes(12)


def test_an_attempt_whose_outcome_the_store_refuses_has_been_abandoned_as_long_as_before(
    memory_workshop,
):
    def refuse():
        raise ValueRejected("too large")

    identity = memory_workshop.abandon("a")
    owner = memory_workshop.record(identity).owner
    memory_workshop.store("renew", identity, owner, -600.0)
    memory_workshop.engine.store.before["complete"] = refuse
    with pytest.raises(ValueRejected, match="too large"):
        decide(memory_workshop, "a", Succeeded(1))
    assert 600.0 <= memory_workshop.record(identity).abandoned_for < 1200.0


def test_the_key_is_checked_like_everywhere(memory_workshop):
    with pytest.raises(InvalidKey):
        decide(memory_workshop, "no spaces allowed", Succeeded(1))


@pytest.mark.parametrize("undecided", [Unknown("?"), 5])
def test_what_decides_nothing_is_refused_before_the_record_is_touched(undecided):
    with Idempotency("memory://", policy=Policy(abandoned="hold")) as idem:
        with pytest.raises(ZeroDivisionError):
            idem.execute("k", lambda: 1 / 0)
        before = idem.peek("k")
        with pytest.raises(ConfigError, match="a person decides"):
            settle(idem, "k", undecided)
        assert idem.peek("k").owner == before.owner


async def test_what_decides_nothing_is_rejected_awaited_too():
    async with AsyncIdempotency("memory://") as idem:
        with pytest.raises(ConfigError, match="a person decides"):
            await settle_async(idem, "k", Unknown("?"))
