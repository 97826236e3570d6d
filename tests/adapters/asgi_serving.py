"""ASGI applications on real servers, in the loop of the test, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from hypercorn.asyncio import serve as serve_hypercorn
from hypercorn.config import Config

SERVERS = ("uvicorn", "hypercorn", "hypercorn-h2")
H2 = {"http1": False, "http2": True}  # prior knowledge: no certificate is needed


@asynccontextmanager
async def served(
    app: Any, server: str = "uvicorn", **config: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an application from its startup to its shutdown, and give a client of it.

    `config` is more of uvicorn's.
    """
    # Named TCP: asyncio sends small answers at once only on a socket that says so.
    bound = socket.socket(proto=socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    over = asyncio.Event()
    run = _on_uvicorn if server.startswith("uvicorn") else _on_hypercorn
    if server == "uvicorn-httptools":
        config["http"] = "httptools"
    running = asyncio.create_task(run(app, bound, over, **config))
    options = H2 if server == "hypercorn-h2" else {}
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False, **options) as client:  # noqa: S501 - nothing is encrypted here
            yield client
    finally:
        over.set()
        # From Python 3.12 on, Hypercorn waits without an end for an application that left frames of
        # HTTP/2 unread, with semel and without.
        await asyncio.wait([running], timeout=10)
        if not running.done():
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class _Uvicorn(uvicorn.Server):
    """Leaves the signals of the test process alone, and stops at once."""

    def __init__(self, config: uvicorn.Config, over: asyncio.Event) -> None:
        super().__init__(config)
        self._over = over

    async def main_loop(self) -> None:
        await self._over.wait()


async def _on_uvicorn(app: Any, bound: socket.socket, over: asyncio.Event, **more: Any) -> None:
    fixed = {"lifespan": "on", "log_config": None, "ws": "none"}
    config = uvicorn.Config(app, timeout_graceful_shutdown=2, **fixed, **{"http": "h11", **more})
    await _Uvicorn(config, over)._serve([bound])


async def _on_hypercorn(app: Any, bound: socket.socket, over: asyncio.Event) -> None:
    config = Config()
    config.bind = [f"fd://{bound.detach()}"]
    config.errorlog = None
    await serve_hypercorn(app, config, shutdown_trigger=over.wait)


def keyed(key: str = "k", **more: str) -> dict[str, str]:
    return {"Idempotency-Key": f'"{key}"', **more}


def replayed(answer: httpx.Response) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


async def eventually(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what is waited for cannot tell
            await asyncio.sleep(0.005)


async def begun(client: httpx.AsyncClient, *lines: str, body: bytes = b"") -> asyncio.StreamWriter:
    """Begin a request by hand, so that it can be left at any moment."""
    url = client.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = "\r\n".join([*lines, f"Host: {url.host}", "", ""])
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def left(writer: asyncio.StreamWriter) -> None:
    """Go away without a word."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
