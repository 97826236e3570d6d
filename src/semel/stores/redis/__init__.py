"""Records in Redis (6.2 or newer) and Valkey: one server, Sentinel or a cluster.

One packed string per record, one script and one round trip per verb, the server's clock. URLs are
described in `addresses`, keys in `keys`, the record in `packing`.

The least a server has to permit, `idem:` being the prefix:

    ACL SETUSER semel on >password ~idem:* &idem:* -@all
        +evalsha +eval +get +set +del +pexpire +pttl +time +zadd +zrem +zrangebyscore
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

from semel.stores.redis.adopt import connect, connect_async
from semel.stores.redis.aio import AsyncRedisStore
from semel.stores.redis.store import RedisStore
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT

__all__ = ["AsyncRedisStore", "RedisStore", "open_async_store", "open_store"]


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> RedisStore:
    """Open a store for threads; options are redis-py's (`max_connections`, `ssl_ca_certs`...)."""
    return RedisStore(connect(url, timeout, options), prefix=prefix)


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncRedisStore:
    """Open a store for asyncio; connects on first use."""
    return AsyncRedisStore(connect_async(url, timeout, options), prefix=prefix)
