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
from math import inf
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError

from semel.stores.redis.delivery import Address, Reply
from semel.stores.redis.failures import DRIVER_ERRORS
from semel.stores.redis.redis_py import known_error, primary_address, read_reply, take_connection
from semel.stores.redis.repeating import NOT_THE_PRIMARY, SILENCE, WITHOUT_SENTINEL


class Wire:
    """One connection of the pool. One that nobody holds any more goes back to the pool, closed.

    So none is lost when an exception of a signal handler strikes between two steps.
    """

    __slots__ = ("_pool", "connection", "taken")

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.taken = 0.0
        """When it was last taken, for those who ask."""
        self.connection: Any = None
        self.connection = take_connection(pool)

    def lend_back(self) -> None:
        """Give the connection back to the pool as it is."""
        connection, self.connection = self.connection, None
        self._pool.release(connection)

    def end(self) -> None:
        """Close the connection, and give it back."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    __del__ = end


class Wires:
    """The connections to one server."""

    def __init__(self, pool: Any, *, keep: bool) -> None:
        self.pool = self._pool = pool
        self._keep = keep
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._idle: list[Wire] = []
        self._pid = os.getpid()

    def exchange(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        """Send commands in one round trip; an error that the server answers is a reply, too."""
        wire = self._take()
        try:
            connection = wire.connection
            connection.send_packed_command([b"".join(commands)])
            replies = [_reply(connection) for _ in commands]
        except BaseException:
            # Half a round trip may be on its way: nobody else must read the rest of it.
            self.drop(wire)
            raise
        self._give_back(wire)
        return replies

    def ask(self, command: bytes) -> Reply | Exception:
        """Send one command, and give its reply."""
        wire = self._take()
        try:
            connection = wire.connection
            connection.send_packed_command((command,))
            reply: Reply = read_reply(connection)
        except BaseException:
            self.drop(wire)
            raise
        self._give_back(wire)
        return reply

    def drop(self, wire: Wire | None = None) -> None:
        """Close this connection and those that are idle: what broke one may have broken all."""
        if wire is not None:
            wire.end()
        with suppress(IndexError):  # none is left
            while True:
                self._idle.pop().end()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        self.drop()

    def _take(self) -> Wire:
        if self._pid != os.getpid():
            self._inherited = self._idle  # forked: these connections are the parent's, left alone
            self._begin()
        with suppress(IndexError):  # none is idle; not the reason of what connecting may raise
            return self._idle.pop()
        return Wire(self._pool)

    def _give_back(self, wire: Wire) -> None:
        if not self._keep:
            wire.lend_back()
            return
        self._idle.append(wire)
        if self._closed:
            self.drop()


class SentinelWires(Wires):
    """The connections to the primary that Sentinel names.

    Sentinel is asked whether a server is still the primary before a new connection is used, before
    one is used after a silence, and before an answer that came late is believed.
    """

    def __init__(self, pool: Any, *, keep: bool, patience: float) -> None:
        super().__init__(pool, keep=keep)
        self._patience = patience
        self._primary: Address | None = None
        self._confirmed = -inf
        """When that primary answered promptly, or Sentinel named it."""

    def _take(self) -> Wire:
        while True:
            wire = super()._take()
            if self._is_primary(wire.connection, self._confirmed):
                wire.taken = monotonic()
                return wire
            self.drop(wire)
            if not wire.taken:
                # redis-py connects to the old primary until the failover has ended.
                raise Disconnected(NOT_THE_PRIMARY)

    def _give_back(self, wire: Wire) -> None:
        if not self._is_primary(wire.connection, wire.taken):
            self.drop(wire)
            raise Disconnected(NOT_THE_PRIMARY)
        self._confirmed = max(self._confirmed, monotonic())
        super()._give_back(wire)

    def _is_primary(self, connection: Any, known: float) -> bool:
        address = (connection.host, connection.port)
        if address == self._primary and monotonic() - known <= SILENCE:
            return True
        named = self._ask_sentinels()
        # In this order: other threads must not take an earlier primary for a confirmed one.
        self._primary = named or self._pool.master_address
        self._confirmed = monotonic() + (WITHOUT_SENTINEL if named is None else 0.0)
        return address == self._primary

    def _ask_sentinels(self) -> Address | None:
        """Ask who is the primary; None when no Sentinel answers in time."""
        manager = self._pool.sentinel_manager
        end = monotonic() + self._patience
        for sentinel in manager.sentinels:
            with suppress(*DRIVER_ERRORS):
                found = sentinel.sentinel_get_master_addr_by_name(self._pool.service_name)
                if found is not None:
                    return primary_address(manager, found)
            if monotonic() >= end:
                break
        return None


def _reply(connection: Any) -> Reply | Exception:
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as error:
        # Without its traceback: that would keep the frames of this exchange, and so its
        # connection, until the garbage collector runs.
        return known_error(error).with_traceback(None)
