"""Responses of Django as values, and values as responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import chain
from typing import Any, NamedTuple

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from semel.adapters.django.bodies import inner
from semel.adapters.following import up_to
from semel.http.messages import Answer, HeaderLine
from semel.http.rulebook import Rulebook
from semel.http.storing import UNPROTECTED


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
    """Read a response on a thread; a stream gets what was read of it back."""
    if not response.streaming:
        return _told(response, response.content, limit)
    content = response.streaming_content
    if response.is_async:
        held, whole = async_to_sync(_up_to)(limit, content)
        response.streaming_content = _again(held, content)
    else:
        held, whole = up_to(limit, content)
        response.streaming_content = chain(held, content)
    return Told(response.status_code, lines_of(response), b"".join(held) if whole else None)


async def aread(response: Any, limit: int) -> Told:
    """Read a response on asyncio; a stream gets what was read of it back."""
    if not response.streaming:
        return _told(response, response.content, limit)
    content = response.streaming_content
    if response.is_async:
        held, whole = await _up_to(limit, content)
        response.streaming_content = _again(held, content)
    else:
        held, whole = await sync_to_async(up_to)(limit, content)
        response.streaming_content = _again(held) if whole else chain(held, content)
    return Told(response.status_code, lines_of(response), b"".join(held) if whole else None)


def _told(response: Any, body: bytes, limit: int) -> Told:
    return Told(response.status_code, lines_of(response), body if len(body) <= limit else None)


async def _up_to(limit: int, chunks: AsyncIterator[bytes]) -> tuple[list[bytes], bool]:
    held: list[bytes] = []
    async for chunk in chunks:
        held.append(chunk)
        limit -= len(chunk)
        if limit < 0:
            return held, False
    return held, True


async def _again(
    held: list[bytes], rest: AsyncIterator[bytes] | None = None
) -> AsyncIterator[bytes]:
    for chunk in held:
        yield chunk
    if rest is not None:
        async for chunk in rest:
            yield chunk


# --- answers that are raised ---------------------------------------------------------------------

_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (MultiPartParserError, 400),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
)


def told_by(error: Any, request: Any, book: Rulebook) -> Told | None:
    """Say which answer an error of a view will become; None = it is a failure of the view."""
    status = next((code for kind, code in _STATUSES if isinstance(error, kind)), None)
    framework = request is not inner(request)
    if framework and isinstance(error, import_string("rest_framework.exceptions.APIException")):
        status = getattr(error, "status_code", None)
    if status is None or book.keeping(status) == "failure":
        return None
    if book.keeping(status) != "store":
        return Told(status, [], b"")
    if framework:
        response = request.parser_context["view"].handle_exception(error)
    else:
        response = response_for_exception(request, error)
    return read(rendered(response, request), book.max_response)
