"""Django's requests and responses as values, and values as responses.

The body of a request may have been read, or parsed, before us. That of a response may be a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from copy import copy
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
from asgiref.sync import AsyncToSync, async_to_sync, sync_to_async
from django.core.exceptions import (
    BadRequest,
    PermissionDenied,
    RequestDataTooBig,
    SuspiciousOperation,
)
from django.core.handlers.exception import response_for_exception
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    RawPostDataException,
    UnreadablePostError,
)
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.urls import get_resolver, get_urlconf
from django.utils.module_loading import import_string

from semel.adapters import wsgi
from semel.adapters.check_decorators import PROTECTED
from semel.adapters.integration import Flow
from semel.adapters.wsgi import content_length, header_lines, is_chunked, up_to
from semel.core.optional import have
from semel.engine.colours.tasks import without_stop_iteration
from semel.errors import ConfigError
from semel.http.requests import (
    FORMS,
    HeaderLine,
    Headers,
    Request,
    form_bytes,
    upload_of,
    without_boundary,
)
from semel.http.rules import Rejected, RouteRules
from semel.http.storing import UNPROTECTED, Answer


def in_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a plain function run on the thread that Django has for a request."""
    return sync_to_async(without_stop_iteration(function))


def inner(request: Any) -> Any:
    """Return Django's own request, also of one of REST framework's."""
    return request if isinstance(request, HttpRequest) else request._request  # noqa: SLF001 - has no other name


def is_asgi(request: Any) -> bool:
    """Return whether a request came by ASGI, whose messages are there whole."""
    return hasattr(request, "scope")


def is_protected(request: Any) -> bool:
    """Return whether an integration further outside protects a request already."""
    own = inner(request)
    return PROTECTED in own.META or (is_asgi(own) and PROTECTED in own.scope)


class Body:
    """A request for the rules, and its body; the view can read it again."""

    def __init__(self, request: Any, limit: int) -> None:
        self._given, self._limit = request, limit
        self._request = inner(request)
        _check(self._request)
        read_started = self._request._read_started  # noqa: SLF001 - has no other name
        self._lost = read_started and not hasattr(self._request, "_body")
        self.request = Request(
            self._request.method,
            self._request.path,
            _query(self._request),
            Headers(self._lines()),
            request,
        )

    def _lines(self) -> Iterable[HeaderLine]:
        request = self._request
        # On ASGI the lines themselves are there: WSGI joins those of equal names.
        lines = request.scope["headers"] if is_asgi(request) else header_lines(request.META)
        return without_boundary(lines) if self._lost else lines

    def read(self) -> bytes:
        """Return the body, or bytes that stand for what was made of it."""
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

    async def aread(self) -> bytes:
        """Return the body: on asyncio it is there whole."""
        return self.read()

    def _join_chunks(self) -> None:
        """Read a body in chunks to its end: Django goes by a Content-Length, or takes it for empty.

        One that was read before us was cut, then.
        """
        request = self._request
        if request._read_started:  # noqa: SLF001 - has no other name
            raise Rejected("body_incomplete")
        wsgi.Body(request.META, self._limit).read()
        request._stream = request.META["wsgi.input"]  # noqa: SLF001 - has no other name

    def _written_again(self) -> bytes:
        """Write what was parsed before us, by Django or by REST framework."""
        request, given = self._request, self._given
        if request.content_type in FORMS and hasattr(request, "_files"):
            fields = _pairs(request.POST)
            uploads = [
                upload_of(name, file.name, file.content_type, file)
                for name, file in _pairs(request.FILES)
            ]
            if not fields and not uploads:
                raise Rejected("body_incomplete")  # what Django makes of a form with errors
            return form_bytes(fields, uploads)
        try:
            return msgspec.json.encode(given.data)
        except (AttributeError, RawPostDataException, TypeError) as error:
            raise ConfigError(
                "the body was read from the request's stream before semel: use request.body, "
                "which keeps it"
            ) from error


def _check(request: Any) -> None:
    """Check that a request has what Django keeps for itself: a class of requests needs settings."""
    if type(request) is HttpRequest and not hasattr(request, "_read_started"):
        raise ConfigError(
            "a plain HttpRequest() has no body to read: make the request with "
            "django.test.RequestFactory, or with its client"
        )
    have("django", request, "_read_started", "_stream")


