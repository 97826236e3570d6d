"""How a store is notified that a record has changed, so that no waiting call has to poll for it.

`Subscriptions` keeps account of who waits for what: it never waits, touches no connection, and
takes the time as an argument. A `Listener` has the one connection to a server on which all the
threads of a process wait (an `AsyncListener`: all the tasks of an event loop). A database brings
the `Subscriber`: how to connect, how to subscribe, what its messages say.

A notification means "ask again". It carries nothing, because other users of the server may send one
too. Whatever fails here, a lost message or a server that refuses, is no error of the caller's: its
watch says that it is not notified, and the engine polls.
"""

from __future__ import annotations

import asyncio
import enum
import random
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from time import monotonic
from typing import Any, Final, Generic, Protocol, Self, TypeAlias, TypeVar

from semel.core.observers import Log
from semel.stores.batching import has_ended

log = Log(__name__)

SOON: Final = 0.25
"""Seconds within which a subscription is confirmed, unless something is wrong."""

SAFETY: Final = 5.0
"""Seconds after which a waiter that is notified asks all the same: a message may have been lost."""

CLEANUP: Final = 1.0
"""Seconds after which subscriptions that are no longer needed are ended."""

LINGER: Final = 10.0
"""Seconds after which a connection on which no call waits anymore is closed."""

CLOSING: Final = 1.0
"""Seconds that closing waits for the thread; one that still connects ends by itself."""

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Between two attempts to listen where it has failed."""

ChannelName: TypeAlias = Hashable


class Listening(enum.Enum):
    """What can be expected of a watch."""

    SOON = enum.auto()
    """The subscription is on its way."""
    YES = enum.auto()
    NO = enum.auto()


class Reopen(Exception):
    """The subscriber has learnt how to speak to its server: it has to be opened again."""


class Waiter(ABC):
    """Where one caller waits for a record; what threads and tasks have in common."""

    def __init__(self, channel: ChannelName) -> None:
        self.channel = channel
        self.listening = self._known = Listening.SOON

    @abstractmethod
    def wake(self) -> None:
        """Let the caller ask the store."""

    def pause(self, planned: float) -> float:
        """How long to wait at most before the store is asked again."""
        if self.listening is Listening.NO:
            return planned
        if self.listening is Listening.SOON:
            return max(planned, SOON)
        return max(planned, random.uniform(SAFETY / 2, SAFETY))  # noqa: S311 - no secret

    def _notified(self, *, woken: bool) -> bool:
        """Whether a message ended the wait, and not the time or a change of what to expect."""
        known, self._known = self._known, self.listening
        return woken and self._known is known


W = TypeVar("W", bound=Waiter)


class Channel(Generic[W]):
    """Those who wait for the same record."""

    __slots__ = ("subscribed", "waiters")

    def __init__(self) -> None:
        self.subscribed = False
        self.waiters: dict[W, None] = {}

    def set(self, listening: Listening) -> None:
        """Say what to expect; each waiter asks again, for it missed what happened before."""
        self.subscribed = listening is Listening.YES
        for waiter in self.waiters:
            waiter.listening = listening
            waiter.wake()


class Subscriptions(Generic[W]):
    """Everybody who waits on one connection, and what its subscriber has received.

    Calls come one at a time: a listener with several threads holds a lock.
    """

    def __init__(self, where: str) -> None:
        self.backoff = Backoff(where)
        self._channels: dict[ChannelName, Channel[W]] = {}
        self._requested: deque[Channel[W]] = deque()
        """Subscriptions that are on their way; a server answers in the order of the requests."""
        self._unused: dict[ChannelName, None] = {}
        """Channels that are still subscribed to, but have no waiter any more."""

    def __len__(self) -> int:
        return len(self._channels)

    def channels(self) -> list[ChannelName]:
        """List the channels that have waiters."""
        return list(self._channels)

    def is_subscribed(self, channel: ChannelName) -> bool:
        """Whether the waiters of this channel will be notified."""
        found = self._channels.get(channel)
        return found is not None and found.subscribed

    # --- who waits -----------------------------------------------------------------------

    def add(self, waiter: W) -> bool:
        """Add a waiter; True when it is the first of its channel, which must be subscribed to."""
        channel = self._channels.get(waiter.channel)
        first = channel is None
        if channel is None:
            channel = self._channels[waiter.channel] = Channel()
            self._unused.pop(waiter.channel, None)
        channel.waiters[waiter] = None
        if channel.subscribed:
            waiter.listening = Listening.YES
            waiter.wake()
        return first

    def remove(self, waiter: W) -> None:
        """Remove a waiter, if it was added; may come twice.

        The subscription stays for a while, so that leaving does not wait for the server.
        """
        channel = self._channels.get(waiter.channel)
        if channel is None:
            return
        channel.waiters.pop(waiter, None)
        if not channel.waiters:
            del self._channels[waiter.channel]
            self._unused[waiter.channel] = None

    def take_unused(self) -> list[ChannelName]:
        """Take what can be unsubscribed."""
        unused, self._unused = self._unused, {}
        return list(unused)

    # --- what a subscriber says ----------------------------------------------------------

    def requested(self, channel: ChannelName) -> None:
        """A subscription was requested."""
        self._requested.append(self._channels[channel])

    def received(self, channel: ChannelName) -> None:
        """A message came."""
        found = self._channels.get(channel)
        if found is not None:
            for waiter in found.waiters:
                waiter.wake()

    def confirmed(self) -> None:
        """The oldest subscription that was requested is in force."""
        self.backoff.succeeded()
        self._requested.popleft().set(Listening.YES)

    def rejected(self) -> None:
        """The oldest subscription that was requested is not possible here."""
        self._requested.popleft().set(Listening.NO)

    def ended(self, channel: ChannelName) -> None:
        """The server has ended a subscription, by itself or on request."""
        found = self._channels.get(channel)
        # The answer to our own request finds the channel gone, or a new one not yet confirmed.
        if found is not None and found.subscribed:
            found.set(Listening.NO)

    def lose(self) -> None:
        """The connection is gone, and all subscriptions with it."""
        self._requested.clear()
        self._unused.clear()
        for channel in self._channels.values():
            channel.set(Listening.NO)


class Backoff:
    """When listening may be tried again after it failed; the log says so once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._logged = False
        self._pause, self._until = FIRST_PAUSE, 0.0
        self.works = False
        """Whether a subscription on the open connection has been confirmed."""

    def is_over(self, now: float) -> bool:
        """Whether it may be tried."""
        return now >= self._until

    def failed(self, error: Exception, now: float) -> None:
        """Wait longer each time; but what worked and broke may be opened again at once."""
        if self.works:
            self.works = False
            return
        self._until = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if not self._logged:
            self._logged = True
            log.warning("no wake-ups from %s; waiting calls poll: %s", self._where, error)

    def succeeded(self) -> None:
        """Listening works."""
        self.works, self._logged = True, False
        self._pause, self._until = FIRST_PAUSE, 0.0


