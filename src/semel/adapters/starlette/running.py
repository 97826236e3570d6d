"""One protected request whose endpoint runs, and the record of its answer or its error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from anyio import CancelScope
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from semel.adapters.aio_integration import AsyncExchange
from semel.adapters.starlette.answers import (
    read,
    response_of_answer,
    response_of_error,
    send_for_error,
)
from semel.adapters.streaming import Flow
from semel.http.storing import UNPROTECTED, is_event_stream

shield: Final = partial(CancelScope, shield=True)
"""AnyIO cancels again and again, hence its own shield; a second cancellation by others counts."""


class Invocation(NamedTuple):
    """One request, and the endpoint that is to answer it."""

    request: Request
    call: Callable[..., Awaitable[Any]]
    """Calls the application's function, with more arguments if there are any."""
    respond: Callable[[Any], Awaitable[Response]]
    """Makes a response of what the function has returned."""


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
                await self._refused(error)
            response = await invocation.respond(value)
            return await self._recorded(response)
        except BaseException as error:
            if not self._exchange.ended:
                await self._exchange.raised(error)
            raise

    async def _refused(self, error: HTTPException) -> NoReturn:
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
        """Save a response; gives what is to be sent, which is another if the attempt was lost."""
        rules, lines = self._exchange.rules, response.raw_headers
        lines[:] = rules.first(lines)
        if is_event_stream(lines):
            await self._exchange.unprotected()
            lines.append(UNPROTECTED)
            return response
        response, body = await read(response, self._request, self._flow)
        instead = await self._exchange.answered(response.status_code, response.raw_headers, body)
        return response if instead is None else response_of_answer(instead)
