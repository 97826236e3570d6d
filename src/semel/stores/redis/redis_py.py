"""The inside of redis-py that semel stands on, and where its versions (5.0 to 8) differ.

This is the only module that knows a private name of redis-py's, or that one version does a thing
in another way than the next. `check` looks for everything before a store is used: what a later
redis-py has taken away is then one clear `ConfigError`, not an AttributeError in some later call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
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
    "redis.connection:Connection.connect",
    "redis.connection:Connection.send_command",
    "redis.connection:Connection.send_packed_command",
    "redis.connection:Connection.read_response",
    "redis.connection:Connection.disconnect",
    "redis.asyncio.connection:ConnectionPool.get_connection",
    "redis.asyncio.connection:ConnectionPool.release",
    "redis.asyncio.connection:Connection.connect",
    "redis.asyncio.connection:Connection.send_command",
    "redis.asyncio.connection:Connection.read_response",
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
    ("redis.connection:Connection", ("_connect_callbacks", "_parser", "_sock")),
    ("redis.asyncio.connection:Connection", ("_connect_callbacks", "_reader", "_writer")),
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
    """Take a connection from a pool, to `make_ready`; to be awaited if the pool is for asyncio."""
    return pool.get_connection(*_FOR_A_POOL)


def new_connection(pool: Any) -> Any:
    """Create a connection beside a pool, which doesn't count it; to `make_ready`."""
    return pool.connection_class(**pool.connection_kwargs)


# An exception of a signal handler, a cancellation, or an error of a credential provider may end the
# handshake (login, choice of the database) at any line. redis-py then puts the connection back into
# its pool, and uses it as if it were ready. It does the same with a connection on which the reply
# to a command of its own was not read. So a connection leaves a pool only if the last line of both
# was seen to run, on the socket that it has now; else it connects anew. A PubSub calls `connect` on
# its own connection before it has read all replies, and would lose messages: it is known by its
# call-back.


class _Watched:
    """A connection for threads."""

    _connect_callbacks: Any
    _sock: Any
    ready_on: Any = None
    """The socket whose handshake has ended."""
    unread = 0
    """How many replies to redis-py's commands were not read; semel sends its own in packed form."""

    def connect(self) -> None:
        """Connect, unless the connection is ready; pools call this for each that leaves them."""
        parent: Any = super()
        if not _is_ready(self) or (self.unread and not self._connect_callbacks):
            parent.disconnect()
        parent.connect()
        self.unread = 0
        self.ready_on = self._sock

    def send_command(self, *args: Any, **options: Any) -> None:
        """Send a command of redis-py's."""
        parent: Any = super()
        self.unread += 1
        parent.send_command(*args, **options)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply; an error is one, too."""
        parent: Any = super()
        try:
            reply = parent.read_response(*args, **options)
        except driver.ResponseError:
            self.unread -= self.unread > 0
            raise
        self.unread -= self.unread > 0  # a pipeline was sent in packed form
        return reply


class _AsyncWatched:
    """A connection for asyncio."""

    _connect_callbacks: Any
    _writer: Any
    ready_on: Any = None
    unread = 0

    async def connect(self) -> None:
        """Connect, unless the connection is ready; pools call this for each that leaves them."""
        parent: Any = super()
        if not _is_ready_async(self) or (self.unread and not self._connect_callbacks):
            await hang_up(self)
        await parent.connect()
        self.unread = 0
        self.ready_on = self._writer

    async def send_command(self, *args: Any, **options: Any) -> None:
        """Send a command of redis-py's."""
        parent: Any = super()
        self.unread += 1
        await parent.send_command(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply; an error is one, too."""
        parent: Any = super()
        try:
            reply = await parent.read_response(*args, **options)
        except driver.ResponseError:
            self.unread -= self.unread > 0
            raise
        self.unread -= self.unread > 0
        return reply


def watch(pool: Any) -> None:
    """Let a pool make connections that are watched, an application's pool as well."""
    pool.connection_class = _watched(pool.connection_class)


@cache
def _watched(kind: Any) -> Any:
    if issubclass(kind, (_Watched, _AsyncWatched)):
        return kind
    mixin = _AsyncWatched if inspect.iscoroutinefunction(kind.connect) else _Watched
    return type(kind.__name__, (mixin, kind), {})


def make_ready(connection: Any) -> None:
    """Connect a connection that was taken from a pool, unless its handshake was seen to end.

    That of a watched one was. Others are from the time before an application gave us its pool.
    """
    if not _is_ready(connection):
        connection.disconnect()
        connection.connect()
        connection.ready_on = socket_of(connection)


async def make_ready_async(connection: Any) -> None:
    """Connect a connection for asyncio, unless its handshake was seen to end."""
    if not _is_ready_async(connection):
        await hang_up(connection)
        await connection.connect()
        connection.ready_on = _writer_of(connection)


async def hang_up(connection: Any) -> None:
    """Close a connection for asyncio, also one of which redis-py knows one half."""
    await connection.disconnect(nowait=True)
    vars(connection).update(_reader=None, _writer=None)


def _is_ready(connection: Any) -> bool:
    socket = socket_of(connection)
    return socket is not None and getattr(connection, "ready_on", None) is socket


def _is_ready_async(connection: Any) -> bool:
    writer = _writer_of(connection)
    return writer is not None and getattr(connection, "ready_on", None) is writer


parser_of: Final = attrgetter("_parser")
"""Returns what reads the replies of a connection for threads, once it is connected."""

socket_of: Final = attrgetter("_sock")
"""Returns the socket of a connection for threads."""

_writer_of: Final = attrgetter("_writer")


def take_over(connection: Any, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, Any]:
    """Read the stream of a connection for asyncio with a protocol of ours, from now on.

    Returns the transport, and redis-py's own protocol, which must be notified of the stream's end.
    """
    transport: asyncio.Transport = _writer_of(connection).transport
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
    """Return an error in its class: until 5.x only a cluster's client knows those of a cluster."""
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
    """Read the map of a cluster, on new connections; the node that was lost is asked last."""
    nodes = (*manager.nodes_cache.values(), *manager.startup_nodes.values())
    for client in filter(None, (node.redis_connection for node in nodes)):
        client.connection_pool.disconnect(inuse_connections=False)
    manager.initialize(**_lost(manager, lost, asks_last=_ASKS_LAST))


async def read_map_async(manager: Any, lost: str | None) -> None:
    """Read the map of a cluster, for asyncio. Not to be called twice at the same time."""
    await hang_up_nodes((*manager.nodes_cache.values(), *manager.startup_nodes.values()))
    await manager.initialize(**_lost(manager, lost, asks_last=_ASKS_LAST_ASYNC))


async def hang_up_nodes(nodes: Iterable[Any]) -> None:
    """Close the connections that lie in a cluster's nodes, for asyncio.

    What redis-py asks for on its own is then asked for on new ones.
    """
    for node in nodes:
        for connection in tuple(_free_connections(node)):
            await hang_up(connection)


def _lost(manager: Any, lost: str | None, *, asks_last: bool) -> dict[str, Any]:
    if asks_last:
        return {_LAST: lost}
    # A new dictionary: another thread may be going through the old one.
    listed = manager.startup_nodes.items()
    manager.startup_nodes = dict(sorted(listed, key=lambda entry: entry[0] == lost))
    return {}


_free_connections: Final = attrgetter("_free")


def give_back_to_node(node: Any, connection: Any) -> None:
    """Return a connection to the cluster's node that lent it, for asyncio."""
    release = getattr(node, "release", None)  # from 6.4 on
    if release is None:
        _free_connections(node).append(connection)  # as its own commands do
    else:
        release(connection)
