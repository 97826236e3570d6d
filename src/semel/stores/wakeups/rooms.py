"""Who waits for which record on one connection, and what has been heard there.

This module keeps account. It never waits, touches no connection, and time is an argument. Calls
come one at a time: whoever has several threads holds a lock.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from semel.core.records import Ended

log = logging.getLogger(__name__)

SOON: Final = 0.25
"""Seconds within which a subscription is confirmed, unless something is wrong."""

SAFETY: Final = 5.0
"""Seconds after which a waiter that hears asks all the same: a message may have been lost."""

TIDY: Final = 1.0
"""Seconds after which subscriptions that nobody needs any more are ended."""

LINGER: Final = 10.0
"""Seconds after which a connection on which nobody waits any more is closed."""

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Between two attempts to listen where it has failed."""

Channel: TypeAlias = Hashable


class Hearing(enum.Enum):
    """What can be expected of a watch."""

    SOON = enum.auto()
    """The subscription is on its way."""
    YES = enum.auto()
    NO = enum.auto()


class Seat(Protocol):
    """Where one caller waits."""

    channel: Channel
    hearing: Hearing

    def wake(self, message: Any = None) -> None:
        """Let the caller look; `message` is what it finds."""
        ...


S = TypeVar("S", bound=Seat)


class BaseWatch:
    """What a watch is like in both kinds."""

    def __init__(self, channel: Channel, read: Callable[[Any], Ended | None]) -> None:
        self.channel = channel
        self.hearing = Hearing.SOON
        self._read = read
        self._message: Any = None

    def pause(self, planned: float) -> float:
        """How long to wait at most before the store is asked again."""
        if self.hearing is Hearing.NO:
            return planned
        if self.hearing is Hearing.SOON:
            return max(planned, SOON)
        return max(planned, random.uniform(SAFETY / 2, SAFETY))  # noqa: S311 - no secret

    def _heard(self) -> Ended | None:
        message, self._message = self._message, None
        return None if message is None else self._read(message)


class OtherWay(Exception):
    """The line has learnt how its server wants to be spoken to: it is to be opened anew."""


class Room(Generic[S]):
    """Those who wait for the same record."""

    __slots__ = ("hears", "seats")

    def __init__(self) -> None:
        self.hears = False
        self.seats: dict[S, None] = {}

    def set(self, hearing: Hearing) -> None:
        """Tell everyone what to expect; each asks again, for what happened before was unheard."""
        self.hears = hearing is Hearing.YES
        for seat in self.seats:
            seat.hearing = hearing
            seat.wake()


class Rooms(Generic[S]):
    """Everybody who waits on one connection. What a line hears, it says here."""

    def __init__(self, where: str) -> None:
        self.outage = Outage(where)
        self._rooms: dict[Channel, Room[S]] = {}
        self._asked: deque[Room[S]] = deque()
        """Rooms whose subscription is on its way; a server answers in the order it was asked."""
        self._left: dict[Channel, None] = {}
        """What is still subscribed to, although nobody waits for it any more."""

    def __len__(self) -> int:
        return len(self._rooms)

    def channels(self) -> list[Channel]:
        """List what is waited for."""
        return list(self._rooms)

    def hears(self, channel: Channel) -> bool:
        """Whether somebody waits here for this, and will hear of it."""
        room = self._rooms.get(channel)
        return room is not None and room.hears

    # --- who waits -----------------------------------------------------------------------

    def enter(self, seat: S) -> bool:
        """Give a seat; True when it is the first of its room, which then must be asked for."""
        room = self._rooms.get(seat.channel)
        first = room is None
        if room is None:
            room = self._rooms[seat.channel] = Room()
            self._left.pop(seat.channel, None)
        room.seats[seat] = None
        if room.hears:
            seat.hearing = Hearing.YES
            seat.wake()
        return first

    def leave(self, seat: S) -> None:
        """Give up a seat, if it was given; may come twice.

        The subscription stays for a while: a caller that leaves is in a hurry.
        """
        room = self._rooms.get(seat.channel)
        if room is None:
            return
        room.seats.pop(seat, None)
        if not room.seats:
            del self._rooms[seat.channel]
            self._left[seat.channel] = None

    def left(self) -> list[Channel]:
        """Take what can be unsubscribed."""
        left, self._left = self._left, {}
        return list(left)

    # --- what a line hears ---------------------------------------------------------------

    def asked(self, channel: Channel) -> None:
        """A subscription was asked for."""
        self._asked.append(self._rooms[channel])

    def told(self, channel: Channel, message: Any) -> None:
        """A message came."""
        room = self._rooms.get(channel)
        if room is not None:
            for seat in room.seats:
                seat.wake(message)

    def confirmed(self) -> None:
        """The oldest subscription that was asked for is in force."""
        self.outage.end()
        self._asked.popleft().set(Hearing.YES)

    def refused(self) -> None:
        """The oldest subscription that was asked for cannot be had here."""
        self._asked.popleft().set(Hearing.NO)

    def dropped(self, channel: Channel) -> None:
        """The server has ended a subscription, by itself or as it was asked."""
        room = self._rooms.get(channel)
        # The answer to our own request finds the room gone, or a new one not yet confirmed.
        if room is not None and room.hears:
            room.set(Hearing.NO)

    def deafen(self) -> None:
        """Nothing is heard any more."""
        self._asked.clear()
        self._left.clear()
        for room in self._rooms.values():
            room.set(Hearing.NO)


class Outage:
    """When listening may be tried again after it failed; the log is told once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._told = False
        self._pause, self._until = FIRST_PAUSE, 0.0
        self.works = False
        """Whether the line that is open has been confirmed to hear."""

    def is_over(self, now: float) -> bool:
        """Whether it may be tried."""
        return now >= self._until

    def failed(self, error: Exception, now: float) -> None:
        """Wait longer each time; but a line that worked and broke may be opened again at once."""
        if self.works:
            self.works = False
            return
        self._until = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if not self._told:
            self._told = True
            log.warning("no wake-ups from %s, whoever waits polls: %s", self._where, error)

    def end(self) -> None:
        """It works."""
        self.works, self._told = True, False
        self._pause, self._until = FIRST_PAUSE, 0.0
