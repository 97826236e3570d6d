"""The body of a Flask request, which may have been read, or parsed, before us."""

from __future__ import annotations

from typing import Final

from flask import request

from semel.adapters import wsgi
from semel.errors import ConfigError
from semel.http.requests import Headers, Request, Upload, form_bytes, without_boundary
from semel.http.rules import Rejected

_FORMS: Final = ("multipart/form-data", "application/x-www-form-urlencoded")


class Body:
    """A request for the rules, and its body, which may have been read before us."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        this = request._get_current_object()  # type: ignore[attr-defined]  # it is a proxy
        environ, known = this.environ, vars(this)
        self._untouched = "stream" not in known
        self._kept = "_cached_data" in known
        self._parsed = "form" in known
        self._form = "form" in known and this.mimetype in _FORMS and not this.get_data()
        lines = wsgi.header_lines(environ)
        self.request = Request(
            request.method,
            wsgi.path_of(environ),
            request.query_string,
            Headers(without_boundary(lines) if self._form else lines),
            this,
        )

    def read(self) -> bytes:
        """Give the body; the view can read it again."""
        if self._untouched:
            return wsgi.Body(request.environ, self._limit).read()
        chunked = wsgi.is_chunked(request.environ)
        if chunked and not request.environ.get("wsgi.input_terminated"):
            raise Rejected("body_incomplete")  # Flask takes it for empty
        length = request.content_length or 0  # of chunks it is not known
        if length > self._limit:
            raise Rejected("body_too_large")
        body = self._form_bytes() if self._form else request.get_data()
        if len(body) > self._limit:
            raise Rejected("body_too_large")
        if self._form and not body and (chunked or length > 0):
            # Flask parses a form with errors as an empty one, and empty forms all look alike.
            raise Rejected("body_incomplete")
        if not self._kept and self._is_cut(body, length, chunked=chunked):
            raise ConfigError(
                "the body was read from request.stream before the view: read it by "
                "request.get_data(), which keeps it"
            )
        return body

    def _is_cut(self, body: bytes, length: int, *, chunked: bool) -> bool:
        """Tell whether somebody took some of the body, or all of it, out of the stream before us.

        How long a body in chunks was cannot be known then, so its stream may not be touched; the
        parser of forms leaves what is no form where it is.
        """
        if self._parsed:
            return not body and (chunked or length > 0)
        return chunked or len(body) < length

    def _form_bytes(self) -> bytes:
        uploads = []
        for name, file in request.files.items(multi=True):
            position = file.stream.tell()  # a hook may have read it, for a checksum
            file.stream.seek(0)
            content = file.stream.read()
            file.stream.seek(position)
            uploads.append(Upload(name, file.filename or "", file.content_type or "", content))
        return form_bytes(request.form.items(multi=True), uploads)
