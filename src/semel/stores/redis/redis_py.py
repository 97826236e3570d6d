"""The inside of redis-py that semel stands on, and where its versions (5.0 to 8) differ.

This is the only module that knows a private name of redis-py's, or that one version does a thing
in another way than the next. `check` looks for everything before a store is used: what a later
redis-py has taken away is then one clear `ConfigError`, not an AttributeError in some later call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final

import redis
from hiredis import Reader
from redis import exceptions as driver

from semel.core.optional import have, inside

_PACKAGE: Final = "redis"
_inside: Final = partial(inside, _PACKAGE)

_NAMES: Final = (
    "redis.connection:ConnectionPool.get_connection",
    "redis.connection:ConnectionPool.release",
    "redis.connection:Connection.send_packed_command",
    "redis.connection:Connection.read_response",
    "redis.connection:Connection.disconnect",
    "redis.asyncio.connection:ConnectionPool.get_connection",
    "redis.asyncio.connection:ConnectionPool.release",
    "redis.asyncio.connection:Connection.connect",
    "redis.asyncio.connection:Connection.disconnect",
    "redis.sentinel:SentinelConnectionPool.master_address",
    "redis.cluster:NodesManager.initialize",
    "redis.cluster:RedisCluster.get_redis_connection",
    "redis.cluster:RedisCluster.keyslot",
    "redis.asyncio.cluster:NodesManager.initialize",
    "redis.asyncio.cluster:ClusterNode.acquire_connection",
    "redis.asyncio.cluster:ClusterNode.execute_command",
    "redis.asyncio.cluster:RedisCluster.keyslot",
)
"""What the classes must have, private or not: all that lies under the command layer."""

_ATTRIBUTES: Final = (
    ("redis.connection:Connection", ("_parser", "_sock")),
    ("redis.asyncio.connection:Connection", ("_writer",)),
)
"""What only an object has. A connection can be made without connecting it."""


@cache
def check() -> None:
    """Raise a `ConfigError` that names what this redis-py does not have; all is well once for all.

    Every new store asks.
    """
    for name in _NAMES:
        _inside(name)
    for name, attributes in _ATTRIBUTES:
        have(_PACKAGE, _inside(name)(), *attributes)


def _parameter(function: str, name: str) -> inspect.Parameter | None:
    return inspect.signature(_inside(function)).parameters.get(name)


# --- connections -------------------------------------------------------------------------------

# Until 5.2 a pool asks which command a connection is for, and does not care; later, to tell it is
# deprecated.
_COMMAND: Final = _parameter("redis.connection:ConnectionPool.get_connection", "command_name")
_MUST_TELL: Final = _COMMAND is not None and _COMMAND.default is inspect.Parameter.empty
_FOR_A_POOL: Final = ("",) if _MUST_TELL else ()


def take_connection(pool: Any) -> Any:
    """Take a connection from a pool, connected; to be awaited if it is a pool for asyncio."""
    return pool.get_connection(*_FOR_A_POOL)


parser_of: Final = attrgetter("_parser")
"""Returns what reads the replies of a connection for threads, once it is connected."""

socket_of: Final = attrgetter("_sock")
"""Returns the socket of a connection for threads."""

_transport_of: Final = attrgetter("_writer.transport")


def take_over(connection: Any, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, Any]:
    """Read the stream of a connection for asyncio with a protocol of ours, from now on.

    Returns the transport, and redis-py's own protocol, which must be notified of the stream's end.
    """
    transport: asyncio.Transport = _transport_of(connection)
    stream = transport.get_protocol()
    transport.set_protocol(protocol)
    return transport, stream


async def close_pool(pool: Any) -> None:
    """Close a pool for asyncio, and all its connections."""
    close = getattr(pool, "aclose", None) or pool.disconnect  # from 5.0.1 on
    await close()


def pool_is_empty(error: object) -> bool:
    """Whether the pool has no free connection. Until 7.1 not every pool has a class for that."""
    return isinstance(error, driver.MaxConnectionsError) or (
        type(error) is driver.ConnectionError and str(error) == "Too many connections"
    )


# --- errors that a server answers --------------------------------------------------------------

_ERRORS: Final[dict[str, type[Exception]]] = {
    "ASK": driver.AskError,
    "CLUSTERDOWN": driver.ClusterDownError,
    "LOADING": driver.BusyLoadingError,
    "MASTERDOWN": driver.MasterDownError,
    "MOVED": driver.MovedError,
    "NOAUTH": driver.AuthenticationError,
    "NOPERM": driver.NoPermissionError,
    "NOSCRIPT": driver.NoScriptError,
    "OOM": driver.OutOfMemoryError,
    "READONLY": driver.ReadOnlyError,
    "TRYAGAIN": driver.TryAgainError,
    "WRONGPASS": driver.AuthenticationError,
}
NOT_YET: Final = object()
"""What a `new_reader` returns while a reply is not whole."""
_MAXCLIENTS: Final = "ERR max number of clients reached"


def reply_error(text: str) -> Exception:
    """Make redis-py's exception of an error that a server answered."""
    if text == _MAXCLIENTS:
        return driver.ConnectionError(text)
    code, _, rest = text.partition(" ")
    kind = _ERRORS.get(code)
    return driver.ResponseError(text) if kind is None else kind(rest)


