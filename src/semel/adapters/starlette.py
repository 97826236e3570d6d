"""Starlette: a decorator for endpoints, plain functions and methods of an `HTTPEndpoint`.

    idempotent = Idempotent("postgresql://localhost/shop")

    @idempotent(required=True, session=async_sessionmaker(engine))
    async def pay(request: Request, session: AsyncSession) -> Response: ...

An endpoint and its save are a task of their own: a client that disconnects takes neither with it.
The framework may have read the body already, as bytes or as a form. A response is read to its end,
whatever kind it is, and an error gets its answer, before anything is sent: it is recorded first.

FastAPI's decorator stands on this one. What `session=` does is in `starlette_sessions`.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager
from copy import copy
from functools import cache, partial, wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    overload,
)

from semel.adapters import asgi
from semel.adapters.check_decorators import (
    PROTECTED,
    Decorated,
    Routed,
    check_protected,
    name_of,
)
from semel.adapters.integration import AsyncExchange, AsyncIntegration, Background, Flow
from semel.aio import AsyncIdempotency
from semel.core.optional import Needed, inside
from semel.errors import ConfigError
from semel.http import requests
from semel.http.options import IntegrationOptions
from semel.http.requests import FORMS, Upload, form_bytes, without_boundary
from semel.http.rules import Rejected, RouteRules, TenantCheck
from semel.http.storing import UNPROTECTED, Answer, is_event_stream
from semel.stores.batching import running_loop
from semel.sync import Idempotency

with Needed("semel[starlette]", by=__name__):
    from anyio import CancelScope, to_thread
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from semel.adapters.starlette_sessions import SessionChoice

__all__ = ["Idempotent"]

F = TypeVar("F", bound=Callable[..., Any])
SessionOption: TypeAlias = Callable[[], Any] | str
"""A `sessionmaker` or an `async_sessionmaker`, or the parameter whose session is injected."""

_NOT_CALLED_BY_STARLETTE: Final = (
    "a decorated endpoint was called without a request: Starlette calls it with one, and a test "
    "that calls an endpoint itself has to call the undecorated function"
)


# Not public: what Starlette itself asks of a handler.
is_async_callable: Final = inside("starlette", "starlette._utils:is_async_callable")

_HANDLED: Final = "semel.handled"
"""Is in the scope of a request whose error has its answer: the error, and the answer."""

_SENT_AT_ONCE: Final = {"version": "3.0", "spec_version": "2.4"}
"""The server to which a response need not listen while it is sent."""

_STREAMS: Final = StreamingResponse.__call__, StreamingResponse.stream_response
"""What sends the chunks of a stream as they are: a class with others may send more than those."""

shield: Final = partial(CancelScope, shield=True)
"""AnyIO cancels again and again, hence its own shield; a second cancellation by others counts."""


class EndpointOptions(IntegrationOptions, total=False):
    """Options of every integration, and of endpoints that share a transaction with their record."""

    session: SessionOption | None
    """The session in whose transaction the record is written with the endpoint's own rows."""


