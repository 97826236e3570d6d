"""Wake-ups from Redis for threads: one connection for each server that somebody waits on.

redis-py connects (TLS, login, Sentinel are its business); then the socket is read and written
here, because its own subscriptions have no way to be told of another channel by another thread.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Final, cast

from semel.core.records import Identity
from semel.stores.redis.cluster import ClusterTransport
from semel.stores.redis.hearsay import Hearsay, Manner, read_message
from semel.stores.redis.keys import KeyLayout
from semel.stores.redis.redis_py import socket_of
from semel.stores.redis.transport import ServerTransport, Transport
from semel.stores.wakeups.rooms import Rooms
from semel.stores.wakeups.threads import Ear, Watch

CHUNK: Final = 65536


class RedisLine:
    """One connection of redis-py's that listens."""

    confirms = True

    def __init__(self, server: Any, manner: Manner) -> None:
        # Beside the pool: this connection is in use for long, and must not count there.
        self._connection = server.connection_class(**server.connection_kwargs)
        self._manner = manner
        self._hearsay = Hearsay(manner)

    def open(self) -> None:
        """Connect."""
        self._connection.connect()
        self._socket = socket_of(self._connection)

    def fileno(self) -> int:
        """Give the socket to wait on."""
        number: int = self._socket.fileno()
        return number

    def subscribe(self, channel: Any) -> None:
        """Ask for the messages of a channel."""
        self._socket.sendall(self._manner.subscribe(channel))

    def unsubscribe(self, channel: Any) -> None:
        """Ask for them no longer."""
        self._socket.sendall(self._manner.unsubscribe(channel))

    def read(self, rooms: Rooms[Any]) -> None:
        """Tell what has come."""
        while True:
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionError("the server has hung up")
            self._hearsay.read(data, rooms)
            # What TLS has decrypted already does not make the socket readable again.
            if not getattr(self._socket, "pending", int)():
                return

    def close(self) -> None:
        """Disconnect."""
        self._connection.disconnect()


class RedisWakeups:
    """Everything that a store hears."""

    def __init__(self, transport: Transport, keys: KeyLayout) -> None:
        self._transport = transport
        self._keys = keys
        self._manner = Manner()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._ears: dict[str, Ear] = {}

    def watch(self, identity: Identity) -> Watch:
        """Listen for the end of the record's running attempt."""
        if self._pid != os.getpid():
            self._begin()  # forked: the connections are the parent's, and nobody reads them here
        channel = self._keys.record(identity)
        return Watch(self._ear(channel), channel, read_message)

    def close(self) -> None:
        """End every connection."""
        while self._ears:
            self._ears.popitem()[1].close()

    def _ear(self, channel: bytes) -> Ear:
        name, server = _server_of(self._transport, channel)
        known = self._ears.get(name)
        if known is not None:
            return known
        line = None if server is None else partial(RedisLine, server, self._manner)
        return self._ears.setdefault(name, Ear(line, self._transport.where))


def _server_of(transport: Transport, channel: bytes) -> tuple[str, Any]:
    """Name the server that has the record, and give its pool; None when there is no such server."""
    if isinstance(transport, ServerTransport):
        return "", transport._client.connection_pool  # noqa: SLF001 - our own class
    client = cast("ClusterTransport", transport).client
    for node in client.nodes_manager.slots_cache.get(client.keyslot(channel), [])[:1]:
        return node.name, client.get_redis_connection(node).connection_pool
    return "", None
