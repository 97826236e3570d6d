"""ASGI: a middleware for Starlette, FastAPI, Litestar, Django and any other application.

    app = IdempotencyMiddleware(app, "redis://localhost:6379/0")

A request that runs is a task of its own, so that a client who goes away, or a server that cancels,
takes neither the handler nor the save with it. The save happens before the last byte leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias, Unpack

from semel.adapters.aio_door import AsyncDoor, AsyncExchange
from semel.adapters.options import MiddlewareOptions
from semel.aio import AsyncIdempotency
from semel.core.decide import Undone
from semel.events import logger
from semel.http.messages import Answer, HeaderLine, Headers, Request
from semel.http.rulebook import Refusal
from semel.http.storing import UNPROTECTED, is_event_stream

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_UNBUFFERABLE: Final = (
    "http.response.pathsend",
    "http.response.zerocopysend",
    "http.response.trailers",
)
"""Ways to answer that would go past us."""


class IdempotencyMiddleware:
    """Protects the requests that have a key; see `semel.http` for the rules and options."""

    def __init__(
        self,
        app: App,
        idempotency: AsyncIdempotency | str,
        **options: Unpack[MiddlewareOptions],
    ) -> None:
        self.app = app
        self._door = AsyncDoor(idempotency, {**options})
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._closing(send))
            return
        book = (
            self._door.routing.find(scope["method"], scope["path"])
            if scope["type"] == "http"
            else None
        )
        if book is None:
            await self.app(scope, receive, send)
            return
        body = _Body(receive, book.max_body)
        begun = await self._begun(scope, body, book)
        if begun is None:
            await self.app(scope, body.again, send)
        elif isinstance(begun, Answer):
            await _send_answer(send, begun)
        elif isinstance(begun, AsyncExchange):
            await self._run(scope, _Protected(begun, body.content, send))

    async def _begun(self, scope: Scope, body: _Body, book: Any) -> AsyncExchange | Answer | None | bool:
        request = Request(
            scope["method"],
            scope["path"],
            scope.get("query_string", b""),
            Headers(scope["headers"]),
            scope,
        )
        try:
            return await self._door.begin(book, request, body.read)
        except _ClientGone:
            return False

    async def _run(self, scope: Scope, protected: _Protected) -> None:
        # Shielded: a cancelled request must neither strand its key nor lose its answer.
        task = asyncio.create_task(protected.run(self.app, scope))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(_tell)
            raise

    def _closing(self, send: Send) -> Send:
        """End what still runs, and the engine, when the server says that all is over."""

        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                if self._running:
                    await asyncio.wait(self._running, timeout=5.0)
                await self._door.close()
            await send(message)

        return closing


def _tell(task: asyncio.Task[None]) -> None:
    """Nobody waits for it any more: an error is only logged."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("a request whose client had gone raised", exc_info=task.exception())


class _ClientGone(Exception):
    """The client went away before its request was whole: nothing runs, nobody can be answered."""


class _Body:
    """The body of a request, read once and given to the application again."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit = receive, limit
        self.content: bytes | None = None
        self._given = False

    async def read(self) -> bytes:
        """Read it whole; more than the limit is refused as soon as it is there."""
        chunks, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._limit:
                raise Refusal("body_too_large")
            chunks.append(chunk)
            more = message.get("more_body", False)
        self.content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self.content

    async def again(self) -> Message:
        """Give what was read, then what the server gives."""
        if self.content is None or self._given:
            return await self._receive()
        self._given = True
        return {"type": "http.request", "body": self.content, "more_body": False}


async def _send_answer(send: Send, answer: Answer) -> None:
    await send(
        {"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)}
    )
    await send({"type": "http.response.body", "body": answer.body})


class _Protected:
    """One request on its way through the application, its answer held back until it is saved."""

    def __init__(self, exchange: AsyncExchange, body: bytes | None, send: Send) -> None:
        self._exchange, self._body, self._send = exchange, body, send
        self._limit = exchange.book.max_response
        self._start: Message | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._live = False
        """What comes is sent on at once: a stream, an answer beyond the limit, or all is saved."""
        self._over = asyncio.Event()
        self._gone = False

    async def run(self, app: App, scope: Scope) -> None:
        self._exchange.enter()
        extensions = scope.get("extensions") or {}
        if any(name in extensions for name in _UNBUFFERABLE):
            kept = {name: value for name, value in extensions.items() if name not in _UNBUFFERABLE}
            scope = {**scope, "extensions": kept}
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:
            if not self._exchange.ended:
                await self._exchange.raised(error)
            raise
        finally:
            self._over.set()
        if not self._exchange.ended:
            await self._exchange.raised(Undone("the application ended without an answer"))

    async def receive(self) -> Message:
        """Give the body, and after it nothing until the answer is complete."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        # Whether the client is still there is not the handler's business: it runs to its end.
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                await self._begin(message)
            case "http.response.body" if not self._exchange.ended:
                await self._collect(message)
            case _:
                await self._pass(message)

    async def _begin(self, message: Message) -> None:
        lines: list[HeaderLine] = self._exchange.book.first(message.get("headers", ()))
        self._start = {**message, "headers": lines}
        if is_event_stream(lines):
            self._live = True
            await self._exchange.unprotected()
            await self._pass({**self._start, "headers": [*lines, UNPROTECTED]})

    async def _collect(self, message: Message) -> None:
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if not more:
            await self._finish(chunk)
        elif self._live:
            await self._pass(message)
        else:
            self._held.append(chunk)
            self._size += len(chunk)
            if self._size > self._limit:
                await self._let_go()

    async def _let_go(self) -> None:
        """The answer is too large to be kept: what is held goes out, the rest follows live."""
        self._live = True
        if self._start is not None:
            await self._pass(self._start)
        for held in self._held:
            await self._pass({"type": "http.response.body", "body": held, "more_body": True})
        self._held.clear()

    async def _finish(self, chunk: bytes) -> None:
        start = self._start
        if start is None:
            raise RuntimeError("the application sent a body before it began its answer")
        kept = None if self._size + len(chunk) > self._limit else b"".join((*self._held, chunk))
        instead = await self._exchange.answered(start["status"], start["headers"], kept)
        self._over.set()
        if self._live:  # too late for another answer: the first part of this one is out
            await self._pass({"type": "http.response.body", "body": chunk})
            return
        if instead is not None:
            await _send_answer(self._pass, instead)
            return
        await self._pass(start)
        for held in self._held:
            await self._pass({"type": "http.response.body", "body": held, "more_body": True})
        await self._pass({"type": "http.response.body", "body": chunk})

    async def _pass(self, message: Message) -> None:
        """Send on; a client who has gone is no reason to stop."""
        if self._gone:
            return
        try:
            await self._send(message)
        except OSError:
            self._gone = True
