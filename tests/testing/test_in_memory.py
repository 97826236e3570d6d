"""`in_memory`: an engine made at import time, and all that hangs on it, uses memory for a test."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    LeaseLost,
    Policy,
    StoreUnavailable,
)
from semel.adapters import asgi, fastapi, flask
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FakeClock, FaultyStore, Refuse, in_memory

NOWHERE = "redis://127.0.0.1:1/0"
"""A server that does not exist: whatever asks it fails."""

ONCE = Policy(store_timeout=0.2)
KEYED = {"Idempotency-Key": "k"}


class Shop:
    """A module of an application, with an engine and a function decorated at import time."""

    def __init__(self, store, **options):
        self.idem = Idempotency(store, **options)
        self.charged = []

        @self.idem.once("charge:{order}", scope="shop")
        def charge(order):
            self.charged.append(order)
            return len(self.charged)

        self.charge = charge


class AsyncShop:
    """The same for asyncio."""

    def __init__(self, store, **options):
        self.idem = AsyncIdempotency(store, **options)
        self.charged = []

        @self.idem.once("charge:{order}", scope="shop")
        async def charge(order):
            self.charged.append(order)
            return len(self.charged)

        self.charge = charge


@pytest.fixture
def shop():
    shop = Shop(NOWHERE, policy=ONCE)
    yield shop
    shop.idem.close(0)


# --- on threads ------------------------------------------------------------------------------


def test_a_decorated_function_uses_memory_inside_and_its_own_store_after_it(shop):
    with in_memory(shop.idem) as store:
        assert isinstance(store, MemoryStore)
        assert [shop.charge("o1"), shop.charge("o1")] == [1, 1]
        assert shop.charge.peek("o1") is not None
    assert shop.charged == ["o1"]
    with pytest.raises(StoreUnavailable):
        shop.charge("o1")
    assert shop.charged == ["o1"]


def test_each_block_begins_without_records(shop):
    for _ in range(2):
        with in_memory(shop.idem):
            shop.charge("o1")
    assert shop.charged == ["o1", "o1"]


def test_the_records_of_the_engines_own_store_are_neither_seen_nor_changed():
    shop = Shop(MemoryStore(), cache=10)
    assert shop.charge("o1") == 1
    with in_memory(shop.idem):
        assert shop.charge("o1") == 2  # the engine's cache is empty, too
        shop.charge.forget("o1")
        shop.idem.marks.set("mark")
    assert shop.charge("o1") == 1
    assert not shop.idem.marks.check("mark")


def test_marks_attempts_and_listings_go_with_the_engine(shop):
    marks = shop.idem.marks
    with in_memory(shop.idem):
        assert marks.set("m")
        with shop.idem.attempt("a") as attempt:
            attempt.result = 1
        assert shop.idem.execute("e", lambda: 2) == 2
        assert {record.identity.key for record in shop.idem.records()} == {"m", "a", "e"}


def test_policies_and_hooks_stay():
    seen = []
    shop = Shop(NOWHERE, hooks=[lambda event: seen.append(type(event).__name__)])
    with in_memory(shop.idem):
        shop.charge("o1")
        shop.charge("o1")
    assert seen == ["Ran", "Replayed"]


def test_an_exception_ends_the_block_as_well(shop):
    own = shop.idem.internals.store
    with pytest.raises(ZeroDivisionError), in_memory(shop.idem):
        shop.idem.execute("k", lambda: 1 / 0)
    assert shop.idem.internals.store is own


def test_blocks_can_be_nested(shop):
    with in_memory(shop.idem):
        assert shop.charge("o1") == 1
        with in_memory(shop.idem):
            assert shop.charge("o1") == 2
        assert shop.charge("o1") == 1


def test_blocks_that_end_in_another_order_leave_the_engine_as_it_was(shop):
    own, outer, inner = shop.idem.internals.store, in_memory(shop.idem), in_memory(shop.idem)
    outer.__enter__()
    inside = inner.__enter__()
    outer.__exit__(None, None, None)
    assert shop.idem.internals.store is inside
    assert shop.charge("o1") == 1
    inner.__exit__(None, None, None)
    assert shop.idem.internals.store is own
    with pytest.raises(StoreUnavailable):
        shop.charge("o1")


def test_a_block_can_be_used_again_but_not_while_it_is_open(shop):
    block = in_memory(shop.idem)
    with block:
        shop.charge("o1")
        with pytest.raises(ConfigError, match="open already"):
            block.__enter__()
    with block:
        assert shop.charge("o1") == 2


def test_other_threads_use_memory_too(shop):
    with in_memory(shop.idem), ThreadPoolExecutor(4) as threads:
        assert set(threads.map(shop.charge, ["o1"] * 20)) == {1}
    assert shop.charged == ["o1"]


def test_a_store_of_the_tests_own_is_used_and_not_closed(shop):
    clock = FakeClock()
    store = FaultyStore(MemoryStore(clock=clock))
    with in_memory(shop.idem, store) as given:
        assert given is store
        shop.charge("o1")
        clock.advance(10 * 365 * 86400)
        assert shop.charge("o1") == 2  # its record has expired
        store.inject("claim", Refuse(), times=100)
        with pytest.raises(StoreUnavailable):
            shop.charge("o2")
    assert store.fired("claim") > 0
    with in_memory(shop.idem, store=store):
        store.heal()
        assert shop.charge("o1") == 2  # what the store knew, it still knows


def test_an_application_that_closes_its_engine_can_be_tested_again_and_again(shop):
    for number in (1, 2):
        with in_memory(shop.idem):
            assert shop.charge("o1") == number
            shop.idem.close()
            with pytest.raises(StoreUnavailable, match="closed"):
                shop.charge("o1")
    shop.idem.close()
    with in_memory(shop.idem):
        assert shop.charge("o1") == 3


def test_an_engine_with_a_running_call_is_refused():
    shop = Shop(MemoryStore())
    with (
        shop.idem.attempt("running"),
        pytest.raises(ConfigError, match="calls that still run"),
        in_memory(shop.idem),
    ):
        pytest.fail("it was not refused")
    with in_memory(shop.idem):
        assert shop.charge("o1") == 1


def test_the_end_of_a_block_waits_for_calls_of_other_threads(shop):
    begun, go_on, ending = threading.Event(), threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(30)
        return "slow"

    def end_soon():
        assert ending.wait(30)
        go_on.set()

    with ThreadPoolExecutor(2) as threads:
        with in_memory(shop.idem) as store:
            running = threads.submit(shop.idem.execute, "k", slow)
            assert begun.wait(30)
            threads.submit(end_soon)
            ending.set()
        assert running.result(30) == "slow"
    assert [record.identity.key for record in store.scan().records] == ["k"]


def test_a_call_that_outlives_its_block_never_reaches_the_engines_own_store(monkeypatch, caplog):
    monkeypatch.setattr("semel.testing.switching._LEFT_WITHIN", 0.01)
    own = FaultyStore(MemoryStore())
    idem, begun, go_on = Idempotency(own), threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor(1) as threads:
        with in_memory(idem):
            running = threads.submit(idem.execute, "k", slow)
            assert begun.wait(30)
        go_on.set()
        with pytest.raises(LeaseLost):
            running.result(30)
    assert own.calls == []
    assert "1 calls still ran" in caplog.text
    assert idem.execute("k", lambda: 5) == 5


def test_a_block_that_ends_inside_its_own_attempt_does_not_wait_for_itself(shop, caplog):
    block = in_memory(shop.idem)
    block.__enter__()
    with pytest.raises(LeaseLost), shop.idem.attempt("k"):
        block.__exit__(None, None, None)
    assert "still ran when their in_memory block ended" in caplog.text


def test_a_block_whose_end_is_interrupted_while_it_is_logged_has_ended(shop):
    def interrupt(record):
        raise KeyboardInterrupt  # as Ctrl-C does, or the time limit of a test

    own, block = shop.idem.internals.store, in_memory(shop.idem)
    block.__enter__()
    attempt = shop.idem.attempt("k")
    attempt.__enter__()
    logger = logging.getLogger("semel")
    logger.addFilter(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            block.__exit__(None, None, None)
    finally:
        logger.removeFilter(interrupt)
    assert shop.idem.internals.store is own
    with pytest.raises(LeaseLost):
        attempt.__exit__(None, None, None)
    with in_memory(shop.idem):
        assert shop.idem.peek("k") is None
    assert shop.idem.internals.store is own


def test_the_default_engine_is_meant_without_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMEL_URL", "sqlite:///default.db")
    semel.configure()

    @semel.once("charge:{order}")
    def charge(order):
        return object.__name__

    with in_memory() as store:
        charge("o1")
        assert semel.marks.set("m")
        assert len(store.scan().records) == 2
    assert not (tmp_path / "default.db").exists()
    semel.configure("memory://")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_has_connections_of_its_own(tmp_path):
    shop = Shop(f"sqlite:///{tmp_path / 'shop.db'}")
    shop.charge("before")
    own = shop.idem.internals.store
    block = in_memory(shop.idem)
    block.__enter__()
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            block.__exit__(None, None, None)
            ended = 0 if shop.idem.internals.store is not own and shop.charge("before") == 1 else 2
        finally:
            os._exit(ended)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    block.__exit__(None, None, None)
    assert shop.idem.internals.store is own
    assert shop.charge("before") == 1
    shop.idem.close()


def test_what_is_no_engine_is_refused_with_what_to_do():
    idempotent = fastapi.Idempotent("memory://")
    with pytest.raises(ConfigError, match="not Idempotent; give the integration an engine"):
        in_memory(idempotent)


def test_a_store_of_the_other_kind_is_refused_and_changes_nothing(shop):
    own = shop.idem.internals.store
    with pytest.raises(ConfigError, match="for threads"), in_memory(shop.idem, AsyncMemoryStore()):
        pytest.fail("it was not refused")
    assert shop.idem.internals.store is own


async def test_an_engine_for_threads_has_no_async_block(shop):
    with pytest.raises(ConfigError, match="without async"):
        async with in_memory(shop.idem):
            pytest.fail("it was not refused")


def test_a_call_that_failed_before_is_no_reason_to_refuse(shop):
    with pytest.raises(StoreUnavailable):
        shop.charge("o1")
    assert shop.idem.internals.leases.next_doubt() < float("inf")
    with in_memory(shop.idem):
        assert shop.charge("o1") == 1


# --- on asyncio ------------------------------------------------------------------------------


@pytest.fixture
def async_shop():
    return AsyncShop(NOWHERE, policy=ONCE)


async def test_a_decorated_async_function_uses_memory_inside_and_its_own_store_after_it(
    async_shop,
):
    async with in_memory(async_shop.idem) as store:
        assert isinstance(store, AsyncMemoryStore)
        assert [await async_shop.charge("o1"), await async_shop.charge("o1")] == [1, 1]
    with pytest.raises(StoreUnavailable):
        await async_shop.charge("o1")
    assert async_shop.charged == ["o1"]
    await async_shop.idem.close(0)


@pytest.mark.parametrize("plain", [True, False])
def test_each_test_may_have_an_event_loop_of_its_own(async_shop, plain):
    async def test():
        if plain:
            assert [await async_shop.charge("o1"), await async_shop.charge("o1")] == [1, 1]
        else:
            async with in_memory(async_shop.idem):
                assert [await async_shop.charge("o1"), await async_shop.charge("o1")] == [1, 1]
        async_shop.charged.clear()

    for _ in range(2):
        if plain:
            with in_memory(async_shop.idem):
                asyncio.run(test())
        else:
            asyncio.run(test())


async def test_an_async_store_of_the_tests_own_is_used(async_shop):
    store = AsyncFaultyStore(AsyncMemoryStore())
    async with in_memory(async_shop.idem, store):
        await async_shop.charge("o1")
    assert [call.verb for call in store.calls] == ["claim", "complete"]


async def test_the_end_of_an_async_block_waits_for_its_calls(async_shop):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        begun.set()
        await go_on.wait()
        return "slow"

    async with in_memory(async_shop.idem) as store:
        running = asyncio.create_task(async_shop.idem.execute("k", slow))
        await begun.wait()
        asyncio.get_running_loop().call_soon(go_on.set)
    assert await running == "slow"
    page = await store.scan()
    assert [record.identity.key for record in page.records] == ["k"]


async def test_an_async_block_that_nothing_used_ends_at_once(async_shop):
    own = async_shop.idem.internals.store
    async with in_memory(async_shop.idem):
        pass
    assert async_shop.idem.internals.store is own


async def test_a_plain_block_of_an_async_engine_does_not_wait(async_shop, caplog):
    own = async_shop.idem.internals.store
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        begun.set()
        await go_on.wait()

    with in_memory(async_shop.idem):
        running = asyncio.create_task(async_shop.idem.execute("k", slow))
        await begun.wait()
    go_on.set()
    with pytest.raises(LeaseLost):
        await running
    assert async_shop.idem.internals.store is own
    assert "1 calls still ran" in caplog.text


# --- integrations ----------------------------------------------------------------------------


def test_a_flask_application_uses_the_memory_of_its_engine(shop):
    app = Flask(__name__)

    @app.post("/charges")
    @flask.Idempotent(shop.idem)
    def charge():
        return {"number": shop.charge("o1")}, 201

    client = app.test_client()
    assert client.post("/charges", headers=KEYED).status_code == 503
    with in_memory(shop.idem):
        first, again = [client.post("/charges", headers=KEYED) for _ in range(2)]
        assert (first.json, again.json) == ({"number": 1}, {"number": 1})
        assert again.headers["Idempotent-Replayed"] == "true"
    assert client.post("/charges", headers=KEYED).status_code == 503


def fastapi_app(idem):
    app = FastAPI()

    @app.post("/charges", status_code=201)
    @fastapi.Idempotent(idem)
    async def charge():
        return {}

    return app


def starlette_app(idem):
    async def charge(request):
        return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
    app.add_middleware(asgi.IdempotencyMiddleware, idempotency=idem)
    return app


@pytest.mark.parametrize("made", [fastapi_app, starlette_app])
def test_an_asgi_application_uses_the_memory_of_its_engine_on_any_loop(async_shop, made):
    app = made(async_shop.idem)

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answers = [await client.post("/charges", headers=KEYED) for _ in range(2)]
        return [answer.headers.get("Idempotent-Replayed") for answer in answers]

    for _ in range(2):
        with in_memory(async_shop.idem):
            assert asyncio.run(send()) == [None, "true"]
