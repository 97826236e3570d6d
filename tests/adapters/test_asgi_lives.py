"""Clients that go away, layers that cancel, servers that stop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager

import anyio
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from adapters.asgi_serving import begun, eventually, keyed, left, replayed, served
from semel import AsyncIdempotency, StoreUnavailable
from semel.adapters.asgi import IdempotencyMiddleware


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


class Slow:
    """A handler that waits to be let on, and says where it is."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs = 0
        self.ended: list[str] = []
        self.go = asyncio.Event()
        self._error = error

    async def pay(self, request) -> PlainTextResponse:
        self.runs += 1
        await self.go.wait()
        if self._error is not None:
            raise self._error
        self.ended.append("handler")
        return PlainTextResponse("paid", background=BackgroundTask(self._after))

    async def _after(self) -> None:
        self.ended.append("task")


def app_of(handler, lifespan=None) -> Starlette:
    return Starlette(routes=[Route("/", handler, methods=["POST"])], lifespan=lifespan)


async def test_18_a_client_that_goes_away_takes_nothing_with_it(engine):
    slow = Slow()
    async with served(IdempotencyMiddleware(app_of(slow.pay), engine)) as client:
        writer = await begun(client, "POST / HTTP/1.1", "Idempotency-Key: k", "Content-Length: 0")
        await eventually(lambda: slow.runs == 1)
        await left(writer)
        slow.go.set()
        await eventually(lambda: slow.ended == ["handler", "task"])
        again = await client.post("/", headers=keyed())
    assert replayed(again)
    assert again.text == "paid"
    assert slow.runs == 1


class Impatient(BaseHTTPMiddleware):
    """A layer of Starlette's own kind: what it has begun is cancelled when it is told so."""

    def __init__(self, app) -> None:
        super().__init__(app)
        self.enough = asyncio.Event()

    async def dispatch(self, request, call_next):
        if self.enough.is_set():
            return await call_next(request)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def stop():
                    await self.enough.wait()
                    scope.cancel()

                group.start_soon(stop)
                return await call_next(request)
        return PlainTextResponse("too slow", 504)


class Hasty:
    """A layer that cancels the task of a request, as a server that stops does."""

    def __init__(self, app) -> None:
        self._app = app
        self.enough = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or self.enough.is_set():
            await self._app(scope, receive, send)
            return
        running = asyncio.create_task(self._app(scope, receive, send))
        await self.enough.wait()
        running.cancel()
        await asyncio.wait((running,))
        await PlainTextResponse("too slow", 504)(scope, receive, send)


class Scoped(Hasty):
    """A layer that cancels by AnyIO, which does so again and again until the request has ended."""

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or self.enough.is_set():
            await self._app(scope, receive, send)
            return
        with anyio.CancelScope() as cancelling:
            async with anyio.create_task_group() as group:

                async def stop():
                    await self.enough.wait()
                    cancelling.cancel()

                group.start_soon(stop)
                await self._app(scope, receive, send)
        await PlainTextResponse("too slow", 504)(scope, receive, send)


@pytest.mark.parametrize("layer", [Impatient, Hasty])
async def test_a_layer_that_cancels_does_not_strand_the_key(engine, layer):
    slow = Slow()
    around = layer(IdempotencyMiddleware(app_of(slow.pay), engine))
    async with served(around) as client:
        first = asyncio.create_task(client.post("/", headers=keyed()))
        await eventually(lambda: slow.runs == 1)
        around.enough.set()
        assert (await first).text == "too slow"
        busy = await client.post("/", headers=keyed())
        slow.go.set()
        await eventually(lambda: slow.ended == ["handler", "task"])
        again = await client.post("/", headers=keyed())
    assert busy.status_code == 409
    assert replayed(again)
    assert again.text == "paid"
    assert slow.runs == 1


