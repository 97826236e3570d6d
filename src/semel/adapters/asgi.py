"""ASGI: a middleware for Starlette, FastAPI, Litestar, Django and any other application.

    app = IdempotencyMiddleware(app, "redis://localhost:6379/0")

A request that runs is a task of its own, so that a client that disconnects, or a server that
cancels, takes neither the handler nor the save with it. The save happens before the last byte
leaves; from there on all is as it would be without us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias, Unpack

from msgspec import Struct

from semel.adapters.check_decorators import PROTECTED
from semel.adapters.integration import AsyncExchange, AsyncIntegration, Background
from semel.aio import AsyncIdempotency
from semel.core.decide import UnstoredResponse
from semel.errors import ConfigError
from semel.http.options import MiddlewareOptions
from semel.http.requests import Headers, Request
from semel.http.rules import Rejected
from semel.http.storing import UNPROTECTED, Answer, is_event_stream
from semel.stores.batching import running_loop

__all__ = ["App", "IdempotencyMiddleware", "Message", "Receive", "Scope", "Send"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_UNBUFFERABLE: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)
"""Ways to answer that would go past us."""

_EMPTY_AT_MOST: Final = 1000
"""Messages without content that are read of a body, beside one for each of its bytes.

Some layers send one beside each that has content. A client that sends nothing else (a frame of
HTTP/2 may be empty) would never reach a limit of bytes.
"""


class IdempotencyMiddleware:
    """Protects the requests to `app` that have a key; see `semel.http` for the rules and options.

    `idempotency` is an `AsyncIdempotency` or a URL.

    Examples:
        >>> app = IdempotencyMiddleware(app, "memory://", include=["/payments"])
    """

    def __init__(
        self,
        app: App,
        idempotency: AsyncIdempotency | str,
        **options: Unpack[MiddlewareOptions],
    ) -> None:
        self.app = app
        self._integration = AsyncIntegration(idempotency, {**options})
        self._background = Background()

    def _request_of(self, scope: Scope) -> Request:
        """Show a request to the rules; a hook."""
        return request_of(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        rules = None
        if scope["type"] == "http" and PROTECTED not in scope:
            # FastAPI puts its own root in the scope; its router takes paths with it and without.
            root = getattr(self.app, "root_path", "") or scope.get("root_path", "")
            rules = self._integration.routing.find(scope["method"], scope["path"], root)
        if rules is None:
            await self.app(scope, receive, send)
            return
        request = self._request_of(scope)
        body = Body(receive, rules.max_body, request.headers)
        try:
            begun = await self._integration.begin(rules, request, body.read)
        except ClientGone:
            return
        if begun is None:
            await self.app(scope, body.receive, send)
        elif isinstance(begun, Answer):
            await send_answer(send, begun)
        else:
            turn = begun.here.turns.take()
            if turn is not None:
                try:
                    await turn
                except BaseException as error:
                    begun.never_began(error)
                    raise
            loop = begun.here.loop
            protected = Protected(begun, body, send, loop.create_future())
            task = self._background.begin(protected.run(self.app, scope), loop)
            try:
                # Not the task itself: a canceled request must neither strand its key nor lose its
                # answer.
                await protected.ended
            except asyncio.CancelledError:
                await self._leave(protected, task)
                raise
            self._background.end(task)
            task.result()  # it has ended, perhaps with an error

    async def _leave(self, protected: Protected, task: asyncio.Task[None]) -> None:
        """Let a request run to its end although its client is gone."""
        protected.client_gone = True
        self._background.leave(task)
        if protected.over:
            task.cancel()  # The save is done: the application learns of it as without us.
            await asyncio.wait((task,))

    # --- the lifespan ------------------------------------------------------------------------

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application live its life, and end ours after it."""
        running_loop()  # a server on trio learns here that semel cannot work there
        takes_part = False

        async def receiving() -> Message:
            nonlocal takes_part
            takes_part = True
            return await receive()

        async def closing(message: Message) -> None:
            nonlocal takes_part
            takes_part = True
            if message["type"].startswith("lifespan.shutdown."):
                await self._background.drain()
                await self._integration.close()
            await send(message)

        try:
            await self.app(scope, receiving, closing)
        except Exception:
            if takes_part or not self._integration.opened_here:
                raise
            # An application without a lifespan, such as Django: the engine needs its end still.
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await closing({"type": "lifespan.shutdown.complete"})


