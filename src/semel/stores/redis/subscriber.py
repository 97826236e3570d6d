"""Wake-ups from Redis: one connection for each server that a call waits on.

redis-py connects (TLS, login, Sentinel are its business); then its socket or stream is read and
written here, because its own subscriptions do not let a thread add a channel while another reads.

A record's key is also the name of its channel: a shard channel (SSUBSCRIBE), which in a cluster
stays with the record's own node, or a plain one where the server has no shard channels (before
Redis 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

from redis.exceptions import AskError, ResponseError

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.stores.listening import OnLost, Reopen, Subscriptions
from semel.stores.redis.commands import pack
from semel.stores.redis.redis_py import NOT_YET, new_connection, new_reader, socket_of, take_over
from semel.stores.redis.tasks import AsyncTransport
from semel.stores.redis.threads import Transport

CHUNK: Final = 65536


class ChannelCommands:
    """How one server is subscribed to: by shard channels, until it says that it has none."""

    def __init__(self) -> None:
        self.sharded = True

    def subscribe(self, channel: Any) -> bytes:
        """Write the command."""
        return pack(("SSUBSCRIBE" if self.sharded else "SUBSCRIBE", channel))

    def unsubscribe(self, channel: Any) -> bytes:
        """Write the command."""
        return pack(("SUNSUBSCRIBE" if self.sharded else "UNSUBSCRIBE", channel))


class MessageReader:
    """Reads the stream of one subscribed connection."""

    def __init__(self, commands: ChannelCommands) -> None:
        self._commands = commands
        self._reader = new_reader()

    def read(self, data: bytes, subscriptions: Subscriptions[Any]) -> None:
        """Pass on what is in a piece of the stream; an error that ends the connection is raised."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not NOT_YET:
            match reply:
                case [b"smessage" | b"message", channel, _]:
                    subscriptions.received(channel)
                case [b"ssubscribe" | b"subscribe", _, _]:
                    subscriptions.confirmed()
                case [b"sunsubscribe" | b"unsubscribe", channel, _]:
                    subscriptions.ended(channel)
                case AskError():  # a MovedError is one too: another node has the slot
                    subscriptions.rejected()
                case ResponseError() if self._commands.sharded and "unknown command" in str(reply):
                    self._commands.sharded = False
                    raise Reopen
                case Exception():
                    raise reply


class _Subscriber:
    """What both kinds have in common."""

    confirms = True
    _write: Callable[[bytes], None]

    def __init__(self, server: Any, commands: ChannelCommands) -> None:
        # Beside the pool: this connection is in use for long, and must not count there.
        self._connection = new_connection(server)
        self._commands = commands
        self._messages = MessageReader(commands)

    def subscribe(self, channel: Any) -> None:
        """Request the messages of a channel."""
        self._write(self._commands.subscribe(channel))

    def unsubscribe(self, channel: Any) -> None:
        """Request them no longer."""
        self._write(self._commands.unsubscribe(channel))


class RedisSubscriber(_Subscriber):
    """One connection of redis-py's that is notified, for threads."""

    def open(self) -> None:
        """Connect."""
        self._connection.connect()
        self._socket = socket_of(self._connection)
        self._write = self._socket.sendall

    def fileno(self) -> int:
        """Return the socket to wait on."""
        number: int = self._socket.fileno()
        return number

    def read(self, subscriptions: Subscriptions[Any]) -> None:
        """Pass on what has come."""
        while True:
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._messages.read(data, subscriptions)
            # What TLS has decrypted already does not make the socket readable again.
            if not getattr(self._socket, "pending", int)():
                return

    def close(self) -> None:
        """Disconnect."""
        self._connection.disconnect()


class AsyncRedisSubscriber(_Subscriber, asyncio.Protocol):
    """One connection of redis-py's that is notified, for asyncio."""

    async def open(self, subscriptions: Subscriptions[Any], on_lost: OnLost) -> None:
        """Connect, and read the stream from then on."""
        await self._connection.connect()
        self._subscriptions, self._on_lost = subscriptions, on_lost
        transport, self._stream = take_over(self._connection, self)
        self._write = transport.write

    def data_received(self, data: bytes) -> None:
        """Pass on what has come."""
        try:
            self._messages.read(data, self._subscriptions)
        except Exception as error:  # noqa: BLE001 - whatever it is, waiting calls poll
            self._on_lost(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so, to redis-py too, which may wait for the end of its stream."""
        self._stream.connection_lost(exc)
        self._on_lost(self, exc or ConnectionError("the server closed the connection"))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.disconnect(nowait=True)


L = TypeVar("L")


class RedisListeners(ForkAware, Generic[L]):
    """The listeners of one store, one for each server."""

    def __init__(
        self,
        transport: Transport | AsyncTransport,
        listener: Callable[..., L],
        subscriber: Callable[[Any, ChannelCommands], Any],
    ) -> None:
        self._transport = transport
        self._new_listener = listener
        self._new_subscriber = subscriber
        self._commands = ChannelCommands()
        self._listeners: dict[str, L] = {}
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Listen on connections of its own: nothing reads the parent's here."""
        leave_alone(self._listeners)
        self._listeners = {}

    def listener(self, channel: bytes) -> L:
        """Return the listener to the server that has the record."""
        notice_fork()
        name, server = self._transport.connector_of(channel)
        known = self._listeners.get(name)
        if known is not None:
            return known
        new = None if server is None else partial(self._new_subscriber, server, self._commands)
        return self._listeners.setdefault(name, self._new_listener(new, self._transport.where))

    def take_all(self) -> list[L]:
        """Take the listeners, to close them."""
        listeners, self._listeners = self._listeners, {}
        return list(listeners.values())
