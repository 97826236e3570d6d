"""Speaks to one server over redis-py's connections, under its command layer, for threads.

redis-py's cost is its command layer and its pool, not its connection. So commands are packed here,
and connections of a client that is ours stay here between two exchanges: the last one used is the
next one taken. A client of the application lends its connections for one exchange each.

Whether an idle connection is still alive is not asked before each use: every script may be run
twice, so an exchange that finds it closed is simply made again on a new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError

from semel.stores.redis.delivery import Address, Reply
from semel.stores.redis.failures import DRIVER_ERRORS
from semel.stores.redis.repeating import (
    NOT_THE_PRIMARY,
    SILENCE,
    WITHOUT_SENTINEL,
    primary_address,
)


class Wires:
    """The connections to one server."""

    def __init__(self, pool: Any, *, keep: bool) -> None:
        self.pool = self._pool = pool
        self._keep = keep
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._idle: list[Any] = []
        self._pid = os.getpid()

    def exchange(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        """Send commands in one round trip; an error that the server answers is a reply, too."""
        connection = self._take()
        try:
            connection.send_packed_command([b"".join(commands)])
            replies = [_reply(connection) for _ in commands]
        except BaseException:
            # Half a round trip may be on its way: nobody else must read the rest of it.
            self.drop(connection)
            raise
        self._give_back(connection)
        return replies

    def ask(self, command: bytes) -> Reply | Exception:
        """Send one command, and give its reply."""
        connection = self._take()
        try:
            connection.send_packed_command((command,))
            # By its parser: what redis-py does around that is for those who do not repeat.
            reply: Reply = connection._parser.read_response(disable_decoding=True)  # noqa: SLF001
        except BaseException:
            self.drop(connection)
            raise
        self._give_back(connection)
        return reply

    def drop(self, connection: Any = None) -> None:
        """Close this connection and those that are idle: what broke one may have broken all."""
        if connection is not None:
            self._end(connection)
        with suppress(IndexError):  # none is left
            while True:
                self._end(self._idle.pop())

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        self.drop()

    def _end(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)

    def _take(self) -> Any:
        if self._pid != os.getpid():
            self._begin()  # forked: these connections are the parent's
        with suppress(IndexError):  # none is idle; not the reason of what connecting may raise
            return self._idle.pop()
        return self._pool.get_connection()

    def _give_back(self, connection: Any) -> None:
        if not self._keep:
            self._pool.release(connection)
            return
        self._idle.append(connection)
        if self._closed:
            self.drop()


class SentinelWires(Wires):
    """The connections to the primary that Sentinel names.

    Before a connection is used after a silence, and before an answer that came late is believed,
    Sentinel is asked whether the server is still the primary.
    """

    def __init__(self, pool: Any, *, keep: bool) -> None:
        super().__init__(pool, keep=keep)
        self._confirmed = monotonic()
        """When the primary answered promptly, or Sentinel named it."""
        self._taken: dict[int, float] = {}

    def _take(self) -> Any:
        while True:
            connection = super()._take()
            if self._is_primary(connection, self._confirmed):
                self._taken[id(connection)] = monotonic()
                return connection
            self.drop(connection)

    def _give_back(self, connection: Any) -> None:
        if not self._is_primary(connection, self._taken.pop(id(connection))):
            self.drop(connection)
            raise Disconnected(NOT_THE_PRIMARY)
        self._confirmed = max(self._confirmed, monotonic())
        super()._give_back(connection)

    def _is_primary(self, connection: Any, known: float) -> bool:
        address = (connection.host, connection.port)
        if monotonic() - known <= SILENCE:
            return bool(self._pool.master_address == address)
        primary = self._ask_sentinels()
        self._confirmed = monotonic() + (WITHOUT_SENTINEL if primary is None else 0.0)
        return primary in (None, address)

    def _ask_sentinels(self) -> Address | None:
        """Ask who is the primary; None when no Sentinel answers."""
        manager = self._pool.sentinel_manager
        for sentinel in manager.sentinels:
            with suppress(*DRIVER_ERRORS):
                found = sentinel.sentinel_get_master_addr_by_name(self._pool.service_name)
                if found is not None:
                    return primary_address(manager, found)
        return None


def _reply(connection: Any) -> Reply | Exception:
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