def _query(request: Any) -> bytes:
    written: str = request.META.get("QUERY_STRING", "")
    # Django has decoded what ASGI gave as bytes; WSGI's texts are bytes in disguise.
    return written.encode("utf-8" if is_asgi(request) else "latin-1")


def _pairs(fields: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in fields.lists() for value in values]


# --- responses -----------------------------------------------------------------------------------

# What a response closes when it has been sent, in order, is not public.
have("django", HttpResponseBase(content_type="text/plain"), "_resource_closers")


class ResponseParts(NamedTuple):
    """What is stored of a response; a body of None is too large."""

    status: int
    lines: list[HeaderLine]
    body: bytes | None


def lines_of(response: Any) -> list[HeaderLine]:
    """The header lines of a response; cookies are not among them, and never stored."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]


def response_of(answer: Answer) -> Any:
    """Make a response from an answer of semel's own, or from a replay."""
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]  # Django's default, which the answer need not have
    for name, value in answer.headers:
        response[name.decode("latin-1")] = value.decode("latin-1")
    return response


def rendered(response: Any, request: Any) -> Any:
    """Return the response of a view whole; Django and REST framework render only after the view."""
    if not isinstance(response, HttpResponseBase):
        raise TypeError(f"a view must return a response, not {type(response).__name__}")
    unrendered: Any = response
    if getattr(unrendered, "is_rendered", True):
        return response
    if request is not inner(request) and not hasattr(unrendered, "accepted_renderer"):
        unrendered.accepted_renderer = request.accepted_renderer
        unrendered.accepted_media_type = request.accepted_media_type
        unrendered.renderer_context = request.parser_context["view"].get_renderer_context()
    return unrendered.render()


def mark_unprotected(response: Any) -> None:
    """Record that a retry of this response runs again."""
    name, value = UNPROTECTED
    response[name.decode()] = value.decode()


# --- their bodies --------------------------------------------------------------------------------


def read(response: Any, limit: int) -> ResponseParts:
    """Read a response on a thread, up to the limit; a stream gets what was read of it back."""
    if not response.streaming:
        return _parts(response, [response.content], limit)
    content = response.streaming_content
    if response.is_async:
        # Read whole, as Django itself does with such a stream on a thread.
        return _replaced(response, async_to_sync(_all)(content), limit)
    held, whole = up_to(limit, content)
    response.streaming_content = chain(held, content)
    return ResponseParts(
        response.status_code, lines_of(response), b"".join(held) if whole else None
    )


async def aread(response: Any, flow: Flow) -> ResponseParts:
    """Read a response on asyncio, to its end; a stream beyond the limit goes out by the flow."""
    if not response.streaming:
        return _parts(response, [response.content], flow.limit)
    content = response.streaming_content
    if not response.is_async:  # read whole, as Django would
        return _replaced(response, await in_thread(lambda: [*content])(), flow.limit)
    await read_on(response, flow)
    if flow.body is not None:
        response.streaming_content = _again([flow.body])
    return ResponseParts(response.status_code, lines_of(response), flow.body)


def send_instead(response: Any, chunks: Any) -> None:
    """Put chunks that read a response's stream in its place; they are closed before it."""
    response.streaming_content = chunks
    closers = response._resource_closers  # noqa: SLF001 - has no other name
    closers.insert(0, closers.pop())


def close_with(request: Any, chunks: Any) -> None:
    """Close chunks, too, when the request is closed: a layer may have dropped their response."""
    own = inner(request)
    closing = own.close

    def close() -> None:
        try:
            chunks.close()
        finally:
            closing()

    own.close = close


def _parts(response: Any, chunks: list[bytes], limit: int) -> ResponseParts:
    fits = sum(map(len, chunks)) <= limit
    return ResponseParts(
        response.status_code, lines_of(response), b"".join(chunks) if fits else None
    )


def _replaced(response: Any, chunks: list[bytes], limit: int) -> ResponseParts:
    """Let a response that was read whole be sent."""
    response.streaming_content = _again(chunks)
    return _parts(response, chunks, limit)


