"""Several event loops, one after the other, as test clients make them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from semel import AsyncIdempotency
from semel.adapters import integration
from semel.adapters.asgi import IdempotencyMiddleware
from stores.sqlite_helpers import in_a_fork

runs = []


async def application(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    runs.append(scope["path"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 100_000})


async def asked(app, key):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    headers = [(b"idempotency-key", key)]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    await app(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]).get(b"idempotent-replayed")


async def lived(app, work):
    """Run some work within a life of the application, as a server does."""
    words = asyncio.Queue()
    told = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan"}, words.get, told.put))
    await words.put({"type": "lifespan.startup"})
    await told.get()
    done = await work
    await words.put({"type": "lifespan.shutdown"})
    await told.get()
    await life
    return done


@pytest.fixture(autouse=True)
def _nothing_ran():
    runs.clear()


def test_a_middleware_that_opened_its_engine_serves_every_loop(sqlite_url):
    app = IdempotencyMiddleware(application, sqlite_url)
    assert asyncio.run(asked(app, b"k")) == (200, None)
    assert asyncio.run(asked(app, b"k")) == (200, b"true")
    assert runs == ["/"]


def test_it_keeps_no_engine_of_a_loop_that_is_closed(sqlite_url):
    app = IdempotencyMiddleware(application, sqlite_url)
    for _ in range(3):
        asyncio.run(asked(app, b"k"))
    assert len(app._integration.engines) == 1
    assert runs == ["/"]


def test_it_keeps_the_engine_of_a_loop_that_is_only_paused(sqlite_url):
    app = IdempotencyMiddleware(application, sqlite_url)
    with asyncio.Runner() as paused:
        paused.run(asked(app, b"k"))
        engine = app._integration.engines[paused.get_loop()].engine
        assert asyncio.run(asked(app, b"k")) == (200, b"true")
        assert app._integration.engines[paused.get_loop()].engine is engine
        assert paused.run(asked(app, b"k")) == (200, b"true")


def test_loops_that_begin_at_the_same_time_have_engines_of_their_own(sqlite_url, monkeypatch):
    app = IdempotencyMiddleware(application, sqlite_url)
    made = integration.AsyncSlots

    def places(value):
        """Let a second loop, in another thread, come between the steps of the first one."""
        monkeypatch.setattr(integration, "AsyncSlots", made)
        other = threading.Thread(target=lambda: second.append(asyncio.run(asked(app, b"k"))))
        other.start()
        other.join()
        return made(value)

    second = []
    monkeypatch.setattr(integration, "AsyncSlots", places)
    assert asyncio.run(asked(app, b"k")) == (200, b"true")
    assert second == [(200, None)]


def test_it_serves_again_after_the_end_of_a_life(sqlite_url):
    app = IdempotencyMiddleware(application, sqlite_url)
    assert asyncio.run(lived(app, asked(app, b"k"))) == (200, None)
    assert asyncio.run(lived(app, asked(app, b"k"))) == (200, b"true")
    assert asyncio.run(lived(app, asyncio.sleep(0))) is None
    assert runs == ["/"]


def test_an_engine_of_the_applications_own_stays_with_its_loop(sqlite_url, caplog):
    app = IdempotencyMiddleware(application, AsyncIdempotency(sqlite_url))
    assert asyncio.run(asked(app, b"k")) == (200, None)
    assert asyncio.run(asked(app, b"k")) == (500, None)
    assert "another event loop" in caplog.text


async def test_a_forked_child_answers_on_a_loop_of_its_own():
    app = IdempotencyMiddleware(application, "memory://")
    assert await asked(app, b"k") == (200, None)
    assert in_a_fork(lambda: asyncio.run(asked(app, b"child"))) == "(200, None)"
    assert await asked(app, b"k") == (200, b"true")
    await app._integration.close()


def test_the_end_of_a_loop_waits_for_no_request_of_another_loop(monkeypatch):
    background, waited_for = integration.Background(), []

    async def wait(tasks, **_):
        waited_for.extend(tasks)

    async def begin():
        return background.begin(asyncio.sleep(0))

    async def end():
        own = await begin()
        await background.drain()
        return own

    monkeypatch.setattr(asyncio, "wait", wait)
    with asyncio.Runner() as paused:
        paused.run(begin())
        with asyncio.Runner() as ending:
            own = ending.run(end())
            assert waited_for == [own]
