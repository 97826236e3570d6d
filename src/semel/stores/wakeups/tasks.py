"""Watches for asyncio: one connection, read by call-backs of the event loop.

A task connects, so that nobody waits for a server that does not answer. The connection ends when
nobody has waited for a while. `threads` is the twin of this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol, Self, TypeAlias

from semel.core.records import Ended
from semel.stores.loops import has_ended
from semel.stores.wakeups.rooms import (
    LINGER,
    TIDY,
    BaseWatch,
    Channel,
    Hearing,
    OtherWay,
    Rooms,
)

Broke: TypeAlias = "Callable[[AsyncLine, Exception], None]"


class AsyncLine(Protocol):
    """A connection that hears. Its errors end it, whatever they are."""

    confirms: bool
    """Whether the server confirms each subscription; else it is in force at once."""

    async def open(self, rooms: Rooms[Any], broke: Broke) -> None:
        """Connect, and tell what is heard from then on, and when it ends."""
        ...

    def subscribe(self, channel: Channel) -> None:
        """Ask for the messages of a channel."""
        ...

    def unsubscribe(self, channel: Channel) -> None:
        """Ask for them no longer."""
        ...

    async def close(self) -> None:
        """Disconnect, if it was connected."""
        ...


class AsyncWatch(BaseWatch):
    """Where one task waits."""

    def __init__(
        self, ear: AsyncEar, channel: Channel, read: Callable[[Any], Ended | None]
    ) -> None:
        super().__init__(channel, read)
        self._ear = ear
        self._woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        self._ear.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._ear.leave(self)

    def wake(self, message: Any = None) -> None:
        """Let the caller look."""
        self._message = message
        self._stir()

    def _stir(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    async def wait(self, seconds: float) -> Ended | None:
        """Sleep so long, or until woken."""
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(seconds, self._stir)
        try:
            await self._woken
        finally:
            alarm.cancel()
            self._woken = loop.create_future()
        return self._heard()


class AsyncEar:
    """The connection on which the tasks of a loop listen to one server."""

    def __init__(self, new_line: Callable[[], AsyncLine] | None, where: str) -> None:
        """`new_line` is None where there is nothing to listen to."""
        self.rooms = Rooms[AsyncWatch](where)
        self._new_line = new_line
        self._opening: asyncio.Task[None] | None = None
        self._line: AsyncLine | None = None
        """The line, while it is open."""
        self._tidying: asyncio.TimerHandle | None = None
        self._idle = 0.0
        self._where = where
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    def enter(self, watch: AsyncWatch) -> None:
        """Begin to listen for a watch; what stands in the way only makes it deaf."""
        first = self.rooms.enter(watch)
        if self._line is not None:
            if first:
                self._subscribe(self._line, watch.channel)
        elif self._opening is None and not self._start():
            watch.hearing = Hearing.NO

    def leave(self, watch: AsyncWatch) -> None:
        """Listen no longer for this watch."""
        self.rooms.leave(watch)

    async def close(self) -> None:
        """End the connection; whoever waits is woken, and polls."""
        ended = has_ended(self._loop, self._where)
        self._closed = True
        if ended:
            return
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        self._hang_up()
        if self._endings:
            await asyncio.wait(self._endings)

    # --- the line ------------------------------------------------------------------------

    def _start(self) -> bool:
        new_line = self._new_line
        if new_line is None or self._closed or not self.rooms.outage.is_over(monotonic()):
            return False
        # By no factory of the application: begun at once, it may have ended before it is noted.
        loop = self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Task(self._open(new_line()), loop=loop)
        return True

    async def _open(self, line: AsyncLine) -> None:
        try:
            await line.open(self.rooms, self._broke)
        except BaseException as error:
            self._opening = None
            self.rooms.deafen()
            with suppress(Exception):  # what did not open may not close either
                await line.close()
            if not isinstance(error, Exception):
                raise
            self.rooms.outage.failed(error, monotonic())
            return
        self._opening, self._line = None, line
        for channel in self.rooms.channels():
            self._subscribe(line, channel)
        self._tidy_later(line)

    def _subscribe(self, line: AsyncLine, channel: Channel) -> None:
        self.rooms.asked(channel)
        with suppress(Exception):  # a broken line says so by itself
            line.subscribe(channel)
            if not line.confirms:
                self.rooms.confirmed()

    def _tidy_later(self, line: AsyncLine) -> None:
        self._tidying = asyncio.get_running_loop().call_later(TIDY, self._tidy, line)

    def _tidy(self, line: AsyncLine) -> None:
        for channel in self.rooms.left():
            line.unsubscribe(channel)
        self._idle = 0.0 if self.rooms else self._idle + TIDY
        if self._idle < LINGER:
            self._tidy_later(line)
        else:
            self._hang_up()

    def _broke(self, line: AsyncLine, error: Exception) -> None:
        """Nothing will be heard any more on this line."""
        if line is not self._line:
            return  # it was hung up here
        self._hang_up()
        if isinstance(error, OtherWay):
            self._start()
        else:
            self.rooms.outage.failed(error, monotonic())

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        self._idle = 0.0
        self.rooms.deafen()
        if self._tidying is not None:
            self._tidying.cancel()
        if line is not None:
            ending = asyncio.get_running_loop().create_task(line.close())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
