"""The decorator of endpoints; how a protected one runs is Starlette's (`semel.adapters.starlette`).

An endpoint and its save are a task of their own: a client who goes away takes neither with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from semel.adapters.check_decorators import Routed
from semel.adapters.fastapi.endpoints import FastAPIEndpoint
from semel.adapters.fastapi.openapi import MARK, document
from semel.adapters.fastapi.routes import all_routes_of
from semel.adapters.starlette import door
from semel.adapters.starlette.endpoints import Endpoint
from semel.http.rules import Rulebook

if TYPE_CHECKING:
    from semel.adapters.starlette.sessions import SessionChoice


class Idempotent(door.Idempotent):
    """Protects endpoints: `@idempotent`, or `@idempotent(required=True, ...)` with more options.

    `idempotency` is a URL or an `AsyncIdempotency`. An `Idempotency` is for endpoints with
    `session=` and a sync session alone; a URL opens whichever kind of engine an endpoint needs.

    Examples:
        >>> idempotent = Idempotent("memory://")
        >>> @app.post("/payments")
        ... @idempotent
        ... async def pay() -> str:
        ...     return "paid"
    """

    def init_app(self, app: FastAPI) -> None:
        """Tell of the protected endpoints in the OpenAPI of `app`, and end when it ends.

        When it starts, a decorator that protects nothing is a ConfigError.
        """
        document(app)
        super().init_app(app)

    def _routed(self, app: Any) -> Iterable[Routed]:
        return (
            # A mounted application need not be of Starlette: its routes have other names.
            Routed(getattr(route, "endpoint", None), route.methods)
            for route in all_routes_of(app.routes)
        )

    def _endpoint(self, function: Callable[..., Any], choice: SessionChoice | None) -> Endpoint:
        return FastAPIEndpoint(function, choice)

    def _finish(self, protected: Any, endpoint: Any, book: Rulebook) -> None:
        protected.__signature__ = endpoint.signature
        setattr(protected, MARK, book.choices)
