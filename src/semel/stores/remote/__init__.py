"""`semel+http://host:8600` and `semel+https://host`: a semel service (`semel serve`) as the store.

    semel+https://semel.internal/base?ca_file=/etc/ssl/internal.pem

The token is SEMEL_TOKEN, or `token=` by name; a URL never has it. Prefix, schema, and retention are
the service's. Options in the URL, or by name:

    ca_file               the authority that signed the service's certificate; else the system's
    cert_file, key_file   a certificate of this client, where the service asks for one

wire             what both sides send, and what the answers of the service mean
addresses        the URL and its options
aio, store       the stores for asyncio and for threads: batches, what is sent again, watches
tasks, threads   the connections: aiohttp for asyncio, http.client for threads
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from semel.core.optional import Needed

if TYPE_CHECKING:
    from semel.stores.remote.aio import AsyncRemoteStore, open_async_store
    from semel.stores.remote.store import RemoteStore, open_store

__all__ = ["AsyncRemoteStore", "RemoteStore", "open_async_store", "open_store"]

_MODULES: Final = {
    "AsyncRemoteStore": "aio",
    "open_async_store": "aio",
    "RemoteStore": "store",
    "open_store": "store",
}


def __getattr__(name: str) -> Any:
    """Import one kind of store when it is asked for: only the one for asyncio needs a package."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with Needed("semel[remote]", by=f"{__name__}.{name}"):
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
