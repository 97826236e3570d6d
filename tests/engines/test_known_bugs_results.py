"""Known bugs of other designs: results that are falsy, large, odd, unreadable, or hard to save."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pydantic
import pytest

import semel.engine._sync.runs
import semel.engine.runs
from engines.facade import MANY, PATIENCE, Effect, Stop, never, until, wait_until
from semel import AsyncIdempotency, ConcurrentRequest, Policy, ResultUnavailable, events
from semel.core.records import ClaimRequest, Encoded, Identity, State
from semel.testing import AsyncFaultyStore, Delay, LoseReply, Refuse


@dataclass
class Receipt:
    number: int
    paid: Decimal
    lines: tuple[str, ...]


class Invoice(pydantic.BaseModel):
    number: UUID
    at: datetime


FALSY = [1, 0, False, "", [], {}, None]

EXACT = [
    (1, "two", (3,)),
    datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    timedelta(seconds=1, microseconds=2),
    Decimal("10.10"),
    UUID(int=42),
    b"\x00\xff",
    Receipt(7, Decimal("1.50"), ("a", "b")),
    Invoice(number=UUID(int=7), at=datetime(2026, 1, 2, tzinfo=UTC)),
    {"receipts": [Receipt(1, Decimal(0), ())], "raw": b"x"},
]


def test_the_first_result_and_its_replay_are_equal_in_value_and_type(world):
    """Known bugs 11 and 12: falsy results run again; the replay of a tuple is a list."""
    engine, other = world.engine(), world.engine()
    for number, result in enumerate([*FALSY, *EXACT]):
        effect = Effect(result)
        for got in [each.execute(f"k{number}", effect) for each in (engine, engine, other)]:
            assert (type(got), got, repr(got)) == (type(result), result, repr(result))
        assert effect.runs == 1, result


def test_a_function_that_returns_nothing_is_done(world):
    """Known bug 11: no result is taken for no execution."""
    runs = []

    def returns_nothing():
        runs.append(1)

    engine = world.engine()
    assert engine.execute("k", returns_nothing) is None
    assert engine.run("k", never).replayed
    assert not engine.consume("k", never)
    assert runs == [1]


def test_each_caller_gets_a_result_of_its_own(memory_world):
    """Known bug 12: what one caller does to its result is seen by the others."""
    engine = memory_world.engine()
    original = {"lines": ["a"]}
    first = engine.execute("k", Effect(original))
    first["lines"].append("b")
    original["lines"].append("c")
    assert engine.execute("k", never) == {"lines": ["a"]}


@pytest.mark.parametrize(
    ("result", "why"), [(object(), "object"), ("x" * 200, "202 bytes")], ids=["odd", "too large"]
)
def test_a_result_that_cannot_be_kept_is_never_a_reason_to_run_again(world, result, why):
    """Known bug 6: the effect is done, and every waiter does it once more."""
    engine, other = world.engine(), world.engine()
    effect = Effect(result).held()
    policy = Policy(max_result_bytes=100)
    running = engine.start("k", effect, policy=policy)
    effect.wait_started()
    waiting = [each.start("k", effect, policy=policy) for each in (engine, other) for _ in range(5)]
    wait_until(lambda: engine.sharers() == 5 and other.sharers() == 4 and other.commands("claim"))
    effect.release()
    assert running.result(PATIENCE) is result
    for call in waiting:
        with pytest.raises(ResultUnavailable, match=why):
            call.result(PATIENCE)
    assert effect.runs == 1
    assert [why in event.reason for event in engine.told(events.ResultOmitted)] == [True]
    assert other.peek("k").state is State.SUCCEEDED


@pytest.mark.parametrize(
    "stored", [Encoded("json", b"\xff"), Encoded("json", b"{"), Encoded("gone-with-a-deploy", b"1")]
)
def test_a_stored_result_that_cannot_be_read_is_never_a_reason_to_run_again(world, stored):
    """Known bug 20: unreadable is taken for absent."""
    engine = world.engine()
    identity, owner = Identity("default", "k"), b"of a deploy."
    engine.ask_store("claim", ClaimRequest(identity, owner, None, 30.0, 60.0))
    assert engine.ask_store("complete", identity, owner, stored, 60.0)
    for _ in range(2):
        with pytest.raises(ResultUnavailable):
            engine.execute("k", never)
    assert not engine.consume("k", never), "what was done is done, readable or not"


@pytest.fixture
def quick_to_give_up(monkeypatch):
    """Calls leave the saving to the timer after a moment."""
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.2)


def test_a_result_that_cannot_be_saved_reaches_its_caller_and_keeps_its_key(
    world, quick_to_give_up
):
    """Known bug 13: saving the success fails, the key is freed, the effect is repeated."""
    engine, other = world.engine(policy=Policy(lease=1)), world.engine()
    engine.store.inject("complete", Refuse(), times=MANY)
    effect = Effect("paid")
    assert engine.execute("k", effect) == "paid"
    assert engine.told(events.ResultNotStored)
    seen = engine.store.fired("complete")
    wait_until(lambda: engine.store.fired("complete") > seen + 2)  # the timer goes on
    with pytest.raises(ConcurrentRequest):
        other.execute("k", never, policy=Policy(concurrent="reject"))
    engine.store.heal()
    assert other.execute("k", never) == engine.execute("k", never) == "paid"
    wait_until(lambda: engine.told(events.ResultStoredLate))
    assert effect.runs == 1


def test_a_result_that_could_not_be_saved_is_saved_when_the_engine_closes(world, quick_to_give_up):
    """Known bug 13: the last chance to save is used."""
    engine, other = world.engine(), world.engine()
    engine.store.inject("complete", Refuse(), times=MANY)
    assert engine.execute("k", Effect("paid")) == "paid"
    engine.store.heal()
    engine.close()
    assert other.execute("k", never, policy=Policy(concurrent="reject")) == "paid"


def test_a_save_whose_reply_was_lost_is_a_success(world):
    """Known bug 13: the save was applied, and the caller is told of a failure."""
    engine, other = world.engine(), world.engine()
    engine.store.inject("complete", LoseReply())
    assert engine.execute("k", Effect("paid")) == "paid"
    assert engine.store.fired("complete") == 1
    assert engine.told(events.Ran)
    assert other.execute("k", never) == "paid"


@pytest.mark.parametrize("fault", [Refuse, LoseReply])
def test_a_caller_interrupted_after_the_effect_and_before_the_save_leaves_a_result(world, fault):
    """Known bug 4: the client went away, and its retry repeats the effect."""
    engine, other = world.engine(), world.engine()
    engine.store.inject("complete", fault(Stop()))
    effect = Effect("paid")
    with pytest.raises(Stop):
        engine.execute("k", effect)
    assert engine.store.fired("complete") == 1
    assert other.execute("k", effect) == "paid"
    assert effect.runs == 1


async def test_a_task_cancelled_after_the_effect_and_before_the_save_leaves_a_result(store_url):
    """Known bug 4: the same with a real cancellation."""
    store = AsyncFaultyStore(semel.open_async_store(store_url))
    store.inject("complete", Delay(0.1))
    effects = []

    async def effect():
        effects.append("paid")
        return "paid"

    async with AsyncIdempotency(store) as idem:
        task = asyncio.create_task(idem.execute("k", effect))
        await until(lambda: store.fired("complete"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await idem.execute("k", effect) == "paid"
    assert effects == ["paid"]
    await store.close()


def test_the_value_of_a_consumed_message_is_dropped(world):
    """Known bug 6: whatever a message's handler gives back, its message is done."""
    engine, other = world.engine(), world.engine()
    assert engine.consume("k", Effect(object()))
    assert not other.consume("k", never)
    assert not engine.told(events.ResultOmitted)
    assert other.execute("k", never) is None
