"""Slots of time: the names, ends and rules of `core/schedules.py`, by example and by property."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import ConfigError
from semel.core.policy import Policy, resolve
from semel.core.schedules import (
    EARLY,
    LENGTHS,
    Schedule,
    Slot,
    in_utc,
    rules_of_slot,
    seconds_left,
)

BERLIN = "Europe/Berlin"
ZONES = [
    "UTC",
    BERLIN,
    "America/New_York",
    "Asia/Kolkata",  # half an hour away from UTC's hours
    "Australia/Lord_Howe",  # its clocks change by half an hour
    "Asia/Beirut",  # they change at midnight
    "America/Santiago",
    "Africa/Cairo",
    "Pacific/Apia",
    "Pacific/Chatham",
]
PERIODS = ["minute", "hour", "day", "week", "month"]

FROM, TO = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (2013, 2038))
moments = st.floats(FROM, TO, allow_nan=False).map(lambda moment: round(moment, 3))


def at(text: str, zone: str = "UTC", *, fold: int = 0) -> float:
    """Local time as seconds since the epoch."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def name(period, text: str, zone: str = "UTC", *, fold: int = 0) -> str:
    tz = None if isinstance(period, timedelta) else zone
    return Schedule(period, tz).slot(at(text, zone, fold=fold)).name


# --- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "start", "named"),
    [
        ("minute", "2026-11-17T18:45:31", "2026-11-17T18:45:00Z"),
        ("hour", "2026-11-17T18:45:31", "2026-11-17T18:00:00Z"),
        ("day", "2026-11-17T18:45:31", "2026-11-17"),
        ("week", "2026-11-17T18:45:31", "2026-W47"),
        ("month", "2026-11-17T18:45:31", "2026-11"),
        (timedelta(minutes=15), "2026-11-17T18:47:31", "2026-11-17T18:45:00Z"),
        (timedelta(seconds=2.5), "2026-11-17T00:00:03", "2026-11-17T00:00:02.500000Z"),
        # month ends, leap days and the weeks around new year
        ("day", "2028-02-29T12:00", "2028-02-29"),
        ("day", "2027-02-28T23:59:58", "2027-02-28"),
        ("month", "2028-02-29T23:59:58", "2028-02"),
        ("month", "2028-02-29T23:59:59", "2028-03"),
        ("month", "2027-12-31T23:59:59.5", "2028-01"),
        ("week", "2027-01-03T12:00", "2026-W53"),
        ("week", "2027-01-04T00:00", "2027-W01"),
        ("week", "2024-12-30T12:00", "2025-W01"),
    ],
)
def test_a_slot_is_named_by_its_date_or_its_beginning(period, start, named):
    assert name(period, start) == named


def test_a_day_is_that_of_the_time_zone():
    assert name("day", "2026-11-18T00:30", BERLIN) == "2026-11-18"
    assert Schedule("day").slot(at("2026-11-18T00:30", BERLIN)).name == "2026-11-17"
    eastern = timezone(timedelta(hours=-5))
    assert Schedule("day", eastern).slot(at("2026-11-18T04:00")).name == "2026-11-17"


def test_an_hour_is_that_of_the_time_zone():
    slot = Schedule("hour", "Asia/Kolkata").slot(at("2026-11-17T10:10", "Asia/Kolkata"))
    assert slot == Slot(
        "2026-11-17T04:30:00Z",
        datetime(2026, 11, 17, 4, 30, tzinfo=UTC),
        datetime(2026, 11, 17, 5, 30, tzinfo=UTC),
    )


def test_a_function_gets_the_local_time_and_names_the_slot():
    def quarter(now: datetime) -> str:
        assert now.tzinfo is not None
        return f"{now.year}-Q{(now.month + 2) // 3}"

    schedule = Schedule(quarter, BERLIN)
    assert schedule.slot(at("2026-03-31T23:59", BERLIN)) == Slot("2026-Q1")
    assert schedule.slot(at("2026-03-31T23:59:59", BERLIN)).name == "2026-Q2"
    assert schedule.longest is None


