"""gRPC: interceptors for servers and clients, on threads and on asyncio, for unary calls.

storing   what of an answer is stored       options      what an application may choose
rulebook  the rules of one method, pure     methods      which rules hold for a method
server    the interceptor for threads       aio_server   the one for asyncio
contexts  what a handler on asyncio sees    registering  handlers, checked before a server starts
client    the interceptor of clients        aio_client   the one for asyncio
retrying  when a client tries again, pure

    server = grpc.server(pool, interceptors=[IdempotencyInterceptor("redis://localhost:6379/0")])

Interceptors run in the order of their list: authorization has to come before this one, or it would
be passed by when an answer is replayed.
"""

from __future__ import annotations

from semel.core.extras import Needed

with Needed("semel[grpc]", by=__name__):
    import google.protobuf  # noqa: F401 - asked for here, so that the answer names the extra
    import grpc  # noqa: F401 - the same

from semel.adapters.grpc.aio_client import AsyncIdempotencyClientInterceptor
from semel.adapters.grpc.aio_server import AsyncIdempotencyInterceptor
from semel.adapters.grpc.client import IdempotencyClientInterceptor
from semel.adapters.grpc.options import CallView, MethodRule
from semel.adapters.grpc.server import IdempotencyInterceptor

__all__ = [
    "AsyncIdempotencyClientInterceptor",
    "AsyncIdempotencyInterceptor",
    "CallView",
    "IdempotencyClientInterceptor",
    "IdempotencyInterceptor",
    "MethodRule",
]
