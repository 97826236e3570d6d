"""What the Redis tests ask for: requests with the parts that do not matter filled in."""

from __future__ import annotations

import contextlib
import os

from semel.core.records import ClaimRequest, CompleteRequest, Encoded, Identity
from semel.stores.redis import open_async_store, open_store

IDENTITY = Identity("orders.create", "42")
RESULT = Encoded("json/1", b'{"id": 42}')
ERROR = Encoded("failure", b"declined")


def new_owner() -> bytes:
    return os.urandom(12)


def ask(identity=IDENTITY, owner=None, *, fingerprint=None, lease=30.0, ttl=600.0, **more):
    return ClaimRequest(identity, owner or new_owner(), fingerprint, lease, ttl, **more)


def finish(request, ttl=600.0):
    return CompleteRequest(request.identity, request.owner, RESULT, ttl)


def opened(url, **options):
    """A store that the test closes by leaving the block."""
    return contextlib.closing(open_store(url, **options))


async def close_client(client):
    """Close a client of the test's own, for asyncio; 5.0.0 calls it close."""
    close = getattr(client, "aclose", None) or client.close
    await close()


@contextlib.asynccontextmanager
async def opened_async(url, **options):
    store = open_async_store(url, **options)
    try:
        yield store
    finally:
        await store.close()
