"""FastAPI: the decorator of an endpoint, behind authorization by a dependency."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from starlette.background import BackgroundTask
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import StreamingResponse

from semel import AsyncIdempotency
from semel.adapters.fastapi import Idempotent
from web.handlers import CORS_ORIGIN, Asked, Business

METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE"]


def application(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> FastAPI:
    def authorize(request: Request) -> None:
        if not business.admits(dict(request.headers)):
            raise HTTPException(403)

    async def endpoint(request: Request) -> Response:
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

    app = FastAPI(dependencies=[Depends(authorize)])
    idempotent = Idempotent(engine, **options)
    app.add_api_route("/{path:path}", idempotent(endpoint), methods=METHODS, response_model=None)
    app.add_middleware(GZipMiddleware, minimum_size=100)
    app.add_middleware(CORSMiddleware, allow_origins=[CORS_ORIGIN])
    return app
