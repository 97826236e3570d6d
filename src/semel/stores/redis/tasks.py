"""Sends the commands of many tasks over one connection: the twin of `threads`, for asyncio.

Commands leave as they come, replies return in their order. redis-py connects (TLS, login, Sentinel,
unix sockets are its business); then the connection's stream is taken over:

- An idle connection sends at once. While replies are outstanding, the commands of one turn of the
  event loop leave together, a handful of writes for many of them.
- Replies are read by hiredis and belong to the commands in the order in which these were sent; the
  reply of a caller that was canceled is dropped.
- A connection repeats nothing. When it breaks, or its oldest command has waited too long, everyone
  who waits is notified, and a command may be sent again the long way, as `retry` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from _thread import get_ident
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

from hiredis import PushNotification
from redis import exceptions as driver
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as TimedOut

from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.errors import StoreError, StoreUnavailable
from semel.stores.batching import has_ended, loop_here, only_loop
from semel.stores.redis.clients import pools_of
from semel.stores.redis.commands import Command, ScanStep
from semel.stores.redis.errors import DRIVER_ERRORS, translated
from semel.stores.redis.redis_py import (
    NOT_YET,
    close_pool,
    hang_up,
    make_ready_async,
    new_reader,
    primary_address,
    take_connection,
    take_over,
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
from semel.stores.urls import SEARCH_SHARE

Answer = TypeVar("Answer")
T = TypeVar("T")

LOOKS_PER_TIMEOUT = 4
"""How often a connection looks at its oldest command while that may time out."""

HANDFUL = 8
SHARE = 2
"""A handful of commands leaves without waiting for more, if it is half of all that is under way:
the server works on them while the next ones are made. If all left in one write, client and server
would take turns; each of many small writes would cost a call of the system."""

Waiting: TypeAlias = tuple["asyncio.Future[Any]", float, Command[Any] | None]
"""Who waits, since when, and for the answer to which command (None: for the bare reply)."""
OnFailure: TypeAlias = Callable[["asyncio.Future[Any]", Command[Any], float], None]
"""Called with a command that was not simply answered, who waits for it and since when."""
OnLate: TypeAlias = "Callable[[Connection], None]"
"""Called when a server answered late: it checks whether these replies can be trusted."""


def _closed() -> Disconnected:
    return Disconnected("the store was closed")


# --- connections -----------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """The commands of many tasks on one connection of redis-py's."""

    def __init__(
        self,
        connection: Any,
        timeout: float,
        on_failure: OnFailure | None = None,
        on_late: OnLate | None = None,
    ) -> None:
        self.connection = connection
        self._on_failure = on_failure
        self._on_late = on_late
        self.confirmed_at = monotonic() if on_late is None else -inf
        """When the server last answered, or was last found to be the right one."""
        self._held: list[tuple[Waiting, Reply]] | None = None
        """Replies that came late: passed on when the server is found to be the right one."""
        self.broken: Disconnected | TimedOut | None = None
        self._timeout = timeout
        self.loop = asyncio.get_running_loop()
        self._new_answer = self.loop.create_future
        self.waiting: deque[Waiting] = deque()
        """The commands on their way."""
        self._outbox: list[bytes] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._reader = new_reader()
        self._transport, self._stream = take_over(connection, self)

    def ask(
        self,
        packed: bytes,
        command: Command[Any] | None = None,
        answer: asyncio.Future[Any] | None = None,
    ) -> asyncio.Future[Any]:
        """Send a command; returns its reply, or what the command reads from it.

        An error that the server answers is a reply, too; that of a command is a failure. A command
        that follows another one is for the `answer` that its caller waits for already.
        """
        if answer is None:
            answer = self._new_answer()
        since = monotonic()
        waiting = self.waiting
        if self.broken is not None:
            self._fail((answer, since, command), self.broken)
            return answer
        if waiting:
            outbox = self._outbox
            outbox.append(packed)
            if len(outbox) == 1:
                self.loop.call_soon(self._send)
            elif len(outbox) >= HANDFUL and len(outbox) * SHARE >= len(waiting):
                self._send()
        else:
            self._transport.write(packed)
        waiting.append((answer, since, command))
        if self._alarm is None:
            self._look_later()
        return answer

    async def exchange(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send commands next to each other; a reply for each."""
        answers = [self.ask(command) for command in commands]
        try:
            return [await answer for answer in answers]
        finally:
            for answer in answers:
                # Cancelled, or the first of them raised the break: the others have no reader.
                if not answer.done():
                    answer.cancel()
                elif not answer.cancelled():
                    answer.exception()

    def end(self, error: Disconnected | TimedOut) -> None:
        """Break the connection, unless it is broken, and notify everyone who waits."""
        if self.broken is None:
            self.broken = error
            self._transport.abort()
        waiting, self.waiting = self.waiting, deque()
        held, self._held = self._held or [], None
        for each in (*(late for late, _ in held), *waiting):
            self._fail(each, error)

    def _send(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands:
            self._transport.write(b"".join(commands))

    def data_received(self, data: bytes) -> None:
        """Pass each reply to the command it belongs to."""
        waiting, next_reply = self.waiting, self._reader.gets
        if self._on_late is not None:
            self._note_silence(self._on_late)
        try:
            self._reader.feed(data)
            while (reply := next_reply()) is not NOT_YET:
                if type(reply) is PushNotification:
                    continue  # news of the server (RESP3) that nobody asked for
                if self._held is None:
                    self._pass_on(waiting[0], reply)
                else:
                    self._held.append((waiting[0], reply))
                waiting.popleft()  # last: whatever is raised above, it is still waited for
        except (InvalidResponse, IndexError) as garbled:
            self.end(Disconnected(f"the server's replies cannot be read: {garbled}"))

    def _pass_on(self, waiting: Waiting, reply: Reply) -> None:
        answer, _, command = waiting
        if answer.done():
            return  # its caller has left
        if command is None:
            answer.set_result(reply)
        elif isinstance(reply, Exception):
            self._fail(waiting, reply)
        else:
            try:
                result = command.read(reply)
            except Exception as unreadable:  # noqa: BLE001 - this caller's error alone
                answer.set_exception(unreadable)
                return
            if type(result) is Large:
                command = command.next_command(result)
                self.ask(command.packed(), command, answer)
            else:
                answer.set_result(result)

    def _fail(self, waiting: Waiting, error: Exception) -> None:
        answer, since, command = waiting
        if answer.done():
            return
        if command is None or self._on_failure is None:
            answer.set_exception(error)
        else:
            self._on_failure(answer, command, since)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify everyone who waits, and redis-py, which may wait for the end of its stream."""
        self.end(Disconnected(f"connection lost: {exc}" if exc else "Connection closed by server."))
        if self._alarm is not None:
            self._alarm.cancel()
        self._stream.connection_lost(exc)

    def leave_to_parent(self) -> None:
        """Let go of the connection: this process was forked from the one that goes on using it.

        From now on its socket leads nowhere. A child that runs the loop of its parent would else
        read the parent's replies, because both share what the loop waits on.
        """
        if self.broken is None:
            self.broken = Disconnected("it belongs to the parent process")
            # A transport that is being closed, or is not asyncio's, may have no socket to exchange.
            with contextlib.suppress(AttributeError, OSError):
                nowhere, other_end = socket.socketpair()
                other_end.close()
                with nowhere:
                    inherited = self._transport.get_extra_info("socket").fileno()
                    os.dup2(nowhere.fileno(), inherited, inheritable=False)

    def _look_later(self) -> None:
        self._alarm = self.loop.call_later(self._timeout / LOOKS_PER_TIMEOUT, self._look)

    def _look(self) -> None:
        """Replies come in order: when the oldest is overdue, so is the connection."""
        self._alarm = None
        if self.waiting:
            if monotonic() - self.waiting[0][1] >= self._timeout:
                self.end(TimedOut("Timeout reading from the server"))
            else:
                self._look_later()

    # --- Sentinel: is its server still the primary? --------------------------------------

    def _note_silence(self, on_late: OnLate) -> None:
        now = monotonic()
        silent_since = max(self.confirmed_at, self.waiting[0][1]) if self.waiting else now
        if now - silent_since > SILENCE and self._held is None:
            self._held = []
            on_late(self)
        self.confirmed_at = now

    def silent(self) -> bool:
        """Whether the server has been silent for such a time that it may have been replaced."""
        return self._held is not None or monotonic() - self.confirmed_at > SILENCE

    def fresh(self) -> bool:
        """Whether it is not known yet that the server is the right one."""
        return self.confirmed_at == -inf

    def believe(self, until: float) -> None:
        """Pass on the replies that were held, and take the server for the right one until then."""
        self.confirmed_at = until
        held, self._held = self._held or [], None
        for waiting, reply in held:
            self._pass_on(waiting, reply)


class SharedTask(Generic[T]):
    """Work that all who need it wait for together; they share a failure.

    A caller that leaves must not take it from those who stay.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[T] | None = None
        """What is under way."""
        self._closed = False

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Begin the work, unless it is under way; no call has to wait for it."""
        if self._closed:
            raise _closed()
        # One that has ended may still be noted: an exception may have struck before its call-back.
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(work())
            self.task.add_done_callback(self._ended)
        return self.task

    async def join(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the work, begun if need be."""
        task = self.begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise _closed() from None  # nobody cancelled this caller
            raise

    def _ended(self, task: asyncio.Task[T]) -> None:
        self.task = None if self.task is task else self.task  # else another has begun since
        if not task.cancelled():
            task.exception()  # raised to those who wait; if nobody does any more, to nobody

    async def close(self) -> None:
        """End what is under way, for good."""
        self._closed = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))


class SharedConnection(ForkAware):
    """The connection of many tasks: the first one that finds none open opens it for all."""

    def __init__(self, pool: Any, timeout: float, **callbacks: Any) -> None:
        self._pool = pool
        self._timeout = timeout
        self._new: Callable[[Any], Connection] = partial(Connection, timeout=timeout, **callbacks)
        self.connection: Connection | None = None
        """The connection that was opened last; it may be broken by now."""
        self._held: list[Any] = []
        """What the pool gave, until it is given back: taken and given in one step each."""
        self._opening = SharedTask[Connection]()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Leave the connection alone, also where the parent's loop seems to run in the child."""
        self._opening = SharedTask[Connection]()
        if self.connection is not None:
            self.connection.leave_to_parent()

    def open_connection(self) -> Connection | None:
        """Return the connection; if it is not open, begin to open it and return none."""
        connection = self.connection
        if connection is None or connection.broken:
            self._opening.begin(self._open)
            return None
        return connection

    async def open(self) -> Connection:
        """Return the connection, opened if need be."""
        if self.connection is not None and self.connection.broken is None:
            return self.connection
        return await self._opening.join(self._open)

    async def _open(self) -> Connection:
        # Twice: redis-py's own timeout must end first, because it knows the reason.
        async with asyncio.timeout(2 * self._timeout):
            await self._release()
            self._held.append(await take_connection(self._pool))
            await make_ready_async(self._held[-1])
        self.connection = self._new(self._held[-1])
        return self.connection

    async def _release(self) -> None:
        if self.connection is not None:
            self.connection.end(_closed())
            self.connection = None
        while self._held:
            await hang_up(self._held[-1])
            await self._pool.release(self._held.pop())

    async def close(self) -> None:
        """Close the connection for good, and give it back."""
        await self._opening.close()
        await self._release()


class Connections:
    """The connections to one server: one for calls, and one for renewals, which must not queue.

    The second one opens while the first one serves: to connect may take longer than a lease lasts,
    and the application's pool may have no connection to spare.
    """

    def __init__(
        self,
        pool: Any,
        timeout: float,
        on_failure: OnFailure | None = None,
        on_late: OnLate | None = None,
    ) -> None:
        self.calls = SharedConnection(pool, timeout, on_failure=on_failure, on_late=on_late)
        self._renewals = SharedConnection(pool, timeout, on_late=on_late)

    def ready(self, *, urgent: bool = False) -> Connection | None:
        """Return the connection for a command, if one is open."""
        notice_fork()
        connection = self.calls.connection
        if connection is None or connection.broken:
            # No connection may be had any more: what is open still keeps the leases.
            connection = self._renewals.connection if urgent else None
            return None if connection is None or connection.broken else connection
        return (self._renewals.open_connection() or connection) if urgent else connection

    async def open(self, *, urgent: bool = False) -> Connection:
        """Return the connection for a command, opened if need be."""
        return self.ready(urgent=urgent) or await self.calls.open()

    async def close(self) -> None:
        """Close them all."""
        for shared in (self._renewals, self.calls):
            await shared.close()


# --- transports ------------------------------------------------------------------------------


class AsyncTransport(ABC):
    """What every kind of server has in common."""

    _redirect_share = 0.0
    """For which part of the time a command may be sent to another node: where there are several."""

    def __init__(self, client: Any, where: str, timeout: float, *, owned: bool = False) -> None:
        self.where = where
        self.client = client
        self._timeout = timeout
        self._owned = owned
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(self, command: Command[Answer], *, urgent: bool = False) -> Awaitable[Answer]:
        """Send one command. An urgent one does not queue behind the others."""
        return self._ask(command, urgent=urgent)

    async def _ask(self, command: Command[Answer], *, urgent: bool) -> Answer:
        return certain((await self.send((command,), urgent=urgent))[0])

    async def send(
        self, commands: Sequence[Command[Answer]], *, urgent: bool = False, spent: float = 0.0
    ) -> list[Answer | StoreError]:
        """Send commands in one round trip (per node); each has its own answer."""
        if not commands:
            return []
        async with self._turn(spent):
            redirect_until = monotonic() + self._timeout * self._redirect_share
            delivery = Delivery(commands, redirect_until, self.where)
            while delivery.pending:
                delivery.replied(await self._exchange(delivery.pending, urgent=urgent))
        return delivery.answers

    @contextlib.asynccontextmanager
    async def _turn(self, spent: float = 0.0) -> AsyncIterator[None]:
        """One caller's turn: on the right loop, within the timeout."""
        self._loop = only_loop(self._loop, self.where)
        if self._closed:
            raise StoreUnavailable(f"the store at {self.where} was closed")
        with translated(self.where):
            async with asyncio.timeout(self._timeout - spent):
                yield

    @abstractmethod
    async def _exchange(
        self, sendings: Sequence[Sending], *, urgent: bool
    ) -> list[Reply | Exception]:
        """Send one round trip."""

    async def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""
        notice_fork()
        ended = has_ended(self._loop, self.where)
        self._closed = True
        # Never used, nothing is open; and redis-py would make an event loop where none is running.
        if self._loop is not None and not ended:
            await self._close()

    @abstractmethod
    async def _close(self) -> None:
        """Close what was opened for this transport, on its loop."""

    def server_of(self, _key: bytes) -> str | None:
        """Name the server that has a key; None = there is only one."""
        return None

    @abstractmethod
    def connector_of(self, _key: bytes) -> tuple[str, Any]:
        """Name the server that has a key, and what connects to it; None = there is no such."""

    @abstractmethod
    async def nodes(self) -> list[str]:
        """Names of the servers that hold keys, in an order that stays."""

    @abstractmethod
    async def scan(self, step: ScanStep) -> tuple[int, list[bytes]]:
        """Make one step of SCAN on one of the `nodes`."""


class AsyncServerTransport(AsyncTransport):
    """One server, or the primary that Sentinel names."""

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(client, where, timeout, **more)
        for connecting in pools_of(client):
            watch(connecting)
        self._follows_the_primary = follows_the_primary(client)
        self._connections = Connections(
            client.connection_pool,
            timeout / 2,
            self._send_again,
            self._answered_late if self._follows_the_primary else None,
        )
        self._asking_sentinel = asyncio.Lock()
        self._checks: set[asyncio.Task[None]] = set()

    def ask(self, command: Command[Answer], *, urgent: bool = False) -> Awaitable[Answer]:
        """Send one command: straight through a connection that is open."""
        notice_fork()
        connection = self._connections.calls.connection
        if (
            connection is None
            or connection.broken is not None
            or urgent
            or self._closed
            # Outside of any loop, a verb may be prepared. A loop of asyncio's knows the thread that
            # runs it now; before Python 3.12, asking which loop runs here is a call of the system.
            or (
                getattr(connection.loop, "_thread_id", None) != get_ident()
                and loop_here() is not connection.loop
            )
            or (self._follows_the_primary and connection.silent())
        ):
            return super().ask(command, urgent=urgent)
        return connection.ask(command.packed(), command)

    def _send_again(
        self, answer: asyncio.Future[Answer], command: Command[Answer], since: float
    ) -> None:
        """It was not simply answered: the long way, from the start, knows what to do then."""
        long_way = self.send((command,), spent=monotonic() - since)
        task = asyncio.ensure_future(long_way)
        task.add_done_callback(partial(_pass_outcome, answer))
        answer.add_done_callback(lambda _: task.cancel())  # its caller may leave

    async def _exchange(
        self, sendings: Sequence[Sending | ScanStep], *, urgent: bool
    ) -> list[Reply | Exception]:
        commands = [sending.packed() for sending in sendings]
        backoff = Backoff(self._timeout * SEARCH_SHARE)
        while True:
            try:
                return await self._exchange_once(commands, urgent=urgent)
            except (driver.ConnectionError, driver.TimeoutError, OSError) as error:
                if self._closed:
                    raise
                await asyncio.sleep(backoff.pause_after(error))

    async def _exchange_once(
        self, commands: Sequence[bytes], *, urgent: bool
    ) -> list[Reply | Exception]:
        connection = await self._connections.open(urgent=urgent)
        if self._follows_the_primary:
            connection = await self._confirmed(connection, urgent=urgent)
        replies = await connection.exchange(commands)
        unfit = unfit_server(replies)
        if unfit is not None:
            # A new connection may lead to a better server, or find this one ready.
            connection.end(unfit)
            if self._follows_the_primary or unfit in replies:
                raise unfit
        return replies

    async def _confirmed(self, connection: Connection, *, urgent: bool) -> Connection:
        """Return the connection if its server is the primary for sure, else a new one."""
        async with self._asking_sentinel:
            while connection.broken or connection.silent():
                if not connection.broken:
                    fresh = connection.fresh()
                    await self._check(connection)
                    if fresh and connection.broken:
                        # redis-py connects to the old primary until the failover has ended.
                        raise connection.broken
                connection = await self._connections.open(urgent=urgent)
            return connection

    def _answered_late(self, connection: Connection) -> None:
        check = asyncio.ensure_future(self._check(connection))
        self._checks.add(check)
        check.add_done_callback(partial(self._checked, connection))

    def _checked(self, connection: Connection, check: asyncio.Task[None]) -> None:
        """Break a connection whose check did not end: its replies would be held for ever."""
        self._checks.discard(check)
        reason = None if check.cancelled() else check.exception()
        if check.cancelled() or reason is not None:
            error = driver.ConnectionError("it is not known whether the server is still primary")
            error.__cause__ = reason
            connection.end(error)

    async def _check(self, connection: Connection) -> None:
        """Believe the connection, or break it: its server may have been replaced."""
        named = await self._ask_sentinels()
        primary = named or self.client.connection_pool.master_address
        if primary == (connection.connection.host, connection.connection.port):
            connection.believe(monotonic() + (WITHOUT_SENTINEL if named is None else 0.0))
        else:
            connection.end(driver.ConnectionError(NOT_THE_PRIMARY))

    async def _ask_sentinels(self) -> Address | None:
        """Ask who is the primary; None when no Sentinel answers in time."""
        pool = self.client.connection_pool
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout / 2):
                for sentinel in pool.sentinel_manager.sentinels:
                    with contextlib.suppress(*DRIVER_ERRORS):
                        found = await sentinel.sentinel_get_master_addr_by_name(pool.service_name)
                        if found is not None:
                            return primary_address(pool.sentinel_manager, found)
        return None

    async def _close(self) -> None:
        for check in self._checks:
            check.cancel()
        await self._connections.close()
        if self._owned:
            for pool in pools_of(self.client):
                await close_pool(pool)

    def connector_of(self, _key: bytes) -> tuple[str, Any]:
        """There is one."""
        return "", self.client.connection_pool

    async def nodes(self) -> list[str]:
        """There is one, and it needs no name."""
        return [""]

    async def scan(self, step: ScanStep) -> tuple[int, list[bytes]]:
        """Make one step of SCAN."""
        async with self._turn():
            [reply] = await self._exchange([step], urgent=False)
            return read_scan(reply)


def _pass_outcome(
    answer: asyncio.Future[Answer], task: asyncio.Task[list[Answer | StoreError]]
) -> None:
    """Pass the outcome of a task to the caller that waits for the answer, if it still does."""
    if task.cancelled():
        answer.cancel()  # from outside, unless the caller has left
        return
    error = task.exception()
    [outcome] = [error] if error is not None else task.result()
    if answer.done():
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
