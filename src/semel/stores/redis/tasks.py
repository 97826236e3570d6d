"""Carries calls to the servers and replies back, for asyncio: the twin of `transport`.

All tasks share the lines to a server: see `Lanes` in `line`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from hiredis import PushNotification, Reader
from redis import exceptions as driver
from redis.exceptions import ConnectionError as LineBroken
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as LineSilent

from semel.errors import StoreError, StoreUnavailable
from semel.stores.loops import has_ended, only_loop
from semel.stores.redis.clients import clients_of
from semel.stores.redis.commands import Call
from semel.stores.redis.errors import DRIVER_ERRORS, translated
from semel.stores.redis.redis_py import (
    close_client,
    primary_address,
    reply_error,
    take_connection,
    take_over,
)
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
from semel.stores.redis.threads import scan_command, scan_reply
from semel.stores.registry import SEARCH_SHARE

# --- One connection, many tasks: commands leave as they come, replies return in their order ---
#
# redis-py's cost is its command layer, not its connection. So a line lets redis-py connect (TLS,
# login, Sentinel, unix sockets are its business) and then takes the connection's stream over:
#
# - An idle line sends at once. While replies are outstanding, the commands of one turn of the event
#   loop leave together, a handful of writes for many of them.
# - Replies are read by hiredis and belong to the commands in the order in which these were sent; a
#   caller that was cancelled leaves its place, and its reply is dropped.
# - A line repeats nothing. When it breaks, or its oldest command has waited too long, everyone who
#   waits is told, and calls are handed to whoever knows what to send again.


_NOT_YET: Final = object()

LOOKS_PER_PATIENCE = 4
"""How often a line looks at its oldest command while it may run out of patience."""


def _closed() -> LineBroken:
    return LineBroken("the store was closed")


HANDFUL = 8
SHARE = 4
"""A handful of commands leaves without waiting for more, if it is a good share (one in four) of all
that is under way: the server works on them while the next ones are made. Were they all in one
write, client and server would take turns; were it many small ones, each would cost its own."""

Waiting: TypeAlias = "asyncio.Future[Any]"
Trouble: TypeAlias = Callable[[Waiting, Call[Any], float], None]
"""Told of a call that was not simply answered, who waits for it and since when."""
Late: TypeAlias = "Callable[[Line], None]"
"""Called when a server answered late: it checks whether the replies on this line can be trusted."""


class Line(asyncio.Protocol):
    """The commands of many tasks on one connection of redis-py's."""

    def __init__(
        self,
        connection: Any,
        patience: float,
        trouble: Trouble | None = None,
        late: Late | None = None,
    ) -> None:
        self.connection = connection
        self._trouble = trouble
        self._late = late
        self.heard = monotonic() if late is None else -inf
        """When the server last answered, or was last found to be the right one."""
        self._held: list[tuple[Waiting, float, Call[Any] | None, Reply]] | None = None
        """Replies that came late: given to their callers when the server is found to be right."""
        self.broken: LineBroken | LineSilent | None = None
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._new_answer = self._loop.create_future
        self.waiting: deque[tuple[Waiting, float, Call[Any] | None]] = deque()
        """The commands on their way: who waits, since when, and for which call, if for one."""
        self._outbox: list[bytes] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._reader = Reader(
            protocolError=InvalidResponse,
            replyError=reply_error,
            notEnoughData=_NOT_YET,
        )
        self._transport, self._stream = take_over(connection, self)

    def ask(self, command: bytes, call: Call[Any] | None = None) -> Waiting:
        """Send a command; gives its reply, or what the call that it was made of reads from it.

        An error that the server answers is a reply, too; that of a call is a trouble.
        """
        answer, since = self._new_answer(), monotonic()
        waiting = self.waiting
        if self.broken is not None:
            self._fail(answer, since, call, self.broken)
            return answer
        if waiting:
            outbox = self._outbox
            outbox.append(command)
            if len(outbox) == 1:
                self._loop.call_soon(self._send)
            elif len(outbox) >= HANDFUL and len(outbox) * SHARE >= len(waiting):
                self._send()
        else:
            self._transport.write(command)
        waiting.append((answer, since, call))
        if self._alarm is None:
            self._watch()
        return answer

    async def exchange(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send commands next to each other; a reply for each."""
        answers = [self.ask(command) for command in commands]
        try:
            return [await answer for answer in answers]
        finally:
            for answer in answers:
                # Cancelled, or told of the break by the first of them: the others have no reader.
                if not answer.done():
                    answer.cancel()
                elif not answer.cancelled():
                    answer.exception()

    def end(self, error: LineBroken | LineSilent) -> None:
        """Break the line, and tell everyone who waits."""
        if self.broken is None:
            self.broken = error
            self._transport.abort()
            self._tell(error)

    def _send(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands:
            self._transport.write(b"".join(commands))

    def data_received(self, data: bytes) -> None:
        """Give each reply to the command it belongs to."""
        reader, waiting = self._reader, self.waiting
        if self._late is not None:
            self._mind_silence(self._late)
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _NOT_YET:
                if type(reply) is PushNotification:
                    continue  # news of the server (RESP3) that nobody asked for
                answer, since, call = waiting.popleft()
                if self._held is not None:
                    self._held.append((answer, since, call, reply))
                    continue
                if answer.done():
                    continue  # its caller has left
                if call is None:
                    answer.set_result(reply)
                elif isinstance(reply, Exception):
                    self._fail(answer, since, call, reply)
                else:
                    _read(answer, call, reply)
        except (InvalidResponse, IndexError) as garbled:
            self.end(LineBroken(f"the server's replies cannot be read: {garbled}"))

    def _mind_silence(self, late: Late) -> None:
        now = monotonic()
        silent_since = max(self.heard, self.waiting[0][1]) if self.waiting else now
        if now - silent_since > SILENCE and self._held is None:
            self._held = []
            late(self)
        self.heard = now

    def silent(self) -> bool:
        """Whether the server has said nothing for so long that it may have been replaced."""
        return self._held is not None or monotonic() - self.heard > SILENCE

    def fresh(self) -> bool:
        """Whether nobody has found out yet that the server is the right one."""
        return self.heard == -inf

    def believe(self, until: float) -> None:
        """Give the replies that were held, and take the server for the right one until then."""
        self.heard = until
        held, self._held = self._held or [], None
        for answer, since, call, reply in held:
            if answer.done():
                continue
            if call is None:
                answer.set_result(reply)
            elif isinstance(reply, Exception):
                self._fail(answer, since, call, reply)
            else:
                _read(answer, call, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everyone who waits, and redis-py, which may wait for the end of its stream."""
        self.end(LineBroken(f"connection lost: {exc}" if exc else "Connection closed by server."))
        if self._alarm is not None:
            self._alarm.cancel()
        self._stream.connection_lost(exc)

    def _tell(self, error: Exception) -> None:
        waiting, self.waiting = self.waiting, deque()
        held, self._held = self._held or [], None
        for answer, since, call in (*(entry[:3] for entry in held), *waiting):
            self._fail(answer, since, call, error)

    def _fail(
        self, answer: Waiting, since: float, call: Call[Any] | None, error: Exception
    ) -> None:
        if answer.done():
            return
        if call is None or self._trouble is None:
            answer.set_exception(error)
        else:
            self._trouble(answer, call, since)

    def _watch(self) -> None:
        self._alarm = self._loop.call_later(self._patience / LOOKS_PER_PATIENCE, self._look)

    def _look(self) -> None:
        """Replies come in order: when the oldest is overdue, so is the line."""
        self._alarm = None
        if self.waiting:
            if monotonic() - self.waiting[0][1] >= self._patience:
                self.end(LineSilent("Timeout reading from the server"))
            else:
                self._watch()


def _read(answer: Waiting, call: Call[Any], reply: Reply) -> None:
    try:
        answer.set_result(call.read(reply))
    except Exception as unreadable:  # noqa: BLE001 - the caller's own, and nobody else's
        answer.set_exception(unreadable)


class Source(Protocol):
    """Where connections come from: a pool of redis-py's, or a node of its cluster."""

    async def borrow(self) -> Any:
        """Give a connection that is connected."""
        ...

    async def give_back(self, connection: Any) -> None:
        """Take back a connection that was closed."""
        ...


S = TypeVar("S", bound=Source)


class Lane(Generic[S]):
    """Keeps one line open: whoever finds none opens it for all who come meanwhile."""

    def __init__(
        self,
        source: S,
        patience: float,
        trouble: Trouble | None = None,
        late: Late | None = None,
    ) -> None:
        self.source = source
        self._patience = patience
        self._trouble = trouble
        self._late = late
        self.line: Line | None = None
        """The line that was opened last; it may be broken by now."""
        self._opening: asyncio.Task[Line] | None = None
        self._closed = False

    def open_line(self) -> Line | None:
        """Give the line; if it is not open, begin to open it and give none."""
        line = self.line
        if line is None or line.broken:
            self.open_soon()
            return None
        return line

    async def open(self) -> Line:
        """Give the line, opened if need be; a failure to open is told to all who wait for it."""
        if self.line is not None and self.line.broken is None:
            return self.line
        opening = self.open_soon()
        try:
            # Shielded: one who leaves must not take the line from those who stay.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if self._closed and opening.cancelled():
                raise _closed() from None  # nobody cancelled this caller
            raise

    def open_soon(self) -> asyncio.Task[Line]:
        """Begin to open the line, unless that is under way; nobody has to wait for it."""
        if self._closed:
            raise _closed()
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return self._opening

    async def _open(self) -> Line:
        # Twice: redis-py's own patience must end first, because it knows the reason.
        async with asyncio.timeout(2 * self._patience):
            await self._release()
            connection = await self.source.borrow()
        self.line = Line(connection, self._patience, self._trouble, self._late)
        return self.line

    def _opened(self, opening: asyncio.Task[Line]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # told to those who wait; if nobody does any more, to nobody

    async def _release(self) -> None:
        line, self.line = self.line, None
        if line is not None:
            line.end(_closed())
            await line.connection.disconnect(nowait=True)
            await self.source.give_back(line.connection)

    async def close(self) -> None:
        """Close the line for good, and give its connection back."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        await self._release()


class Lanes(Generic[S]):
    """The lines to one server: one for calls, and one for renewals, which must not queue behind.

    The second one opens while the first one serves: to connect may take longer than a lease lasts,
    and the application's pool may have no connection to spare.
    """

    def __init__(
        self,
        source: S,
        patience: float,
        trouble: Trouble | None = None,
        late: Late | None = None,
    ) -> None:
        self.source = source
        self._calls = Lane(source, patience, trouble, late)
        self._renewals = Lane(source, patience, None, late)

    def ready(self, *, urgent: bool = False) -> Line | None:
        """Give the line for a call, if one is open."""
        line = self._calls.line
        if line is None or line.broken:
            # No connection may be had any more: what is open still keeps the leases.
            line = self._renewals.line if urgent else None
            return None if line is None or line.broken else line
        return (self._renewals.open_line() or line) if urgent else line

    async def open(self, *, urgent: bool = False) -> Line:
        """Give the line for a call, opened if need be."""
        return self.ready(urgent=urgent) or await self._calls.open()

    async def close(self) -> None:
        """Close them all."""
        for lane in (self._renewals, self._calls):
            await lane.close()


Answer = TypeVar("Answer")


class AsyncTransport(ABC):
    """What every kind of server has in common."""

    def __init__(self, client: Any, where: str, timeout: float, *, owned: bool = False) -> None:
        self.where = where
        self._client = client
        self._timeout = timeout
        self._owned = owned
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Awaitable[Answer]:
        """One call, one answer. An urgent one does not queue behind the others."""
        return self._call(call, urgent=urgent)

    async def _call(self, call: Call[Answer], *, urgent: bool) -> Answer:
        return certain((await self.call_many((call,), urgent=urgent))[0])

    async def call_many(
        self, calls: Sequence[Call[Answer]], *, urgent: bool = False, spent: float = 0.0
    ) -> list[Answer | StoreError]:
        """Many calls in one round trip (per node); each has its own answer."""
        if not calls:
            return []
        async with self._turn(spent):
            replies = await self._deliver(calls, urgent=urgent)
        return answers_to(calls, replies, self.where)

    @contextlib.asynccontextmanager
    async def _turn(self, spent: float = 0.0) -> AsyncIterator[None]:
        """One caller's turn: on the right loop, within the timeout."""
        self._loop = only_loop(self._loop, self.where)
        if self._closed:
            raise StoreUnavailable(f"the store at {self.where} was closed")
        with translated(self.where):
            async with asyncio.timeout(self._timeout - spent):
                yield

    async def _deliver(
        self, calls: Sequence[Call[Any]], *, urgent: bool
    ) -> list[Reply | Exception]:
        delivery = deliver(calls, self._may_redirect())
        attempts = next(delivery)
        while True:
            replies = await self._exchange(attempts, urgent=urgent)
            try:
                attempts = delivery.send(replies)
            except StopIteration as done:
                answers: list[Reply | Exception] = done.value
                return answers

    @abstractmethod
    def _may_redirect(self) -> Callable[[], bool]: ...

    @abstractmethod
    async def _exchange(
        self, attempts: Sequence[Attempt], *, urgent: bool
    ) -> list[Reply | Exception]:
        """Send one round trip."""

    @abstractmethod
    def _all_lanes(self) -> list[Lanes[Any]]:
        """The lines to every server that was ever asked."""

    async def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""
        ended = has_ended(self._loop, self.where)
        self._closed = True
        # Never used, nothing is open; and redis-py would make an event loop where none is running.
        if self._loop is not None and not ended:
            await self._close()

    async def _close(self) -> None:
        for lanes in self._all_lanes():
            await lanes.close()
        if self._owned:
            for client in clients_of(self._client):
                await close_client(client)

    def server_of(self, _key: bytes) -> str | None:
        """Name the server that has a key; None = there is only one."""
        return None

    @abstractmethod
    def connector_of(self, key: bytes) -> tuple[str, Any]:
        """Name the server that has a key, and what connects to it; None = there is no such."""

    @abstractmethod
    async def nodes(self) -> list[str]:
        """Names of the servers that hold keys, in an order that stays."""

    @abstractmethod
    async def scan(
        self, node: str, cursor: int, pattern: bytes, count: int
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN on one of the `nodes`."""


class AsyncServerTransport(AsyncTransport):
    """One server, or the primary that Sentinel names."""

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(client, where, timeout, **more)
        self._follows_the_primary = follows_the_primary(client)
        self._lanes = Lanes(
            _Pool(client.connection_pool),
            timeout / 2,
            self._make_good,
            self._answered_late if self._follows_the_primary else None,
        )
        self._asking_sentinel = asyncio.Lock()
        self._checks: set[asyncio.Task[None]] = set()

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Awaitable[Answer]:
        """One call, one answer: straight through a line that is open."""
        # Outside of any loop a verb may be prepared: so this question, which raises nothing.
        here = asyncio._get_running_loop() is self._loop  # noqa: SLF001 - has no other name
        line = self._lanes.ready() if here and not (urgent or self._closed) else None
        if line is None or (self._follows_the_primary and line.silent()):
            return super().call(call, urgent=urgent)
        return line.ask(call.wire(), call)

    def _make_good(self, answer: asyncio.Future[Answer], call: Call[Answer], since: float) -> None:
        """A call was not simply answered: the long way, from the start, knows what to do then."""
        long_way = self.call_many((call,), spent=monotonic() - since)
        task = asyncio.ensure_future(long_way)
        task.add_done_callback(partial(_hand_on, answer))
        answer.add_done_callback(lambda _: task.cancel())  # its caller may leave

    def _may_redirect(self) -> Callable[[], bool]:
        return never

    def _all_lanes(self) -> list[Lanes[Any]]:
        return [self._lanes]

    async def _exchange(
        self, attempts: Sequence[Attempt], *, urgent: bool
    ) -> list[Reply | Exception]:
        return await self._repeated([attempt.wire() for attempt in attempts], urgent=urgent)

    async def _repeated(
        self, commands: Sequence[bytes], *, urgent: bool = False
    ) -> list[Reply | Exception]:
        repeating = Repeating(self._timeout * SEARCH_SHARE)
        while True:
            try:
                return await self._ask(commands, urgent=urgent)
            except (driver.ConnectionError, driver.TimeoutError, OSError) as error:
                if self._closed:
                    raise
                await asyncio.sleep(repeating.pause_after(error))

    async def _ask(self, commands: Sequence[bytes], *, urgent: bool) -> list[Reply | Exception]:
        line = await self._lanes.open(urgent=urgent)
        if self._follows_the_primary:
            line = await self._confirmed(line, urgent=urgent)
        replies = await line.exchange(commands)
        unfit = unfit_server(replies)
        if unfit is not None:
            # Whoever connects anew may be led to a better one, or find this one ready.
            line.end(unfit)
            if self._follows_the_primary or unfit in replies:
                raise unfit
        return replies

    async def _confirmed(self, line: Line, *, urgent: bool) -> Line:
        """Give the line if its server is the primary for sure, else a new one."""
        async with self._asking_sentinel:
            while line.broken or line.silent():
                if not line.broken:
                    fresh = line.fresh()
                    await self._check(line)
                    if fresh and line.broken:
                        # redis-py connects to the old primary until the failover has ended.
                        raise line.broken
                line = await self._lanes.open(urgent=urgent)
            return line

    def _answered_late(self, line: Line) -> None:
        check = asyncio.ensure_future(self._check(line))
        self._checks.add(check)
        check.add_done_callback(partial(self._checked, line))

    def _checked(self, line: Line, check: asyncio.Task[None]) -> None:
        """Break a line whose check did not come to an end: its replies would be held for ever."""
        self._checks.discard(check)
        reason = None if check.cancelled() else check.exception()
        if check.cancelled() or reason is not None:
            error = driver.ConnectionError("it is not known whether the server is still primary")
            error.__cause__ = reason
            line.end(error)

    async def _check(self, line: Line) -> None:
        """Let the line be believed, or break it: its server may have been replaced."""
        named = await self._ask_sentinels()
        primary = named or self._client.connection_pool.master_address
        if primary == (line.connection.host, line.connection.port):
            line.believe(monotonic() + (WITHOUT_SENTINEL if named is None else 0.0))
        else:
            line.end(driver.ConnectionError(NOT_THE_PRIMARY))

    async def _ask_sentinels(self) -> Address | None:
        """Ask who is the primary; None when no Sentinel answers in time."""
        pool = self._client.connection_pool
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
        await super()._close()

    def connector_of(self, _key: bytes) -> tuple[str, Any]:
        """There is one."""
        return "", self._client.connection_pool

    async def nodes(self) -> list[str]:
        """There is one, and it needs no name."""
        return [""]

    async def scan(
        self,
        node: str,  # noqa: ARG002 - there is only one
        cursor: int,
        pattern: bytes,
        count: int,
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN."""
        async with self._turn():
            [reply] = await self._repeated([scan_command(cursor, pattern, count)])
            return scan_reply(reply)


def _hand_on(answer: asyncio.Future[Answer], task: asyncio.Task[list[Answer | StoreError]]) -> None:
    """Give the outcome of a task to whoever waits for the answer, if he still does."""
    if task.cancelled():
        answer.cancel()  # by a stranger, unless the caller has left
        return
    error = task.exception()
    [outcome] = [error] if error is not None else task.result()
    if answer.done():
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


class _Pool:
    """A pool of redis-py's as a source of connections."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def borrow(self) -> Any:
        return await take_connection(self._pool)

    async def give_back(self, connection: Any) -> None:
        await self._pool.release(connection)
