"""WSGI: a middleware for Flask, Django, Bottle and any other application.

    app = IdempotencyMiddleware(app, "redis://localhost:6379/0")

The application's answer is read before any of it is sent: so the save happens before the last byte
leaves, and a client who goes away takes nothing with it. `close()` of what the application gave is
called once, when the answer is out, as the server would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from itertools import chain
from typing import Any, TypeAlias, Unpack
from wsgiref.util import FileWrapper

from semel.adapters.check_decorators import PROTECTED
from semel.adapters.door import Door, Exchange
from semel.adapters.streaming import Following, Sent, close
from semel.adapters.wsgi_requests import (
    Body,
    Environ,
    path_of,
    refuse_underscores,
    request_of,
    root_of,
    texts,
)
from semel.http.options import MiddlewareOptions
from semel.http.requests import Answer, HeaderLine
from semel.http.storing import UNPROTECTED, has_body, is_event_stream
from semel.sync import Idempotency

StartResponse: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

__all__ = ["App", "Environ", "IdempotencyMiddleware", "StartResponse"]


class IdempotencyMiddleware:
    """Protects the requests to `app` that have a key; see `semel.http` for the rules and options.

    `idempotency` is an Idempotency, or a URL.

    Examples:
        >>> app = IdempotencyMiddleware(app, "memory://", include=["/payments"])
    """

    def __init__(
        self, app: App, idempotency: Idempotency | str, **options: Unpack[MiddlewareOptions]
    ) -> None:
        self.app = app
        refuse_underscores(options)
        self._door = Door(idempotency, {**options})

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = path_of(environ)
        book = self._door.routing.find(environ["REQUEST_METHOD"], path, root_of(environ))
        if book is None or PROTECTED in environ:
            return self.app(environ, start_response)
        body = Body(environ, book.max_body)
        begun = self._door.begin(book, request_of(environ, path), body.read)
        if begun is None:
            return self.app(environ, start_response)
        if isinstance(begun, Answer):
            return _answer(begun, start_response)
        return _Protected(begun, start_response).run(self.app, environ)

    def close(self) -> None:
        """Close the engine, if this middleware opened it."""
        self._door.close()


def _answer(answer: Answer, start_response: StartResponse) -> list[bytes]:
    start_response(_status_line(answer.status), texts(answer.headers))
    return [answer.body]


def _status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


class _Protected:
    """One request on its way through the application, its answer held back until it is saved."""

    def __init__(self, exchange: Exchange, start_response: StartResponse) -> None:
        self._exchange, self._start_response = exchange, start_response
        self._limit = exchange.book.max_response
        self._begun: tuple[str, list[HeaderLine]] | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._sent = False

    def run(self, app: App, environ: Environ) -> Iterable[bytes]:
        """Run the application, and give what the server is to send."""
        environ[PROTECTED] = True
        environ["wsgi.file_wrapper"] = FileWrapper  # the server's own would send files past us
        self._exchange.enter()
        chunks: Iterable[bytes] = ()
        try:
            chunks = app(environ, self._start)
            return self._read(chunks)
        except BaseException as error:
            if not self._exchange.ended:
                self._exchange.raised(error)
            close(chunks)
            raise

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        """Stand in for the server's start_response: nothing is sent yet."""
        if self._begun is not None and exc_info is None:
            raise AssertionError("the application began its answer twice")
        if self._sent and exc_info is not None:
            raise exc_info[1].with_traceback(exc_info[2])
        lines = self._exchange.book.first(
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers
        )
        self._begun = status, lines
        self._held.clear()  # of an answer that ended in an error
        self._size = 0
        return self._hold

    def _hold(self, chunk: bytes) -> None:
        """Keep a chunk; also the application's `write`, whose chunks come before all others."""
        self._held.append(chunk)
        self._size += len(chunk)

    def _read(self, chunks: Iterable[bytes]) -> Iterable[bytes]:
        """Read the answer up to the limit, and save it."""
        rest = iter(chunks)
        if self._begun is None:  # an application may begin its answer with its first chunk only
            self._hold(next(rest, b""))
        if is_event_stream(self._told()[1]):
            self._exchange.unprotected()
            return self._send(UNPROTECTED, Sent(chain(self._held, rest), chunks))
        while self._size <= self._limit:
            chunk = next(rest, None)
            if chunk is None:
                return self._saved(chunks)
            self._hold(chunk)
        status, lines = self._told()
        following = Following(
            self._exchange, int(status[:3]), lines, chain(self._held, rest), chunks
        )
        return self._send(None, following)

    def _saved(self, chunks: Iterable[bytes]) -> Iterable[bytes]:
        status, lines = self._told()
        code, body = int(status[:3]), b"".join(self._held)
        instead = self._exchange.answered(code, lines, body)
        if instead is not None:
            return Sent(_answer(instead, self._start_response), chunks)
        known = any(name.lower() == b"content-length" for name, _ in lines)
        length = None if known or not has_body(code) else (b"Content-Length", b"%d" % len(body))
        return self._send(length, Sent([body], chunks))

    def _send(self, line: HeaderLine | None, chunks: Iterable[bytes]) -> Iterable[bytes]:
        status, lines = self._told()
        self._start_response(status, texts(lines if line is None else [*lines, line]))
        self._sent = True
        return chunks

    def _told(self) -> tuple[str, list[HeaderLine]]:
        if self._begun is None:
            raise AssertionError("the application ended without an answer")
        return self._begun
