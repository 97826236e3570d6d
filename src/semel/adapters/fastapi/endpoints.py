"""A function of the application as an endpoint: what FastAPI gives to it, and what to us besides.

FastAPI reads a function's signature to know what to give. So the decorated function has a signature
of its own: the endpoint's, with what the rules need added to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

from fastapi import Request, Response, params
from starlette.concurrency import run_in_threadpool

from semel.adapters.fastapi.answers import Responses, route_of
from semel.adapters.starlette.endpoints import (
    Visit,
    checked_endpoint,
    in_step,
    is_of_kind,
    plain_annotation,
)
from semel.core.extras import inside
from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.adapters.starlette.sessions import SessionChoice

# How FastAPI reads a signature is not its public API.
get_typed_signature: Final = inside("fastapi", "fastapi.dependencies.utils:get_typed_signature")
get_typed_return_annotation: Final = inside(
    "fastapi", "fastapi.dependencies.utils:get_typed_return_annotation"
)

_REQUEST: Final = "semel_request"
_RESPONSE: Final = "semel_response"
_NOT_CALLED_BY_FASTAPI: Final = (
    "a decorated endpoint was called without what FastAPI gives to it: a decorator above "
    "@idempotent needs functools.wraps, and a test that calls an endpoint itself has to call the "
    "undecorated function"
)


class FastAPIEndpoint:
    """A function of the application; `signature` is what FastAPI is to see."""

    def __init__(self, function: Callable[..., Any], choice: SessionChoice | None = None) -> None:
        checked_endpoint(function)
        self.is_coroutine = is_of_kind(function, inspect.iscoroutinefunction)
        in_thread: Any = run_in_threadpool if choice is None else in_step
        self._call: Callable[..., Awaitable[Any]] = (
            function if self.is_coroutine else partial(in_thread, function)
        )
        self._choice = choice
        self._returns = get_typed_return_annotation(function)
        self.parameters: Mapping[str, inspect.Parameter] = get_typed_signature(function).parameters
        self.injected: Container[str] = {
            each.name for each in self.parameters.values() if _is_injected(each)
        }
        self._request = self._own(Request)
        self._response = self._own(Response)
        self._routes: dict[int, tuple[Any, Responses]] = {}

    @property
    def signature(self) -> inspect.Signature:
        """The endpoint's own, without the session that we give to it, and with what we need."""
        choice = self._choice
        hidden = None if choice is None or choice.depends else choice.parameter
        shown = [each for each in self.parameters.values() if each.name != hidden]
        # What follows the session may have no default, and FastAPI gives all by name.
        return inspect.Signature(
            sorted([*shown, *self._added()], key=lambda each: each.kind),
            return_annotation=self._returns,
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

    def visited(self, args: tuple[Any, ...], values: dict[str, Any]) -> Visit:
        """Take out of what FastAPI gives what is ours: the request and the answer's beginnings."""
        if args:
            raise ConfigError(_NOT_CALLED_BY_FASTAPI)
        try:
            request = values.pop(_REQUEST) if self._request is None else values[self._request]
            response = values.pop(_RESPONSE) if self._response is None else values[self._response]
        except KeyError:
            raise ConfigError(_NOT_CALLED_BY_FASTAPI) from None
        respond = partial(self._responded, request, response)
        return Visit(request, partial(self._call, **values), respond)

    async def _responded(self, request: Request, beginnings: Response, value: Any) -> Response:
        route = route_of(request)
        if id(route) not in self._routes:  # by id: a route need not have a hash
            # In a transaction no thread is waited for: its connection would wait as well.
            in_loop = self.is_coroutine or self._choice is not None
            self._routes[id(route)] = route, Responses(route, is_coroutine=in_loop)
        return await self._routes[id(route)][1].of(value, beginnings)

    def _own(self, kind: type) -> str | None:
        """Find the parameter to which FastAPI gives its request, or the answer's beginnings."""
        for parameter in self.parameters.values():
            annotation = plain_annotation(parameter)
            if parameter.name in self.injected or not isinstance(annotation, type):
                continue
            if issubclass(annotation, kind):
                return parameter.name
        return None


def _is_injected(parameter: inspect.Parameter) -> bool:
    """Tell whether a dependency gives what a parameter has."""
    more = (parameter.default, *get_args(parameter.annotation)[1:])
    return any(isinstance(each, params.Depends) for each in more)


def _parameter(name: str, annotation: type) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
