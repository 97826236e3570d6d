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

from msgspec import Struct

from semel.core.records import Ended

log = logging.getLogger(__name__)

SOON: Final = 0.25
"""Seconds within which a subscription is confirmed, unless something is wrong."""

SAFETY: Final = 5.0
"""Seconds after which a waiter that hears asks all the same: a message may have been lost."""

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
        match self.hearing:
            case Hearing.SOON:
                return max(planned, SOON)
            case Hearing.YES:
                return max(planned, random.uniform(SAFETY / 2, SAFETY))  # noqa: S311 - no secret
            case Hearing.NO:
                return planned

    def _heard(self) -> Ended | None:
        message, self._message = self._message, None
        return None if message is None else self._read(message)


# --- what a line may hear ----------------------------------------------------------------


class Confirmed(Struct, frozen=True):
    """The oldest subscription that was asked for is in force."""


class Refused(Struct, frozen=True):
    """The oldest subscription that was asked for cannot be had here."""


class Told(Struct, frozen=True):
    """A message came."""

    channel: Channel
    message: Any


class Dropped(Struct, frozen=True):
    """The server has ended a subscription."""

    channel: Channel


News: TypeAlias = Confirmed | Refused | Told | Dropped


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
    """Everybody who waits on one connection."""

    def __init__(self) -> None:
        self._rooms: dict[Channel, Room[S]] = {}
        self._asked: deque[Room[S]] = deque()
        """Rooms whose subscription is on its way; a server confirms in the order it was asked."""

    def hears(self, channel: Channel) -> bool:
        """Whether somebody waits here for this, and will hear of it."""
        room = self._rooms.get(channel)
        return room is not None and room.hears

    def __len__(self) -> int:
        return len(self._rooms)

    def channels(self) -> list[Channel]:
        """List what is waited for."""
        return list(self._rooms)

    def enter(self, seat: S) -> bool:
        """Give a seat; True when it is the first of its room, which then must be asked for."""
        room = self._rooms.get(seat.channel)
        first = room is None
        if room is None:
            room = self._rooms[seat.channel] = Room()
        room.seats[seat] = None
        if room.hears:
            seat.hearing = Hearing.YES
            seat.wake()
        return first

    def leave(self, seat: S) -> bool:
        """Give up a seat; True when it was the last, and the subscription can go."""
        room = self._rooms[seat.channel]
        del room.seats[seat]
        if room.seats:
            return False
        del self._rooms[seat.channel]
        return True

    def asked(self, channel: Channel) -> None:
        """A subscription was asked for."""
        self._asked.append(self._rooms[channel])

    def hear(self, news: News) -> None:
        """Take in what the line heard."""
        match news:
            case Told(channel=channel, message=message):
                if channel in self._rooms:
                    for seat in self._rooms[channel].seats:
                        seat.wake(message)
            case Confirmed():
                self._asked.popleft().set(Hearing.YES)
            case Refused():
                self._asked.popleft().set(Hearing.NO)
            case Dropped(channel=channel):
                # An answer to our own request finds the room gone, or a new one not yet confirmed.
                if channel in self._rooms and self._rooms[channel].hears:
                    self._rooms[channel].set(Hearing.NO)

    def deafen(self) -> None:
        """Nothing is heard any more."""
        self._asked.clear()
        for room in self._rooms.values():
            room.set(Hearing.NO)


class Outage:
    """When listening may be tried again after it failed; the log is told once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._told = False

    def is_over(self, now: float) -> bool:
        """Whether it may be tried."""
        return now >= self._until

    def failed(self, error: Exception, now: float) -> None:
        """Wait longer each time."""
        self._until = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if not self._told:
            self._told = True
            log.warning("no wake-ups from %s, whoever waits polls: %s", self._where, error)

    def end(self) -> None:
        """It works."""
        self._pause, self._until, self._told = FIRST_PAUSE, 0.0, False
