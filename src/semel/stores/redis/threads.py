"""Carries calls to the servers and replies back, for threads.

This module sends. `call` and `call_many` are the whole seam between the store and redis-py: what
is sent again, and why, is decided in `delivery` and `repeating`; what errors mean is said in
`failures`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from queue import Empty
from time import monotonic
from typing import Any, Final, TypeVar

from redis import exceptions as driver
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError

from semel.errors import StoreError, StoreUnavailable
from semel.stores.places import Place, Places
from semel.stores.redis.clients import clients_of
from semel.stores.redis.commands import Call, packed
from semel.stores.redis.errors import DRIVER_ERRORS, translated
from semel.stores.redis.redis_py import known_error, primary_address, read_reply, take_connection
from semel.stores.redis.retry import (
    NOT_THE_PRIMARY,
    SILENCE,
    WITHOUT_SENTINEL,
    Address,
    Attempt,
    Repeating,
    Reply,
    answers_to,
    certain,
    deliver,
    follows_the_primary,
    never,
    unfit_server,
)
from semel.stores.registry import SEARCH_SHARE

# --- Speaks to one server over redis-py's connections, under its command layer, for threads ---
#
# redis-py's cost is its command layer and its pool, not its connection. So commands are packed
# here, and connections of a client that is ours stay here between two exchanges: the last one used is the
# next one taken. A client of the application lends its connections for one exchange each.
#
# Whether an idle connection is still alive is not asked before each use: every script may be run
# twice, so an exchange that finds it closed is simply made again on a new one.


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


# --- Lets as many callers in as there are connections; the others wait, for a bounded time ---
#
# redis-py's own pools refuse the caller that finds every connection in use (only one of its four
# pool kinds can wait), so a burst would fail instead of queueing. A gate stands in front of every
# client that semel opened itself.


class Gate(Places):
    """Takes and gives places: one for each exchange with the server."""

    def __init__(self, places: int, timeout: float, where: str) -> None:
        super().__init__(places)
        self._timeout = timeout
        self._where = where

    def take(self) -> Place:
        """Wait for a place; the caller returns it with `give`."""
        try:
            return self.get(timeout=self._timeout)
        except Empty:
            raise _full(self._places, self._timeout, self._where) from None


class OpenGate:
    """The gate of those who do not wait at one."""

    def take(self) -> None:
        """Go on."""

    def give(self, place: Any) -> None:
        """Nothing was taken."""


def _full(places: int, timeout: float, where: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"all {places} connections to {where} stayed in use for {timeout:g} s; nothing was sent. "
        "Raise max_connections, or look for what holds them"
    )


Answer = TypeVar("Answer")

_OPEN: Final = OpenGate()


class Transport(ABC):
    """What every kind of server has in common."""

    def __init__(
        self,
        where: str,
        timeout: float,
        *,
        gate: Gate | None = None,
        owned: bool = False,
    ) -> None:
        self.where = where
        self._timeout = timeout
        self._gate: Gate | OpenGate = _OPEN if gate is None else gate
        self._owned = owned
        self._closed = False

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Answer:
        """One call, one answer. An urgent one does not wait at the gate."""
        return certain(self.call_many((call,), urgent=urgent)[0])

    def call_many(
        self, calls: Sequence[Call[Answer]], *, urgent: bool = False
    ) -> list[Answer | StoreError]:
        """Many calls in one round trip (per node); each has its own answer."""
        if not calls:
            return []
        if self._closed:
            raise StoreUnavailable(f"the store at {self.where} was closed")
        with translated(self.where):
            replies = self._deliver(calls, urgent=urgent)
        return answers_to(calls, replies, self.where)

    def _deliver(self, calls: Sequence[Call[Any]], *, urgent: bool) -> list[Reply | Exception]:
        delivery = deliver(calls, self._may_redirect())
        attempts = next(delivery)
        gate = _OPEN if urgent else self._gate
        place = gate.take()
        try:
            while True:
                attempts = delivery.send(self._exchange(attempts))
        except StopIteration as done:
            replies: list[Reply | Exception] = done.value
            return replies
        finally:
            gate.give(place)

    @abstractmethod
    def _may_redirect(self) -> Callable[[], bool]: ...

    @abstractmethod
    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        """Send one round trip."""

    @abstractmethod
    def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""

    def server_of(self, _key: bytes) -> str | None:
        """Name the server that has a key; None = there is only one."""
        return None

    @abstractmethod
    def connector_of(self, key: bytes) -> tuple[str, Any]:
        """Name the server that has a key, and what connects to it; None = there is no such."""

    @abstractmethod
    def nodes(self) -> list[str]:
        """Names of the servers that hold keys, in an order that stays."""

    @abstractmethod
    def scan(self, node: str, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        """One step of SCAN on one of the `nodes`."""


class ServerTransport(Transport):
    """One server, or the primary that Sentinel names."""

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(where, timeout, **more)
        self._client = client
        pool = client.connection_pool
        self._wires = (
            SentinelWires(pool, keep=self._owned, patience=timeout / 2)
            if follows_the_primary(client)
            else Wires(pool, keep=self._owned)
        )

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Answer:
        """One call, one answer: straight through, while the server simply answers."""
        if self._closed:
            return super().call(call, urgent=urgent)
        gate = _OPEN if urgent else self._gate
        try:
            place = gate.take()
            try:
                reply = self._wires.ask(call.wire())
            finally:
                gate.give(place)
            if not isinstance(reply, Exception):
                return call.read(reply)
        except DRIVER_ERRORS:
            pass
        # It did not simply answer: the long way, from the start, knows what to do then.
        return super().call(call, urgent=urgent)

    def _may_redirect(self) -> Callable[[], bool]:
        return never

    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        return self._repeated([attempt.wire() for attempt in attempts])

    def _repeated(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        repeating = Repeating(self._timeout * SEARCH_SHARE)
        while True:
            try:
                return self._ask(commands)
            except (driver.ConnectionError, driver.TimeoutError, OSError) as error:
                time.sleep(repeating.pause_after(error))

    def _ask(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        replies = self._wires.exchange(commands)
        if unfit_server(replies) is not None:
            # Whoever connects anew may be led to a better one. Where that is certain, behind a
            # Sentinel, and where a server is still loading, redis-py has raised it already.
            self._wires.drop()
        return replies

    def close(self) -> None:
        """Close the client if it is ours."""
        self._closed = True
        self._wires.close()
        if self._owned:
            for client in clients_of(self._client):
                client.close()

    def connector_of(self, _key: bytes) -> tuple[str, Any]:
        """There is one."""
        return "", self._client.connection_pool

    def nodes(self) -> list[str]:
        """There is one, and it needs no name."""
        return [""]

    def scan(
        self,
        node: str,  # noqa: ARG002 - there is only one
        cursor: int,
        pattern: bytes,
        count: int,
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN."""
        with translated(self.where):
            place = self._gate.take()
            try:
                [reply] = self._repeated([scan_command(cursor, pattern, count)])
            finally:
                self._gate.give(place)
            return scan_reply(reply)


def scan_command(cursor: int, pattern: bytes, count: int) -> bytes:
    """One SCAN command."""
    return packed(("SCAN", cursor, "MATCH", pattern, "COUNT", count))


def scan_reply(reply: Reply | Exception) -> tuple[int, list[bytes]]:
    """Read where to go on, and the keys found."""
    if isinstance(reply, Exception):
        raise reply
    following, keys = reply
    return int(following), list(keys)
