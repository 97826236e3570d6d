"""One server that takes headers of a megabyte: `python header_server.py NAME FD`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterable
from typing import Any

from semel.adapters import asgi, wsgi

MIB = 1024 * 1024


async def answer(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        raise NotImplementedError("this application has no lifespan")
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


def respond(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("201 Created", [("Content-Length", "4")])
    return [b"done"]


PATHS: Any = {"include": ["/a*/a*/b", "/pay"], "query": "key"}
on_asgi = asgi.IdempotencyMiddleware(answer, "memory://", **PATHS)
on_wsgi = wsgi.IdempotencyMiddleware(respond, "memory://", **PATHS)


def uvicorn(listening: socket.socket, http: Any) -> None:
    from uvicorn import Config, Server

    config = Config(on_asgi, http=http, h11_max_incomplete_event_size=2 * MIB, log_level="warning")
    Server(config).run(sockets=[listening])


def hypercorn(listening: socket.socket) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.h11_max_incomplete_size = 2 * MIB
    asyncio.run(serve(on_asgi, config))


def waitress(listening: socket.socket) -> None:
    from waitress import serve

    serve(on_wsgi, sockets=[listening], max_request_header_size=2 * MIB, _quiet=True)


def gunicorn(listening: socket.socket) -> None:
    limits = ["--limit-request-line=0", f"--limit-request-field_size={2 * MIB}"]
    command = [sys.executable, "-m", "gunicorn", *limits, "--log-level=warning", "--timeout=600"]
    bound = f"--bind=fd://{listening.detach()}"
    os.execv(sys.executable, [*command, bound, "header_server:on_wsgi"])  # noqa: S606 - our own


def main(name: str, fd: int) -> None:
    os.set_inheritable(fd, True)
    listening = socket.socket(fileno=fd)
    if name.startswith("uvicorn-"):
        uvicorn(listening, name.removeprefix("uvicorn-"))
    else:
        {"hypercorn": hypercorn, "waitress": waitress, "gunicorn": gunicorn}[name](listening)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
