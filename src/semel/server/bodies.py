"""What every route of the service reads of a request: the caller, the type, the body, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.requests import Request

from semel.server.problems import Problem
from semel.server.tokens import Caller
from semel.server.wire import PACK

MOST_BYTES: Final = 4 * 1024 * 1024
"""Of a body."""
LINGER: Final = 4
"""How much of a body that is too large is read and dropped: a client that is still sending when the
connection closes never sees the answer."""
BODY_WITHIN: Final = 10.0
"""Seconds."""

Authenticate = Callable[[Request], Caller]


def media_type_of(request: Request) -> str:
    """Return the type of the body, JSON or MessagePack; raise `unsupported_media_type`."""
    named = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if named not in PACK or encoding != "identity":
        raise Problem("unsupported_media_type", close=True)
    return named


async def read_request(request: Request, authenticate: Authenticate) -> tuple[Caller, str, bytes]:
    """Return who asks, the type of the body, and the body."""
    caller = authenticate(request)
    media_type = media_type_of(request)
    body = await read_body(request)
    if caller.replaced:  # while the body came, its token was taken back, or has other rights
        caller = authenticate(request)
    return caller, media_type, body


async def read_body(request: Request, most: int = MOST_BYTES) -> bytes:
    """Return the body; raise `body_too_large`, or `invalid_request` if it does not arrive."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_WITHIN):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > most * LINGER:
                    break
    except TimeoutError:
        detail = f"the body did not arrive within {BODY_WITHIN:g} seconds"
        raise Problem("invalid_request", detail, field="body", close=True) from None
    if size > most:
        raise Problem("body_too_large", close=True)
    return b"".join(parts)


async def client_left(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
