"""The interceptor of clients on threads: a key for each unary call, the same on every retry.

    channel = grpc.intercept_channel(channel, IdempotencyClientInterceptor())

It waits between tries in the caller's thread, so `stub.Method.future(...)` gives its future when
the call has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import grpc

from semel.adapters.grpc.retrying import ClientOptions, Retrying


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class IdempotencyClientInterceptor(grpc.UnaryUnaryClientInterceptor):
    """Gives each unary call a key, and tries it again under that key; `sleep` waits in between."""

    def __init__(
        self, *, sleep: Callable[[float], None] = time.sleep, **options: Unpack[ClientOptions]
    ) -> None:
        self._retrying = Retrying(**options)
        self._sleep = sleep

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Make one call, in as many tries as it takes."""
        given = client_call_details
        logical = self._retrying.begin(given.method, given.metadata, given.timeout)
        while True:
            details = _Details(
                given.method,
                logical.timeout,
                logical.metadata,
                given.credentials,
                getattr(given, "wait_for_ready", None),
                getattr(given, "compression", None),
            )
            call = continuation(details, request)
            pause = logical.pause(call.code(), call.trailing_metadata())
            if pause is None:
                return call
            self._sleep(pause)
