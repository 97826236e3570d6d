"""Coroutines of semel that something else than asyncio drives, as trio does: one clear error.

Driven here by hand, which is what any such library does. With trio itself, and with Starlette on
trio, the same was seen.
"""

from __future__ import annotations

import logging

import pytest
from fastapi import FastAPI

from semel import AsyncIdempotency, ConfigError, open_async_store
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.fastapi import Idempotent
from semel.core.records import Identity

NEEDS_ASYNCIO = r"AsyncIdempotency runs on asyncio.*trio\.to_thread\.run_sync"

URLS = ["memory://", "redis://127.0.0.1:1", "postgresql://127.0.0.1:1/d", "mysql://u@127.0.0.1:1/d"]


def driven(coroutine):
    """Run a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("it waits for something")


@pytest.fixture(params=[*URLS, "sqlite"])
def url(request, tmp_path):
    return f"sqlite:///{tmp_path}/semel.db" if request.param == "sqlite" else request.param


async def never():
    raise AssertionError("this ran, and must not")


async def by_block(url):
    async with AsyncIdempotency(url) as idem:
        await idem.execute("k", never)


async def by_decorator(url):
    idem = AsyncIdempotency(url)

    @idem.once("k:{number}")
    async def pay(number):
        await never()

    await pay(1)


async def by_transaction(url):
    async with AsyncIdempotency(url).transaction(object(), "k"):
        await never()


async def by_peek(url):
    await AsyncIdempotency(url).peek("k")


@pytest.mark.parametrize("use", [by_block, by_decorator, by_transaction, by_peek])
def test_an_engine_says_that_it_needs_asyncio(url, use):
    with pytest.raises(ConfigError, match=NEEDS_ASYNCIO):
        driven(use(url))


def test_a_store_that_needs_asyncio_says_so(url):
    if url == "memory://":
        assert driven(open_async_store(url).get(Identity("s", "k"))) is None
    else:
        with pytest.raises(ConfigError, match=NEEDS_ASYNCIO):
            driven(open_async_store(url).get(Identity("s", "k")))


def test_an_engine_that_was_never_used_can_be_closed_anywhere(url):
    driven(AsyncIdempotency(url).close())


async def nothing(scope, receive, send):
    await never()


async def request():
    return {"type": "http.request", "body": b"", "more_body": False}


def test_a_request_without_asyncio_is_answered_and_the_reason_is_logged(caplog):
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"idempotency-key", b'"k"')]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    with caplog.at_level(logging.ERROR):
        driven(IdempotencyMiddleware(nothing, "memory://")(scope, request, send))
    assert sent[0]["status"] == 500
    assert "AsyncIdempotency runs on asyncio" in caplog.text


def test_a_server_without_asyncio_learns_of_it_when_it_starts():
    middleware = IdempotencyMiddleware(nothing, "memory://")
    with pytest.raises(ConfigError, match=NEEDS_ASYNCIO):
        driven(middleware({"type": "lifespan"}, request, nothing))


def test_an_application_of_fastapi_without_asyncio_learns_of_it_when_it_starts():
    app = FastAPI()
    Idempotent("memory://").init_app(app)
    with pytest.raises(ConfigError, match=NEEDS_ASYNCIO):
        driven(app.router.lifespan_context(app).__aenter__())
