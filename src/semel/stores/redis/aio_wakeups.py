"""Wake-ups from Redis for asyncio: the twin of `wakeups`.

redis-py connects; then the connection's stream is taken over, as in `line`.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from semel.core.records import Identity
from semel.stores.redis.aio_cluster import AsyncClusterTransport
from semel.stores.redis.aio_transport import AsyncTransport
from semel.stores.redis.hearsay import Hearsay, Manner, read_message
from semel.stores.redis.keys import KeyLayout
from semel.stores.redis.redis_py import take_over
from semel.stores.wakeups.rooms import Rooms
from semel.stores.wakeups.tasks import AsyncEar, AsyncWatch, Broke


class AsyncRedisLine(asyncio.Protocol):
    """One connection of redis-py's that listens."""

    confirms = True

    def __init__(self, server: Any, manner: Manner) -> None:
        # Beside the pool: this connection is in use for long, and must not count there.
        self._connection = server.connection_class(**server.connection_kwargs)
        self._manner = manner
        self._hearsay = Hearsay(manner)

    async def open(self, rooms: Rooms[Any], broke: Broke) -> None:
        """Connect, and read the stream from then on."""
        await self._connection.connect()
        self._rooms, self._broke = rooms, broke
        self._transport, self._stream = take_over(self._connection, self)

    def subscribe(self, channel: Any) -> None:
        """Ask for the messages of a channel."""
        self._transport.write(self._manner.subscribe(channel))

    def unsubscribe(self, channel: Any) -> None:
        """Ask for them no longer."""
        self._transport.write(self._manner.unsubscribe(channel))

    def data_received(self, data: bytes) -> None:
        """Tell what has come."""
        try:
            self._hearsay.read(data, self._rooms)
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits polls
            self._broke(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell it, and redis-py, which may wait for the end of its stream."""
        self._stream.connection_lost(exc)
        self._broke(self, exc or ConnectionError("the server has hung up"))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.disconnect(nowait=True)


class AsyncRedisWakeups:
    """Everything that a store hears."""

    def __init__(self, transport: AsyncTransport, keys: KeyLayout) -> None:
        self._transport = transport
        self._keys = keys
        self._manner = Manner()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._ears: dict[str, AsyncEar] = {}

    def watch(self, identity: Identity) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        if self._pid != os.getpid():
            self._begin()  # forked: the connections are the parent's, and nobody reads them here
        channel = self._keys.record(identity)
        return AsyncWatch(self._ear(channel), channel, read_message)

    async def close(self) -> None:
        """End every connection."""
        while self._ears:
            await self._ears.popitem()[1].close()

    def _ear(self, channel: bytes) -> AsyncEar:
        name, server = _server_of(self._transport, channel)
        known = self._ears.get(name)
        if known is not None:
            return known
        line = None if server is None else partial(AsyncRedisLine, server, self._manner)
        return self._ears.setdefault(name, AsyncEar(line, self._transport.where))


def _server_of(transport: AsyncTransport, channel: bytes) -> tuple[str, Any]:
    """Name the server that has the record, and give its pool; None when there is no such server."""
    client = transport._client  # noqa: SLF001 - our own class
    if not isinstance(transport, AsyncClusterTransport):
        return "", client.connection_pool
    for node in client.nodes_manager.slots_cache.get(client.keyslot(channel), [])[:1]:
        return node.name, node
    return "", None
