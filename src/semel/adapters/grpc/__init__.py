"""gRPC: interceptors for servers and clients, on threads and on asyncio, for unary calls.

server    the interceptors of servers                client   the interceptors of clients
rules     options, and what they mean for a call     storing  what is stored of a response

    server = grpc.server(pool, interceptors=[IdempotencyInterceptor("redis://localhost:6379/0")])

Interceptors run in the order of their list: authorization has to come before this one, or it would
be passed by when an answer is replayed.
"""

from __future__ import annotations

from semel.core.optional import Needed

with Needed("semel[grpc]", by=__name__):
    import google.protobuf  # noqa: F401 - asked for here, so that the answer names the extra
    import grpc  # noqa: F401 - the same

from semel.adapters.grpc.client import (
    AsyncIdempotencyClientInterceptor,
    IdempotencyClientInterceptor,
)
from semel.adapters.grpc.rules import CallView, MethodRule
from semel.adapters.grpc.server import AsyncIdempotencyInterceptor, IdempotencyInterceptor

__all__ = [
    "AsyncIdempotencyClientInterceptor",
    "AsyncIdempotencyInterceptor",
    "CallView",
    "IdempotencyClientInterceptor",
    "IdempotencyInterceptor",
    "MethodRule",
]
