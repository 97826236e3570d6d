"""WSGI: a middleware for Flask, Django, Bottle and any other application.

    app = IdempotencyMiddleware(app, "redis://localhost:6379/0")

The application's answer is read before any of it is sent: so the save happens before the last byte
leaves, and a client that disconnects takes nothing with it. `close()` of what the application gave
is called once, when the answer is out, as the server would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from io import BytesIO
from itertools import chain
from typing import Any, Final, Self, TypeAlias, Unpack
from weakref import ref
from wsgiref.util import FileWrapper

from semel.adapters._sync.integration import Exchange, Integration
from semel.adapters.check_decorators import PROTECTED
from semel.core.decide import UnstoredResponse
from semel.errors import ConfigError
from semel.http.options import MiddlewareOptions
from semel.http.requests import HeaderLine, Headers, Request
from semel.http.rules import Rejected
from semel.http.storing import UNPROTECTED, Answer, has_body, is_event_stream
from semel.sync import Idempotency

__all__ = ["App", "Environ", "IdempotencyMiddleware", "StartResponse"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_CHUNK: Final = 64 * 1024
_LONGEST_LENGTH: Final = 18
"""The most digits of a Content-Length; a longer one is no real length."""
_UNPREFIXED: Final = {"CONTENT_TYPE": b"content-type", "CONTENT_LENGTH": b"content-length"}


class IdempotencyMiddleware:
    """Protects the requests to `app` that have a key; see `semel.http` for the rules and options.

    `idempotency` is an `Idempotency` or a URL.

    Examples:
        >>> app = IdempotencyMiddleware(app, "memory://", include=["/payments"])
    """

    def __init__(
        self, app: App, idempotency: Idempotency | str, **options: Unpack[MiddlewareOptions]
    ) -> None:
        self.app = app
        check_header_names(options)
        self._integration = Integration(idempotency, {**options})

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = path_of(environ)
        rules = self._integration.routing.find(environ["REQUEST_METHOD"], path, root_of(environ))
        if rules is None or PROTECTED in environ:
            return self.app(environ, start_response)
        body = Body(environ, rules.max_body)
        begun = self._integration.begin(rules, request_of(environ, path), body.read)
        if begun is None:
            return self.app(environ, start_response)
        if isinstance(begun, Answer):
            return _answer(begun, start_response)
        return _Protected(begun, start_response).run(self.app, environ)

    def close(self) -> None:
        """Close the engine, if this middleware opened it."""
        self._integration.close()


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
        self._limit = exchange.rules.max_response
        self._begun: tuple[str, list[HeaderLine]] | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._sent = False

    def run(self, app: App, environ: Environ) -> Iterable[bytes]:
        """Run the application, and return what the server is to send."""
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
            raise AssertionError("the application began its response twice")
        if self._sent and exc_info is not None:
            raise exc_info[1].with_traceback(exc_info[2])
        lines = self._exchange.rules.first(
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
        if is_event_stream(self._beginning()[1]):
            self._exchange.unprotected()
            return self._send(UNPROTECTED, Sent(chain(self._held, rest), chunks))
        while self._size <= self._limit:
            chunk = next(rest, None)
            if chunk is None:
                return self._saved(chunks)
            self._hold(chunk)
        status, lines = self._beginning()
        following = StreamedAnswer(
            self._exchange, int(status[:3]), lines, chain(self._held, rest), chunks
        )
        return self._send(None, following)

    def _saved(self, chunks: Iterable[bytes]) -> Iterable[bytes]:
        status, lines = self._beginning()
        code, body = int(status[:3]), b"".join(self._held)
        instead = self._exchange.answered(code, lines, body)
        if instead is not None:
            return Sent(_answer(instead, self._start_response), chunks)
        known = any(name.lower() == b"content-length" for name, _ in lines)
        length = None if known or not has_body(code) else (b"Content-Length", b"%d" % len(body))
        return self._send(length, Sent([body], chunks))

    def _send(self, line: HeaderLine | None, chunks: Iterable[bytes]) -> Iterable[bytes]:
        status, lines = self._beginning()
        self._start_response(status, texts(lines if line is None else [*lines, line]))
        self._sent = True
        return chunks

    def _beginning(self) -> tuple[str, list[HeaderLine]]:
        if self._begun is None:
            raise AssertionError("the application ended without a response")
        return self._begun


# --- one request: its body, and its answer on the way through the application --------------------


def check_header_names(options: Mapping[str, Any]) -> None:
    """Reject a header that no request can have: in WSGI the dashes of a name are underscores."""
    for route in options.get("routes") or ():
        check_header_names(getattr(route, "options", {}))
    header = options.get("header")
    if isinstance(header, str) and "_" in header:
        raise ConfigError(
            f"header={header!r}: WSGI cannot tell _ from - in a header's name, and servers drop "
            "names with _ for that reason; write it with -"
        )


def path_of(environ: Environ) -> str:
    """The whole path of a request, as the client knows it."""
    return _decoded(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))


def root_of(environ: Environ) -> str:
    """The path at which the application is mounted."""
    return _decoded(environ.get("SCRIPT_NAME", ""))


def _decoded(written: str) -> str:
    return written.encode("latin-1").decode("utf-8", "surrogateescape")


def header_lines(environ: Mapping[str, Any]) -> list[HeaderLine]:
    """The header lines of a request, as far as WSGI tells them: equal names are one line."""
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
    return lines


def request_of(environ: Environ, path: str) -> Request:
    """Show a request to the rules."""
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    headers = Headers(header_lines(environ))
    return Request(environ["REQUEST_METHOD"].upper(), path, query, headers, environ)


def content_length(environ: Mapping[str, Any]) -> int | None:
    """How long the client says that its body is; None = it does not say."""
    written = environ.get("CONTENT_LENGTH")
    if not written:
        return None
    if not written.isdecimal():
        raise Rejected("body_incomplete")
    if len(written) > _LONGEST_LENGTH:
        raise Rejected("body_too_large")
    return int(written)


def is_chunked(environ: Mapping[str, Any]) -> bool:
    """Return whether a body came in chunks: RFC 9112 has them count, not a Content-Length."""
    return bool(environ.get("HTTP_TRANSFER_ENCODING"))


class Body:
    """The body of a request, read once and put back for the application."""

    def __init__(self, environ: Environ, limit: int) -> None:
        self._environ, self._limit = environ, limit

    def read(self) -> bytes:
        """Read it whole; more than the limit is rejected as soon as it is there."""
        length = self._length()
        if length is not None and length > self._limit:
            raise Rejected("body_too_large")
        # Of wrong chunks, servers raise errors of their own: gunicorn's are no OSErrors.
        unreadable = Exception if length is None else OSError
        try:
            content = self._up_to(self._limit + 1 if length is None else length)
        except unreadable:  # the client has gone, or its chunks are wrong
            raise Rejected("body_incomplete") from None
        if len(content) > self._limit:
            raise Rejected("body_too_large")
        if length is not None and len(content) < length:
            raise Rejected("body_incomplete")
        self._environ["wsgi.input"] = BytesIO(content)
        if self._environ.pop("HTTP_TRANSFER_ENCODING", None):
            # The chunks are joined, and a length that came beside them was wrong: an application
            # that goes by it would see only a part of the body that was compared.
            self._environ["CONTENT_LENGTH"] = str(len(content))
        return content

    def _up_to(self, wanted: int) -> bytes:
        source, content = self._environ["wsgi.input"], bytearray()
        while len(content) < wanted:
            # Some servers give one chunk of the client's at a time, however small.
            chunk = source.read(min(_CHUNK, wanted - len(content)))
            if not chunk:
                break
            content += chunk
        return bytes(content)

    def _length(self) -> int | None:
        """The bytes to read; None = until the server says that it is all."""
        terminated = self._environ.get("wsgi.input_terminated")
        if is_chunked(self._environ):
            # Only the chunks say where the body ends, whatever Content-Length says beside them.
            if not terminated:
                raise Rejected("body_incomplete")
            return None
        length = content_length(self._environ)
        if length is None and not terminated:
            return 0
        return length


def texts(lines: Iterable[HeaderLine]) -> list[tuple[str, str]]:
    """Write header lines as WSGI has them."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in lines]


