"""FastAPI: the decorator of an endpoint, behind authorization by a dependency; and other forms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from starlette.background import BackgroundTask
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import StreamingResponse

from semel import AsyncIdempotency
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.fastapi import Idempotent
from web.handlers import CORS_ORIGIN, Asked, Business

METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE"]


def application(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> FastAPI:
    async def endpoint(request: Request) -> Response:
        return await _answer(business, request)

    return _around(business, Idempotent(engine, **options)(endpoint))


def in_session(business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]) -> FastAPI:
    """The record is committed with the rows of the endpoint's own session."""
    url = engine.internals.setup.opening["url"].replace("sqlite:", "sqlite+aiosqlite:")
    maker = async_sessionmaker(create_async_engine(url, poolclass=NullPool))

    async def endpoint(request: Request, session: AsyncSession) -> Response:
        return await _answer(business, request)

    return _around(business, Idempotent(engine, **options)(session=maker)(endpoint))


def in_middleware(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> FastAPI:
    async def endpoint(request: Request) -> Response:
        return await _answer(business, request)

    app = _around(business, endpoint)
    app.add_middleware(IdempotencyMiddleware, engine, **options)
    return app


async def _answer(business: Business, request: Request) -> Response:
    asked = Asked(request.method, request.url.path, dict(request.headers), await request.body())
    reply = await asyncio.to_thread(business, asked)
    after = None if reply.after is None else BackgroundTask(reply.after)
    response: Response
    if reply.streamed:
        response = StreamingResponse(reply.chunks, reply.status, background=after)
    else:
        response = Response(b"".join(reply.chunks), reply.status, background=after)
    lengths = [line for line in response.raw_headers if line[0] == b"content-length"]
    response.raw_headers = lengths + [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.lines
    ]
    return response


def _around(business: Business, endpoint: Callable[..., Any]) -> FastAPI:
    def authorize(request: Request) -> None:
        if not business.admits(dict(request.headers)):
            raise HTTPException(403)

    app = FastAPI(dependencies=[Depends(authorize)])
    app.add_api_route("/{path:path}", endpoint, methods=METHODS, response_model=None)
    app.add_middleware(GZipMiddleware, minimum_size=100)
    app.add_middleware(CORSMiddleware, allow_origins=[CORS_ORIGIN])
    return app
