"""Takes the application's own client, or opens one by URL.

This module chooses the transport. A client given by the application is used as it is and never
closed here; one opened by URL gets a limit, our timeouts, and is closed with the store.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from semel.errors import ConfigError
from semel.stores.redis.addresses import Kind, parse_url
from semel.stores.redis.aio_cluster import AsyncClusterTransport
from semel.stores.redis.clients import async_opener, connection_limit, opener
from semel.stores.redis.cluster import ClusterTransport
from semel.stores.redis.errors import CLUSTER
from semel.stores.redis.redis_py import check
from semel.stores.redis.tasks import AsyncServerTransport, AsyncTransport
from semel.stores.redis.threads import Limit, ServerTransport, Transport


def adopt(client: Any, timeout: float) -> Transport:
    """The transport over a client for threads that the application has."""
    check()
    if isinstance(client, redis.RedisCluster):
        return ClusterTransport(lambda: client, _cluster_name(client), timeout)
    if isinstance(client, redis.Redis):
        return ServerTransport(client, _server_name(client), timeout)
    raise _wrong_client(client, "RedisStore", "redis.Redis or redis.RedisCluster")


def adopt_async(client: Any, timeout: float) -> AsyncTransport:
    """The transport over a client for asyncio that the application has."""
    check()
    if isinstance(client, redis.asyncio.RedisCluster):
        return AsyncClusterTransport(client, _cluster_name(client), timeout)
    if isinstance(client, redis.asyncio.Redis):
        return AsyncServerTransport(client, _server_name(client), timeout)
    raise _wrong_client(
        client, "AsyncRedisStore", "redis.asyncio.Redis or redis.asyncio.RedisCluster"
    )


def connect(url: str, timeout: float, options: dict[str, Any]) -> Transport:
    """The transport to the servers that a URL names, for threads."""
    check()
    address = parse_url(url)
    where = address.where
    make = opener(address, timeout, options)
    limit = Limit(connection_limit(address, options), timeout, where)
    if address.kind is Kind.CLUSTER:
        return ClusterTransport(make, where, timeout, limit=limit, owned=True)
    return ServerTransport(make(), where, timeout, limit=limit, owned=True)


def connect_async(url: str, timeout: float, options: dict[str, Any]) -> AsyncTransport:
    """The transport to the servers that a URL names, for asyncio."""
    check()
    address = parse_url(url)
    client = async_opener(address, timeout, options)()
    kind = AsyncClusterTransport if address.kind is Kind.CLUSTER else AsyncServerTransport
    return kind(client, address.where, timeout, owned=True)


def _server_name(client: Any) -> str:
    settings = client.connection_pool.connection_kwargs
    service = getattr(client.connection_pool, "service_name", None)
    if service is not None:
        return f"redis {service!r} (by sentinel)"
    if "path" in settings:
        return f"redis {settings['path']}"
    return f"redis {settings.get('host', 'localhost')}:{settings.get('port', 6379)}"


def _cluster_name(client: Any) -> str:
    nodes = client.nodes_manager.startup_nodes.values()
    return CLUSTER + ",".join(f"{node.host}:{node.port}" for node in nodes)


def _wrong_client(client: Any, store: str, wanted: str) -> ConfigError:
    kind = type(client)
    return ConfigError(
        f"{store} takes a {wanted}, got a {kind.__module__}.{kind.__qualname__}; "
        "sync clients go with RedisStore, redis.asyncio ones with AsyncRedisStore"
    )
