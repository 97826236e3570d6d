"""Old finished records of a scope are forgotten together, with an entry in the audit trail."""

from __future__ import annotations

import asyncio

import pytest

from semel import AsyncIdempotency, Idempotency, InvalidKey, StoreUnavailable
from semel.core.records import Identity, TouchRequest
from semel.repair import AsyncAuditTrail, AuditTrail, forget_finished, forget_finished_async
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FakeClock, FaultyStore, Refuse, crash

DOWN = StoreUnavailable("the server is down")


class Failing(MemoryStore):
    """Answers each end of retention with an error."""

    def send(self, requests):
        if any(isinstance(request, TouchRequest) for request in requests):
            return [DOWN] * len(requests)
        return super().send(requests)


class AsyncFailing(AsyncMemoryStore):
    """The same for asyncio."""

    async def send(self, requests):
        if any(isinstance(request, TouchRequest) for request in requests):
            return [DOWN] * len(requests)
        return await super().send(requests)


def test_records_that_ended_long_ago_are_forgotten_and_younger_ones_stay():
    clock = FakeClock()
    with Idempotency(MemoryStore(clock=clock)) as idem:
        idem.execute("old", lambda: 1, scope="orders")
        idem.execute("old", lambda: 1, scope="other")
        clock.advance(3600)
        idem.execute("young", lambda: 1, scope="orders")
        crash(idem, "stuck", scope="orders")
        assert forget_finished(idem, "orders", older_than=1800, name="anna", reason="ticket 7") == 1
        assert [record.key for record in idem.records(scope="orders")] == ["stuck", "young"]
        assert idem.peek("old", scope="other") is not None
        (entry,) = AuditTrail(idem).read()
        assert (entry.action, entry.scope, entry.reason) == ("forget", "orders", "ticket 7")


def test_async_engines_forget_them_too():
    async def forgotten():
        async with AsyncIdempotency(AsyncMemoryStore()) as idem:
            for number in range(5):
                await idem.marks.set(f"order:{number}", scope="orders")
            steps = []
            options = {"older_than": 0, "batch": 2, "pause": 0}
            assert (
                await forget_finished_async(idem, "orders", progress=steps.append, **options) == 5
            )
            assert steps[-1] == 5
            assert await forget_finished_async(idem, "orders", **options) == 0
            assert len(await AsyncAuditTrail(idem).read(scope="orders")) == 2

    asyncio.run(forgotten())


def test_without_its_entry_nothing_is_forgotten():
    store = FaultyStore(MemoryStore())
    with Idempotency(store) as idem:
        idem.execute("old", lambda: 1, scope="orders")
        store.inject("put", Refuse())
        with pytest.raises(StoreUnavailable):
            forget_finished(idem, "orders", older_than=0)
        assert store.fired("put") == 1
        assert idem.peek("old", scope="orders") is not None


def test_an_error_of_the_store_is_raised():
    with Idempotency(Failing()) as idem:
        idem.execute("old", lambda: 1, scope="orders")
        with pytest.raises(StoreUnavailable, match="the server is down"):
            forget_finished(idem, "orders", older_than=0)

    async def in_tasks():
        async with AsyncIdempotency(AsyncFaultyStore(AsyncFailing())) as idem:
            await idem.marks.set("old", scope="orders")
            with pytest.raises(StoreUnavailable, match="the server is down"):
                await forget_finished_async(idem, "orders", older_than=0)
            assert await idem.internals.store.get(Identity("orders", "old")) is not None

    asyncio.run(in_tasks())


def test_the_audit_trail_is_no_scope_to_forget():
    with Idempotency("memory://") as idem, pytest.raises(InvalidKey, match="audit trail"):
        forget_finished(idem, "semel.audit", older_than=0)
