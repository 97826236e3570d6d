"""Plain ASGI: the middleware inside CORS, compression and authorization, around a bare application."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from semel import AsyncIdempotency
from semel.adapters.asgi import App, IdempotencyMiddleware, Receive, Scope, Send
from web.handlers import CORS_ORIGIN, Asked, Broken, Business, Folder
from web.stacks.hosts import Hosts, MakeApplication

PATHSEND = "http.response.pathsend"
_END = object()


def application(business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]) -> App:
    middleware = IdempotencyMiddleware(Application(business), engine, **options)
    compressing = GZipMiddleware(Authorized(middleware, business), minimum_size=100)
    return CORSMiddleware(compressing, allow_origins=[CORS_ORIGIN])


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


class Authorized:
    """Refuses revoked users, before the middleware; and offers what some servers offer."""

    def __init__(self, app: App, business: Business) -> None:
        self._app, self._business = app, business

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._business.admits(_headers(scope)):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body"})
            return
        extensions = {**(scope.get("extensions") or {}), PATHSEND: {}}
        await self._app({**scope, "extensions": extensions}, receive, send)


class Application:
    """The handlers as a bare ASGI application."""

    def __init__(self, business: Business) -> None:
        self._business = business

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close"})
            return
        asked = Asked(scope["method"], scope["path"], _headers(scope), await _body(receive))
        try:
            reply = await asyncio.to_thread(self._business, asked)
        except Broken:
            if asked.path == "/raise_page":  # as a layer inside the middleware does it
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": b"the page of an error"})
            raise
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.lines]
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        if (
            asked.path.startswith("/large/")
            and PATHSEND in scope["extensions"]
            and (asked.method == "POST")
        ):
            await send({"type": PATHSEND, "path": __file__})
            return
        chunks = iter(reply.chunks)
        if not reply.streamed:
            await send({"type": "http.response.body", "body": b"".join(chunks)})
        else:
            while (chunk := await asyncio.to_thread(next, chunks, _END)) is not _END:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
        if reply.after is not None:
            await asyncio.to_thread(reply.after)


async def _body(receive: Receive) -> bytes:
    chunks, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


class ByHost:
    """The application that the server runs: gives each request to its host."""

    def __init__(self, folder: Folder, make: MakeApplication) -> None:
        self._hosts = Hosts(folder, AsyncIdempotency, make)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        app = self._hosts.application(_headers(scope)["host"])
        await app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for engine in self._hosts.engines.values():
            await engine.close(timeout=1)
        await send({"type": "lifespan.shutdown.complete"})
