"""The decorator of endpoints, and how a protected one runs.

An endpoint and its save are a task of their own: a client who goes away takes neither with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Any, Final, NoReturn, TypeVar, Unpack, cast, overload

from anyio import CancelScope
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from semel.adapters.aio_door import AsyncDoor, AsyncExchange
from semel.adapters.aio_following import Flow
from semel.adapters.aside import Aside
from semel.adapters.fastapi.answers import (
    Responses,
    read,
    response_of_answer,
    response_of_error,
    route_of,
    send_for_error,
)
from semel.adapters.fastapi.bodies import Body
from semel.adapters.fastapi.endpoints import Endpoint
from semel.adapters.fastapi.openapi import MARK, document
from semel.adapters.fastapi.routes import all_routes_of
from semel.adapters.misplaced import Decorated, Routed, name_of, refuse_unprotected
from semel.adapters.nesting import PROTECTED
from semel.aio import AsyncIdempotency
from semel.errors import ConfigError
from semel.http.messages import Answer
from semel.http.options import DoorOptions
from semel.http.rulebook import Rulebook
from semel.http.storing import UNPROTECTED, is_event_stream

F = TypeVar("F", bound=Callable[..., Any])

_shield: Final = partial(CancelScope, shield=True)
"""AnyIO cancels again and again, hence its own shield; a second cancellation by others counts."""


class Idempotent:
    """Protects endpoints: `@idempotent`, or `@idempotent(required=True, ...)` with more options."""

    def __init__(
        self, idempotency: AsyncIdempotency | str | None = None, **options: Unpack[DoorOptions]
    ) -> None:
        if idempotency is None:
            raise ConfigError(
                'it is not said where records are kept: Idempotent("sqlite:///semel.db"), say, '
                "or Idempotent(AsyncIdempotency()), which goes by semel's settings"
            )
        self._options: dict[str, Any] = {**options}
        self._door = AsyncDoor(idempotency, {})
        self._door.book(self._options)  # a bad option is told of here, not at the first endpoint
        self._aside = Aside()
        self._decorated: list[Decorated] = []

    @overload
    def __call__(self, endpoint: F, /) -> F: ...
    @overload
    def __call__(self, /, **options: Unpack[DoorOptions]) -> Callable[[F], F]: ...
    def __call__(self, endpoint: Any = None, /, **options: Any) -> Any:
        """Decorate an endpoint; the route's own decorator goes above this one."""
        if endpoint is None:
            return partial(self._protect, options)
        return self._protect(options, endpoint)

    def init_app(self, app: FastAPI) -> None:
        """Tell of the protected endpoints in the application's OpenAPI, and end when it ends.

        When it starts, a decorator that protects nothing is a ConfigError.
        """
        document(app)
        around = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            refuse_unprotected(
                self._decorated,
                (
                    # A mounted application need not be of Starlette: its routes have other names.
                    Routed(getattr(route, "endpoint", None), route.methods)
                    for route in all_routes_of(app.routes)
                ),
            )
            try:
                async with around(app) as state:
                    yield state
            finally:
                await self._aside.drain()
                await self._door.close()

        app.router.lifespan_context = lifespan

    def _protect(self, options: dict[str, Any], function: F) -> F:
        book = self._door.book({**self._options, **options})
        endpoint, name = Endpoint(function), name_of(function)
        routes: dict[int, tuple[Any, Responses]] = {}

        @wraps(function)
        async def protected(*misplaced: Any, **values: Any) -> Any:
            request, beginnings = endpoint.taken(misplaced, values)
            begun = await self._begun(book, request, name)
            if begun is None:
                return await endpoint.call(values)
            if isinstance(begun, Answer):
                return response_of_answer(begun)
            route = route_of(request)
            if id(route) not in routes:  # by id: a route need not have a hash
                routes[id(route)] = route, Responses(route, is_coroutine=endpoint.is_coroutine)
            flow = Flow(book.max_response, _shield)
            running = _Running(begun, request, routes[id(route)][1], flow)
            return await flow.answer(self._aside, running.run(endpoint, values, beginnings))

        protected.__signature__ = endpoint.signature  # type: ignore[attr-defined]
        setattr(protected, MARK, book.choices)
        self._decorated.append(Decorated(function, protected, book.choices.methods))
        return cast("F", protected)

    async def _begun(
        self, book: Rulebook, request: Request, name: str
    ) -> AsyncExchange | Answer | None:
        if PROTECTED in request.scope or not book.concerns(request.method, name):
            return None
        body = Body(request, book.max_body)
        return await self._door.begin(book, body.request, body.read)


class _Running:
    """One request whose endpoint runs."""

    def __init__(
        self, exchange: AsyncExchange, request: Request, responses: Responses, flow: Flow
    ) -> None:
        self._exchange, self._request, self._responses = exchange, request, responses
        self._flow = flow

    async def run(
        self, endpoint: Endpoint, values: dict[str, Any], beginnings: Response
    ) -> Response:
        """Run the endpoint, and record its answer or its error."""
        self._exchange.enter()
        try:
            try:
                value = await endpoint.call(values)
            except HTTPException as error:
                await self._refused(error)
            response = await self._responses.of(value, beginnings)
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
        keeping = self._exchange.book.keeping(error.status_code, lines)
        if keeping == "store":
            response = await response_of_error(self._request, error)
            if response is not None:
                send_for_error(self._request, error, await self._recorded(response))
        elif keeping != "failure":
            await self._exchange.answered(error.status_code, lines, b"")
        raise error

    async def _recorded(self, response: Response) -> Response:
        """Save a response; gives what is to be sent, which is another if the attempt was lost."""
        book, lines = self._exchange.book, response.raw_headers
        lines[:] = book.first(lines)
        if is_event_stream(lines):
            await self._exchange.unprotected()
            lines.append(UNPROTECTED)
            return response
        response, body = await read(response, self._request, self._flow)
        instead = await self._exchange.answered(response.status_code, response.raw_headers, body)
        return response if instead is None else response_of_answer(instead)
