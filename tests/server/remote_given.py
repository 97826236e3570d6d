"""A service in a thread of the test's process: uvicorn on a real socket, over a store of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from semel.core.records import FINGERPRINT_BYTES, OWNER_BYTES, Encoded, Identity
from semel.server.app import create_app
from semel.server.running import Server, listen, setup_of
from semel.server.service import Service
from semel.server.tokens import Tokens
from semel.stores.base import AsyncStore

PATIENCE = 60.0

# What requests are made of; the contract, whose module pytest rewrites, has its own.
LONG = 600.0
KEY, OTHER = Identity("orders.create", "order:42"), Identity("orders.create", "order:43")
ANNA, BERT = b"\x00anna\xff".ljust(OWNER_BYTES, b"\x00"), b"bert".ljust(OWNER_BYTES, b"\x00")
RED = b"red".ljust(FINGERPRINT_BYTES, b"\x00")
RESULT, ERROR = Encoded("json", b'{"charge":"ch_1"}'), Encoded("failure", b'["ValueError","no"]')
RUN_INFO = b'{"by":"web-1:4711","ttl":600,"codec":"json/1"}'


class Served:
    """Its `url` is for semel+http; what answers there is what `use` was called with last."""

    def __init__(self) -> None:
        self._listener, place = listen("127.0.0.1", 0)
        self.url = f"semel+http://{place}"
        self.port = int(place.rpartition(":")[2])
        self._app: Any = None
        self.service: Service | None = None
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
        )
        self._server = Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="served", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    def on_loop(self, work: Any) -> Any:
        """Run a coroutine where the service runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def use(
        self, make_store: Callable[[], AsyncStore], tokens: str | None = None, **more: Any
    ) -> Service:
        """Answer from the store that this makes, with the tokens of this file."""

        async def begin() -> Service:
            service = Service(make_store(), setup_of("memory://", None), **more)
            self._app = create_app(service, None if tokens is None else Tokens.load(tokens))
            return service

        self.leave()
        self.service = self.on_loop(begin())
        return self.service

    def answer_with(self, app: Any) -> None:
        """Answer by an ASGI application of the test's."""
        self._app = app

    def leave(self) -> None:
        """Close the store that was used."""
        service, self.service = self.service, None
        if service is not None:
            self.on_loop(service.close())

    def close(self) -> None:
        self.leave()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        self._loop.close()
        self._listener.close()


@contextlib.contextmanager
def served() -> Iterator[Served]:
    """A service for a module's tests."""
    running = Served()
    try:
        yield running
    finally:
        running.close()


def problem_app(status: int, body: bytes, content_type: str, **headers: str) -> Any:
    """An ASGI application that always answers the same."""
    lines = {"content-type": content_type, **headers}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        packed = [(name.encode(), text.encode()) for name, text in lines.items()]
        await send({"type": "http.response.start", "status": status, "headers": packed})
        await send({"type": "http.response.body", "body": body})

    return app
