"""What every integration relies on: an exchange ends its key, whatever interrupts it."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from semel import AsyncIdempotency, ConfigError, Idempotency, current_attempt
from semel.adapters._sync.integration import Integration
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.fastapi import Idempotent
from semel.adapters.integration import (
    LARGE,
    LARGE_AT_ONCE,
    AsyncIntegration,
    Background,
    Flow,
)
from semel.core.records import State
from semel.http.requests import Headers, Request
from semel.http.storing import Answer

REQUEST = Request("POST", "/", b"", Headers([(b"idempotency-key", b"k")]), None)


async def no_body():
    return b""


async def begun(integration):
    exchange = await integration.begin(integration.routing.find("POST", "/"), REQUEST, no_body)
    exchange.enter()
    return exchange


def test_an_engine_of_the_other_kind_is_refused():
    told = "an AsyncIdempotency or a URL is needed, not Idempotency"
    with Idempotency("memory://") as engine, pytest.raises(ConfigError, match=told):
        AsyncIntegration(engine, {})


def test_an_async_tenant_is_refused_by_an_integration_for_threads(caplog):
    async def tenant(request):
        return "ann"

    with Idempotency("memory://") as engine:
        integration = Integration(engine, {"tenant": tenant})
        answer = integration.begin(integration.routing.find("POST", "/"), REQUEST, lambda: b"")
    assert answer.status == 500
    assert "needs an integration for asyncio" in caplog.text


async def test_a_large_answer_that_is_cancelled_before_its_turn_is_saved():
    async with AsyncIdempotency("memory://") as engine:
        integration = AsyncIntegration(engine, {})
        exchange = await begun(integration)
        for _ in range(LARGE_AT_ONCE):
            await exchange.here.large.get()
        task = asyncio.create_task(exchange.answered(200, [], bytes(LARGE)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        replay = await integration.begin(exchange.rules, REQUEST, no_body)
    assert isinstance(replay, Answer)
    assert len(replay.body) == LARGE


def test_a_large_answer_whose_thread_is_interrupted_before_its_turn_is_saved(monkeypatch):
    with Idempotency("memory://") as engine:
        integration = Integration(engine, {})
        exchange = integration.begin(integration.routing.find("POST", "/"), REQUEST, bytes)
        exchange.enter()

        def interrupted():
            raise SystemExit

        monkeypatch.setattr(exchange.here.large, "get", interrupted)
        with pytest.raises(SystemExit):
            exchange.answered(200, [], bytes(LARGE))
        assert engine.peek("k", scope="http").state is State.SUCCEEDED


async def test_an_answer_that_cannot_be_packed_does_not_strand_its_key():
    async with AsyncIdempotency("memory://") as engine:
        exchange = await begun(AsyncIntegration(engine, {}))
        with pytest.raises(TypeError):
            await exchange.answered(200, [("texts", "not bytes")], b"")
        assert not exchange.ended  # so an integration records that the handler failed
        await exchange.raised(TypeError())
        assert (await engine.peek("k", scope="http")).state is State.FAILED


# --- integrations within integrations --------------------------------------------------------------------------


async def answered_twice(app):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return [await client.post("/", headers={"Idempotency-Key": "k"}) for _ in range(2)]


async def test_a_middleware_further_inside_lets_a_protected_request_pass():
    async def app(scope, receive, send):
        await PlainTextResponse("paid")(scope, receive, send)

    async with AsyncIdempotency("memory://") as engine:
        inside = IdempotencyMiddleware(app, engine)
        first, second = await answered_twice(IdempotencyMiddleware(inside, engine))
    assert (first.text, second.text) == ("paid", "paid")
    assert second.headers["Idempotent-Replayed"] == "true"


async def test_a_decorated_endpoint_lets_a_protected_request_pass():
    app = FastAPI()
    async with AsyncIdempotency("memory://") as engine:

        @app.post("/")
        @Idempotent(engine)
        async def pay() -> str:
            return current_attempt().key

        first, second = await answered_twice(IdempotencyMiddleware(app, engine))
    assert (first.json(), second.json()) == ("k", "k")
    assert second.headers["Idempotent-Replayed"] == "true"


# --- tenants --------------------------------------------------------------------------------------

SHARED = "tenant= is not set, so all clients share their keys"
TENANTS = [({}, 1), ({"tenant": None}, 0), ({"tenant": lambda _: "ann"}, 0)]


@pytest.mark.parametrize(("options", "warnings"), TENANTS, ids=["unset", "none", "set"])
def test_an_integration_for_threads_warns_once_that_keys_are_shared(caplog, options, warnings):
    with Idempotency("memory://") as engine:
        integration = Integration(engine, options)
        rules = integration.routing.find("POST", "/"), integration.rules_for(options)
        assert SHARED not in caplog.text  # an endpoint may still say whose its requests are
        keyless = Request("POST", "/", b"", Headers([]), None)
        assert integration.begin(rules[0], keyless, bytes) is None
        assert SHARED not in caplog.text
        for each in rules:
            integration.begin(each, REQUEST, bytes)
    assert caplog.text.count(SHARED) == warnings


@pytest.mark.parametrize(("options", "warnings"), TENANTS, ids=["unset", "none", "set"])
async def test_an_integration_for_tasks_warns_once_that_keys_are_shared(caplog, options, warnings):
    async with AsyncIdempotency("memory://") as engine:
        integration = AsyncIntegration(engine, options)
        for each in (integration.routing.find("POST", "/"), integration.rules_for(options)):
            await integration.begin(each, REQUEST, no_body)
    assert caplog.text.count(SHARED) == warnings


# --- large answers --------------------------------------------------------------------------------


async def test_an_answer_that_is_sent_too_late_breaks_and_is_not_cut():
    """What was read of it meanwhile is gone: it must not look whole."""
    flow, background = Flow(3), Background()

    async def run():
        for _ in range(5):
            await flow.take(b"xxxx", lambda chunks: chunks)

    chunks = await flow.answer(background, run())
    flow.leave()  # as the timer does
    with pytest.raises(TimeoutError, match="not sent within 30 seconds"):
        await anext(chunks)