# --- one request: its body, and its answer on the way through the application --------------------


def request_of(scope: Scope) -> Request:
    """Show a request to the rules."""
    return Request(
        scope["method"].upper(),
        scope["path"],
        scope.get("query_string", b""),
        Headers(scope["headers"]),
        scope,
    )


async def send_answer(send: Send, answer: Answer) -> None:
    """Send an answer of semel's own, or a replay."""
    await send(
        {"type": "http.response.start", "status": answer.status, "headers": [*answer.headers]}
    )
    await send({"type": "http.response.body", "body": answer.body})


class ClientGone(Exception):
    """The client went away before it had sent the whole request: nothing runs."""


class Body(Struct, eq=False):
    """The body of a request, read once and given to the application again."""

    _receive: Receive
    _limit: int
    _headers: Headers
    _content: bytes | None = None

    async def read(self) -> bytes:
        """Read it whole; more than the limit is rejected as soon as it is there."""
        gathered = bytearray()  # not a list: a client may send a byte at a time, or none
        empty, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            if not chunk:
                empty += 1
            size = len(gathered)
            if size + len(chunk) > self._limit or empty > _EMPTY_AT_MOST + size:
                raise Rejected("body_too_large")
            if not more and not gathered:  # most are one message, which need not be copied
                return self._kept(bytes(chunk))
            gathered += chunk
        return self._kept(bytes(gathered))

    def _kept(self, content: bytes) -> bytes:
        if not content and self._headers.get("content-length", "").strip("0"):
            if self._headers.get("transfer-encoding"):
                raise Rejected("body_incomplete")  # no chunks, and they count, not the length
            # Starlette's BaseHTTPMiddleware shows an empty body then, and all would be the same.
            raise ConfigError(
                "a middleware around the application has read the body and kept none of it: read "
                "it there with await request.body(), which keeps it, not with form() or stream()"
            )
        self._content = content
        return content

    def taken(self) -> Message | None:
        """Return the body that was read, once: a large one is not kept longer than needed."""
        content, self._content = self._content, None
        if content is None:
            return None
        return {"type": "http.request", "body": content, "more_body": False}

    async def receive(self) -> Message:
        """Return what was read, then what the server receives."""
        message = self.taken()
        return await self._receive() if message is None else message