# --- the days on which the clocks change ---------------------------------------------------


def test_a_day_of_23_hours_is_one_slot():
    schedule = Schedule("day", BERLIN)
    slot = schedule.slot(at("2026-03-29T01:30", BERLIN))
    assert slot.name == "2026-03-29"
    assert slot.end - slot.start == timedelta(hours=23)
    assert schedule.slot(at("2026-03-29T03:30", BERLIN)) == slot
    assert schedule.slot(at("2026-03-29T23:30", BERLIN)) == slot
    assert schedule.slot(at("2026-03-30T00:00", BERLIN)).start == slot.end


def test_a_day_of_25_hours_is_one_slot_though_an_hour_comes_twice():
    schedule = Schedule("day", BERLIN)
    first = schedule.slot(at("2026-10-25T02:30", BERLIN))
    assert first == schedule.slot(at("2026-10-25T02:30", BERLIN, fold=1))
    assert first.end - first.start == timedelta(hours=25)
    assert first.name == "2026-10-25"


def test_an_hour_that_comes_twice_is_two_slots():
    assert name("hour", "2026-10-25T02:30", BERLIN) == "2026-10-25T00:00:00Z"
    assert name("hour", "2026-10-25T02:30", BERLIN, fold=1) == "2026-10-25T01:00:00Z"


def test_a_day_without_a_midnight_begins_when_the_clocks_change():
    slot = Schedule("day", "Asia/Beirut").slot(at("2026-03-29T12:00", "Asia/Beirut"))
    assert slot.start == datetime(2026, 3, 28, 22, tzinfo=UTC)
    assert slot.end - slot.start == timedelta(hours=23)


def test_weeks_and_months_with_a_change_of_the_clocks_are_one_slot_each():
    week = Schedule("week", BERLIN).slot(at("2026-10-25T02:30", BERLIN, fold=1))
    assert (week.name, week.end - week.start) == ("2026-W43", timedelta(days=7, hours=1))
    month = Schedule("month", BERLIN).slot(at("2026-03-29T12:00", BERLIN))
    assert (month.name, month.end - month.start) == ("2026-03", timedelta(days=31, hours=-1))


# --- early and late ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "day"),
    [
        ("2026-11-17T23:59:58.999", "2026-11-17"),
        ("2026-11-17T23:59:59", "2026-11-18"),
        ("2026-11-17T23:59:59.999", "2026-11-18"),
        ("2026-11-18T00:00", "2026-11-18"),
        ("2026-11-18T23:59:58", "2026-11-18"),
    ],
)
def test_up_to_a_second_early_counts_for_the_coming_slot_and_a_late_start_for_its_own(start, day):
    assert name("day", start, BERLIN) == day


# --- properties ----------------------------------------------------------------------------


@given(st.sampled_from(PERIODS), st.sampled_from(ZONES), moments)
def test_every_moment_is_in_its_slot_and_slots_follow_each_other(period, zone, now):
    schedule = Schedule(period, zone)
    slot = schedule.slot(now)
    moment = datetime.fromtimestamp(now + EARLY, UTC)
    assert slot.start <= moment < slot.end
    assert (slot.end - slot.start).total_seconds() <= LENGTHS[period] == schedule.longest
    # The last moment of a slot has its name still, the first one after it has another one.
    if (period, zone) != ("hour", "Australia/Lord_Howe"):  # half of it may be repeated there
        assert schedule.slot(slot.end.timestamp() - EARLY - 0.001).name == slot.name
        assert schedule.slot(slot.start.timestamp() - EARLY).name == slot.name
        assert schedule.slot(slot.end.timestamp() - EARLY).name != slot.name
        assert schedule.slot(slot.start.timestamp() - EARLY - 0.001).name != slot.name


