"""Two services on uvicorn: a shop whose handler calls a bank, each behind semel's middleware.

The bank runs in a thread of the test. The shop is a process, `python -m adapters.chain`, that can be told
to die after it has called the bank; its socket is bound by the test, so that it can be started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from semel import AsyncIdempotency, Policy
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.httpx import AsyncIdempotentTransport

HOST = "127.0.0.1"
PATIENCE = 60.0
TESTS = Path(__file__).resolve().parent.parent


def application(handle: Callable[[str], Awaitable[Any]]) -> Any:
    """An ASGI application that answers every request with what a function of its path gives."""

    async def app(scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        while (await receive()).get("more_body", False):
            pass
        body = json.dumps(await handle(scope["path"])).encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


class Bank:
    """Counts the requests that reach it, and the charges that it makes."""

    def __init__(self, store: str) -> None:
        self.lines: list[str] = []
        """The key's header of every request, replays included."""
        self.charges = 0
        self._protected = IdempotencyMiddleware(application(self._charge), store)

    async def _charge(self, path: str) -> Any:
        self.charges += 1
        logging.getLogger("bank").warning("charging")
        return {"charge": self.charges}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http":
            self.lines += [
                value.decode() for name, value in scope["headers"] if name == b"idempotency-key"
            ]
        await self._protected(scope, receive, send)


def _server(app: Any) -> uvicorn.Server:
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
    return uvicorn.Server(config)


@contextlib.contextmanager
def served(app: Any) -> Iterator[int]:
    """Serve an application from a thread; gives the port."""
    server = _server(app)
    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


class Shop:
    """The process that calls the bank."""

    def __init__(self, folder: Path, bank: str) -> None:
        self.crash = folder / "crash"
        """While there is such a file, the shop dies after it has called the bank."""
        self._listening = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._listening.getsockname()[1]}"
        number = self._listening.fileno()
        self._command = [sys.executable, "-m", "adapters.chain", str(number), str(folder), bank]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, cwd=TESTS, pass_fds=[self._listening.fileno()]
        )

    def died(self) -> bool:
        return self._process.wait(PATIENCE) == -signal.SIGKILL

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._listening.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fd", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("bank")
    told = parser.parse_args()
    crash = told.folder / "crash"

    async def order(path: str) -> Any:
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport()) as client:
            charged = await client.post(f"{told.bank}/charges", json={"amount": 5})
        if crash.exists():
            crash.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return {**charged.json(), "replayed": "idempotent-replayed" in charged.headers}

    engine = AsyncIdempotency(f"sqlite:///{told.folder / 'shop.db'}", policy=Policy(lease=0.3))
    app = IdempotencyMiddleware(application(order), engine)
    _server(app).run(sockets=[socket.socket(fileno=told.fd)])


if __name__ == "__main__":
    main()
