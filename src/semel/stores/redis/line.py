"""One connection, many tasks: commands leave as they come, replies return in their order.

redis-py's cost is its command layer, not its connection. So a line lets redis-py connect (TLS,
login, Sentinel, unix sockets are its business) and then takes the connection's stream over:

- An idle line sends at once. While replies are outstanding, the commands of one turn of the event
  loop leave together, a handful of writes for many of them.
- Replies are read by hiredis and belong to the commands in the order in which these were sent; a
  caller that was cancelled leaves its place, and its reply is dropped.
- A line repeats nothing. When it breaks, or its oldest command has waited too long, everyone who
  waits is told, and calls are handed to whoever knows what to send again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from hiredis import PushNotification, Reader
from redis.exceptions import ConnectionError as LineBroken
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as LineSilent

from semel.stores.redis.redis_py import reply_error, take_over
from semel.stores.redis.repeating import SILENCE
from semel.stores.redis.scripts import Call

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

Reply = Any
Answer: TypeAlias = "asyncio.Future[Any]"
Trouble: TypeAlias = Callable[[Answer, Call[Any], float], None]
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
        self._held: list[tuple[Answer, float, Call[Any] | None, Reply]] | None = None
        """Replies that came late: given to their callers when the server is found to be right."""
        self.broken: LineBroken | LineSilent | None = None
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._new_answer = self._loop.create_future
        self.waiting: deque[tuple[Answer, float, Call[Any] | None]] = deque()
        """The commands on their way: who waits, since when, and for which call, if for one."""
        self._outbox: list[bytes] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._reader = Reader(
            protocolError=InvalidResponse,
            replyError=reply_error,
            notEnoughData=_NOT_YET,
        )
        self._transport, self._stream = take_over(connection, self)

    def ask(self, command: bytes, call: Call[Any] | None = None) -> Answer:
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

    def _fail(self, answer: Answer, since: float, call: Call[Any] | None, error: Exception) -> None:
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


def _read(answer: Answer, call: Call[Any], reply: Reply) -> None:
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