class Protected(Struct, eq=False):
    """One request on its way through the application, its answer held back until it is saved.

    While it is being saved, the whole stack of the application waits in `send`. So there are few
    coroutines and few objects here: with many requests at once, following them all is what the
    garbage collector is busy with.
    """

    _exchange: AsyncExchange
    _body: Body
    _send: Send
    ended: asyncio.Future[None]
    """The application has ended."""
    over: bool = False
    """There is nothing left to save."""
    out: bool = False
    """There is nothing left to send either, or it passes live: the client may be listened to."""
    client_gone: bool = False
    _start: Message | None = None
    _held: list[bytes] | None = None
    """The parts of the answer so far, if it has several."""
    _size: int = 0
    _flows: bool = False
    """Too large to be kept: what was held is out, but for the newest part; the rest follows."""
    _streams: bool = False
    """A stream of events, which passes as if we were not there."""
    _listening: tuple[asyncio.Future[None], ...] = ()
    """Waits of the application for what the client does."""

    async def run(self, app: App, scope: Scope) -> None:
        """Run the application to its end."""
        self._exchange.enter()
        scope[PROTECTED] = True
        extensions = scope.get("extensions")
        if extensions and not _UNBUFFERABLE.isdisjoint(extensions):
            # In place: layers around us read in their scope what the application wrote there.
            scope["extensions"] = {
                name: value for name, value in extensions.items() if name not in _UNBUFFERABLE
            }
        try:
            await app(scope, self.receive, self.send)
            if not self._exchange.ended:
                await self._exchange.raised(
                    UnstoredResponse("the application ended without an answer")
                )
        except BaseException as error:
            if not self._exchange.ended:
                await self._exchange.raised(error)
            raise
        finally:
            if not self.out:
                self._set_out()
            if not self.ended.done():
                self.ended.set_result(None)

    def _set_out(self) -> None:
        self.over = self.out = True
        listening, self._listening = self._listening, ()
        for listener in listening:
            if not listener.done():
                listener.set_result(None)

    async def receive(self) -> Message:
        """Return the body, and after it nothing until the answer is out.

        Not sooner: what streams an answer stops, in the middle of it, when the client is gone.
        """
        message = self._body.taken()
        if message is not None:
            return message
        # Whether the client is still there is not the handler's business: it runs to its end.
        if not self.out:
            await self._wait_until_out()
        return await self._body.receive() if self._streams else {"type": "http.disconnect"}

    async def _wait_until_out(self) -> None:
        listener = asyncio.get_running_loop().create_future()
        self._listening += (listener,)
        try:
            await listener
        finally:  # some only have a look, again and again
            self._listening = tuple(each for each in self._listening if each is not listener)

    async def send(self, message: Message) -> None:
        """Take what the application sends."""
        kind, start = message["type"], self._start
        if self.over:
            await self._send(message)
        elif kind == "http.response.start":
            begun = self._begin(message)
            if is_event_stream(begun["headers"]) and not self._exchange.ended:
                await self._pass_live(begun)
        elif kind != "http.response.body":
            await self._pass(message)
        elif start is None:
            raise RuntimeError("the application sent a body before it began its response")
        elif message.get("more_body", False):
            await self._hold(start, message)
        else:  # not in a function of its own, so that fewer coroutines wait for the save
            message, body = self._whole(message)
            instead = None
            # Else a layer inside has given up on an answer while it was being saved, and gives one
            # of its own: the save goes on, and a retry gets what it saves.
            if not self._exchange.ended:
                instead = await self._exchange.answered(start["status"], start["headers"], body)
            self.over = True
            await self._finish(start, message, instead)

    def _begin(self, message: Message) -> Message:
        """Note how the answer begins."""
        lines = self._exchange.rules.first(message.get("headers", ()))
        self._start = {**message, "headers": lines}
        self._held = None  # of an answer that a layer inside has given up
        if not self._flows:
            self._size = 0
        return self._start

    async def _pass_live(self, start: Message) -> None:
        """Let a stream of events pass as if we were not there."""
        await self._exchange.unprotected()
        self._streams = True
        self._set_out()
        if self.client_gone:
            raise asyncio.CancelledError  # which came before there was a stream to end
        start["headers"].append(UNPROTECTED)
        await self._send(start)

    async def _hold(self, start: Message, message: Message) -> None:
        """Keep a part of the answer, or let it go if there are too many."""
        chunk = bytes(message.get("body", b""))  # of a view, a copy: its buffer may be used again
        if not chunk:
            return
        self._size += len(chunk)
        held = self._held
        if held is None:
            self._held = [chunk]
        elif self._size <= self._exchange.rules.max_response:
            held.append(chunk)
        else:
            # The newest one stays here: should it be the last, the end is recorded before.
            first = () if self._flows else (start,)
            self._held, self._flows = [chunk], True
            await self._pass(*first, _part(b"".join(held), more=True))

    def _whole(self, message: Message) -> tuple[Message, bytes | None]:
        """Return what is sent at the end, and the whole body; None = it is too large."""
        body = bytes(message.get("body", b""))
        self._size += len(body)
        if self._held is not None:
            body = b"".join((*self._held, body))
            message, self._held = _part(body), None
        return message, body if self._size <= self._exchange.rules.max_response else None

    async def _finish(self, start: Message, message: Message, instead: Answer | None) -> None:
        """Send the answer that was saved, or what has to go out in its place."""
        try:
            if self._flows:  # too late for another answer: the first part of this one is out
                await self._pass(message)
            elif instead is not None:
                await send_answer(self._pass, instead)
            else:
                await self._pass(start, message)
        finally:
            self._set_out()

    async def _pass(self, *messages: Message) -> None:
        """Send on; a client that has gone is no reason to stop."""
        try:
            for message in messages:
                if not self.client_gone:
                    await self._send(message)
        except OSError:
            self.client_gone = True


def _part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
