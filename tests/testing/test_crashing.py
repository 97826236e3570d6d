"""Attempts that crash on purpose, and recorded events."""

from __future__ import annotations

import asyncio

import pytest

from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    require_attempt,
)
from semel.events import Ran, Replayed
from semel.repair import Reconciler, Succeeded
from semel.testing import crash, crash_async, record_events

HOLD = Policy(abandoned="hold")


def test_a_crash_leaves_what_a_killed_process_leaves():
    with Idempotency("memory://", policy=HOLD) as idem:
        sent = []
        record = crash(idem, "order:1", lambda: sent.append(require_attempt().derive("charge")))
        assert (record.abandoned, record.hold, record.number) == (True, True, 1)
        assert sent == [record.derive("charge")]
        with pytest.raises(OutcomeUnknown):
            idem.execute("order:1", lambda: "again")
        Reconciler(idem, {"default": lambda _: Succeeded("found")}, older_than=0).run_once()
        assert idem.execute("order:1", lambda: "again") == "found"


def test_the_next_call_runs_after_a_crash_under_takeover():
    with Idempotency("memory://") as idem:

        @idem.once("{order}")
        def pay(order, amount):
            return require_attempt().number

        crash(idem, pay.key_for(1, 5), scope=pay.scope, payload={"amount": 5})
        with pytest.raises(PayloadMismatch):
            pay(1, 6)
        assert pay(1, 5) == 2


def test_what_a_crashing_attempt_raises_reaches_the_test():
    with Idempotency("memory://", policy=HOLD) as idem:
        with pytest.raises(ZeroDivisionError):
            crash(idem, "order:1", lambda: 1 / 0)
        assert idem.peek("order:1").abandoned


def test_a_decorated_function_is_rejected_in_place_of_waiting_for_itself():
    with Idempotency("memory://", policy=HOLD) as idem:

        @idem.once(key=lambda: "order:1")
        def pay():
            return "paid"

        for fn in (pay, lambda: [pay()]):
            with pytest.raises(ConfigError, match=r"pass the undecorated one, such as .*__wrapped"):
                crash(idem, "order:1", fn, scope=pay.scope)
            assert idem.forget("order:1", scope=pay.scope)
        assert crash(idem, "order:1", pay.__wrapped__, scope=pay.scope).abandoned


def test_an_async_decorated_function_is_rejected_in_place_of_waiting_for_itself():
    async def crashed():
        async with AsyncIdempotency("memory://", policy=HOLD) as idem:

            @idem.once(key=lambda: "order:1")
            async def pay():
                return "paid"

            with pytest.raises(ConfigError, match="pass the undecorated one"):
                await crash_async(idem, "order:1", pay, scope=pay.scope)

    asyncio.run(crashed())


def test_only_an_attempt_that_may_begin_can_crash():
    with Idempotency("memory://") as idem:
        idem.execute("order:1", lambda: "done")
        with pytest.raises(ConfigError, match="the store says Finished"):
            crash(idem, "order:1")
        with pytest.raises(ConfigError, match="something removed it"):
            crash(idem, "order:2", lambda: idem.forget("order:2"))


def test_async_attempts_crash_too():
    async def crashed():
        async with AsyncIdempotency("memory://", policy=HOLD) as idem:
            numbers = []

            async def charge():
                numbers.append(require_attempt().number)

            record = await crash_async(idem, "order:1", charge)
            assert (record.abandoned, record.hold, numbers) == (True, True, [1])
            assert (await crash_async(idem, "order:2")).abandoned

    asyncio.run(crashed())


def test_the_events_of_a_block_are_recorded_and_hooks_stay():
    heard = []
    with Idempotency("memory://", hooks=[heard.append]) as idem:
        idem.execute("order:0", lambda: 0)
        with record_events(idem) as events:
            idem.execute("order:1", lambda: 1)
            idem.execute("order:1", lambda: 1, scope="other")
            idem.execute("order:1", lambda: 1)
        idem.execute("order:2", lambda: 2)
        assert [each.key for each in events.of(Replayed)] == ["order:1"]
        assert [each.scope for each in events.of(Ran, scope="other")] == ["other"]
        assert {each.key for each in events} == {"order:1"}
        assert set(events) < set(heard)


def test_an_engine_without_hooks_tells_a_block_of_what_it_would_not_even_log():
    with Idempotency("memory://") as idem:
        idem.execute("order:1", lambda: 1)
        with record_events(idem) as outer, record_events(idem) as inner:
            idem.execute("order:1", lambda: 1)
        assert len(outer.of(Replayed)) == len(inner.of(Replayed)) == 1
