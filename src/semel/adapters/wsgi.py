"""WSGI: a middleware for Flask, Django, Bottle and any other application.

    app = IdempotencyMiddleware(app, "redis://localhost:6379/0")

The application's answer is read before any of it is sent: so the save happens before the last byte
leaves, and a client who goes away takes nothing with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from io import BytesIO
from itertools import chain
from typing import Any, Final, TypeAlias, Unpack

from semel.adapters.door import Door, Exchange
from semel.adapters.options import MiddlewareOptions
from semel.http.messages import Answer, HeaderLine, Headers, Request
from semel.http.rulebook import Refusal
from semel.http.storing import UNPROTECTED, is_event_stream
from semel.sync import Idempotency

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_CHUNK: Final = 64 * 1024
_UNPREFIXED: Final = {"CONTENT_TYPE": b"content-type", "CONTENT_LENGTH": b"content-length"}


class IdempotencyMiddleware:
    """Protects the requests that have a key; see `semel.http` for the rules and options."""

    def __init__(
        self, app: App, idempotency: Idempotency | str, **options: Unpack[MiddlewareOptions]
    ) -> None:
        self.app = app
        self._door = Door(idempotency, {**options})

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = path_of(environ)
        book = self._door.routing.find(environ["REQUEST_METHOD"], path)
        if book is None:
            return self.app(environ, start_response)
        body = _Body(environ, book.max_body)
        begun = self._door.begin(book, request_of(environ, path), body.read)
        if begun is None:
            return self.app(environ, start_response)
        if isinstance(begun, Answer):
            return _answer(begun, start_response)
        return _Protected(begun, start_response).run(self.app, environ)

    def close(self) -> None:
        """Close the engine, if this middleware opened it."""
        self._door.close()


def path_of(environ: Environ) -> str:
    """The whole path of a request, as the client knows it."""
    written: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return written.encode("latin-1").decode("utf-8", "surrogateescape")


def request_of(environ: Environ, path: str) -> Request:
    """Show a request to the rules."""
    lines = [
        (name[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    lines += [
        (name, environ[key].encode("latin-1"))
        for key, name in _UNPREFIXED.items()
        if environ.get(key)
    ]
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    return Request(environ["REQUEST_METHOD"], path, query, Headers(lines), environ)


class _Body:
    """The body of a request, read once and laid back for the application."""

    def __init__(self, environ: Environ, limit: int) -> None:
        self._environ, self._limit = environ, limit

    def read(self) -> bytes:
        """Read it whole; more than the limit is refused as soon as it is there."""
        length = self._length()
        if length is not None and length > self._limit:
            raise Refusal("body_too_large")
        source = self._environ["wsgi.input"]
        wanted = self._limit + 1 if length is None else length
        chunks, size = [], 0
        while size < wanted:
            chunk = source.read(min(_CHUNK, wanted - size))
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
        if size > self._limit:
            raise Refusal("body_too_large")
        if length is not None and size < length:
            raise Refusal("body_incomplete")
        content = b"".join(chunks)
        self._environ["wsgi.input"] = BytesIO(content)
        return content

    def _length(self) -> int | None:
        """The bytes to read; None = until the server says that it is all."""
        written = self._environ.get("CONTENT_LENGTH")
        if written:
            return int(written) if written.isdecimal() else 0
        return None if self._environ.get("wsgi.input_terminated") else 0


def _answer(answer: Answer, start_response: StartResponse) -> list[bytes]:
    start_response(_status_line(answer.status), _texts(answer.headers))
    return [answer.body]


def _status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def _texts(lines: Iterable[HeaderLine]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in lines]


class _Protected:
    """One request on its way through the application, its answer held back until it is saved."""

    def __init__(self, exchange: Exchange, start_response: StartResponse) -> None:
        self._exchange, self._start_response = exchange, start_response
        self._limit = exchange.book.max_response
        self._started: tuple[str, list[tuple[str, str]]] | None = None
        self._held: list[bytes] = []

    def run(self, app: App, environ: Environ) -> Iterable[bytes]:
        self._exchange.enter()
        try:
            chunks = app(environ, self._start)
            return self._read(chunks)
        except BaseException as error:
            if not self._exchange.ended:
                self._exchange.raised(error)
            raise

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        """Stand in for the server's start_response: nothing is sent yet."""
        if self._started is not None and exc_info is None:
            raise AssertionError("the application began its answer twice")
        lines = self._exchange.book.first(
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers
        )
        self._started = status, _texts(lines)
        return self._held.append

    def _read(self, chunks: Iterable[bytes]) -> Iterable[bytes]:
        """Read the answer up to the limit, and save it."""
        iterator = iter(chunks)
        try:
            first = next(iterator, None)  # an application may begin its answer only here
            if first is not None:
                self._held.append(first)
            if is_event_stream(self._lines()):
                return self._live(chunks, iterator)
            size = sum(map(len, self._held))
            while size <= self._limit:
                chunk = next(iterator, None)
                if chunk is None:
                    return self._saved(chunks)
                self._held.append(chunk)
                size += len(chunk)
        except BaseException:
            _close(chunks)
            raise
        return self._too_large(chunks, iterator)

    def _saved(self, chunks: Iterable[bytes]) -> Iterable[bytes]:
        _close(chunks)
        status, headers = self._begun()
        body = b"".join(self._held)
        instead = self._exchange.answered(_code(status), self._lines(), body)
        if instead is not None:
            return _answer(instead, self._start_response)
        self._start_response(status, headers)
        return [body]

    def _live(self, source: Iterable[bytes], rest: Iterator[bytes]) -> Iterable[bytes]:
        status, headers = self._begun()
        self._exchange.unprotected()
        self._start_response(status, [*headers, *_texts([UNPROTECTED])])
        return _Live(chain(self._held, rest), source)

    def _too_large(self, source: Iterable[bytes], rest: Iterator[bytes]) -> Iterable[bytes]:
        """Send what is held and the rest as it comes; the end is recorded before the last of it."""
        status, headers = self._begun()
        self._start_response(status, headers)

        def end(error: BaseException | None) -> None:
            if self._exchange.ended:
                return
            if error is not None:
                self._exchange.raised(error)
            else:
                self._exchange.answered(_code(status), self._lines(), None)

        return _Following(chain(self._held, rest), source, end)

    def _begun(self) -> tuple[str, list[tuple[str, str]]]:
        if self._started is None:
            raise AssertionError("the application ended without an answer")
        return self._started

    def _lines(self) -> list[HeaderLine]:
        return [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in self._begun()[1]
        ]


class _Live:
    """A stream of events, sent as it comes: it may have no end."""

    def __init__(self, chunks: Iterator[bytes], source: Iterable[bytes]) -> None:
        self._chunks, self._source = chunks, source

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Close the application's own iterable."""
        _close(self._source)


class _Following:
    """An answer that is sent as it comes; its end is told before the last of it leaves."""

    def __init__(
        self,
        chunks: Iterator[bytes],
        source: Iterable[bytes],
        end: Callable[[BaseException | None], None],
    ) -> None:
        self._chunks, self._source, self._end = chunks, source, end

    def __iter__(self) -> Iterator[bytes]:
        last = next(self._chunks, b"")
        for chunk in self._heard():
            yield last
            last = chunk
        self._end(None)
        yield last

    def close(self) -> None:
        """Also when the client has gone: an application whose answer is recorded runs to its end."""
        try:
            for _ in self._heard():
                pass
            self._end(None)
        finally:
            _close(self._source)

    def _heard(self) -> Iterator[bytes]:
        try:
            yield from self._chunks
        except Exception as error:
            self._end(error)
            raise


def _close(chunks: object) -> None:
    close = getattr(chunks, "close", None)
    if close is not None:
        close()


def _code(status: str) -> int:
    return int(status[:3])
