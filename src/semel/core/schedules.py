"""Slots of time, in each of which a scheduled job runs once: their names, beginnings and ends.

This module computes. It reads no clock: the time of a start is an argument, in seconds since the
epoch. Its rules:

- A start counts for the slot that it is in. Up to `EARLY` seconds before the end of a slot it
  counts for the next one: schedulers may start a job a little before its time.
- Days, weeks and months are those of a time zone and have the names of their local dates. So a day
  of 23 or 25 hours is one day, with one name.
- Minutes and hours are those of a time zone too, named by their beginning in UTC: of two hours
  that show the same local time, each has its own name.
- A duration is counted from the epoch on: all machines agree about its slots.
- A function of the time of the start may return any other name of a slot.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Final, Literal, TypeAlias, get_args

from msgspec import Struct

from semel.core.policy import DAY, HOUR, MINUTE, Duration, Rules, changed, seconds
from semel.core.records import LONGEST
from semel.errors import ConfigError

Calendar: TypeAlias = Literal["minute", "hour", "day", "week", "month"]
Period: TypeAlias = Calendar | Duration | Callable[[datetime], str]

EARLY: Final = 1.0
"""Seconds before a slot in which a start already counts for it."""

SHORTEST: Final = 2.0
"""Seconds of the shortest duration: in a shorter one, most starts would count as early."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)

LENGTHS: Final[dict[str, float]] = {
    "minute": MINUTE,
    "hour": HOUR,
    "day": DAY + HOUR,
    "week": 7 * DAY + HOUR,
    "month": 31 * DAY + HOUR,
}
"""Seconds that a slot lasts at most: the clocks may be set back by an hour in it."""


class Slot(Struct, frozen=True):
    """A slot of time in which a job runs once; its start and end are in UTC."""

    name: str
    start: datetime | None = None
    """The start, or None where your own function names the slots."""
    end: datetime | None = None


class Schedule:
    """Which slot a start counts for."""

    def __init__(self, period: Period, tz: str | tzinfo | None = None) -> None:
        self._period: str | timedelta | Callable[[datetime], str]
        self.longest: float | None
        """Seconds that a slot lasts at most; None where only a function knows."""
        if isinstance(period, str):
            if period not in LENGTHS:
                names = ", ".join(repr(name) for name in get_args(Calendar))
                raise ConfigError(
                    f"once_per: no period is called {period!r}; use one of {names}, a timedelta, "
                    "or a function of the time"
                )
            self._period, self.longest = period, LENGTHS[period]
        elif callable(period):
            if inspect.iscoroutinefunction(period):
                raise ConfigError("once_per: the function that names slots must be a plain one")
            self._period, self.longest = period, None
        else:
            self.longest = seconds("the period of once_per", period)
            if self.longest < SHORTEST:
                raise ConfigError(
                    f"the period of once_per must be at least {SHORTEST:g} seconds, because a "
                    f"start up to {EARLY:g} second early counts for the next slot; "
                    f"got {self.longest:g}"
                )
            if tz is not None:
                raise ConfigError(
                    "once_per: a duration is counted from 1970-01-01 UTC on, in every time zone; "
                    'tz= is for "day", "week" and their kind, and for functions'
                )
            self._period = timedelta(seconds=self.longest)
        self._zone = UTC if tz is None else _zone(tz)

    def slot(self, now: float) -> Slot:
        """Return the slot that a start at this time counts for."""
        moment = EPOCH + timedelta(seconds=now + EARLY)
        period = self._period
        if isinstance(period, timedelta):
            start = EPOCH + (moment - EPOCH) // period * period
            return Slot(in_utc(start), start, start + period)
        local = moment.astimezone(self._zone)
        if not isinstance(period, str):
            return Slot(_checked_name(period(local)))
        if period in {"minute", "hour"}:
            length = timedelta(seconds=LENGTHS[period])
            # Counted on the clock of the time zone: some are half an hour away from UTC's.
            since = (local.replace(tzinfo=UTC) - EPOCH) % length
            start = moment - since
            return Slot(in_utc(start), start, start + length)
        name, first, following = _days(period, local.date())
        return Slot(name, self._midnight(first), self._midnight(following))

    def _midnight(self, day: date) -> datetime:
        """Return when a local day begins.

        Where the clocks are changed at midnight, this is the first of two midnights, or, if there
        is none, the moment of the change.
        """
        return datetime(day.year, day.month, day.day, tzinfo=self._zone).astimezone(UTC)


def seconds_left(slot: Slot, now: float) -> float:
    """Return how long a slot still lasts; none if nothing says when it ends."""
    return 0.0 if slot.end is None else max(0.0, (slot.end - EPOCH).total_seconds() - now)


def in_utc(moment: datetime) -> str:
    """Write a moment down: to the second, or to the microsecond where it has a fraction."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"


def rules_of_slot(rules: Rules, longest: float | None, standby: float | None) -> Rules:
    """Return the rules of a job that runs once in a slot of at most so many seconds.

    It is remembered for two slots at least, so that a late start, or one whose clock is wrong,
    finds that it was done. `standby` is how long a start waits for one that runs; None: not.
    """
    two_slots = 0.0 if longest is None else min(2 * longest, LONGEST)
    return changed(
        rules,
        duplicate="replay",  # a start that comes second is no error
        concurrent="reject" if standby is None else "wait",
        wait_timeout=standby,
        ttl=max(rules.ttl, two_slots),
        failed_ttl=max(rules.failed_ttl, two_slots),
    )


def _days(period: str, today: date) -> tuple[str, date, date]:
    """Return the name of a slot of whole days, its first day, and the first one after it."""
    match period:
        case "week":
            year, week, weekday = today.isocalendar()
            first = today - timedelta(days=weekday - 1)
            return f"{year}-W{week:02}", first, first + timedelta(days=7)
        case "month":
            first = today.replace(day=1)
            following = (first + timedelta(days=31)).replace(day=1)
            return f"{first:%Y-%m}", first, following
        case _:
            return today.isoformat(), today, today + timedelta(days=1)


def _zone(tz: object) -> tzinfo:
    if isinstance(tz, tzinfo):
        return tz
    from zoneinfo import ZoneInfo  # noqa: PLC0415 - `import semel` must not pay for it

    if not isinstance(tz, str):
        raise ConfigError(
            f"once_per: tz must be the name of a time zone, or a tzinfo; got {type(tz).__name__}"
        )
    try:
        return ZoneInfo(tz)
    except (LookupError, ValueError, OSError) as error:
        raise ConfigError(
            f"once_per: no time zone is called {tz!r} here; names are such as 'Europe/Berlin'. A "
            "machine without time zones of its own, such as Windows, needs: pip install tzdata"
        ) from error


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "once_per: the function must return the name of the slot, a string that is not empty; "
            f"got {name!r}"
        )
    return name
