"""A function of the application as an endpoint: what Starlette calls it with."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from semel.adapters.starlette.running import Invocation
from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.adapters.starlette.sessions import SessionChoice

_NOT_CALLED_BY_STARLETTE: Final = (
    "a decorated endpoint was called without a request: Starlette calls it with one, and a test "
    "that calls an endpoint itself has to call the undecorated function"
)


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
    """Give the annotation of a parameter, without what `Annotated` adds to it."""
    annotation = parameter.annotation
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
