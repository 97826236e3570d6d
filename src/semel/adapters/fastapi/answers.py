"""What an endpoint returns becomes a whole answer, the way FastAPI makes it.

FastAPI does this after the endpoint; the answer has to be saved before, so it is done here, with
FastAPI's own parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from fastapi import Request, Response
from fastapi.datastructures import DefaultPlaceholder

from semel.core.extras import inside

# What makes a response of a value is not FastAPI's public API.
serialize_response: Final = inside("fastapi", "fastapi.routing:serialize_response")
is_body_allowed_for_status_code: Final = inside(
    "fastapi", "fastapi.utils:is_body_allowed_for_status_code"
)

_KNOWN: Final = inspect.signature(serialize_response).parameters
"""What this FastAPI wants to know to serialize a value: older ones know less."""


class Responses:
    """Makes the responses of one route, as the route was declared."""

    def __init__(self, route: Any, *, is_coroutine: bool) -> None:
        given, has_model = route.response_class, route.response_field is not None
        is_default = isinstance(given, DefaultPlaceholder)
        self._class: type[Response] = given.value if is_default else given
        self._status: int | None = route.status_code
        # FastAPI's quick way: a model is written to JSON at once.
        self._quick = "dump_json" in _KNOWN and has_model and is_default
        told = {
            "field": route.response_field,
            "include": route.response_model_include,
            "exclude": route.response_model_exclude,
            "by_alias": route.response_model_by_alias,
            "exclude_unset": route.response_model_exclude_unset,
            "exclude_defaults": route.response_model_exclude_defaults,
            "exclude_none": route.response_model_exclude_none,
            "is_coroutine": is_coroutine,
            "dump_json": self._quick,
        }
        self._serialize: Callable[..., Awaitable[Any]] = partial(
            serialize_response, **{name: value for name, value in told.items() if name in _KNOWN}
        )

    async def of(self, value: object, beginnings: Response) -> Response:
        """Make the response of a value; `beginnings` has what the endpoint set beside it."""
        if isinstance(value, Response):
            return value
        content = await self._serialize(response_content=value)
        status = beginnings.status_code or self._status
        options: dict[str, Any] = {} if status is None else {"status_code": status}
        if self._quick:
            response = Response(content, media_type="application/json", **options)
        else:
            response = self._class(content, **options)
        if not is_body_allowed_for_status_code(response.status_code):
            response.body = b""
        response.raw_headers.extend(beginnings.raw_headers)
        return response


def route_of(request: Request) -> Any:
    """Give the route that was chosen, as the routers around it completed it."""
    route = request.scope["route"]
    completed = request.scope.get("fastapi", {}).get("effective_route_context")
    return completed if getattr(completed, "original_route", None) is route else route
