"""The service as an ASGI application: routes, bodies, tokens, and what every request passes.

This module is HTTP. What the verbs do is in `service`, what they take and answer in `wire`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Final

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.server import store_api
from semel.server.bodies import Authenticate, client_left, read_request
from semel.server.metrics import Metrics
from semel.server.openapi import document
from semel.server.problems import Problem, problem_response
from semel.server.service import Gone, Service
from semel.server.tokens import ANYONE, Caller, Tokens
from semel.server.wire import JSON, PACK, VERBS, Named, unpack

ABOUT: Final = """\
semel: run any operation once per key, from every language.

POST /v1/start   claim a key, or get its result      GET /openapi.json   the whole interface
POST /v1/renew   renew the lease of an attempt       GET /live           this process runs
POST /v1/finish  store the result of an attempt      GET /ready          its store answers
POST /v1/fail    record that it failed               GET /metrics        for Prometheus
POST /v1/keys    make new keys
"""


class Tenants:
    """Finds out who sends a request; a service without tokens answers this machine only."""

    def __init__(self, tokens: Tokens | None) -> None:
        self.tokens = tokens

    def __call__(self, request: Request) -> Caller:
        """Return the caller, or raise `unauthorized`."""
        return ANYONE if self.tokens is None else self.tokens.authenticate(request.headers)


def create_app(service: Service, tokens: Tokens | None = None) -> Starlette:
    """Make the application; `app.state.tenants.tokens` may be replaced while it runs."""
    tenants = Tenants(tokens)
    metrics = Metrics(service)
    routes = [
        Route("/", _about),
        Route("/live", _live),
        Route("/ready", _ready(service)),
        Route("/openapi.json", _openapi),
        Route("/metrics", _metrics(metrics, tenants)),
        *(
            Route(
                f"/v1/{name}",
                metrics.counted(name, _verb(name, service, tenants)),
                methods=["POST"],
            )
            for name in VERBS
        ),
    ]
    for route in store_api.routes(service, tenants):
        counted = metrics.counted(route.path.rpartition("/")[2], route.endpoint)
        routes.append(Route(route.path, counted, methods=["POST"]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            Problem: _problem,
            HTTPException: _http_problem,
            ClientDisconnect: _gone,
            Gone: _gone,
            Exception: _internal,
        },
        middleware=[Middleware(LocalOnly)] if tokens is None else [],
    )
    app.state.tenants = tenants
    app.router.redirect_slashes = False
    return app


def _verb(
    name: str, service: Service, tenants: Authenticate
) -> Callable[[Request], Awaitable[Response]]:
    verb, run = VERBS[name], getattr(service, name)

    async def answer(request: Request) -> Response:
        arrived = monotonic()
        caller, media_type, body = await read_request(request, tenants)
        asked = unpack(body, media_type, verb.asks)
        caller.require("use", asked.scope if isinstance(asked, Named) else UNSET)
        if name == "start":
            told = await run(caller, asked, arrived, partial(client_left, request))
        else:
            told = await run(caller, asked)
        return Response(
            PACK[media_type](told), headers={"Cache-Control": "no-store"}, media_type=media_type
        )

    return answer


# --- what needs no token -------------------------------------------------------------------------


async def _about(_: Request) -> Response:
    return PlainTextResponse(ABOUT)


async def _live(_: Request) -> Response:
    return JSONResponse({"status": "live"}, headers=_NO_STORE)


async def _openapi(_: Request) -> Response:
    return Response(document(), media_type=JSON)


def _ready(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        if service.stopping:
            raise Problem("store_error", "The service is stopping.", close=True)
        try:
            error = await service.ready()
        except asyncio.CancelledError:  # the end of `--grace`
            raise Problem("store_error", "The service has stopped.", close=True) from None
        if error is not None:
            raise Problem("store_error")
        return JSONResponse({"status": "ready"}, headers=_NO_STORE)

    return answer


def _metrics(metrics: Metrics, tenants: Authenticate) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        tenants(request).require("view", None)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return answer


_NO_STORE: Final = {"Cache-Control": "no-store"}


# --- errors --------------------------------------------------------------------------------------


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)  # noqa: S101 - Starlette's type of a handler is wider
    return problem_response(error)


async def _http_problem(_: Request, error: Exception) -> Response:
    missing = getattr(error, "status_code", 404) == 404  # noqa: PLR2004 - the only other is 405
    headers = getattr(error, "headers", None)
    return problem_response(
        Problem("not_found" if missing else "method_not_allowed", headers=headers)
    )


async def _internal(_: Request, __: Exception) -> Response:
    return problem_response(Problem("idempotency_error"))


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=400)  # which no one receives


# --- a service without tokens --------------------------------------------------------------------

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name or address."""
    name = host.strip("[]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class LocalOnly:
    """Answers requests to a loopback Host only.

    A page in a browser on this machine can send requests here, under the name of its own server if
    that name leads to 127.0.0.1: without tokens the Host is all that tells them apart.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer `forbidden`."""
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            found = _HOST.fullmatch(b",".join(hosts).decode("latin-1"))
            if found is None or not is_loopback(found[1]):
                detail = "without tokens this service answers only requests to localhost"
                await problem_response(Problem("forbidden", detail))(scope, receive, send)
                return
        await self._app(scope, receive, send)
