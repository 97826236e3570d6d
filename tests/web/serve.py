"""One worker process: `python -m web.serve STACK --fd N --folder F` serves all profiles of a stack.

The socket is bound by whoever starts the worker: no port is guessed, and requests may be sent at once.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from web.handlers import Folder

THREADS = 16


class Stack(Struct, frozen=True):
    """A framework on a server, and what is peculiar to it."""

    module: str
    serve: Callable[[Any, socket.socket], None]
    asynchronous: bool
    make: str = "application"
    decorator: bool = False
    """The integration is at the handler: it has no paths to choose from."""
    repeats_lines: bool = True
    """The framework can send several header lines of one name."""
    reads_ahead: bool = False
    """The server, or Django on ASGI, reads a whole body before the integration sees any of it."""


def _on_uvicorn(app: Any, listening: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(app, http="h11", log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


def _on_hypercorn(app: Any, listening: socket.socket) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.graceful_timeout = config.keep_alive_timeout = 1
    config.shutdown_timeout = 2

    async def main() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await serve(app, config, shutdown_trigger=over.wait)

    asyncio.run(main())


def _on_waitress(app: Any, listening: socket.socket) -> None:
    import waitress

    waitress.serve(app, sockets=[listening], threads=THREADS, _quiet=True)


def _on_werkzeug(app: Any, listening: socket.socket) -> None:
    from werkzeug.serving import make_server

    host, port = listening.getsockname()
    make_server(host, port, app, threaded=True, fd=listening.detach()).serve_forever()


STACKS = {
    "asgi": Stack("asgi", _on_uvicorn, asynchronous=True),
    "asgi-hypercorn": Stack("asgi", _on_hypercorn, asynchronous=True),
    "fastapi": Stack("fastapi", _on_uvicorn, asynchronous=True, decorator=True),
    "wsgi": Stack("wsgi", _on_werkzeug, asynchronous=False),
    "flask": Stack("flask", _on_werkzeug, asynchronous=False, decorator=True),
    "django": Stack(
        "django", _on_waitress, asynchronous=False, repeats_lines=False, reads_ahead=True
    ),
    "django-async": Stack(
        "django",
        _on_uvicorn,
        asynchronous=True,
        make="async_application",
        repeats_lines=False,
        reads_ahead=True,
    ),
    "proxy": Stack("proxy", _on_uvicorn, asynchronous=True),
}

FORMS = {
    "starlette": Stack("starlette", _on_uvicorn, asynchronous=True, decorator=True),
    "starlette-session": Stack(
        "starlette", _on_uvicorn, asynchronous=True, make="in_session", decorator=True
    ),
    "fastapi-middleware": Stack("fastapi", _on_uvicorn, asynchronous=True, make="in_middleware"),
    "fastapi-session": Stack(
        "fastapi", _on_uvicorn, asynchronous=True, make="in_session", decorator=True
    ),
    "django-view": Stack(
        "django", _on_waitress, asynchronous=False, make="of_view", repeats_lines=False
    ),
    "django-async-view": Stack(
        "django", _on_uvicorn, asynchronous=True, make="of_async_view", repeats_lines=False
    ),
    "django-atomic": Stack(
        "django", _on_waitress, asynchronous=False, make="of_atomic_view", repeats_lines=False
    ),
}
"""Other forms of the same integrations, for rules in which they have a part of their own."""

FRAMEWORKS = [name for name in STACKS if name != "asgi-hypercorn"]
"""Each framework once, for rules that no server has a part in."""
MIDDLEWARES = [name for name, stack in STACKS.items() if not stack.decorator]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stack", choices=STACKS | FORMS)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    stack, folder = (STACKS | FORMS)[told.stack], Folder(told.folder)
    make = getattr(importlib.import_module(f"web.stacks.{stack.module}"), stack.make)
    if stack.asynchronous:
        from web.stacks.asgi import ByHost

        app: Any = ByHost(folder, make)
    else:
        from web.stacks.wsgi import by_host

        app = by_host(folder, make)
    stack.serve(app, socket.socket(fileno=told.fd))


if __name__ == "__main__":
    main()