def new_reader() -> Reader:
    """Make a parser of what a server sends; an error that it answers is returned."""
    return Reader(
        protocolError=driver.InvalidResponse, replyError=reply_error, notEnoughData=NOT_YET
    )


def known_error(error: driver.ResponseError) -> Exception:
    """Give an error its class: until 5.x only a cluster's client knows those of a cluster."""
    return reply_error(str(error)) if type(error) is driver.ResponseError else error


# --- Sentinel ----------------------------------------------------------------------------------

_forced_address: Final = attrgetter("_force_master_ip")
_MAY_FORCE: Final = _parameter("redis.sentinel:Sentinel", "force_master_ip") is not None  # 5.1


def primary_address(manager: Any, found: tuple[Any, int]) -> tuple[str, int]:
    """Read what a Sentinel says of its primary, as redis-py does when it connects."""
    # Not what redis-py asks for: that is the old primary until the failover has ended.
    host, port = found
    forced = _forced_address(manager) if _MAY_FORCE else None
    return forced or (host.decode() if isinstance(host, bytes) else host), port


# --- clusters ----------------------------------------------------------------------------------

RETRIES_BELONG_TO_NODES: Final = redis.__version__.startswith("5.")
"""Whether `retry` of a cluster's client is that of each connection, not of the client itself."""

_LAST: Final = "last_failed_node_name"
_ASKS_LAST: Final = _parameter("redis.cluster:NodesManager.initialize", _LAST) is not None
_ASKS_LAST_ASYNC: Final = (
    _parameter("redis.asyncio.cluster:NodesManager.initialize", _LAST) is not None
)


def read_map(manager: Any, lost: str | None) -> None:
    """Read the map of a cluster; the node that was lost is asked last."""
    manager.initialize(**_lost(manager, lost, asks_last=_ASKS_LAST))


def read_map_async(manager: Any, lost: str | None) -> Awaitable[None]:
    """Read the map of a cluster, for asyncio. Not to be called twice at the same time."""
    reading: Awaitable[None] = manager.initialize(
        **_lost(manager, lost, asks_last=_ASKS_LAST_ASYNC)
    )
    return reading


def _lost(manager: Any, lost: str | None, *, asks_last: bool) -> dict[str, Any]:
    if asks_last:
        return {_LAST: lost}
    # A new dictionary: another thread may be going through the old one.
    listed = manager.startup_nodes.items()
    manager.startup_nodes = dict(sorted(listed, key=lambda entry: entry[0] == lost))
    return {}


_free_connections: Final = attrgetter("_free")


def give_back_to_node(node: Any, connection: Any) -> None:
    """Give back a connection that a cluster's node lent, for asyncio."""
    release = getattr(node, "release", None)  # from 6.4 on
    if release is None:
        _free_connections(node).append(connection)  # as its own commands do
    else:
        release(connection)