class Idempotent:
    """Protects endpoints: `@idempotent`, or `@idempotent(required=True, ...)` with more options.

    `idempotency` is a URL or an `AsyncIdempotency`. An `Idempotency` is for endpoints with
    `session=` and a sync session only; a URL opens the kind of engine that an endpoint needs.

    Examples:
        >>> from starlette.responses import JSONResponse
        >>> idempotent = Idempotent("memory://")
        >>> @idempotent(required=True)
        ... async def pay(request: Request) -> JSONResponse:
        ...     return JSONResponse({"paid": 5}, 201)
    """

    def __init__(
        self,
        idempotency: AsyncIdempotency | Idempotency | str | None = None,
        **options: Unpack[EndpointOptions],
    ) -> None:
        if idempotency is None:
            raise ConfigError(
                'Idempotent() needs a store or an engine: pass Idempotent("sqlite:///semel.db"), '
                "for example, or Idempotent(AsyncIdempotency()), which uses semel's settings"
            )
        self._options: dict[str, Any] = {**options}
        self._given = idempotency
        self._threads: Idempotency | None = None
        self._integration = (
            _ThreadsIntegration(idempotency)
            if isinstance(idempotency, Idempotency)
            else AsyncIntegration(idempotency, {})
        )
        checked = {**self._options}
        _choice_of(checked.pop("session", None))
        # A bad option is an error here, not at the first endpoint.
        self._integration.rules_for(checked)
        self._background = Background()
        self._decorated: list[Decorated] = []

    @overload
    def __call__(self, endpoint: F, /) -> F: ...
    @overload
    def __call__(self, /, **options: Unpack[EndpointOptions]) -> Callable[[F], F]: ...
    def __call__(self, endpoint: Any = None, /, **options: Any) -> Any:
        """Decorate an endpoint; the route's own decorator goes above this one."""
        if endpoint is None:
            return partial(self._protect, options)
        return self._protect(options, endpoint)

    def init_app(self, app: Any) -> None:
        """Close the engine when `app` shuts down, after the requests that still run.

        When `app` starts, a decorator that protects nothing raises `ConfigError`.
        """
        around = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            running_loop()  # a server on trio learns here that semel cannot work there
            check_protected(self._decorated, self._routed(app))
            try:
                async with around(app) as state:
                    yield state
            finally:
                await self._background.drain()
                await self._integration.close()
                if self._threads is not None:
                    await to_thread.run_sync(self._threads.close)
                    self._threads = None

        app.router.lifespan_context = lifespan

    def _routed(self, app: Any) -> Iterable[Routed]:
        """Return the endpoints of an application, and those of what is mounted in it."""
        return (
            Routed(getattr(route, "endpoint", None), route.methods)
            for route in _all_routes(app.routes)
            if getattr(route, "methods", None) is not None
        )

    def _endpoint(self, function: Callable[..., Any], choice: SessionChoice | None) -> Endpoint:
        """Make an endpoint of a function, as the framework calls it; a hook."""
        return StarletteEndpoint(function, choice)

    def _protect(self, options: dict[str, Any], function: F) -> F:
        options = {**self._options, **options}
        choice = _choice_of(options.pop("session", None))
        rules = self._integration.rules_for(options)
        endpoint, name = self._endpoint(function, choice), name_of(function)
        if choice is None and isinstance(self._given, Idempotency):
            raise ConfigError(
                f"{name} needs an AsyncIdempotency or a URL: an Idempotency is for endpoints "
                "with session= and a sync session alone"
            )
        by = Protection(endpoint.invoked, self._integration, rules, self._background, name)
        run = protected(by) if choice is None else self._in_session(by, choice, endpoint)
        decorated = wraps(function)(run)
        self._decorated.append(Decorated(function, decorated, rules.choices.methods))
        self._finish(decorated, endpoint, rules)
        return cast("F", decorated)

    def _finish(self, decorated: Any, endpoint: Any, rules: RouteRules) -> None:
        """Describe a decorated function to the framework; a hook."""

    def _in_session(
        self, by: Protection, choice: SessionChoice, endpoint: Endpoint
    ) -> Callable[..., Awaitable[Any]]:
        """Check that session, endpoint and engine are of one kind, and let it run in a session."""
        name, for_threads = by.name, isinstance(self._given, Idempotency)
        choice.bind(endpoint, name)
        if not isinstance(self._given, str) and for_threads is choice.is_async:
            session, engine = (
                ("an AsyncSession", "AsyncIdempotency")
                if choice.is_async
                else ("a Session", "Idempotency")
            )
            raise ConfigError(
                f"{name} has a session that is {session}, which goes with an {engine}; a URL in "
                "its place opens the kind that is needed"
            )
        from semel.adapters import starlette_sessions  # noqa: PLC0415 - as below

        return starlette_sessions.protected(
            by, choice, partial(self._engine, is_async=choice.is_async)
        )

    def _engine(self, *, is_async: bool) -> AsyncIdempotency | Idempotency:
        """Return the engine for sessions of a kind: of the running loop, or of threads."""
        if is_async:
            return self._integration.engines.here().engine
        if isinstance(self._given, Idempotency):
            return self._given
        if self._threads is None:
            self._threads = Idempotency(cast("str", self._given))
        return self._threads


