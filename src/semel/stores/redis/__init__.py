"""Records in Redis (6.2 or newer) and Valkey: one server, Sentinel or a cluster.

One packed string per record, one script and one round trip per verb, the server's clock; results of
64 KB or more go past the scripts, which would copy them (see `Commands.upload`). URLs are described
in `clients`, keys in `commands`, the record in `replies`.

The least a server has to permit, `idem:` being the prefix:

    ACL SETUSER semel on >password ~idem:* &idem:* -@all
        +evalsha +eval +get +getrange +set +del +pexpire +pttl +time +zadd +zrem +zrangebyscore
        +setrange +rename            results of 64 KB or more; else they take the server longer
        +pexpiretime                 Redis 7 and newer
        +spublish +ssubscribe +sunsubscribe    wake-ups, Redis 7 and newer; else waiters poll
        +publish +subscribe +unsubscribe       wake-ups, before Redis 7; else waiters poll
        +scan                        listing and counting (command line, dashboard)
        +info                        `semel doctor`, about the server's settings
        +cluster|slots +command      a cluster
        +asking                      a cluster while its slots are moved
        +select                      another database than 0

Redis alone can lose what it acknowledged (asynchronous failover, eviction, no persistence); put SQL
behind it where that matters. Use `maxmemory-policy noeviction`: a full server then refuses new keys
(`StoreFull`, nothing runs) instead of forgetting old ones, and still renews and saves what runs.
"""

from __future__ import annotations

from typing import Any

from semel.core.optional import Needed

with Needed("semel[redis]", by=__name__):
    import redis
    import redis.asyncio

from semel.stores.redis.aio import AsyncRedisStore
from semel.stores.redis.clients import Kind, connection_limit, opener, parse_url
from semel.stores.redis.cluster import AsyncClusterTransport, ClusterTransport
from semel.stores.redis.redis_py import check
from semel.stores.redis.store import RedisStore
from semel.stores.redis.tasks import AsyncServerTransport
from semel.stores.redis.threads import Limit, ServerTransport
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT

__all__ = ["AsyncRedisStore", "RedisStore", "open_async_store", "open_store"]


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> RedisStore:
    """Open a store for threads; options are redis-py's (`max_connections`, `ssl_ca_certs`...)."""
    check()
    address = parse_url(url)
    where, connect = address.where, opener(address, timeout, options, redis)
    limit = Limit(connection_limit(address, options), timeout, where)
    if address.kind is Kind.CLUSTER:
        cluster = ClusterTransport(connect, where, timeout, limit=limit, owned=True)
        return RedisStore(cluster, prefix=prefix)
    server = ServerTransport(connect(), where, timeout, limit=limit, owned=True)
    return RedisStore(server, prefix=prefix)


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncRedisStore:
    """Open a store for asyncio; connects on first use."""
    check()
    address = parse_url(url)
    where, connect = address.where, opener(address, timeout, options, redis.asyncio)
    if address.kind is Kind.CLUSTER:
        cluster = AsyncClusterTransport(connect, where, timeout, owned=True)
        return AsyncRedisStore(cluster, prefix=prefix)
    server = AsyncServerTransport(connect(), where, timeout, owned=True)
    return AsyncRedisStore(server, prefix=prefix)
