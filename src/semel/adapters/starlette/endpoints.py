"""The decorator of endpoints, and what Starlette calls an endpoint with.

An endpoint and its save are a task of their own: a client who goes away takes neither with it.
"""

from __future__ import annotations

import inspect
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
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    overload,
)

from anyio import to_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from semel.adapters.check_decorators import (
    Decorated,
    Routed,
    check_protected,
    name_of,
)
from semel.adapters.integration import AsyncIntegration
from semel.adapters.starlette.running import Invocation, Protection, protected
from semel.adapters.streaming import Background
from semel.aio import AsyncIdempotency
from semel.errors import ConfigError
from semel.http.options import IntegrationOptions
from semel.http.rules import RouteRules
from semel.stores.loops import running_loop
from semel.sync import Idempotency

if TYPE_CHECKING:
    from semel.adapters.starlette.sessions import SessionChoice

F = TypeVar("F", bound=Callable[..., Any])
SessionOption: TypeAlias = Callable[[], Any] | str
"""A `sessionmaker` or an `async_sessionmaker`, or the parameter whose session is injected."""

_NOT_CALLED_BY_STARLETTE: Final = (
    "a decorated endpoint was called without a request: Starlette calls it with one, and a test "
    "that calls an endpoint itself has to call the undecorated function"
)


class EndpointOptions(IntegrationOptions, total=False):
    """Options of every integration, and of endpoints that share a transaction with their record."""

    session: SessionOption | None
    """The session in whose transaction the record is written with the endpoint's own rows."""


class Idempotent:
    """Protects endpoints: `@idempotent`, or `@idempotent(required=True, ...)` with more options.

    `idempotency` is a URL or an `AsyncIdempotency`. An `Idempotency` is for endpoints with
    `session=` and a sync session alone; a URL opens whichever kind of engine an endpoint needs.

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
                'say where records are kept: Idempotent("sqlite:///semel.db"), for example, or '
                "Idempotent(AsyncIdempotency()), which uses semel's settings"
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
        """End when `app` ends, and finish the requests that still run then.

        When it starts, a decorator that protects nothing is a ConfigError.
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
        """Tell the framework more of a decorated function; a hook."""

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
        from semel.adapters.starlette import sessions  # noqa: PLC0415 - as below

        return sessions.protected(by, choice, partial(self._engine, is_async=choice.is_async))

    def _engine(self, *, is_async: bool) -> AsyncIdempotency | Idempotency:
        """Return the engine for sessions of a kind: of the running loop, or of threads."""
        if is_async:
            return self._integration.engines[running_loop()].engine
        if isinstance(self._given, Idempotency):
            return self._given
        if self._threads is None:
            self._threads = Idempotency(cast("str", self._given))
        return self._threads


class _ThreadsIntegration(AsyncIntegration):
    """The rules of an engine for threads; the sessions of its endpoints claim in their own way."""

    def __init__(self, idempotency: Idempotency) -> None:
        self.opened_here = False
        self.engine = cast("AsyncIdempotency", idempotency)  # asked for its settings alone


def _choice_of(given: SessionOption | None) -> SessionChoice | None:
    if given is None:
        return None
    # Only here: an application without such an endpoint need not have SQLAlchemy.
    from semel.adapters.starlette.sessions import SessionChoice  # noqa: PLC0415

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
                "an endpoint that yields its answer is a stream, which cannot be replayed: "
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
    """Tell of what kind a function is, or the one that it wraps, or that an object is called by."""
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
