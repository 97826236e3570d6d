"""What WSGI tells of a request: its path, its header lines, its body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, Final, TypeAlias

from semel.errors import ConfigError
from semel.http.requests import HeaderLine, Headers, Request
from semel.http.rules import Refusal

Environ: TypeAlias = dict[str, Any]

_CHUNK: Final = 64 * 1024
_LONGEST_LENGTH: Final = 18
"""Digits of a Content-Length; nobody sends more bytes than that."""
_UNPREFIXED: Final = {"CONTENT_TYPE": b"content-type", "CONTENT_LENGTH": b"content-length"}


def refuse_underscores(options: Mapping[str, Any]) -> None:
    """Refuse a header that no request can have: in WSGI the dashes of a name are underscores."""
    for route in options.get("routes") or ():
        refuse_underscores(getattr(route, "options", {}))
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
        raise Refusal("body_incomplete")
    if len(written) > _LONGEST_LENGTH:
        raise Refusal("body_too_large")
    return int(written)


def is_chunked(environ: Mapping[str, Any]) -> bool:
    """Tell whether a body came in chunks: RFC 9112 has them count, not a Content-Length."""
    return bool(environ.get("HTTP_TRANSFER_ENCODING"))


class Body:
    """The body of a request, read once and laid back for the application."""

    def __init__(self, environ: Environ, limit: int) -> None:
        self._environ, self._limit = environ, limit

    def read(self) -> bytes:
        """Read it whole; more than the limit is refused as soon as it is there."""
        length = self._length()
        if length is not None and length > self._limit:
            raise Refusal("body_too_large")
        try:
            content = self._up_to(self._limit + 1 if length is None else length)
        except OSError:  # the client has gone, or its chunks are wrong
            raise Refusal("body_incomplete") from None
        if len(content) > self._limit:
            raise Refusal("body_too_large")
        if length is not None and len(content) < length:
            raise Refusal("body_incomplete")
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
                raise Refusal("body_incomplete")
            return None
        length = content_length(self._environ)
        if length is None and not terminated:
            return 0
        return length


def texts(lines: Iterable[HeaderLine]) -> list[tuple[str, str]]:
    """Write header lines as WSGI has them."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in lines]