class _Subscriber(Protocol):
    """A connection that is notified. Its errors end it, whatever they are."""

    confirms: bool
    """Whether the server confirms each subscription; else it is in force at once."""

    def subscribe(self, channel: ChannelName) -> None:
        """Request the messages of a channel."""
        ...

    def unsubscribe(self, channel: ChannelName) -> None:
        """Request them no longer."""
        ...


S = TypeVar("S", bound=_Subscriber)


class _Listener(Generic[S, W]):
    """What the listeners of threads and of tasks have in common."""

    def __init__(self, new_subscriber: Callable[[], S] | None, where: str) -> None:
        """`new_subscriber` is None where there is nothing to listen to."""
        self.subscriptions = Subscriptions[W](where)
        self._new_subscriber = new_subscriber
        self._subscriber: S | None = None
        """The subscriber, while it is open."""
        self._idle = 0.0
        """Seconds for which there has been no waiter."""
        self._closed = False

    def _may_start(self) -> bool:
        return not self._closed and self.subscriptions.backoff.is_over(monotonic())

    def _subscribe(self, subscriber: S, channel: ChannelName) -> None:
        self.subscriptions.requested(channel)
        with suppress(Exception):  # a broken connection is noticed elsewhere
            subscriber.subscribe(channel)
            if not subscriber.confirms:
                self.subscriptions.confirmed()

    def _clean_up(self, subscriber: S) -> bool:
        """Unsubscribe from unused channels; False when there has been no waiter for long."""
        for channel in self.subscriptions.take_unused():
            subscriber.unsubscribe(channel)
        self._idle = 0.0 if self.subscriptions else self._idle + CLEANUP
        return self._idle < LINGER


# --- threads: one connection, and one thread that reads it -----------------------------------


class Subscriber(_Subscriber, Protocol):
    """A connection that is notified, for threads."""

    def open(self) -> None:
        """Connect; this may take its time."""
        ...

    def fileno(self) -> int:
        """Return the socket to wait on."""
        ...

    def read(self, subscriptions: Subscriptions[Any]) -> None:
        """Pass on what has come; never waits for more."""
        ...

    def close(self) -> None:
        """Disconnect, if it was connected."""
        ...