class _ThreadsIntegration(AsyncIntegration):
    """The rules of an engine for threads; the sessions of its endpoints claim in their own way."""

    def __init__(self, idempotency: Idempotency) -> None:
        self.opened_here = False
        self.tenants = TenantCheck()
        self.engine = cast("AsyncIdempotency", idempotency)  # asked for its settings alone


def _choice_of(given: SessionOption | None) -> SessionChoice | None:
    if given is None:
        return None
    # Only here: an application without such an endpoint need not have SQLAlchemy.
    from semel.adapters.starlette_sessions import SessionChoice  # noqa: PLC0415

    return SessionChoice(given)


def _all_routes(routes: Any) -> Iterator[Any]:
    for route in routes:
        yield route
        yield from _all_routes(getattr(route, "routes", None) or ())


# --- endpoints --------------------------------------------------------------------------------


class Endpoint(ABC):
    """A function of the application, and what the framework calls it with."""

    parameters: Mapping[str, inspect.Parameter]
    injected: Container[str] = frozenset()
    """The parameters whose values come from dependencies."""

    def __init__(self, function: Callable[..., Any], choice: SessionChoice | None = None) -> None:
        if not callable(function):
            raise ConfigError(f"an endpoint is needed, not {type(function).__name__}")
        if is_of_kind(function, inspect.isgeneratorfunction) or is_of_kind(
            function, inspect.isasyncgenfunction
        ):
            raise ConfigError(
                "an endpoint that yields its response is a stream, which can't be replayed: "
                "return a response, or leave the endpoint undecorated"
            )
        self.is_coroutine = is_of_kind(function, inspect.iscoroutinefunction)
        in_thread = run_in_threadpool if choice is None else choice.in_thread
        self._function: Callable[..., Awaitable[Any]] = (
            function if self.is_coroutine else partial(in_thread, function)
        )

    @abstractmethod
    def invoked(self, args: tuple[Any, ...], values: dict[str, Any]) -> Invocation:
        """Take what the framework has called the decorated function with."""


class StarletteEndpoint(Endpoint):
    """A function that takes the request and returns a response."""

    def __init__(self, function: Callable[..., Any], choice: SessionChoice | None = None) -> None:
        if isinstance(function, type):
            raise ConfigError("decorate the methods of an endpoint's class, not the class")
        super().__init__(function, choice)
        self.parameters = parameters_of(function)

    def invoked(self, args: tuple[Any, ...], values: dict[str, Any]) -> Invocation:
        """Find the request: the first argument, or the one after `self` in a method."""
        request = next((each for each in args[:2] if isinstance(each, Request)), None)
        if request is None:
            raise ConfigError(_NOT_CALLED_BY_STARLETTE)
        return Invocation(request, partial(self._function, *args, **values), _returned)


async def _returned(value: Any) -> Response:
    if not isinstance(value, Response):
        raise TypeError(f"an endpoint returns a Response, not {type(value).__name__}")
    return value


def is_of_kind(function: Callable[..., Any], test: Callable[[object], bool]) -> bool:
    """Return whether a function, or the one that it wraps or is called by, is of a kind."""
    while isinstance(function, partial):
        function = function.func
    given = function, inspect.unwrap(function)
    return any(test(each) or test(getattr(each, "__call__", None)) for each in given)  # noqa: B004 - it is asked what it is


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Read a function's parameters; names that only a type checker knows stay texts."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:
        return inspect.signature(function).parameters


def plain_annotation(parameter: inspect.Parameter) -> Any:
    """Return the annotation of a parameter, without what `Annotated` adds to it."""
    annotation = parameter.annotation
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


# --- one protected request ------------------------------------------------------------------------


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
        """Record an answer that is raised; the error is raised further, past the dependencies."""
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
        """Save a response; return the one to send, which is another if the attempt was lost."""
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
    """Let an error that is raised further end in this response."""
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
    """Make a response from an answer of semel's own, or from a replay."""
    response = Response(answer.body, answer.status)
    response.raw_headers = [*answer.headers]
    return response


