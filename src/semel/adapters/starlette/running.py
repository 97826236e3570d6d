"""One protected request whose endpoint runs: its body, its answer or error, and their record.

The framework may have read the body already, as bytes or as a form. A response is read to its end,
whatever kind it is, and an error gets its answer, before anything is sent: it is recorded first.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, cast

from anyio import CancelScope
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from semel.adapters.asgi import EMPTY_AT_MOST
from semel.adapters.check_decorators import PROTECTED
from semel.adapters.integration import AsyncExchange, AsyncIntegration
from semel.adapters.streaming import Background, Flow
from semel.core.optional import inside
from semel.http import messages
from semel.http.messages import Answer, Upload, form_bytes, without_boundary
from semel.http.rules import Rejected, RouteRules
from semel.http.storing import UNPROTECTED, is_event_stream

# Not public: what Starlette itself asks of a handler.
is_async_callable: Final = inside("starlette", "starlette._utils:is_async_callable")

_HANDLED: Final = "semel.handled"
"""Is in the scope of a request whose error has its answer: the error, and the answer."""

_SENT_AT_ONCE: Final = {"version": "3.0", "spec_version": "2.4"}
"""The server to which a response need not listen while it is sent."""

shield: Final = partial(CancelScope, shield=True)
"""AnyIO cancels again and again, hence its own shield; a second cancellation by others counts."""


class Invocation(NamedTuple):
    """One request, and the endpoint that is to answer it."""

    request: Request
    call: Callable[..., Awaitable[Any]]
    """Calls the application's function, with more arguments if there are any."""
    respond: Callable[[Any], Awaitable[Response]]
    """Makes a response of what the function has returned."""


class Protection(NamedTuple):
    """What protects an endpoint."""

    invoked: Callable[[tuple[Any, ...], dict[str, Any]], Invocation]
    """Takes what the framework has called the decorated function with."""
    integration: AsyncIntegration
    rules: RouteRules
    background: Background
    name: str
    """The endpoint's own, for messages."""


def protected(by: Protection) -> Callable[..., Awaitable[Any]]:
    """Make the function that the framework calls in the place of an endpoint."""
    rules = by.rules

    async def answered(*args: Any, **values: Any) -> Any:
        invocation = by.invoked(args, values)
        request = invocation.request
        if PROTECTED in request.scope or not rules.concerns(request.method, by.name):
            return await invocation.call()
        body = Body(request, rules.max_body)
        begun = await by.integration.begin(rules, body.request, body.read)
        if begun is None:
            return await invocation.call()
        if isinstance(begun, Answer):
            return response_of_answer(begun)
        flow = Flow(rules.max_response, shield)
        return await flow.answer(by.background, Running(begun, request, flow).run(invocation))

    return answered


class Running:
    """One request whose endpoint runs."""

    def __init__(self, exchange: AsyncExchange, request: Request, flow: Flow) -> None:
        self._exchange, self._request, self._flow = exchange, request, flow

    async def run(self, invocation: Invocation) -> Response:
        """Run the endpoint, and record its answer or its error."""
        self._exchange.enter()
        try:
            try:
                value = await invocation.call()
            except HTTPException as error:
                await self._raised(error)
            response = await invocation.respond(value)
            return await self._recorded(response)
        except BaseException as error:
            if not self._exchange.ended:
                await self._exchange.raised(error)
            raise

    async def _raised(self, error: HTTPException) -> NoReturn:
        """Record an answer that is raised; the error goes on its way, past the dependencies."""
        lines = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (error.headers or {}).items()
        ]
        decision = self._exchange.rules.decide(error.status_code, lines)
        if decision == "store":
            response = await response_of_error(self._request, error)
            if response is not None:
                send_for_error(self._request, error, await self._recorded(response))
        elif decision != "failure":
            await self._exchange.answered(error.status_code, lines, b"")
        raise error

    async def _recorded(self, response: Response) -> Response:
        """Save a response; returns what is to be sent, which is another if the attempt was lost."""
        rules, lines = self._exchange.rules, response.raw_headers
        lines[:] = rules.first(lines)
        if is_event_stream(lines):
            await self._exchange.unprotected()
            lines.append(UNPROTECTED)
            return response
        response, body = await read(response, self._request, self._flow)
        instead = await self._exchange.answered(response.status_code, response.raw_headers, body)
        return response if instead is None else response_of_answer(instead)


# --- responses -----------------------------------------------------------------------------------


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


# --- the body of a request -----------------------------------------------------------------------


class Body:
    """A request for the rules, and its body; more of it than the limit is refused."""

    def __init__(self, request: Request, limit: int) -> None:
        self._request, self._limit = request, limit
        self._parts = vars(request)  # what was read or parsed of its body is not public
        self._form = self._parts["_form"]
        scope = request.scope
        self.request = messages.Request(
            scope["method"].upper(),
            scope["path"],
            scope.get("query_string", b""),
            messages.Headers(self._lines()),
            request,
        )

    def _lines(self) -> list[messages.HeaderLine]:
        lines: list[messages.HeaderLine] = self._request.scope["headers"]
        return lines if self._form is None else without_boundary(lines)

    async def read(self) -> bytes:
        """Return the body; one that nobody has read yet is kept for the endpoint."""
        if self._form is not None:
            return await self._form_bytes()
        if "_body" not in self._parts:
            self._parts["_body"] = await self._streamed()
        body = await self._request.body()
        if len(body) > self._limit:
            raise Rejected("body_too_large")
        return body

    async def _streamed(self) -> bytes:
        content, empty = bytearray(), 0  # not a list: a client may send one byte at a time
        receive = self._parts["_receive"]

        async def counted() -> Any:
            """Receive for Starlette's stream, which keeps messages without content to itself."""
            nonlocal empty
            message = await receive()
            if not message.get("body"):
                empty += 1
                if empty > EMPTY_AT_MOST + len(content):
                    raise Rejected("body_too_large")
            return message

        self._parts["_receive"] = counted
        try:
            async for chunk in self._request.stream():
                content += chunk
                if len(content) > self._limit:
                    raise Rejected("body_too_large")
        except ClientDisconnect:
            raise Rejected("body_incomplete") from None
        finally:
            self._parts["_receive"] = receive
        return bytes(content)

    async def _form_bytes(self) -> bytes:
        items = self._form.multi_items()
        if sum(_size(value) for _, value in items) > self._limit:
            raise Rejected("body_too_large")
        fields = [(name, value) for name, value in items if isinstance(value, str)]
        files = [(name, value) for name, value in items if not isinstance(value, str)]
        return form_bytes(fields, [await _upload(name, file) for name, file in files])


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else value.size or 0


async def _upload(name: str, file: Any) -> Upload:
    position = file.file.tell()  # a dependency may have read it, for a checksum
    await file.seek(0)
    content = await file.read()
    await file.seek(position)
    return Upload(name, file.filename or "", file.content_type or "", content)
