"""The body of a Django request, which may have been read, or parsed, before us."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException, UnreadablePostError

from semel.adapters import wsgi
from semel.adapters.check_decorators import PROTECTED
from semel.adapters.wsgi import content_length, header_lines, is_chunked
from semel.core.extras import have
from semel.errors import ConfigError
from semel.http.messages import HeaderLine, Headers, Request, Upload, form_bytes, without_boundary
from semel.http.rules import Rejected

_FORMS: Final = ("multipart/form-data", "application/x-www-form-urlencoded")


def inner(request: Any) -> Any:
    """Give Django's own request, also of one of REST framework's."""
    return request if isinstance(request, HttpRequest) else request._request


def is_asgi(request: Any) -> bool:
    """Tell whether a request came by ASGI, whose messages are there whole."""
    return hasattr(request, "scope")


def is_protected(request: Any) -> bool:
    """Tell whether an integration further outside protects a request already."""
    own = inner(request)
    return PROTECTED in own.META or (is_asgi(own) and PROTECTED in own.scope)


class Body:
    """A request for the rules, and its body; the view can read it again."""

    def __init__(self, request: Any, limit: int) -> None:
        self._given, self._limit = request, limit
        self._request = inner(request)
        _check(self._request)
        self._lost = self._request._read_started and not hasattr(self._request, "_body")
        self.request = Request(
            self._request.method,
            self._request.path,
            _query(self._request),
            Headers(self._lines()),
            request,
        )

    def _lines(self) -> Iterable[HeaderLine]:
        request = self._request
        # On ASGI the lines themselves are there: WSGI tells equal names as one.
        lines = request.scope["headers"] if is_asgi(request) else header_lines(request.META)
        return without_boundary(lines) if self._lost else lines

    def read(self) -> bytes:
        """Give the body, or bytes that stand for what was made of it."""
        if not is_asgi(self._request) and is_chunked(self._request.META):
            self._join_chunks()
        length = content_length(self._request.META) or 0
        if length > self._limit:
            raise Rejected("body_too_large")
        if self._lost:
            return self._written_again()
        try:
            body: bytes = self._request.body
        except RequestDataTooBig:
            raise Rejected("body_too_large") from None
        except UnreadablePostError:  # the client has gone, or its chunks are wrong
            raise Rejected("body_incomplete") from None
        if len(body) > self._limit:
            raise Rejected("body_too_large")
        if len(body) < length:
            raise Rejected("body_incomplete")
        return body

    def _join_chunks(self) -> None:
        """Read a body in chunks to its end: Django goes by a Content-Length, or takes it for empty.

        One that was read before us was cut, then.
        """
        request = self._request
        if request._read_started:
            raise Rejected("body_incomplete")
        wsgi.Body(request.META, self._limit).read()
        request._stream = request.META["wsgi.input"]

    def _written_again(self) -> bytes:
        """Write what was parsed before us, by Django or by REST framework."""
        request, given = self._request, self._given
        if request.content_type in _FORMS and hasattr(request, "_files"):
            fields, uploads = _pairs(request.POST), _uploads(request.FILES)
            if not fields and not uploads:
                raise Rejected("body_incomplete")  # so Django tells of a form with errors
            return form_bytes(fields, uploads)
        try:
            return msgspec.json.encode(given.data)
        except (AttributeError, RawPostDataException, TypeError) as error:
            raise ConfigError(
                "the body was read from the request's stream before us: read it by request.body, "
                "which keeps it"
            ) from error


def _check(request: Any) -> None:
    """Check that a request has what Django keeps for itself: a class of requests needs settings."""
    if type(request) is HttpRequest and not hasattr(request, "_read_started"):
        raise ConfigError(
            "a plain HttpRequest() has no body to read: make the request by "
            "django.test.RequestFactory, or by its client"
        )
    have("django", request, "_read_started", "_stream")


def _query(request: Any) -> bytes:
    written: str = request.META.get("QUERY_STRING", "")
    # Django has decoded what ASGI gave as bytes; WSGI's texts are bytes in disguise.
    return written.encode("utf-8" if is_asgi(request) else "latin-1")


def _pairs(fields: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in fields.lists() for value in values]


def _uploads(files: Any) -> list[Upload]:
    uploads = []
    for name, file in _pairs(files):
        position = file.tell()  # a middleware may have read it, for a checksum
        file.seek(0)
        content = file.read()
        file.seek(position)
        uploads.append(Upload(name, file.name or "", file.content_type or "", content))
    return uploads
