"""Plain WSGI: the middleware inside CORS, compression and authorization, around a bare application."""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from semel import Idempotency
from semel.adapters.wsgi import App, Environ, IdempotencyMiddleware, StartResponse
from web.handlers import CORS_ORIGIN, Asked, Broken, Business, Folder, Reply
from web.stacks.hosts import Hosts, MakeApplication


def application(business: Business, engine: Idempotency, options: Mapping[str, Any]) -> App:
    return Around(IdempotencyMiddleware(Application(business), engine, **options), business)


def _headers(environ: Environ) -> dict[str, str]:
    named = {
        name[5:].replace("_", "-").lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    return {**named, "content-type": environ.get("CONTENT_TYPE", "")}


class Around:
    """Authorization, CORS and compression, as layers around the middleware do it."""

    def __init__(self, app: App, business: Business) -> None:
        self._app, self._business = app, business

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers = _headers(environ)
        if not self._business.admits(headers):
            start_response("403 Forbidden", [])
            return []
        zipped = "gzip" in headers.get("accept-encoding", "")
        crossing = headers.get("origin") == CORS_ORIGIN

        def start(status: str, lines: list[tuple[str, str]], exc_info: Any = None) -> Any:
            if crossing:
                lines = [*lines, ("Access-Control-Allow-Origin", CORS_ORIGIN)]
            if zipped:
                lines = [line for line in lines if line[0].lower() != "content-length"]
                lines.append(("Content-Encoding", "gzip"))
            return start_response(status, lines, exc_info)

        chunks = self._app(environ, start)
        if not zipped:
            return chunks
        with contextlib.closing(chunks) if hasattr(chunks, "close") else contextlib.nullcontext():
            return [gzip.compress(b"".join(chunks))]


class Application:
    """The handlers as a bare WSGI application."""

    def __init__(self, business: Business) -> None:
        self._business = business

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            body = _body(environ)
        except (OSError, ValueError, OverflowError):  # it is not whole, or has no length
            start_response("400 Incomplete", [("Content-Length", "0")])
            return []
        asked = Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"], _headers(environ), body)
        try:
            reply = self._business(asked)
        except Broken:
            if asked.path != "/raise_page":
                raise
            # As a layer inside the middleware does it.
            start_response("500 Broken", [("Content-Length", "20")], sys.exc_info())
            return [b"the page of an error"]
        start_response(f"{reply.status} Answered", reply.lines)
        return Closing(reply)


class Closing:
    """Chunks whose `close` does what is left to do."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._reply.chunks)

    def close(self) -> None:
        if self._reply.after is not None:
            self._reply.after()


def _body(environ: Environ) -> bytes:
    length = environ.get("CONTENT_LENGTH")
    content: bytes
    if not length and environ.get("wsgi.input_terminated"):
        content = environ["wsgi.input"].read()
    else:
        content = environ["wsgi.input"].read(int(length or 0))
    return content


def by_host(folder: Folder, make: MakeApplication) -> Callable[..., Iterable[bytes]]:
    """The application that the server runs: gives each request to its host."""
    hosts = Hosts(folder, Idempotency, make)

    def give(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        chunks: Iterable[bytes] = hosts.application(environ["HTTP_HOST"])(environ, start_response)
        return chunks

    return give
