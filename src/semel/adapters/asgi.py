"""ASGI: a middleware for Starlette, FastAPI, Litestar, Django and any other application.

    app = IdempotencyMiddleware(app, "redis://localhost:6379/0")

A request that runs is a task of its own, so that a client who goes away, or a server that cancels,
takes neither the handler nor the save with it. The save happens before the last byte leaves; from
there on all is as it would be without us.
"""

from __future__ import annotations

import asyncio
from typing import Unpack

from semel.adapters.aio_door import AsyncDoor
from semel.adapters.asgi_requests import (
    App,
    Body,
    ClientGone,
    Message,
    Protected,
    Receive,
    Scope,
    Send,
    request_of,
    send_answer,
)
from semel.adapters.check_decorators import PROTECTED
from semel.adapters.streaming import Aside
from semel.aio import AsyncIdempotency
from semel.http.options import MiddlewareOptions
from semel.http.requests import Answer
from semel.stores.loops import running_loop

__all__ = ["App", "IdempotencyMiddleware", "Message", "Receive", "Scope", "Send"]


class IdempotencyMiddleware:
    """Protects the requests to `app` that have a key; see `semel.http` for the rules and options.

    `idempotency` is an AsyncIdempotency, or a URL.

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
        self._door = AsyncDoor(idempotency, {**options})
        self._aside = Aside()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        book = None
        if scope["type"] == "http" and PROTECTED not in scope:
            book = self._door.routing.find(
                scope["method"], scope["path"], scope.get("root_path", "")
            )
        if book is None:
            await self.app(scope, receive, send)
            return
        body = Body(receive, book.max_body)
        try:
            begun = await self._door.begin(book, request_of(scope), body.read)
        except ClientGone:
            return
        if begun is None:
            await self.app(scope, body.receive, send)
        elif isinstance(begun, Answer):
            await send_answer(send, begun)
        else:
            protected = Protected(begun, body, send, asyncio.get_running_loop().create_future())
            task = self._aside.begin(protected.run(self.app, scope))
            try:
                # Not the task itself: a cancelled request must neither strand its key nor lose its
                # answer.
                await protected.ended
            except asyncio.CancelledError:
                await self._leave(protected, task)
                raise
            self._aside.end(task)
            task.result()  # it has ended, perhaps with an error

    async def _leave(self, protected: Protected, task: asyncio.Task[None]) -> None:
        """Let a request run on for which nobody waits any more."""
        protected.client_gone = True
        self._aside.leave(task)
        if protected.over:
            task.cancel()  # The save is done: the application learns of it as without us.
            await asyncio.wait((task,))

    # --- the server's life -------------------------------------------------------------------

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application live its life, and end ours after it."""
        running_loop()  # a server on trio learns here that semel cannot work there
        heard = False

        async def hearing() -> Message:
            nonlocal heard
            heard = True
            return await receive()

        async def closing(message: Message) -> None:
            nonlocal heard
            heard = True
            if message["type"].startswith("lifespan.shutdown."):
                await self._aside.drain()
                await self._door.close()
            await send(message)

        try:
            await self.app(scope, hearing, closing)
        except Exception:
            if heard or not self._door.opened_here:
                raise
            # An application without a lifespan, such as Django: the engine needs its end still.
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await closing({"type": "lifespan.shutdown.complete"})
