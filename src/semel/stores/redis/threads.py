"""Sends commands over redis-py's connections, under its command layer, for threads.

`ask` and `send` of a transport are the whole seam between the store and redis-py: what is sent
again, and why, is decided in `retry`; what errors mean is said in `errors`. `tasks` is the twin of
this module, `cluster` has the transport of a cluster.

redis-py's cost is its command layer and its pool, not its connection. So commands are packed here,
and connections of a client that is ours stay here between two round trips: the last one used is the
next one taken. A client of the application lends its connections for one round trip each.

Whether an idle connection is still alive is not asked before each use: every script may be run
twice, so a round trip that finds it closed is simply made again on a new one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty
from time import monotonic
from typing import Any, Final, TypeVar

from redis import exceptions as driver
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.errors import StoreError, StoreUnavailable
from semel.stores.redis.clients import pools_of
from semel.stores.redis.commands import LARGE, Command, ScanStep
from semel.stores.redis.errors import DRIVER_ERRORS, translated
from semel.stores.redis.redis_py import (
    known_error,
    make_ready,
    new_connection,
    parser_of,
    primary_address,
    take_connection,
    watch,
)
from semel.stores.redis.replies import Large, read_scan
from semel.stores.redis.retry import (
    NOT_THE_PRIMARY,
    SILENCE,
    WITHOUT_SENTINEL,
    Address,
    Backoff,
    Delivery,
    Reply,
    Sending,
    certain,
    follows_the_primary,
    unfit_server,
)
from semel.stores.thread_batching import Slot, Slots
from semel.stores.urls import SEARCH_SHARE

Answer = TypeVar("Answer")


# --- how many callers ------------------------------------------------------------------------


class Limit(Slots):
    """Lets as many callers in as there are connections; the others wait, for a bounded time.

    redis-py's own pools refuse the caller that finds every connection in use (only one of its four
    pool kinds can wait), so a burst would fail instead of queueing. Every client that semel opened
    itself has a limit.
    """

    def __init__(self, places: int, timeout: float, where: str) -> None:
        super().__init__(places)
        self._timeout = timeout
        self._where = where

    def take(self) -> Slot:
        """Wait for a place; the caller returns it with `give`."""
        try:
            return self.get(timeout=self._timeout)
        except Empty:
            raise StoreUnavailable(
                f"all {self._count} connections to {self._where} stayed in use for "
                f"{self._timeout:g} s; nothing was sent. "
                "Raise max_connections, or look for what holds them"
            ) from None


class NoLimit:
    """The limit of those who do not wait: renewals, and clients of the application."""

    def take(self) -> None:
        """Return at once: there is no limit."""

    def give(self, place: Any) -> None:
        """Nothing was taken."""


_NO_LIMIT: Final = NoLimit()


# --- connections -----------------------------------------------------------------------------


class Connection:
    """One connection. It closes when no caller refers to it any more.

    So none is lost when an exception of a signal handler strikes between two steps. A client that
    is ours gets its connections beside its pool, because redis-py loses one when the exception
    strikes inside the pool. An application's pool lends one, and gets it back.
    """

    __slots__ = ("_held", "_lender", "connection", "parser", "taken")

    def __init__(self, pool: Any, *, lent: bool) -> None:
        self._lender = pool if lent else None
        self.taken = 0.0
        """When it was last taken, for those who ask."""
        self._held: list[Any] = []
        """The connection, until it is given back: taken and given in one step, and never twice."""
        self._held.append(take_connection(pool) if lent else new_connection(pool))
        [self.connection] = self._held
        try:
            make_ready(self.connection)
        except BaseException:
            self.end()
            raise
        self.parser = parser_of(self.connection)

    def release(self) -> None:
        """Return the connection to the pool that lent it, as it is."""
        connection = self._held.pop()
        if self._lender is not None:
            self._lender.release(connection)

    def end(self) -> None:
        """Close the connection, and give it back."""
        if self._held:
            self._held[0].disconnect()  # struck here, it is still held, and ended once more
            self.release()

    __del__ = end


class Connections(ForkAware):
    """The connections to one server."""

    def __init__(self, pool: Any, *, keep: bool) -> None:
        self.pool = pool
        self._keep = keep
        self._closed = False
        self._idle: list[Connection] = []
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Start with no connection: these are the parent's."""
        leave_alone(self._idle)
        self._idle = []

    def exchange(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        """Send commands in one round trip; an error that the server answers is a reply, too."""
        taken = self._take()
        try:
            connection = taken.connection
            # In one write; but a large value is not worth another copy.
            large = len(commands[0]) >= LARGE
            connection.send_packed_command(commands if large else (b"".join(commands),))
            replies = [_reply(connection) for _ in commands]
        except BaseException:
            # Half a round trip may be on its way: nobody else must read the rest of it.
            self.drop(taken)
            raise
        self._give_back(taken)
        return replies

    def ask(self, command: bytes) -> Reply | Exception:
        """Send one command, and return its reply; an error that the server answers is one, too."""
        taken = self._take()
        try:
            taken.connection.send_packed_command((command,))
            # By the parser: what redis-py does around that is for those who do not repeat.
            reply: Reply = taken.parser.read_response(disable_decoding=True)
        except BaseException:
            self.drop(taken)
            raise
        self._give_back(taken)
        return reply

    def drop(self, broken: Connection | None = None) -> None:
        """Close this connection and those that are idle: what broke one may have broken all."""
        if broken is not None:
            broken.end()
        with suppress(IndexError):  # none is left
            while True:
                self._idle.pop().end()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        self.drop()

    def _take(self) -> Connection:
        notice_fork()
        with suppress(IndexError):  # none is idle; not the reason of what connecting may raise
            return self._idle.pop()
        return Connection(self.pool, lent=not self._keep)

    def _give_back(self, taken: Connection) -> None:
        if not self._keep:
            taken.release()
            return
        self._idle.append(taken)
        if self._closed:
            self.drop()


class SentinelConnections(Connections):
    """The connections to the primary that Sentinel names.

    Sentinel is asked whether a server is still the primary before a new connection is used, before
    one is used after a silence, and before an answer that came late is believed.
    """

    def __init__(self, pool: Any, *, keep: bool, timeout: float) -> None:
        super().__init__(pool, keep=keep)
        self._timeout = timeout
        self._primary: Address | None = None
        self._confirmed = -inf
        """When that primary answered promptly, or Sentinel named it."""

    def _take(self) -> Connection:
        while True:
            found = super()._take()
            if self._is_primary(found.connection, self._confirmed):
                found.taken = monotonic()
                return found
            self.drop(found)
            if not found.taken:
                # redis-py connects to the old primary until the failover has ended.
                raise Disconnected(NOT_THE_PRIMARY)

    def _give_back(self, taken: Connection) -> None:
        if not self._is_primary(taken.connection, taken.taken):
            self.drop(taken)
            raise Disconnected(NOT_THE_PRIMARY)
        self._confirmed = max(self._confirmed, monotonic())
        super()._give_back(taken)

    def _is_primary(self, connection: Any, known: float) -> bool:
        address = (connection.host, connection.port)
        if address == self._primary and monotonic() - known <= SILENCE:
            return True
        named = self._ask_sentinels()
        # In this order: other threads must not take an earlier primary for a confirmed one.
        self._primary = named or self.pool.master_address
        self._confirmed = monotonic() + (WITHOUT_SENTINEL if named is None else 0.0)
        return address == self._primary

    def _ask_sentinels(self) -> Address | None:
        """Ask who is the primary; None when no Sentinel answers in time."""
        manager = self.pool.sentinel_manager
        end = monotonic() + self._timeout
        for sentinel in manager.sentinels:
            with suppress(*DRIVER_ERRORS):
                found = sentinel.sentinel_get_master_addr_by_name(self.pool.service_name)
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


# --- transports ------------------------------------------------------------------------------


class Transport(ABC):
    """What every kind of server has in common."""

    _redirect_share = 0.0
    """For which part of the time a command may be sent to another node: where there are several."""

    def __init__(
        self,
        where: str,
        timeout: float,
        *,
        limit: Limit | None = None,
        owned: bool = False,
    ) -> None:
        self.where = where
        self._timeout = timeout
        self._limit: Limit | NoLimit = _NO_LIMIT if limit is None else limit
        self._owned = owned
        self._closed = False

    def ask(self, command: Command[Answer], *, urgent: bool = False) -> Answer:
        """Send one command. An urgent one does not wait for others to end."""
        return certain(self.send((command,), urgent=urgent)[0])

    def send(
        self, commands: Sequence[Command[Answer]], *, urgent: bool = False
    ) -> list[Answer | StoreError]:
        """Send commands in one round trip (per node); each has its own answer."""
        if not commands:
            return []
        with self._turn(urgent=urgent):
            redirect_until = monotonic() + self._timeout * self._redirect_share
            delivery = Delivery(commands, redirect_until, self.where)
            while delivery.pending:
                delivery.replied(self._exchange(delivery.pending))
        return delivery.answers

    @contextmanager
    def _turn(self, *, urgent: bool = False) -> Iterator[None]:
        """One caller's turn: with a place of the limit."""
        if self._closed:
            raise StoreUnavailable(f"the store at {self.where} was closed")
        limit = _NO_LIMIT if urgent else self._limit
        with translated(self.where):
            place = limit.take()
            try:
                yield
            finally:
                limit.give(place)

    @abstractmethod
    def _exchange(self, sendings: Sequence[Sending]) -> list[Reply | Exception]:
        """Send one round trip."""

    @abstractmethod
    def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""

    def server_of(self, _key: bytes) -> str | None:
        """Name the server that has a key; None = there is only one."""
        return None

    @abstractmethod
    def connector_of(self, _key: bytes) -> tuple[str, Any]:
        """Name the server that has a key, and what connects to it; None = there is no such."""

    @abstractmethod
    def nodes(self) -> list[str]:
        """Names of the servers that hold keys, in an order that stays."""

    @abstractmethod
    def scan(self, step: ScanStep) -> tuple[int, list[bytes]]:
        """Make one step of SCAN on one of the `nodes`."""


class ServerTransport(Transport):
    """One server, or the primary that Sentinel names."""

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(where, timeout, **more)
        self.client = client
        for connecting in pools_of(client):
            watch(connecting)
        pool = client.connection_pool
        self._connections = (
            SentinelConnections(pool, keep=self._owned, timeout=timeout / 2)
            if follows_the_primary(client)
            else Connections(pool, keep=self._owned)
        )

    def ask(self, command: Command[Answer], *, urgent: bool = False) -> Answer:
        """Send one command: straight through, while the server simply answers."""
        if self._closed:
            return super().ask(command, urgent=urgent)
        limit = _NO_LIMIT if urgent else self._limit
        try:
            place = limit.take()
            try:
                reply = self._connections.ask(command.packed())
            finally:
                limit.give(place)
            if not isinstance(reply, Exception):
                answer = command.read(reply)
                if type(answer) is Large:
                    return self.ask(command.next_command(answer), urgent=urgent)
                return answer
        except DRIVER_ERRORS:
            pass
        # It did not simply answer: the long way, from the start, knows what to do then.
        return super().ask(command, urgent=urgent)

    def _exchange(self, sendings: Sequence[Sending | ScanStep]) -> list[Reply | Exception]:
        commands = [sending.packed() for sending in sendings]
        backoff = Backoff(self._timeout * SEARCH_SHARE)
        while True:
            try:
                replies = self._connections.exchange(commands)
            except (driver.ConnectionError, driver.TimeoutError, OSError) as error:
                time.sleep(backoff.pause_after(error))
            else:
                if unfit_server(replies) is not None:
                    # A new connection may lead to a better one. Where that is certain, behind a
                    # Sentinel, and where a server is still loading, redis-py has raised it already.
                    self._connections.drop()
                return replies

    def close(self) -> None:
        """Close the client if it is ours."""
        self._closed = True
        self._connections.close()
        if self._owned:
            for pool in pools_of(self.client):
                pool.disconnect()

    def connector_of(self, _key: bytes) -> tuple[str, Any]:
        """There is one."""
        return "", self.client.connection_pool

    def nodes(self) -> list[str]:
        """There is one, and it needs no name."""
        return [""]

    def scan(self, step: ScanStep) -> tuple[int, list[bytes]]:
        """Make one step of SCAN."""
        with self._turn():
            [reply] = self._exchange([step])
            return read_scan(reply)