# --- answers on their way out: Flask and Django send theirs so, too ------------------------------


def close(chunks: object) -> None:
    """Close what an application gave, if it can be closed."""
    closing = getattr(chunks, "close", None)
    if closing is not None:
        closing()


def up_to(limit: int, chunks: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Read the chunks of an answer: what was read, and whether that is all of it."""
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        limit -= len(chunk)
        if limit < 0:
            return held, False
    return held, True


class Sent:
    """An answer on its way out; what the application gave is closed after it."""

    def __init__(self, chunks: Iterable[bytes], source: object) -> None:
        self._chunks, self._source = chunks, source

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        """Close what the application gave."""
        close(self._source)


class StreamedAnswer:
    """An answer too large to be kept, sent as it comes; its end is recorded before the last of it.

    A client that disconnects does not end it: `close`, which every server calls, reads on to the
    end. So does its own end, for one that never reaches a server: a function of Flask's
    `after_request` may put another answer in its place, and a key that nothing ends would be held
    for ever. If the garbage collector ends it, the stream may be cut, and the attempt has failed.
    """

    def __init__(
        self,
        exchange: Exchange,
        status: int,
        lines: list[HeaderLine],
        chunks: Iterator[bytes],
        source: object,
    ) -> None:
        self._exchange, self._status, self._lines = exchange, status, lines
        self._chunks, self._source = chunks, source
        self._uncollected = ref(self)
        self._ahead: bytes | None = None
        self._ahead = self._next()

    def __del__(self) -> None:
        if self._ahead is None:
            return
        with suppress(Exception):  # it is recorded, and no caller is left to notify
            if self._uncollected() is None:
                # The collector clears weak references first, and then closes generators in any
                # order: one that it has closed looks like one that has ended.
                self._ahead = None
                self._exchange.raised(UnstoredResponse("the answer was dropped before its end"))
            self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        chunk = self._ahead
        if chunk is None:
            raise StopIteration
        self._ahead = self._next()
        return chunk

    def close(self) -> None:
        """Read what is left, and close what the application gave."""
        try:
            while self._ahead is not None:
                self._ahead = self._next()
        finally:
            close(self._source)

    def _next(self) -> bytes | None:
        try:
            chunk = next(self._chunks, None)
        except BaseException as error:
            self._ahead = None
            self._exchange.raised(error)
            raise
        if chunk is None:
            self._exchange.answered(self._status, self._lines, None)
        return chunk
