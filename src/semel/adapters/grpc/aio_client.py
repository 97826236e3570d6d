"""The interceptor of clients on asyncio: a key for each unary call, the same on every retry.

channel = grpc.aio.insecure_channel(target, interceptors=[AsyncIdempotencyClientInterceptor()])
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Unpack

import grpc

from semel.adapters.grpc.retrying import ClientOptions, Retrying


class AsyncIdempotencyClientInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives each unary call a key, and tries it again under that key; `sleep` waits in between."""

    def __init__(
        self,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._retrying = Retrying(**options)
        self._sleep = sleep

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Make one call, in as many tries as it takes."""
        given = client_call_details
        logical = self._retrying.begin(given.method, given.metadata, given.timeout)
        while True:
            details = grpc.aio.ClientCallDetails(
                given.method,
                logical.timeout,
                grpc.aio.Metadata(*logical.metadata),
                given.credentials,
                given.wait_for_ready,
            )
            call = await continuation(details, request)
            try:
                pause = logical.pause(await call.code(), await call.trailing_metadata())
            except asyncio.CancelledError:
                # gRPC cancels only this task: the server must be notified as well.
                call.cancel()
                raise
            if pause is None:
                return call
            await self._sleep(pause)