async def test_an_error_that_nobody_waits_for_is_logged(engine, caplog):
    slow = Slow(ArithmeticError("the sum"))
    around = Hasty(IdempotencyMiddleware(app_of(slow.pay), engine))
    async with served(around) as client:
        first = asyncio.create_task(client.post("/", headers=keyed()))
        await eventually(lambda: slow.runs == 1)
        around.enough.set()
        await first
        slow.go.set()
        with caplog.at_level(logging.ERROR, "semel"):
            await eventually(lambda: caplog.records)
    assert "after its client had disconnected" in caplog.text
    assert "the sum" in caplog.text


async def test_after_the_save_a_cancellation_reaches_the_application(engine):
    """As without the middleware: what runs after the answer is the application's own."""
    reached = []

    async def after() -> None:
        reached.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            reached.append("cancelled")
            raise

    async def pay(request):
        return PlainTextResponse("paid", background=BackgroundTask(after))

    middleware = IdempotencyMiddleware(app_of(pay), engine)

    class Cancelling(Hasty):
        async def __call__(self, scope, receive, send) -> None:
            running = asyncio.create_task(self._app(scope, receive, send))
            if scope["type"] == "http" and not self.enough.is_set():
                await self.enough.wait()
                running.cancel()
            await asyncio.wait((running,))

    around = Cancelling(middleware)
    async with served(around) as client:
        first = await client.post("/", headers=keyed())
        await eventually(lambda: reached)
        around.enough.set()
        await eventually(lambda: len(reached) == 2)
        again = await client.post("/", headers=keyed())
    assert reached == ["begun", "cancelled"]
    assert (first.text, replayed(again)) == ("paid", True)


async def test_an_engine_of_a_url_is_closed_when_the_server_stops_and_waits_for_the_last():
    slow = Slow()

    @asynccontextmanager
    async def lifespan(app):
        yield
        asyncio.get_running_loop().call_later(0.05, slow.go.set)

    app = app_of(slow.pay, lifespan)
    middleware = IdempotencyMiddleware(app, "memory://")
    around = Hasty(middleware)
    async with served(around) as client:
        first = asyncio.create_task(client.post("/", headers=keyed()))
        await eventually(lambda: slow.runs == 1)
        around.enough.set()
        await first
        assert slow.ended == []
    assert slow.ended == ["handler", "task"]
    with pytest.raises(StoreUnavailable, match="closed"):
        await middleware._integration.engine.execute("k", asyncio.sleep)


async def test_an_engine_that_was_given_is_left_open(engine):
    async with served(IdempotencyMiddleware(app_of(Slow().pay), engine)):
        pass
    assert await engine.consume("k", lambda: asyncio.sleep(0))


async def test_an_application_without_a_lifespan_has_its_engine_closed_too():
    async def app(scope, receive, send):
        raise ValueError("Django can only handle ASGI/HTTP connections, not lifespan.")

    middleware = IdempotencyMiddleware(app, "memory://")
    async with served(middleware):
        pass
    with pytest.raises(StoreUnavailable, match="closed"):
        await middleware._integration.engine.execute("k", asyncio.sleep)


@pytest.mark.parametrize("hears", [False, True])
async def test_a_life_that_fails_is_told_to_the_server(engine, hears):
    async def app(scope, receive, send):
        if hears:
            await receive()
        raise ValueError("it cannot start")

    middleware = IdempotencyMiddleware(app, "memory://" if hears else engine)

    async def startup():
        return {"type": "lifespan.startup"}

    with pytest.raises(ValueError, match="it cannot start"):
        await middleware({"type": "lifespan"}, startup, None)


async def test_a_stream_of_events_that_begins_after_its_request_was_cancelled_ends_at_once(engine):
    go, sent = asyncio.Event(), []

    async def stream(scope, receive, send):
        await go.wait()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    app = IdempotencyMiddleware(stream, engine)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"k")]}
    request = asyncio.create_task(app(scope, receive, send))
    await eventually(lambda: app._background._tasks)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    go.set()
    await eventually(lambda: not app._background._tasks)
    assert sent == []