class Watch(Waiter):
    """Where one thread waits."""

    def __init__(self, listener: Listener, channel: ChannelName) -> None:
        super().__init__(channel)
        self._listener = listener
        self._asleep = threading.Lock()  # cheaper than an Event, which has several locks
        self._asleep.acquire()

    def __enter__(self) -> Self:
        try:
            self._listener.add(self)
            return self  # noqa: TRY300 - inside: interrupted here, too, nobody else would remove it
        except BaseException:
            self._listener.remove(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._listener.remove(self)

    def wake(self) -> None:
        """Let the caller ask the store; the listener calls this under its lock."""
        if self._asleep.locked():
            self._asleep.release()

    def wait(self, seconds: float) -> bool:
        """Sleep for this time, or until woken; True if a message did it."""
        return self._notified(woken=self._asleep.acquire(timeout=seconds))


class Listener(_Listener[Subscriber, Watch]):
    """The connection on which the threads of a process listen to one server.

    Its thread connects, too, so that no caller waits for a server that does not answer. It ends,
    and the connection with it, when no call has waited for a while.
    """

    def __init__(self, new_subscriber: Callable[[], Subscriber] | None, where: str) -> None:
        super().__init__(new_subscriber, where)
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._thread: threading.Thread | None = None
        self._subscriber = None
        self._stop: socket.socket | None = None
        """A byte sent here wakes the thread."""
        self._idle = 0.0

    def add(self, watch: Watch) -> None:
        """Begin to listen for a watch; an obstacle only means that it is not notified."""
        with self._lock:
            first = self.subscriptions.add(watch)
            if self._subscriber is not None:
                if first:
                    self._subscribe(self._subscriber, watch.channel)
            elif self._thread is None and not self._start():
                watch.listening = Listening.NO

    def remove(self, watch: Watch) -> None:
        """Listen no longer for this watch."""
        with self._lock:
            self.subscriptions.remove(watch)

    def close(self) -> None:
        """End the connection; waiting calls are woken, and poll."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._stop is not None:
                self._stop.send(b"!")
        if thread is not None:
            thread.join(CLOSING)

    def _start(self) -> bool:
        new_subscriber = self._new_subscriber
        if new_subscriber is None or not self._may_start():
            return False
        thread = threading.Thread(
            target=self._run, args=(new_subscriber,), name="semel-wakeups", daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # no further thread, or the interpreter ends
            return False
        # Only now: a thread that was never started would leave every waiter without notifications
        # for ever.
        self._thread = thread
        return True

    # --- the thread ----------------------------------------------------------------------

    def _run(self, new_subscriber: Callable[[], Subscriber]) -> None:
        me = threading.current_thread()
        with self._lock:
            if self._thread is not me:
                return  # its start was interrupted, and the next waiter starts another
        try:
            stop, stopped = socket.socketpair()
            with stop, stopped:
                with self._lock:
                    self._stop = stop
                while not self._listen(new_subscriber(), stopped):
                    pass
        except OSError as error:  # the process may open no more files
            with self._lock:
                self.subscriptions.backoff.failed(error, monotonic())
        finally:
            with self._lock:
                if self._thread is me:  # else it was reset already
                    self._reset()
                    self.subscriptions.lose()

    def _listen(self, subscriber: Subscriber, stopped: socket.socket) -> bool:
        """Listen while there are waiters; False = the connection has to be reopened."""
        try:
            subscriber.open()
            with self._lock:
                if self._closed:
                    return True
                self._subscriber = subscriber
                for channel in self.subscriptions.channels():
                    self._subscribe(subscriber, channel)
            with selectors.DefaultSelector() as ready:
                ready.register(subscriber, selectors.EVENT_READ)
                ready.register(stopped, selectors.EVENT_READ)
                while self._goes_on(subscriber, ready.select(CLEANUP)):
                    pass
        except Reopen:
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, waiting calls poll
            with self._lock:
                self.subscriptions.backoff.failed(error, monotonic())
        finally:
            with self._lock:
                if self._subscriber is subscriber:
                    self._subscriber = None
            subscriber.close()
        return True

    def _goes_on(
        self, subscriber: Subscriber, ready: list[tuple[selectors.SelectorKey, int]]
    ) -> bool:
        with self._lock:
            if self._closed:
                return False
            if ready:
                subscriber.read(self.subscriptions)  # the other socket is used only to close
                return True
            if self._clean_up(subscriber):
                return True
            self._reset()  # under the lock: the next waiter starts another thread
            return False


# --- tasks: one connection, read by call-backs of the event loop -----------------------------

OnLost: TypeAlias = "Callable[[AsyncSubscriber, Exception], None]"


class AsyncSubscriber(_Subscriber, Protocol):
    """A connection that is notified, for asyncio."""

    async def open(self, subscriptions: Subscriptions[Any], on_lost: OnLost) -> None:
        """Connect; from then on pass on what comes, and say when the connection ends."""
        ...

    async def close(self) -> None:
        """Disconnect, if it was connected."""
        ...


class AsyncWatch(Waiter):
    """Where one task waits."""

    def __init__(self, listener: AsyncListener, channel: ChannelName) -> None:
        super().__init__(channel)
        self._listener = listener
        self._woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        self._listener.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.remove(self)

    def wake(self) -> None:
        """Let the caller ask the store."""
        self._end_wait(woken=True)

    def _end_wait(self, *, woken: bool = False) -> None:
        if not self._woken.done():
            self._woken.set_result(woken)

    async def wait(self, seconds: float) -> bool:
        """Sleep for this time, or until woken; True if a message did it."""
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(seconds, self._end_wait)
        try:
            return self._notified(woken=await self._woken)
        finally:
            alarm.cancel()
            self._woken = loop.create_future()


class AsyncListener(_Listener[AsyncSubscriber, AsyncWatch]):
    """The connection on which the tasks of a loop listen to one server.

    A task connects, so that no caller waits for a server that does not answer. The connection ends
    when no call has waited for a while.
    """

    def __init__(self, new_subscriber: Callable[[], AsyncSubscriber] | None, where: str) -> None:
        super().__init__(new_subscriber, where)
        self._opening: asyncio.Task[None] | None = None
        self._cleanup: asyncio.TimerHandle | None = None
        self._where = where
        self._loop: asyncio.AbstractEventLoop | None = None
        self._disconnecting: set[asyncio.Task[None]] = set()

    def add(self, watch: AsyncWatch) -> None:
        """Begin to listen for a watch; an obstacle only means that it is not notified."""
        first = self.subscriptions.add(watch)
        if self._subscriber is not None:
            if first:
                self._subscribe(self._subscriber, watch.channel)
        # One that has ended may still be noted: an exception may have struck before the note of it.
        elif (self._opening is None or self._opening.done()) and not self._start():
            watch.listening = Listening.NO

    def remove(self, watch: AsyncWatch) -> None:
        """Listen no longer for this watch."""
        self.subscriptions.remove(watch)

    async def close(self) -> None:
        """End the connection; waiting calls are woken, and poll."""
        ended = has_ended(self._loop, self._where)
        self._closed = True
        if ended:
            return
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        self._disconnect()
        if self._disconnecting:
            await asyncio.wait(self._disconnecting)

    def _start(self) -> bool:
        new_subscriber = self._new_subscriber
        if new_subscriber is None or not self._may_start():
            return False
        # By no factory of the application: begun at once, it may have ended before it is noted.
        loop = self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Task(self._open(new_subscriber()), loop=loop)
        return True

    async def _open(self, subscriber: AsyncSubscriber) -> None:
        try:
            await subscriber.open(self.subscriptions, self._on_lost)
            self._opening, self._subscriber = None, subscriber
            for channel in self.subscriptions.channels():
                self._subscribe(subscriber, channel)
            self._clean_up_later(subscriber)
        except BaseException as error:
            self._opening = self._subscriber = None
            self.subscriptions.lose()
            with suppress(Exception):  # what did not open may not close either
                await subscriber.close()
            if not isinstance(error, Exception):
                raise
            self.subscriptions.backoff.failed(error, monotonic())

    def _clean_up_later(self, subscriber: AsyncSubscriber) -> None:
        loop = asyncio.get_running_loop()
        self._cleanup = loop.call_later(CLEANUP, self._clean_up_now, subscriber)

    def _clean_up_now(self, subscriber: AsyncSubscriber) -> None:
        if self._clean_up(subscriber):
            self._clean_up_later(subscriber)
        else:
            self._disconnect()

    def _on_lost(self, subscriber: AsyncSubscriber, error: Exception) -> None:
        if subscriber is not self._subscriber:
            return  # it was disconnected here
        self._disconnect()
        if isinstance(error, Reopen):
            self._start()
        else:
            self.subscriptions.backoff.failed(error, monotonic())

    def _disconnect(self) -> None:
        subscriber, self._subscriber = self._subscriber, None
        self._idle = 0.0
        self.subscriptions.lose()
        if self._cleanup is not None:
            self._cleanup.cancel()
        if subscriber is not None:
            closing = asyncio.get_running_loop().create_task(subscriber.close())
            self._disconnecting.add(closing)
            closing.add_done_callback(self._disconnecting.discard)
