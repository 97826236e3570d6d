"""Watches for threads: one connection, and one thread that reads it.

The thread connects, too, so that nobody waits for a server that does not answer. It ends, and the
connection with it, when nobody has waited for a while. `tasks` is the twin of this module.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Final, Protocol, Self

from semel.core.records import Ended
from semel.stores.wakeups.rooms import (
    LINGER,
    TIDY,
    BaseWatch,
    Channel,
    Hearing,
    OtherWay,
    Rooms,
)

CLOSING: Final = 1.0
"""Seconds that closing waits for the thread; one that still connects ends by itself."""


class Line(Protocol):
    """A connection that hears. Its errors end it, whatever they are."""

    confirms: bool
    """Whether the server confirms each subscription; else it is in force at once."""

    def open(self) -> None:
        """Connect; this may take its time."""
        ...

    def fileno(self) -> int:
        """Give the socket to wait on."""
        ...

    def subscribe(self, channel: Channel) -> None:
        """Ask for the messages of a channel."""
        ...

    def unsubscribe(self, channel: Channel) -> None:
        """Ask for them no longer."""
        ...

    def read(self, rooms: Rooms[Any]) -> None:
        """Tell what has come; never waits for more."""
        ...

    def close(self) -> None:
        """Disconnect, if it was connected."""
        ...


class Watch(BaseWatch):
    """Where one thread waits."""

    def __init__(self, ear: Ear, channel: Channel, read: Callable[[Any], Ended | None]) -> None:
        super().__init__(channel, read)
        self._ear = ear
        self._gate = threading.Lock()  # an Event is several locks, and a waiter is in a hurry
        self._gate.acquire()

    def __enter__(self) -> Self:
        try:
            self._ear.enter(self)
            return self  # noqa: TRY300 - inside: interrupted here, too, nobody else would leave
        except BaseException:
            self._ear.leave(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._ear.leave(self)

    def wake(self, message: Any = None) -> None:
        """Let the caller look; the ear calls this under its lock."""
        self._message = message
        if self._gate.locked():
            self._gate.release()

    def wait(self, seconds: float) -> Ended | None:
        """Sleep so long, or until woken."""
        # Taken before the look: what comes meanwhile opens it again.
        self._gate.acquire(timeout=seconds)
        return self._heard()


class Ear:
    """The connection on which the threads of a process listen to one server."""

    def __init__(self, new_line: Callable[[], Line] | None, where: str) -> None:
        """`new_line` is None where there is nothing to listen to."""
        self.rooms = Rooms[Watch](where)
        self._new_line = new_line
        self._lock = threading.Lock()
        self._closed = False
        self._retire()

    def _retire(self) -> None:
        self._thread: threading.Thread | None = None
        self._line: Line | None = None
        """The line, while it is open."""
        self._bell: socket.socket | None = None
        """Ringing wakes the thread."""
        self._idle = 0.0

    def enter(self, watch: Watch) -> None:
        """Begin to listen for a watch; what stands in the way only makes it deaf."""
        with self._lock:
            first = self.rooms.enter(watch)
            if self._line is not None:
                if first:
                    self._subscribe(self._line, watch.channel)
            elif self._thread is None and not self._start():
                watch.hearing = Hearing.NO

    def leave(self, watch: Watch) -> None:
        """Listen no longer for this watch."""
        with self._lock:
            self.rooms.leave(watch)

    def close(self) -> None:
        """End the connection; whoever waits is woken, and polls."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._bell is not None:
                self._bell.send(b"!")
        if thread is not None:
            thread.join(CLOSING)

    def _start(self) -> bool:
        new_line = self._new_line
        if new_line is None or self._closed or not self.rooms.outage.is_over(monotonic()):
            return False
        thread = threading.Thread(
            target=self._run, args=(new_line,), name="semel-wakeups", daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # no thread to be had, or the interpreter ends
            return False
        # Only now: a thread that was never started would leave every waiter without notifications
        # for ever.
        self._thread = thread
        return True

    def _subscribe(self, line: Line, channel: Channel) -> None:
        self.rooms.asked(channel)
        with suppress(Exception):  # a broken line is noticed by its reader
            line.subscribe(channel)
            if not line.confirms:
                self.rooms.confirmed()

    # --- the thread ----------------------------------------------------------------------

    def _run(self, new_line: Callable[[], Line]) -> None:
        me = threading.current_thread()
        with self._lock:
            if self._thread is not me:
                return  # its start was interrupted, and the next waiter starts another
        try:
            bell, door = socket.socketpair()
            with bell, door:
                with self._lock:
                    self._bell = bell
                while not self._listen(new_line(), door):
                    pass
        except OSError as error:  # the process may open no more files
            with self._lock:
                self.rooms.outage.failed(error, monotonic())
        finally:
            with self._lock:
                if self._thread is me:  # else it retired already
                    self._retire()
                    self.rooms.deafen()

    def _listen(self, line: Line, door: socket.socket) -> bool:
        """Listen until there is nobody to listen for; False = the line has to be opened anew."""
        try:
            line.open()
            with self._lock:
                if self._closed:
                    return True
                self._line = line
                for channel in self.rooms.channels():
                    self._subscribe(line, channel)
            with selectors.DefaultSelector() as ready:
                ready.register(line, selectors.EVENT_READ)
                ready.register(door, selectors.EVENT_READ)
                while self._goes_on(line, ready.select(TIDY)):
                    pass
        except OtherWay:
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits polls
            with self._lock:
                self.rooms.outage.failed(error, monotonic())
        finally:
            with self._lock:
                if self._line is line:
                    self._line = None
            line.close()
        return True

    def _goes_on(self, line: Line, ready: list[tuple[selectors.SelectorKey, int]]) -> bool:
        with self._lock:
            if self._closed:
                return False
            if ready:
                line.read(self.rooms)  # the bell rings only to close
                return True
            for channel in self.rooms.left():
                line.unsubscribe(channel)
            self._idle = 0.0 if self.rooms else self._idle + TIDY
            if self._idle < LINGER:
                return True
            self._retire()  # under the lock: who enters now starts another thread
            return False
