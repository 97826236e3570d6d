"""Reconcilers that run by themselves: in a thread, in a task."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading

import pytest

from engines.facade import until, wait_until
from semel import State
from semel.core.records import ClaimRequest, Identity
from semel.repair import AsyncReconciler, Reconciler, Succeeded
from semel.repair.reconcile import aio_caught, aio_consult
from semel.stores.memory import AsyncMemoryStore
from semel.stores.urls import open_async_store, open_store
from semel.testing import AsyncFaultyStore, FaultyStore, Refuse

OWNER = b"\x00the owner\xff\x00"
KEY = Identity("orders", "a")
PATIENCE = 60.0
RESOLVERS = {"orders": lambda _: Succeeded("found out")}


def test_a_thread_looks_again_and_again(sqlite_url):
    store = open_store(sqlite_url)
    store.migrate()
    with Reconciler(sqlite_url, RESOLVERS, older_than=0, every=0.01):
        store.claim(ClaimRequest(KEY, OWNER, None, 600.0, 600.0, hold=True))
        store.renew(KEY, OWNER, 0.0)
        wait_until(lambda: store.get(KEY).state is State.SUCCEEDED)
    store.close()
    assert not [each for each in threading.enumerate() if each.name == "semel-reconciler"]


async def test_a_task_looks_again_and_again(sqlite_url):
    store = open_store(sqlite_url)
    store.migrate()
    async with AsyncReconciler(sqlite_url, RESOLVERS, older_than=0, every=0.01):
        store.claim(ClaimRequest(KEY, OWNER, None, 600.0, 600.0, hold=True))
        store.renew(KEY, OWNER, 0.0)
        await until(lambda: store.get(KEY).state is State.SUCCEEDED)
    store.close()


def abandoned(store, count):
    for number in range(count):
        identity = Identity("orders", str(number))
        store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=True))
        store.renew(identity, OWNER, 0.0)


class Holding:
    """A resolver that holds its first record until the test lets it go on."""

    def __init__(self) -> None:
        self.asked = 0
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, record):
        self.asked += 1
        self.entered.set()
        assert self.go_on.wait(PATIENCE)
        return Succeeded("found out")


def ended(store):
    return sum(record.state is State.SUCCEEDED for record in store.scan().records)


def test_stopping_finishes_the_record_in_hand_and_no_other():
    store, resolver = open_store("memory://"), Holding()
    abandoned(store, 5)
    made = Reconciler(store, {"orders": resolver}, older_than=0)
    made.start()
    assert resolver.entered.wait(PATIENCE)
    stopping = threading.Thread(target=made.stop)
    stopping.start()
    wait_until(made._background.stopping.is_set)
    resolver.go_on.set()
    stopping.join(PATIENCE)
    assert not stopping.is_alive()
    assert (resolver.asked, ended(store)) == (1, 1)
    assert made.run_once().resolved == 4  # which looks again
    made.close()


async def test_stopping_a_task_finishes_the_record_in_hand_and_no_other():
    store, resolver = AsyncMemoryStore(), Holding()
    for number in range(5):
        identity = Identity("orders", str(number))
        await store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=True))
        await store.renew(identity, OWNER, 0.0)
    made = AsyncReconciler(store, {"orders": resolver}, older_than=0)
    made.start()
    await until(resolver.entered.is_set)
    stopping = asyncio.create_task(made.stop())
    await until(made._background.stopping.is_set)
    resolver.go_on.set()
    await asyncio.wait_for(stopping, PATIENCE)
    assert resolver.asked == 1
    assert (await made.run_once()).resolved == 4
    await made.close()


@pytest.mark.parametrize("full", [False, True])
def test_stopping_ends_a_single_run_after_its_record_too(full):
    store, resolver = open_store("memory://"), Holding()
    abandoned(store, 5)
    made = Reconciler(store, {"orders": resolver}, older_than=0)
    reports = []
    running = threading.Thread(target=lambda: reports.append(made.run_once(full=full)))
    running.start()
    assert resolver.entered.wait(PATIENCE)
    made.stop()
    resolver.go_on.set()
    running.join(PATIENCE)
    assert reports[0].resolved == resolver.asked == ended(store) == 1
    made.close()


def test_stopping_ends_a_full_reading_of_the_store():
    store = FaultyStore(open_store("memory://"))
    abandoned(store, 600)  # more than one page
    made = Reconciler(store, RESOLVERS, older_than=0)
    pages, scan = [], store.scan

    def scanned(**options):
        pages.append(options)
        made.stop()
        return scan(**options)

    store.scan = scanned
    assert made.run_once(full=True).resolved == 0
    assert len(pages) == 1
    made.close()


def test_stopping_ends_the_looking_after_what_people_have_to_decide():
    store = FaultyStore(open_store("memory://"))
    abandoned(store, 5)
    made = Reconciler(store, {}, older_than=0)
    assert made.run_once().waiting == 5
    for number in range(5):
        store.forget(Identity("orders", str(number)))
    asked, get = [], store.get

    def got(identity):
        asked.append(identity)
        made.stop()
        return get(identity)

    store.get = got
    made.run_once()
    assert len(asked) == 1
    made.close()


async def test_stopping_ends_the_looking_of_a_task_too():
    store = AsyncFaultyStore(AsyncMemoryStore())
    identities = [Identity("orders", str(number)) for number in range(5)]
    for identity in identities:
        await store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=True))
        await store.renew(identity, OWNER, 0.0)
    made = AsyncReconciler(store, {}, older_than=0)
    assert (await made.run_once()).waiting == 5
    asked, get = [], store.get

    async def got(identity):
        asked.append(identity)
        await made.stop()
        return await get(identity)

    for identity in identities:
        await store.forget(identity)
    store.get = got
    await made.run_once()
    assert len(asked) == 1
    await made.close()


def test_a_reconciler_warns_once_where_nobody_says_how_long_outcomes_are_kept(caplog):
    store = open_store("memory://")
    abandoned(store, 3)
    made = Reconciler(store, RESOLVERS, older_than=0)
    assert made.run_once().resolved == 3
    assert caplog.text.count("outcomes of held attempts of scope orders are kept for") == 1
    made.close()


def test_a_run_that_fails_is_not_the_last(caplog):
    store = FaultyStore(open_store("memory://", prefix="", timeout=1))
    store.inject("stuck", Refuse(), times=2)
    with Reconciler(store, RESOLVERS, every=0.01):
        wait_until(lambda: len(store.calls) > 3)
    assert store.fired("stuck") == 2
    assert "reconciliation failed" in caplog.text


async def test_a_run_of_a_task_that_fails_is_not_the_last(caplog):
    store = AsyncFaultyStore(open_async_store("memory://", prefix="", timeout=1))
    store.inject("stuck", Refuse(), times=2)
    async with AsyncReconciler(store, RESOLVERS, every=0.01):
        await until(lambda: len(store.calls) > 3)
    assert store.fired("stuck") == 2
    assert "reconciliation failed" in caplog.text


def test_starting_twice_is_starting_once_and_stopping_twice_is_harmless():
    made = Reconciler(open_store("memory://"), {})
    made.start()
    first = made._background.running
    made.start()
    assert made._background.running is first
    made.stop()
    made.stop()
    assert not first.is_alive()
    made.start()  # and again
    made.close()


async def test_an_async_one_too():
    made = AsyncReconciler(open_async_store("memory://"), {})
    made.start()
    first = made._background.running
    made.start()
    assert made._background.running is first
    await made.stop()
    await made.stop()
    assert first.done()
    await made.close()


async def test_resolvers_of_a_task_may_be_async_or_plain_or_give_an_awaitable():
    store = AsyncMemoryStore()
    threads = []

    async def by_await(record):
        await asyncio.sleep(0)
        return Succeeded("async")

    def by_thread(record):
        threads.append(threading.current_thread())
        return Succeeded("plain")

    def by_promise(record):
        return by_await(record)

    resolvers = {"one": by_await, "two": by_thread, "three": by_promise}
    for scope in resolvers:
        await store.claim(ClaimRequest(Identity(scope, "a"), OWNER, None, 600.0, 600.0))
        await store.renew(Identity(scope, "a"), OWNER, 0.0)
    made = AsyncReconciler(store, resolvers, older_than=0)
    assert (await made.run_once()).resolved == 3
    assert threads
    assert threads[0] is not threading.main_thread()
    await made.close()


# --- a worker never ends without a word ----------------------------------------------------------


def test_a_resolver_that_exits_does_not_end_the_thread(caplog):
    store, asked = open_store("memory://"), []
    store.claim(ClaimRequest(Identity("left", "a"), OWNER, None, 600.0, 600.0, hold=True))
    store.renew(Identity("left", "a"), OWNER, 0.0)

    def leaving(record):
        asked.append(record)
        sys.exit(3)

    resolvers = {"left": leaving, **RESOLVERS}
    with Reconciler(store, resolvers, older_than=0, every=0.01, backoff=0.01):
        wait_until(lambda: asked)
        abandoned(store, 1)
        wait_until(lambda: ended(store) == 1)
    assert "resolver of left failed" in caplog.text


async def resolved(store):
    async with asyncio.timeout(PATIENCE):
        while (await store.get(KEY)).state is not State.SUCCEEDED:  # noqa: ASYNC110 - it cannot tell
            await asyncio.sleep(0.005)


async def test_a_resolver_whose_own_task_was_canceled_does_not_end_the_reconciler(caplog):
    store, asked = AsyncMemoryStore(), []

    async def waiting(record):
        asked.append(record)
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner

    await store.claim(ClaimRequest(Identity("left", "a"), OWNER, None, 600.0, 600.0, hold=True))
    await store.renew(Identity("left", "a"), OWNER, 0.0)
    resolvers = {"left": waiting, **RESOLVERS}
    async with AsyncReconciler(store, resolvers, older_than=0, every=0.01, backoff=0.01):
        await until(lambda: asked)
        await store.claim(ClaimRequest(KEY, OWNER, None, 600.0, 600.0, hold=True))
        await store.renew(KEY, OWNER, 0.0)
        await resolved(store)
    assert "resolver of left failed" in caplog.text


def test_a_run_ends_by_what_is_meant_for_the_program():
    def interrupted(record):
        raise KeyboardInterrupt

    store = open_store("memory://")
    abandoned(store, 1)
    made = Reconciler(store, {"orders": interrupted}, older_than=0)
    with pytest.raises(KeyboardInterrupt):
        made.run_once()
    made.close()


async def test_a_run_that_is_canceled_ends():
    store, entered = AsyncMemoryStore(), asyncio.Event()

    async def waiting(record):
        entered.set()
        await asyncio.Event().wait()

    await store.claim(ClaimRequest(KEY, OWNER, None, 600.0, 600.0, hold=True))
    await store.renew(KEY, OWNER, 0.0)
    made = AsyncReconciler(store, {"orders": waiting}, older_than=0)
    running = asyncio.create_task(made.run_once())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await made.close()


def test_a_reconciler_whose_loop_is_gone_ends():
    entered = []

    async def waiting(record):
        entered.append(record)
        await asyncio.Event().wait()

    async def begun():
        store = AsyncMemoryStore()
        await store.claim(ClaimRequest(KEY, OWNER, None, 600.0, 600.0, hold=True))
        await store.renew(KEY, OWNER, 0.0)
        await aio_caught(aio_consult, waiting, None)

    running = begun()
    with contextlib.suppress(StopIteration):
        running.send(None)
    assert entered
    running.close()  # a RuntimeError if the GeneratorExit had been caught


def test_a_thread_that_ends_says_so_and_can_be_started_again(caplog):
    made, store = None, FaultyStore(open_store("memory://"))

    def interrupted(**_):
        raise KeyboardInterrupt

    stuck, store.stuck = store.stuck, interrupted
    made = Reconciler(store, RESOLVERS, older_than=0, every=0.01)
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        made.start()
        made._background.running.join(PATIENCE)
    finally:
        threading.excepthook = hook
    assert "reconciler thread ended by an error; start()" in caplog.text
    store.stuck = stuck
    abandoned(store, 1)
    made.start()
    wait_until(lambda: ended(store) == 1)
    made.close()


async def test_a_task_that_was_canceled_says_so_and_can_be_started_again(caplog):
    store = AsyncMemoryStore()
    made = AsyncReconciler(store, RESOLVERS, older_than=0, every=0.01)
    made.start()
    await asyncio.sleep(0)
    made._background.running.cancel()
    await asyncio.wait([made._background.running])
    assert "reconciler task ended by an error; start()" in caplog.text
    made.start()
    await store.claim(ClaimRequest(KEY, OWNER, None, 600.0, 600.0, hold=True))
    await store.renew(KEY, OWNER, 0.0)
    await resolved(store)
    made._background.running.cancel()
    await made.close()  # raises nothing: the log has it