async def read(response: Response, request: Request, flow: Flow) -> tuple[Response, bytes | None]:
    """Read a response to its end: what is to be sent in its place, and its body.

    A body of None is too large; what is not all there then goes out by the flow.
    """
    kind: Any = type(response)
    if kind.__call__ is not Response.__call__:
        if (kind.__call__, getattr(kind, "stream_response", None)) == _STREAMS:
            return response, await _held(response, flow)
        return await _sent(response, request, flow)
    body = bytes(response.body)
    return response, None if len(body) > flow.limit else body


async def _held(response: Any, flow: Flow) -> bytes | None:
    """Read a stream, and let it begin again with what was read of it."""

    def begun(chunks: AsyncIterator[bytes]) -> Response:
        sent = copy(response)
        sent.body_iterator = chunks
        return _waiting(sent, flow)

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
        return _waiting(_begun(StreamingResponse(chunks), start, background), flow)

    async def send(message: Any) -> None:
        start.update(message)
        await flow.take(bytes(message.get("body", b"")), begun)

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


def _waiting(response: Response, flow: Flow) -> Response:
    """Let a response, when it is sent no longer, wait for the request that it answers.

    Starlette leaves the chunks of a response where they are when its client disconnects: only the
    garbage collector would end them.
    """
    sent: Any = response
    sent.__class__ = _waiting_kind(sent.__class__)
    sent.semel_flow = flow
    return response


@cache
def _waiting_kind(kind: Any) -> type:
    class Sent(kind):  # type: ignore[misc]  # of whatever class the endpoint's response is
        semel_flow: Flow

        async def __call__(self, *args: Any) -> None:
            try:
                await super().__call__(*args)
            finally:
                await self.semel_flow.finished()

    return Sent


# --- the body of a request -----------------------------------------------------------------------


class Body:
    """A request for the rules, and its body; more of it than the limit is rejected."""

    def __init__(self, request: Request, limit: int) -> None:
        self._request, self._limit = request, limit
        self._parts = vars(request)  # what was read or parsed of its body is not public
        # The bytes, wherever they are there: of what is no form, the framework makes an empty one.
        self._consumed = self._parts["_stream_consumed"] and "_body" not in self._parts
        self._form: Any = self._parts["_form"] if self._consumed and _is_form(request) else None
        scope = request.scope
        lines: list[requests.HeaderLine] = scope["headers"]
        self.request = requests.Request(
            scope["method"].upper(),
            scope["path"],
            scope.get("query_string", b""),
            requests.Headers(lines if self._form is None else without_boundary(lines)),
            request,
        )

    async def read(self) -> bytes:
        """Return the body; if it had not been read yet, it is kept for the endpoint."""
        if self._form is not None:
            return await self._form_bytes()
        if self._consumed:
            raise ConfigError(
                "the body was read with request.stream() before the endpoint: read it with "
                "await request.body(), which keeps it"
            )
        if "_body" not in self._parts:
            try:
                self._parts["_body"] = await asgi.Body(
                    self._parts["_receive"], self._limit, self.request.headers
                ).read()
            except asgi.ClientGone:
                raise Rejected("body_incomplete") from None
        body = await self._request.body()
        if len(body) > self._limit:
            raise Rejected("body_too_large")
        return body

    async def _form_bytes(self) -> bytes:
        items = self._form.multi_items()
        if sum(_size(value) for _, value in items) > self._limit:
            raise Rejected("body_too_large")
        fields = [(name, value) for name, value in items if isinstance(value, str)]
        files = [(name, value) for name, value in items if not isinstance(value, str)]
        return form_bytes(fields, [await _upload(name, file) for name, file in files])


def _is_form(request: Request) -> bool:
    written = request.headers.get("content-type", "")
    return written.partition(";")[0].strip().lower() in FORMS


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else value.size or 0


async def _upload(name: str, file: Any) -> Upload:
    position = file.file.tell()  # a dependency may have read it, for a checksum
    await file.seek(0)
    content = await file.read()
    await file.seek(position)
    return Upload(name, file.filename or "", file.content_type or "", content)