@given(st.sampled_from(ZONES), moments, st.floats(0, 40 * 86400))
def test_slots_of_days_are_named_by_the_local_date_alone(zone, now, later):
    for period in ("day", "week", "month"):
        schedule = Schedule(period, zone)
        first, second = schedule.slot(now), schedule.slot(now + later)
        dates = [
            datetime.fromtimestamp(moment + EARLY, ZoneInfo(zone)).date()
            for moment in (now, now + later)
        ]
        same = {
            "day": dates[0] == dates[1],
            "week": dates[0].isocalendar()[:2] == dates[1].isocalendar()[:2],
            "month": dates[0].replace(day=1) == dates[1].replace(day=1),
        }
        assert (first.name == second.name) is same[period]


@given(st.integers(2_000_000, 10**13), moments)
def test_a_duration_is_counted_from_the_epoch(microseconds, now):
    period = timedelta(microseconds=microseconds)
    slot = Schedule(period).slot(now)
    moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=now + EARLY)
    assert slot.start <= moment < slot.end
    assert slot.end - slot.start == period
    assert (slot.start - datetime.fromtimestamp(0, UTC)) % period == timedelta(0)
    assert slot.name == in_utc(slot.start)


# --- what is left, and the rules of a slot -------------------------------------------------


def test_what_is_left_of_a_slot_is_never_negative():
    slot = Schedule("hour").slot(at("2026-11-17T18:45"))
    assert seconds_left(slot, at("2026-11-17T18:45")) == 900.0
    assert seconds_left(slot, at("2026-11-17T19:00:01")) == 0.0
    assert seconds_left(Slot("2026-Q1"), 0.0) == 0.0


def test_a_slot_is_remembered_for_two_slots_at_least():
    rules = rules_of_slot(resolve(), LENGTHS["month"], None)
    assert rules.ttl == rules.failed_ttl == 2 * LENGTHS["month"]
    long = resolve(Policy(ttl=10**8, failed_ttl=10**7))
    assert rules_of_slot(long, LENGTHS["month"], None).ttl == 10**8
    assert rules_of_slot(long, LENGTHS["month"], None).failed_ttl == 10**7
    assert rules_of_slot(resolve(), None, None).ttl == resolve().ttl


def test_a_start_waits_only_on_standby():
    guard = resolve(Policy(duplicate="reject"))
    alone = rules_of_slot(guard, 60.0, None)
    assert (alone.duplicate, alone.replays, alone.waits) == ("replay", True, False)
    waiting = rules_of_slot(guard, 60.0, 12.0)
    assert (waiting.waits, waiting.wait_timeout) == (True, 12.0)


# --- wrong use -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "tz", "said"),
    [
        ("fortnight", None, "no period is called 'fortnight'"),
        (None, None, "the period of once_per must be a number of seconds or a timedelta"),
        (True, None, "the period of once_per must be a number of seconds or a timedelta"),
        (timedelta(0), None, "more than zero"),
        (1.5, None, "at least 2 seconds"),
        (timedelta(days=40_000), None, "at most 100 years"),
        (timedelta(hours=1), BERLIN, "counted from 1970-01-01 UTC"),
        ("day", "Europe/Atlantis", "no time zone is called 'Europe/Atlantis'"),
        ("day", "../etc/passwd", "no time zone is called"),
        ("day", "", "no time zone is called"),
        ("day", 3, "tz must be the name of a time zone"),
    ],
)
def test_a_wrong_period_or_time_zone_is_rejected(period, tz, said):
    with pytest.raises(ConfigError, match=said):
        Schedule(period, tz)


def test_an_async_function_cannot_name_slots():
    async def quarter(now):
        return "2026-Q1"

    with pytest.raises(ConfigError, match="plain one"):
        Schedule(quarter)


@pytest.mark.parametrize("returned", [None, "", 7])
def test_a_function_must_return_a_name(returned):
    with pytest.raises(ConfigError, match="the name of the slot"):
        Schedule(lambda now: returned).slot(0.0)
