"""One application on uvicorn, for `benchmarks.web`: tells its port, then serves until stopped."""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn

ANSWER: dict[str, Any] = {"number": 1, "state": "charged", "receipt": "x" * 60}


def starlette_app() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def pay(request: Request) -> JSONResponse:
        await request.json()
        return JSONResponse(ANSWER, 201)

    return Starlette(routes=[Route("/payments", pay, methods=["POST"])])


def fastapi_app(around: Any = lambda endpoint: endpoint) -> Any:
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Payment(BaseModel):
        account: str
        amount: int
        currency: str
        order: str

    class Receipt(BaseModel):
        number: int
        state: str
        receipt: str

    async def pay(payment: Payment) -> Receipt:  # noqa: ARG001 - as an endpoint is written
        return Receipt(**ANSWER)

    # The classes live here, so the annotations cannot be found by their names.
    pay.__annotations__ = {"payment": Payment, "return": Receipt}
    app = FastAPI()
    app.post("/payments", status_code=201)(around(pay))
    return app


def protected(app: Any, lane: str, redis: str) -> Any:
    """Put one of the middlewares around an application."""
    match lane:
        case "semel":
            from semel.adapters.asgi import IdempotencyMiddleware

            return IdempotencyMiddleware(app, redis)
        case "commands":
            from benchmarks.web_floor import TwoCommands

            return TwoCommands(app, redis)
        case "idemkit":
            from idemkit import HttpConfig
            from idemkit import IdempotencyMiddleware as Idemkit
            from idemkit.backends.redis import RedisBackend

            return Idemkit(app, backend=RedisBackend.from_url(redis), config=HttpConfig())
        case "asgi_idempotency_header":
            from idempotency_header_middleware import IdempotencyHeaderMiddleware
            from idempotency_header_middleware.backends import RedisBackend as HeaderBackend
            from redis.asyncio import Redis

            return IdempotencyHeaderMiddleware(app, HeaderBackend(Redis.from_url(redis)))
    return app


def main() -> None:
    framework, lane, redis = sys.argv[1:]
    if lane == "decorator":
        from semel.adapters.fastapi import Idempotent

        app = fastapi_app(Idempotent(redis))
    else:
        app = protected(starlette_app() if framework == "starlette" else fastapi_app(), lane, redis)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        # asyncio does so by itself only for sockets that were made with the number of TCP.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=600)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
