"""A response is read to its end, whatever kind it is, and an error gets its answer.

Both happen before the answer is sent: it is recorded first.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from copy import copy
from functools import partial
from typing import Any, Final, cast

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from semel.adapters.streaming import Flow
from semel.core.extras import inside
from semel.http.requests import Answer
from semel.http.storing import is_event_stream

# Not public: what Starlette itself asks of a handler.
is_async_callable: Final = inside("starlette", "starlette._utils:is_async_callable")

_HANDLED: Final = "semel.handled"
"""Is in the scope of a request whose error has its answer: the error, and the answer."""

_SENT_AT_ONCE: Final = {"version": "3.0", "spec_version": "2.4"}
"""The server to which a response need not listen while it is sent."""


async def response_of_error(request: Request, error: HTTPException) -> Response | None:
    """Let the application's own handler answer an error; None = it does not.

    The handler stays in its table in a wrapper, which lets it answer each error once.
    """
    handlers, by_status = request.scope["starlette.exception_handlers"]
    table, name = by_status, cast("object", error.status_code)
    if name not in table:
        table, name = handlers, next(kind for kind in type(error).__mro__ if kind in handlers)
    if not isinstance(table[name], _HandlesOnce):
        table[name] = _HandlesOnce(table[name])
    response: Response | None = await table[name].asked(request, error)
    if response is None or is_event_stream(response.raw_headers):
        return response
    return await _whole(response, request)


def send_for_error(request: Request, error: HTTPException, response: Response) -> None:
    """Let an error that goes on its way end in this response."""
    request.scope[_HANDLED] = error, response


class _HandlesOnce:
    """A handler of the application's for errors; one that it has answered keeps its answer."""

    def __init__(self, handler: Any) -> None:
        # Starlette's own question: the wrapper answers for every endpoint of the application.
        is_async = is_async_callable(handler)
        self.asked: Any = handler if is_async else partial(run_in_threadpool, handler)

    async def __call__(self, request: Any, error: Exception) -> Any:
        known, response = request.scope.get(_HANDLED, (None, None))
        return response if known is error else await self.asked(request, error)


async def _whole(response: Response, request: Request) -> Response:
    """Read a response to its end: it is recorded first; Starlette sends it later."""
    if type(response).__call__ is Response.__call__:
        return response
    return (await _sent(response, request, Flow(sys.maxsize)))[0]


def response_of_answer(answer: Answer) -> Response:
    """Make a response of an answer that is ours, or of a replay."""
    response = Response(answer.body, answer.status)
    response.raw_headers = [*answer.headers]
    return response


async def read(response: Response, request: Request, flow: Flow) -> tuple[Response, bytes | None]:
    """Read a response to its end: what is to be sent in its place, and its body.

    A body of None is too large; what is not all there then goes out by the flow.
    """
    if hasattr(response, "body_iterator"):
        return response, await _held(response, flow)
    if type(response).__call__ is not Response.__call__:
        return await _sent(response, request, flow)
    body = bytes(response.body)
    return response, None if len(body) > flow.limit else body


async def _held(response: Any, flow: Flow) -> bytes | None:
    """Read a stream, and let it begin again with what was read of it."""

    def begun(chunks: AsyncIterator[bytes]) -> Response:
        sent: Any = copy(response)
        sent.body_iterator = chunks
        return cast("Response", sent)

    async for chunk in response.body_iterator:
        encoded = chunk.encode(response.charset) if isinstance(chunk, str) else bytes(chunk)
        await flow.take(encoded, begun)
    body = flow.body
    if body is not None:
        response.body_iterator = _once(body)
    return body


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _sent(response: Response, request: Request, flow: Flow) -> tuple[Response, bytes | None]:
    """Read a response that makes its body only when it is sent, such as a file."""
    start: Any = {}
    background, response.background = response.background, None

    def begun(chunks: AsyncIterator[bytes]) -> Response:
        return _begun(StreamingResponse(chunks), start, background)

    async def send(message: Any) -> None:
        start.update(message)
        await flow.take(message.get("body", b""), begun)

    quiet = {**request.scope, "extensions": {}, "asgi": _SENT_AT_ONCE}
    await response(quiet, request.receive, send)
    body = flow.body
    return _begun(Response(body), start, background), body


def _begun(response: Response, start: Any, background: Any) -> Response:
    """Let a response begin as another one would."""
    response.status_code = start["status"]
    response.raw_headers = [*start["headers"]]
    response.background = background
    return response