async def _all(chunks: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


async def _again(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


# --- responses that are sent while their streams are read ----------------------------------------
#
# Django closes a response when its client has gone, and with it the stream and the request: under a
# view whose stream is still read. So closing waits for the reading, and only on the loop: the
# thread that closes is the one of which a stream asks its rows.


async def read_on(response: Any, flow: Flow) -> None:
    """Read the stream of a response to its end; beyond the flow's limit it goes out meanwhile."""
    ended: Future[None] = Future()
    loop = asyncio.get_running_loop()

    def begun(chunks: AsyncIterator[bytes]) -> Any:
        # A thread that waits for this view goes on from here: what needs one asks for another.
        AsyncToSync.executors.current = None
        sent = copy(response)
        sent.__class__ = _waiting(response.__class__)
        sent.semel_flow = flow
        sent.streaming_content = chunks
        # The list is the same one: what belongs to the response is closed when this one is.
        closers = response._resource_closers  # noqa: SLF001 - has no other name
        _put_off(closers, ended, partial(loop.call_soon_threadsafe, flow.leave))
        return sent

    try:
        async for chunk in response.streaming_content:
            await flow.take(chunk, begun)
    finally:
        if flow.is_open:
            await sync_to_async(ended.set_result)(None)


@cache
def _waiting(kind: Any) -> type:
    """Make the class of responses that, when they are sent no longer, wait for their request."""

    class Sent(kind):  # type: ignore[misc]  # of whatever class the view's response is
        semel_flow: Flow

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for part in super().__aiter__():
                    yield part
            finally:
                await self.semel_flow.finished()

    return Sent


def _put_off(
    closers: list[Callable[[], object]], ended: Future[None], leave: Callable[[], object]
) -> None:
    """Let none of the closers run before the end of the reading.

    It has come already, unless the client has gone before the first chunk: nobody waits then.
    """

    def first() -> None:
        waiting = closers[1:]
        del closers[1:]  # Django, which goes through the list, goes no further
        for closer in waiting:
            ended.add_done_callback(partial(_close, closer))
        leave()

    closers.insert(0, first)


def _close(closer: Callable[[], object], _: Future[None]) -> None:
    closer()


# --- responses that are raised -------------------------------------------------------------------

_HANDLED: Final = "_semel_handled"
"""The attribute of a request whose error has its answer: the error, and the answer."""

_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (MultiPartParserError, 400),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
)


def parts_of_error(error: Any, request: Any, rules: RouteRules) -> ResponseParts | None:
    """Say which answer an error of a view will become; None = it is a failure of the view."""
    status = next((code for kind, code in _STATUSES if isinstance(error, kind)), None)
    framework = request is not inner(request)
    if framework and isinstance(error, import_string("rest_framework.exceptions.APIException")):
        status = getattr(error, "status_code", None)
    if status is None or rules.decide(status) == "failure":
        return None
    if rules.decide(status) != "store":
        return ResponseParts(status, [], b"")
    if framework:
        response = request.parser_context["view"].handle_exception(error)
    else:
        response = response_for_exception(request, error)
    response = rendered(response, request)
    response.headers.pop(rules.choices.replayed_header, None)
    send_for_error(error, request, response)
    return read(response, rules.max_response)


def send_for_error(error: Any, request: Any, response: Any) -> None:
    """Let an error that is raised further end in this response: its handler has answered it."""
    if request is not inner(request):  # REST framework has a view for each request
        view = request.parser_context["view"]
        handle = view.handle_exception
        view.handle_exception = lambda raised: response if raised is error else handle(raised)
        return
    setattr(request, _HANDLED, (error, response))
    _handle_once(get_resolver(get_urlconf()))


def _handle_once(resolver: Any) -> None:
    """Let the error handlers that a resolver finds answer each error once."""
    if "resolve_error_handler" in vars(resolver):
        return
    resolve = resolver.resolve_error_handler

    def resolved(status: Any) -> Any:
        handler = resolve(status)

        @wraps(handler)
        def answer(request: Any, *args: Any, **details: Any) -> Any:
            known, response = getattr(request, _HANDLED, (None, None))
            if known is not None and known is details.get("exception"):
                return response
            return handler(request, *args, **details)

        return answer

    resolver.resolve_error_handler = resolved
