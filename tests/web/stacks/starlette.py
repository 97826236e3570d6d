"""Starlette: the decorator of an endpoint, with a session of its own or without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel import AsyncIdempotency
from semel.adapters.starlette import Idempotent
from web.handlers import Asked, Business


def application(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> Starlette:
    async def endpoint(request: Request) -> Response:
        return await asyncio.to_thread(_answer, business, request, await request.body())

    return _routed(Idempotent(engine, **options)(endpoint))


def in_session(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> Starlette:
    """The record is committed with the rows of the session of a plain function."""
    url = engine.internals.setup.opening["url"]
    maker = sessionmaker(create_engine(url, poolclass=NullPool))

    def endpoint(request: Request, session: Session) -> Response:
        return _answer(business, request, b"")

    return _routed(Idempotent(url, **options)(session=maker)(endpoint))


def _answer(business: Business, request: Request, body: bytes) -> Response:
    asked = Asked(request.method, request.url.path, dict(request.headers), body)
    reply = business(asked)
    return Response(b"".join(reply.chunks), reply.status, dict(reply.lines))


def _routed(endpoint: Callable[..., Any]) -> Starlette:
    return Starlette(routes=[Route("/{path:path}", endpoint, methods=["POST", "PATCH"])])
