"""Clients that leave, or do not read: nothing is held for them, and nothing waits for a collector.

The garbage collector is switched off. It would end what is dropped in the middle, at some time; a
quiet process, or one that tunes its collector, may wait for it for ever.
"""

from __future__ import annotations

import asyncio
import gc
from inspect import signature
from itertools import count

import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import FileResponse, StreamingResponse
from starlette.routing import Route

from adapters.asgi_serving import eventually, keyed, served
from semel import AsyncIdempotency, State
from semel.adapters import fastapi, integration, starlette
from semel.adapters.asgi import IdempotencyMiddleware

SERVERS = ("uvicorn", "uvicorn-httptools", "hypercorn")
CHUNK = b"x" * 50_000
CHUNKS = 100


@pytest.fixture(autouse=True)
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


class Outer(BaseHTTPMiddleware):
    """A layer that runs the application in a task of its own."""

    async def dispatch(self, request, call_next):
        return await call_next(request)


class Answers:
    """Large answers of each kind, and how many of them were read to their ends."""

    def __init__(self, tmp_path) -> None:
        self.ended = 0
        self._file = tmp_path / "file"
        self._file.write_bytes(CHUNK * CHUNKS)

    async def stream(self):
        for _ in range(CHUNKS):
            yield CHUNK
            await asyncio.sleep(0)
        self.ended += 1

    def plain(self):
        for _ in range(CHUNKS):
            yield CHUNK
        self.ended += 1

    async def broken(self):
        for _ in range(CHUNKS):
            yield CHUNK
        self.ended += 1
        raise ValueError("broken off")

    def make(self, kind):
        return (
            FileResponse(self._file) if kind == "file" else StreamingResponse(getattr(self, kind)())
        )


def app_of(integration, engine, answers, layered):
    async def pay(request):
        return answers.make(request.query_params["kind"])

    options = {"tenant": None, "max_response": 100_000}
    if integration == "fastapi":
        app, idempotent = FastAPI(), fastapi.Idempotent(engine, **options)
        idempotent.init_app(app)

        @app.post("/")
        @idempotent
        async def _(kind: str):
            return answers.make(kind)

    elif integration == "starlette":
        idempotent = starlette.Idempotent(engine, **options)
        app = Starlette(routes=[Route("/", idempotent(pay), methods=["POST"])])
        idempotent.init_app(app)
    else:
        app = Starlette(routes=[Route("/", pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, idempotency=engine, **options)
    if layered:
        app.add_middleware(Outer)
    return app


async def leave(client, key, kind):
    """Begin to read an answer, and go."""
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"POST /?kind={kind} HTTP/1.1\r\nHost: test\r\nIdempotency-Key: {key}\r\n"
        "Content-Length: 0\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


@pytest.mark.fault(56, 57)
@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("integration", ["fastapi", "starlette", "middleware"])
async def test_a_client_who_leaves_holds_no_key(engine, tmp_path, integration, server, layered):
    answers, keys = Answers(tmp_path), count()
    async with served(app_of(integration, engine, answers, layered), server) as client:
        for kind in ("stream", "plain", "broken", "file"):
            for _ in range(3):
                before, key = answers.ended, f"k{next(keys)}"
                await leave(client, key, kind)
                # Read to its end, or broken off: neither is running any more.
                await eventually(lambda: not engine.internals.leases)
                record = await engine.peek(key, scope="http")
                expected = State.FAILED if kind == "broken" else State.SUCCEEDED
                assert record.state is expected, kind
                assert answers.ended == before + (kind != "file"), kind
        again = await client.post("/?kind=stream", headers=keyed("k0"))
    assert again.json()["code"] == "result_omitted"


@pytest.mark.fault(57)
async def test_an_answer_that_is_never_sent_is_read_to_its_end(engine, tmp_path, monkeypatch):
    """Also in a cycle of references: the layer around keeps the error, which keeps the answer."""
    monkeypatch.setattr(integration, "UNSENT", 0.05)
    answers, app = Answers(tmp_path), FastAPI()
    idempotent = fastapi.Idempotent(engine, tenant=None, max_response=100_000)

    async def dependency():
        yield
        raise LookupError("after the endpoint")

    # Older ones close every dependency before they send the response.
    scoped = {"scope": "function"} if "scope" in signature(Depends).parameters else {}

    @app.post("/", dependencies=[Depends(dependency, **scoped)])
    @idempotent
    async def pay():
        return answers.make("stream")

    app.add_middleware(Outer)
    async with served(app) as client:
        answer = await client.post("/", headers=keyed())
        assert answer.status_code == 500
        await eventually(lambda: not engine.internals.leases)
    assert answers.ended == 1
    assert (await engine.peek("k", scope="http")).state is State.SUCCEEDED
