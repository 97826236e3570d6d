"""A bare WSGI application behind the middleware, for servers that are started by their command line."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from semel.adapters.wsgi import IdempotencyMiddleware

_numbers = itertools.count(1)
EVENTS = 3


def shop(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    number = str(next(_numbers))
    lines = [("Content-Type", "text/plain"), ("X-Run", number)]
    match environ["PATH_INFO"]:
        case "/file":
            start_response("200 OK", lines)
            file = tempfile.TemporaryFile()  # noqa: SIM115 - its wrapper closes it
            file.write(b"a file of this server" * 100)
            file.seek(0)
            return environ["wsgi.file_wrapper"](file)
        case "/written":
            start_response("200 OK", lines)(b"written, ")
            return [b"returned"]
        case "/large":
            start_response("200 OK", lines)
            return (b"%08d" % part for part in range(1000))
        case "/huge":
            start_response("200 OK", lines)
            return (b"x" * 64 * 1024 for _ in range(400))  # more than servers and sockets take
        case "/events":
            start_response("200 OK", [("Content-Type", "text/event-stream"), ("X-Run", number)])
            return (b"data: %d\n\n" % event for event in range(EVENTS))
        case _:
            length = environ.get("CONTENT_LENGTH")
            body = environ["wsgi.input"].read(int(length) if length else -1)
            start_response("201 Created", lines)
            return [b"said: ", body]


def made() -> IdempotencyMiddleware:
    """Made in the worker, with the store that the environment names."""
    gc.disable()  # nothing may depend on when it runs
    return IdempotencyMiddleware(shop, os.environ["SHOP_STORE"], max_response=4000)
