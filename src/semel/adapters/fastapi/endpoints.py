"""A function of the application as an endpoint: what FastAPI gives to it, and what to us besides.

FastAPI reads a function's signature to know what to give. So the decorated function has a signature
of its own: the endpoint's, with what the rules need added to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, get_args, get_origin

from fastapi import Request, Response, params
from fastapi.dependencies.utils import get_typed_return_annotation, get_typed_signature
from starlette.concurrency import run_in_threadpool

from semel.errors import ConfigError

_REQUEST: Final = "semel_request"
_RESPONSE: Final = "semel_response"
_NOT_CALLED_BY_FASTAPI: Final = (
    "a decorated endpoint was called without what FastAPI gives to it: a decorator above "
    "@idempotent needs functools.wraps, and a test that calls an endpoint itself has to call the "
    "undecorated function"
)


class Endpoint:
    """A function of the application; `signature` is what FastAPI is to see."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ConfigError(f"an endpoint is needed, not {type(function).__name__}")
        if _is(function, inspect.isgeneratorfunction) or _is(function, inspect.isasyncgenfunction):
            raise ConfigError(
                "an endpoint that yields its answer is a stream, which cannot be replayed: "
                "return a response, or leave the endpoint undecorated"
            )
        self.is_coroutine = _is(function, inspect.iscoroutinefunction)
        self._function: Callable[..., Awaitable[Any]] = (
            function if self.is_coroutine else partial(run_in_threadpool, function)
        )
        parameters = get_typed_signature(function).parameters
        self._request = _own(parameters, Request)
        self._response = _own(parameters, Response)
        self.signature = inspect.Signature(
            sorted([*parameters.values(), *self._added()], key=lambda each: each.kind),
            return_annotation=get_typed_return_annotation(function),
        )

    def _added(self) -> list[inspect.Parameter]:
        """Give the parameters that are ours.

        FastAPI gives its request to one parameter only: the endpoint's own, if it has one. The
        key's header is none of them: FastAPI would validate it on each request, for nothing.
        """
        added = []
        if self._request is None:
            added.append(_parameter(_REQUEST, Request))
        if self._response is None:
            added.append(_parameter(_RESPONSE, Response))
        return added

    def taken(self, misplaced: tuple[Any, ...], values: dict[str, Any]) -> tuple[Request, Response]:
        """Take out of what FastAPI gives what is ours: the request and the answer's beginnings."""
        if misplaced:
            raise ConfigError(_NOT_CALLED_BY_FASTAPI)
        try:
            request = values.pop(_REQUEST) if self._request is None else values[self._request]
            response = values.pop(_RESPONSE) if self._response is None else values[self._response]
        except KeyError:
            raise ConfigError(_NOT_CALLED_BY_FASTAPI) from None
        return request, response

    def call(self, values: dict[str, Any]) -> Awaitable[Any]:
        """Call the application's function, a plain one in a thread as FastAPI does."""
        return self._function(**values)


def _is(function: Callable[..., Any], test: Callable[[object], bool]) -> bool:
    """Tell of what kind a function is, or the one that it wraps, or that an object is called by."""
    while isinstance(function, partial):
        function = function.func
    given = function, inspect.unwrap(function)
    return any(test(each) or test(getattr(each, "__call__", None)) for each in given)  # noqa: B004 - it is asked what it is


def _own(parameters: Mapping[str, inspect.Parameter], kind: type) -> str | None:
    """Find the parameter to which FastAPI gives its request, or the answer's beginnings."""
    for parameter in parameters.values():
        annotation, more = parameter.annotation, (parameter.default,)
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)  # type: ignore[assignment]
        given = any(isinstance(each, params.Depends) for each in more)
        if not given and isinstance(annotation, type) and issubclass(annotation, kind):
            return parameter.name
    return None


def _parameter(name: str, annotation: type) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
