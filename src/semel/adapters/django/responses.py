"""Responses of Django as values, and values as responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import wraps
from itertools import chain
from typing import Any, Final, NamedTuple

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.urls import get_resolver, get_urlconf
from django.utils.module_loading import import_string

from semel.adapters.django.bodies import inner
from semel.adapters.django.streaming import read_on
from semel.adapters.streaming import Flow, up_to
from semel.core.extras import have
from semel.http.messages import Answer, HeaderLine
from semel.http.rules import RouteRules
from semel.http.storing import UNPROTECTED

# What a response closes when it has been sent, in order, is not public; here and in `streaming`.
have("django", HttpResponseBase(content_type="text/plain"), "_resource_closers")


class Told(NamedTuple):
    """What is stored of a response; a body of None is too large."""

    status: int
    lines: list[HeaderLine]
    body: bytes | None


def lines_of(response: Any) -> list[HeaderLine]:
    """The header lines of a response; cookies are not among them, and never stored."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]


def response_of(answer: Answer) -> Any:
    """Make a response of an answer that is ours, or of a replay."""
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]  # Django's default, which the answer need not have
    for name, value in answer.headers:
        response[name.decode("latin-1")] = value.decode("latin-1")
    return response


def rendered(response: Any, request: Any) -> Any:
    """Give the response of a view whole; Django and REST framework render only after the view."""
    if not isinstance(response, HttpResponseBase):
        raise TypeError(f"a view must give a response, not {type(response).__name__}")
    unrendered: Any = response
    if getattr(unrendered, "is_rendered", True):
        return response
    if request is not inner(request) and not hasattr(unrendered, "accepted_renderer"):
        unrendered.accepted_renderer = request.accepted_renderer
        unrendered.accepted_media_type = request.accepted_media_type
        unrendered.renderer_context = request.parser_context["view"].get_renderer_context()
    return unrendered.render()


def mark_unprotected(response: Any) -> None:
    """Tell that a retry of this answer runs again."""
    name, value = UNPROTECTED
    response[name.decode()] = value.decode()


# --- bodies --------------------------------------------------------------------------------------


def read(response: Any, limit: int) -> Told:
    """Read a response on a thread, up to the limit; a stream gets what was read of it back."""
    if not response.streaming:
        return _told(response, [response.content], limit)
    content = response.streaming_content
    if response.is_async:
        # Read whole, as Django itself does with such a stream on a thread.
        return _replaced(response, async_to_sync(_all)(content), limit)
    held, whole = up_to(limit, content)
    response.streaming_content = chain(held, content)
    return Told(response.status_code, lines_of(response), b"".join(held) if whole else None)


async def aread(response: Any, limit: int, flow: Flow | None) -> Told:
    """Read a response on asyncio, to its end; a stream beyond the limit goes out by the flow."""
    if not response.streaming:
        return _told(response, [response.content], limit)
    content = response.streaming_content
    if not response.is_async:  # read whole, as Django would
        return _replaced(response, await sync_to_async(_listed)(content), limit)
    if flow is None:
        return _replaced(response, await _all(content), limit)
    await read_on(response, flow)
    if flow.body is not None:
        response.streaming_content = _again([flow.body])
    return Told(response.status_code, lines_of(response), flow.body)


def send_instead(response: Any, chunks: Any) -> None:
    """Put chunks that read a response's stream in its place; they are closed before it."""
    response.streaming_content = chunks
    closers = response._resource_closers
    closers.insert(0, closers.pop())


def _told(response: Any, chunks: list[bytes], limit: int) -> Told:
    fits = sum(map(len, chunks)) <= limit
    return Told(response.status_code, lines_of(response), b"".join(chunks) if fits else None)


def _replaced(response: Any, chunks: list[bytes], limit: int) -> Told:
    """Let a response that was read whole be sent."""
    response.streaming_content = _again(chunks)
    return _told(response, chunks, limit)


def _listed(chunks: Iterable[bytes]) -> list[bytes]:
    return [*chunks]


async def _all(chunks: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


async def _again(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


# --- answers that are raised ---------------------------------------------------------------------

_HANDLED: Final = "_semel_handled"
"""The attribute of a request whose error has its answer: the error, and the answer."""

_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (MultiPartParserError, 400),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
)


def told_by(error: Any, request: Any, rules: RouteRules) -> Told | None:
    """Say which answer an error of a view will become; None = it is a failure of the view."""
    status = next((code for kind, code in _STATUSES if isinstance(error, kind)), None)
    framework = request is not inner(request)
    if framework and isinstance(error, import_string("rest_framework.exceptions.APIException")):
        status = getattr(error, "status_code", None)
    if status is None or rules.decide(status) == "failure":
        return None
    if rules.decide(status) != "store":
        return Told(status, [], b"")
    if framework:
        response = request.parser_context["view"].handle_exception(error)
    else:
        response = response_for_exception(request, error)
    response = rendered(response, request)
    response.headers.pop(rules.choices.replayed_header, None)
    send_for_error(error, request, response)
    return read(response, rules.max_response)


def send_for_error(error: Any, request: Any, response: Any) -> None:
    """Let an error that goes on its way end in this response: its handler has answered it."""
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
        def answer(request: Any, *args: Any, **told: Any) -> Any:
            known, response = getattr(request, _HANDLED, (None, None))
            if known is not None and known is told.get("exception"):
                return response
            return handler(request, *args, **told)

        return answer

    resolver.resolve_error_handler = resolved
