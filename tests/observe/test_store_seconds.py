"""`Ran` and `Replayed` say how long the call waited for its store, and for nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from time import monotonic

import aiosqlite
import pytest

from engines.facade import KINDS, Effect, World, never, wait_until
from semel import AsyncIdempotency, Idempotency, Policy, events
from semel.testing import Refuse

LONG = Policy(lease=1e6)
"""Nothing here is renewed, or comes late."""

HOUR = 3600.0


class Clock:
    """The clock of the engines, moved on by hand."""

    ahead = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead

    def takes(self, seconds: float):
        """Something that takes this long."""

        def take() -> None:
            self.ahead += seconds

        return take


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    for module in ("outcomes", "runs", "_sync.runs", "transactions", "_sync.transactions"):
        monkeypatch.setattr(f"semel.engine.{module}.monotonic", made)
    return made


@pytest.fixture(params=KINDS)
def world(request):
    with World(request.param, "memory://") as opened:
        yield opened


def took(idem, kind, number=-1) -> float | None:
    return idem.told(kind)[number].store_seconds


def hours(seconds: float) -> int:
    """Whole hours: what the test took itself is less."""
    return int(seconds // HOUR)


def test_a_run_waits_for_its_claim_and_its_save(world, clock):
    idem = world.engine(policy=LONG)
    idem.store.before["claim"] = clock.takes(2 * HOUR)
    idem.store.before["complete"] = clock.takes(3 * HOUR)
    idem.execute("k", clock.takes(100 * HOUR))
    assert hours(took(idem, events.Ran)) == 5
    assert hours(idem.told(events.Ran)[0].seconds) == 105


def test_a_replay_waits_for_one_answer(world, clock):
    idem = world.engine(policy=LONG)
    idem.execute("k", lambda: "paid")
    idem.store.before["claim"] = clock.takes(2 * HOUR)
    idem.execute("k", never)
    assert hours(took(idem, events.Replayed)) == 2


def test_a_wait_for_another_attempt_is_no_wait_for_the_store(world, clock, monkeypatch):
    mine, other = world.engine(policy=LONG), world.engine(policy=LONG)
    effect = Effect().held()
    first = other.start("k", effect)
    effect.wait_started()

    def wait(*_):
        clock.ahead += 1000 * HOUR
        effect.release()
        first.result()

    async def wait_task(*_):
        await asyncio.to_thread(wait)

    monkeypatch.setattr("semel.engine._sync.runs.Polling.wait", wait)
    monkeypatch.setattr("semel.engine.runs.Polling.wait", wait_task)
    mine.store.before["claim"] = clock.takes(2 * HOUR)
    assert mine.execute("k", never) == "done"
    [replayed] = mine.told(events.Replayed)
    assert replayed.waited
    assert hours(replayed.store_seconds) == 2


def test_a_follower_and_the_local_cache_ask_no_store(world):
    idem = world.engine(cache=10)
    effect = Effect().held()
    first = idem.start("k", effect)
    effect.wait_started()
    second = idem.start("k", never)
    wait_until(idem.sharers)
    effect.release()
    assert first.result() == second.result() == idem.execute("k", never)
    assert [event.store_seconds for event in idem.told(events.Replayed)] == [None, None]
    assert took(idem, events.Ran) is not None


def test_a_save_that_failed_at_first_counts_both_waits(world, clock):
    idem = world.engine(policy=LONG)

    def refuse_later():
        clock.ahead += 2 * HOUR
        idem.store.before["complete"] = clock.takes(3 * HOUR)

    idem.store.before["complete"] = refuse_later
    idem.store.inject("complete", Refuse())
    idem.execute("k", lambda: "paid")
    assert idem.told(events.StoreFailed)
    assert hours(took(idem, events.Ran)) == 5


def test_attempts_by_hand_are_measured_too():
    told = []
    with Idempotency("memory://", hooks=[told.append]) as idem:
        for _ in range(2):
            with idem.attempt("k") as attempt:
                assert attempt.replayed is bool(told)
    assert [type(event) for event in told] == [events.Ran, events.Replayed]
    assert None not in [event.store_seconds for event in told]


def test_an_attempt_in_a_transaction_waits_for_its_statements(sqlite_url, clock):
    told = []
    with Idempotency(sqlite_url, hooks=[told.append]) as idem:
        idem.peek("any")  # makes the table
        with contextlib.closing(connected(sqlite3, sqlite_url)) as connection:
            for _ in range(2):
                connection.execute("BEGIN IMMEDIATE")
                with idem.transaction(connection, "k") as attempt:
                    if not attempt.replayed:
                        clock.ahead += 100 * HOUR
                        attempt.result = "paid"
                connection.commit()
    assert [type(event) for event in told] == [events.RanInTransaction, events.Replayed]
    assert [0 < event.store_seconds < 100 * HOUR for event in told] == [True, True]
    assert hours(told[0].seconds) == 100


async def test_an_attempt_in_a_transaction_of_a_task_waits_for_its_statements(sqlite_url, clock):
    told = []
    async with AsyncIdempotency(sqlite_url, hooks=[told.append]) as idem:
        await idem.peek("any")
        async with connected(aiosqlite, sqlite_url) as connection:
            for _ in range(2):
                await connection.execute("BEGIN IMMEDIATE")
                async with idem.transaction(connection, "k") as attempt:
                    if not attempt.replayed:
                        clock.ahead += 100 * HOUR
                        attempt.result = "paid"
                await connection.commit()
    assert [type(event) for event in told] == [events.RanInTransaction, events.Replayed]
    assert [0 < event.store_seconds < 100 * HOUR for event in told] == [True, True]


def connected(driver, url):
    return driver.connect(url.removeprefix("sqlite:///"), isolation_level=None)


# --- who does not ask is not measured ---------------------------------------------------------


@pytest.fixture(params=KINDS)
def silent(request, sqlite_url, caplog):
    """An engine without hooks, on a store that can be made to fail; its log is read."""
    caplog.set_level(logging.DEBUG, "semel")
    world = World(request.param, sqlite_url)
    store = world.kind.steered(world._store())
    engine = world.kind.engine(store)
    with world:
        yield world.kind, store, engine
        world.kind.finish(engine.close)


def logged(caplog, *kinds):
    """What is measured in the log, by the names of the events."""
    told = [record.semel for record in caplog.records if hasattr(record, "semel")]
    return [(each["event"], each["store_seconds"]) for each in told if each["event"] in kinds]


def test_without_a_hook_nothing_is_measured(silent, caplog):
    kind, _, engine = silent
    for _ in range(2):
        kind.call(engine.execute, "k", lambda: 1)
    assert logged(caplog, "Ran", "Replayed") == [("Ran", None), ("Replayed", None)]
    assert "store_seconds" not in caplog.text


def test_without_a_hook_a_save_that_failed_at_first_is_not_measured_either(silent, caplog):
    kind, store, engine = silent
    store.inject("complete", Refuse(), times=2)
    kind.call(engine.execute, "k", lambda: 1)
    assert store.fired("complete") == 2
    assert logged(caplog, "Ran") == [("Ran", None)]


def test_without_a_hook_no_attempt_in_a_transaction_is_measured(sqlite_url, caplog):
    caplog.set_level(logging.DEBUG, "semel")
    with Idempotency(sqlite_url) as idem:
        idem.peek("any")
        with contextlib.closing(connected(sqlite3, sqlite_url)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with idem.transaction(connection, "k"):
                pass
            connection.commit()
    assert logged(caplog, "RanInTransaction") == [("RanInTransaction", None)]


async def test_without_a_hook_no_attempt_in_a_transaction_of_a_task_is_measured(sqlite_url, caplog):
    caplog.set_level(logging.DEBUG, "semel")
    async with AsyncIdempotency(sqlite_url) as idem:
        await idem.peek("any")
        async with connected(aiosqlite, sqlite_url) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            async with idem.transaction(connection, "k"):
                pass
            await connection.commit()
    assert logged(caplog, "RanInTransaction") == [("RanInTransaction", None)]
