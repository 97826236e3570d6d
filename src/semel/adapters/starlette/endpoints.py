"""A function of the application as an endpoint: what Starlette calls it with."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Protocol, get_args, get_origin

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from semel.errors import ConfigError

_NOT_CALLED_BY_STARLETTE: Final = (
    "a decorated endpoint was called without a request: Starlette calls it with one, and a test "
    "that calls an endpoint itself has to call the undecorated function"
)


class Invocation(NamedTuple):
    """One request, and the endpoint that is to answer it."""

    request: Request
    call: Callable[..., Awaitable[Any]]
    """Calls the application's function, with more arguments if there are any."""
    respond: Callable[[Any], Awaitable[Response]]
    """Makes a response of what the function has returned."""


class Endpoint(Protocol):
    """A function of the application."""

    is_coroutine: bool
    parameters: Mapping[str, inspect.Parameter]
    injected: Container[str]
    """The parameters whose values come from dependencies."""

    def invoked(self, args: tuple[Any, ...], values: dict[str, Any]) -> Invocation:
        """Take what the framework has called the decorated function with."""
        ...


InThread = Callable[..., Awaitable[Any]]
"""Runs a function in a thread: `await in_thread(function, *args, **kwargs)`."""


class StarletteEndpoint:
    """A function that takes the request and returns a response."""

    injected: Container[str] = frozenset()

    def __init__(
        self, function: Callable[..., Any], in_thread: InThread = run_in_threadpool
    ) -> None:
        if isinstance(function, type):
            raise ConfigError("decorate the methods of an endpoint's class, not the class")
        checked_endpoint(function)
        self.is_coroutine = is_of_kind(function, inspect.iscoroutinefunction)
        self._function: Callable[..., Awaitable[Any]] = (
            function if self.is_coroutine else partial(in_thread, function)
        )
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


def checked_endpoint(function: Any) -> None:
    """Refuse what is no endpoint, or one whose answer cannot be replayed."""
    if not callable(function):
        raise ConfigError(f"an endpoint is needed, not {type(function).__name__}")
    if is_of_kind(function, inspect.isgeneratorfunction) or is_of_kind(
        function, inspect.isasyncgenfunction
    ):
        raise ConfigError(
            "an endpoint that yields its answer is a stream, which cannot be replayed: "
            "return a response, or leave the endpoint undecorated"
        )


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
    """Give the annotation of a parameter, without what `Annotated` adds to it."""
    annotation = parameter.annotation
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


# --- threads of requests with a sync session -----------------------------------------------------


class _Limits(NamedTuple):
    """What bounds the threads of one event loop."""

    requests: CapacityLimiter
    """How many requests with a sync session run at the same time: as many as plain endpoints."""
    steps: CapacityLimiter
    """Every step of those requests has a thread at once.

    In the framework's own pool, the commit of one request would wait for threads of others, which
    wait for the connection that it would give back.
    """


_limits: Final[RunVar[_Limits]] = RunVar("semel_session_limits")


def limits_here() -> _Limits:
    """Give the limits of the running event loop."""
    try:
        return _limits.get()
    except LookupError:
        at_once = to_thread.current_default_thread_limiter().total_tokens
        made = _Limits(CapacityLimiter(at_once), CapacityLimiter(math.inf))
        _limits.set(made)
        return made


async def in_step(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one step of a request with a sync session in a thread."""
    return await to_thread.run_sync(partial(function, *args, **kwargs), limiter=limits_here().steps)
