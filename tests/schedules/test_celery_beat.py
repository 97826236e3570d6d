"""The scheduler for Celery beat: when an entry was due, and which entries it rejects."""

from __future__ import annotations

import contextlib
import pickle
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import Scheduler
from celery.schedules import crontab, schedule
from hypothesis import given
from hypothesis import strategies as st

from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    Policy,
    StoreUnavailable,
    default,
    open_store,
)
from semel.adapters import celery_beat
from semel.adapters.celery_beat import OnceScheduler, every, key_of, latest_due, scheduler_class
from semel.core.records import ClaimRequest, Identity
from semel.testing import FaultyStore, Refuse

BERLIN = ZoneInfo("Europe/Berlin")
OPEN = Policy(store_error="open")
HALF_AN_HOUR = timedelta(minutes=30)


@pytest.fixture
def app():
    """An application whose broker is in memory."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.timezone = "Europe/Berlin"
    app.conf.result_expires = None
    yield app
    app.close()


@pytest.fixture
def idem():
    with Idempotency("memory://") as engine:
        yield engine


@pytest.fixture
def beat(app, idem, monkeypatch):
    """Make beats of the application, whose sends are counted."""
    app.sent = []

    def send_task(name, *args, **options):
        app.sent.append((name, options))
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)

    def made(entries: dict, engine=idem, **options):
        app.conf.beat_schedule = entries
        return scheduler_class(engine, base=Scheduler, **options)(app=app)

    return made


def local(text: str, *, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold)


# --- when an entry was due -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("timing", "now", "due"),
    [
        (crontab(hour=3, minute=30), "2026-11-17T12:00:00.5", "2026-11-17T03:30"),
        (crontab(hour=3, minute=30), "2026-11-17T03:30", "2026-11-17T03:30"),
        (crontab(hour=3, minute=30), "2026-11-17T03:29:59.999", "2026-11-16T03:30"),
        (crontab(minute="*/15"), "2026-11-17T12:16", "2026-11-17T12:15"),
        (crontab(), "2026-11-17T12:16:59.9", "2026-11-17T12:16"),
        (crontab(0, 0, day_of_month=31), "2026-11-17T12:00", "2026-10-31T00:00"),
        (crontab(0, 0, day_of_month=29, month_of_year=2), "2027-11-17T12:00", "2024-02-29T00:00"),
        (crontab(0, 6, day_of_week="mon"), "2026-11-17T12:00", "2026-11-16T06:00"),
        # the days on which the clocks change
        (crontab(hour=1, minute=30), "2026-03-29T12:00", "2026-03-29T01:30"),
        (crontab(hour=4, minute=30), "2026-10-25T12:00", "2026-10-25T04:30"),
        (crontab(hour=11, minute=30), "2026-03-29T12:00", "2026-03-29T11:30"),
        (crontab(hour=2, minute=30), "2026-03-29T03:00", "2026-03-29T02:30"),
        (crontab(hour=2, minute=30), "2026-03-29T12:00", "2026-03-29T02:30"),
        (crontab(hour=2, minute=30), "2026-10-25T12:00", "2026-10-25T02:30"),
    ],
)
def test_the_last_due_time_is_the_same_whenever_a_beat_has_sent_last(app, timing, now, due):
    timing.app = app
    timing.__dict__.pop("tz", None)
    assert latest_due(timing, local(now)).isoformat() == local(due).isoformat()


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_a_crontab_has_each_local_time_once_when_the_clocks_change(app, day):
    timing = crontab(minute="*/30")
    timing.app = app
    first = local(f"{day}T00:00").astimezone(UTC)
    moments = [first + timedelta(minutes=minutes) for minutes in range(0, 300, 10)]
    found = [latest_due(timing, moment) for moment in moments]
    shown = [moment.astimezone(BERLIN) for moment in moments]
    expected = [at.replace(minute=at.minute // 30 * 30, fold=0) for at in shown]
    assert [due.isoformat() for due in found] == [due.isoformat() for due in expected]


@pytest.mark.parametrize("timing", [crontab(minute="*/5"), every(300)], ids=["crontab", "every"])
def test_beats_in_different_time_zones_have_one_key_for_one_moment(timing):
    now = datetime(2026, 11, 18, 9, 56, 0, 5000, tzinfo=UTC)
    keys = set()
    for zone in ("UTC", "Europe/Berlin", "Asia/Kolkata", "America/New_York"):
        there = Celery("zoned", broker="memory://", set_as_current=False)
        there.conf.timezone = zone
        timing.app, timing.nowfun = there, lambda zone=zone: now.astimezone(ZoneInfo(zone))
        timing.__dict__.pop("tz", None)
        keys.add(key_of("report", latest_due(timing, timing.now())))
    assert keys == {"report@2026-11-18T09:55:00Z"}


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_a_time_has_a_key_of_its_own_when_the_clocks_change(app, day):
    timing = crontab(minute=30)  # of the hour that is left out, too: due when it would be over
    timing.app = app
    first = local(f"{day}T00:00").astimezone(UTC)
    found = {latest_due(timing, first + timedelta(minutes=each)) for each in range(0, 360, 10)}
    names = {due.isoformat() for due in found}
    assert len({key_of("report", due) for due in found}) == len(names) > 5


def test_a_beat_in_the_hour_that_comes_twice_sends_nothing_again(beat, app):
    # A beat of Celery 5.7 that starts in that hour takes the entry for due until the hour is over.
    scheduler = beat({"report": {"task": "reports.make", "schedule": crontab(30, 2)}})
    timing = scheduler.schedule["report"].schedule
    again = [local(f"2026-10-25T02:{minute:02}", fold=1) for minute in range(30, 60, 10)]
    for now in (local("2026-10-25T02:30:01"), *again):
        timing.nowfun = lambda now=now: now
        scheduler.apply_entry(scheduler.schedule["report"])
    assert len(app.sent) == 1


@given(st.integers(0, 10**9), st.integers(1, 10**7))
def test_every_is_counted_from_1970_on(now, length):
    timing = every(length)
    moment = datetime.fromtimestamp(now, UTC)
    due = timing.latest(moment)
    assert due <= moment < due + timedelta(seconds=length)
    assert due.timestamp() % length == 0


def test_every_is_due_at_its_times_and_asks_again_at_the_next():
    now = datetime(2026, 11, 17, 12, 16, tzinfo=UTC)
    timing = every(timedelta(minutes=15), nowfun=lambda: now)
    assert timing.is_due(now - timedelta(seconds=61)) == (True, 14 * 60)
    assert timing.is_due(now - timedelta(seconds=59)) == (False, 14 * 60)
    assert timing.is_due((now - timedelta(minutes=16)).replace(tzinfo=None)) == (True, 14 * 60)
    again = pickle.loads(pickle.dumps(every(900)))  # noqa: S301 - beat keeps it so
    assert (type(again), again.run_every, again) == (every, timedelta(minutes=15), timing)


# --- entries -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "timing",
    [30.0, timedelta(minutes=15), schedule(7200, relative=True), schedule(60)],
)
def test_an_interval_that_begins_with_its_beat_stops_beat_at_its_start(beat, timing):
    with pytest.raises(ConfigError, match=r"(?s)'report'.*crontab\(\.\.\.\)"):
        beat({"report": {"task": "reports.make", "schedule": timing}})


@pytest.mark.parametrize("name", ["r" * 235, "ä" * 40])
def test_a_name_that_is_too_long_for_a_key_stops_beat_at_its_start(beat, name):
    with pytest.raises(
        ConfigError, match=r"too long for the key of a record, by \d+ char.* count as three"
    ):
        beat({name: {"task": "reports.make", "schedule": every(60)}})
    beat({name[: len(name) // 2]: {"task": "reports.make", "schedule": every(60)}})


def test_an_entry_that_is_added_later_is_rejected_when_it_is_due(beat, app):
    scheduler = beat({})
    entry = scheduler.add(name="report", task="reports.make", schedule=60)
    with pytest.raises(ConfigError):
        scheduler.apply_async(entry)
    assert app.sent == []


def test_two_beats_send_one_task_with_the_same_id(beat, app, idem):
    entries = {
        "sales report": {
            "task": "reports.make",
            "schedule": every(3600),
            "args": (7,),
            "options": {"queue": "slow"},
        }
    }
    first, second = (beat(entries, policy=Policy(ttl=60)) for _ in range(2))
    now = first.schedule["sales report"].schedule.now()
    results = []
    for scheduler in (first, second):
        scheduler.schedule["sales report"].schedule.nowfun = lambda: now
        before = scheduler.schedule["sales report"]
        results.append(scheduler.apply_async(before).id)
        assert scheduler.schedule["sales report"].total_run_count == 1
        assert before.options == {"queue": "slow"}
    ((task, options),) = app.sent
    assert task == "reports.make"
    assert options["queue"] == "slow"
    (record,) = idem.records(scope="celery.beat")
    assert record.identity.key.startswith("sales%20report@20")
    assert options["task_id"] == str(
        celery_beat.uuid5(celery_beat.NAMESPACE, f"celery.beat:{record.identity.key}")
    )
    assert results == [options["task_id"]] * 2
    assert 7000 < record.remaining <= 7200


def test_an_id_of_your_own_is_kept(beat, app):
    entry = {"task": "reports.make", "schedule": crontab(), "options": {"task_id": "mine"}}
    scheduler = beat({"report": entry}, scope="shop", policy=Policy(ttl=10**7))
    scheduler.apply_entry(scheduler.schedule["report"])
    assert [options["task_id"] for _, options in app.sent] == ["mine"]


def test_a_task_that_could_not_be_sent_is_sent_by_the_next_beat(beat, app, monkeypatch):
    entries = {"report": {"task": "reports.make", "schedule": every(3600)}}
    first, second = beat(entries), beat(entries)
    now = first.schedule["report"].schedule.now()
    for scheduler in (first, second):
        scheduler.schedule["report"].schedule.nowfun = lambda: now
    with monkeypatch.context() as broken:

        def refuse(*args, **options):
            raise ConnectionError("no broker")

        broken.setattr(app, "send_task", refuse)
        first.apply_entry(first.schedule["report"])  # it logs the error, as Celery does
    second.apply_entry(second.schedule["report"])
    assert len(app.sent) == 1


def test_a_beat_waits_for_one_that_is_sending_and_sends_if_that_one_died(beat, app, idem):
    scheduler = beat({"report": {"task": "reports.make", "schedule": every(3600)}})
    entry = scheduler.schedule["report"]
    now = entry.schedule.now()
    entry.schedule.nowfun = lambda: now
    key = key_of("report", entry.schedule.latest(now))
    idem.internals.store.ask(
        ClaimRequest(Identity("celery.beat", key), b"d" * 16, None, lease=0.3, ttl=60.0)
    )
    scheduler.apply_entry(entry)
    assert len(app.sent) == 1


def test_while_the_store_is_down_nothing_is_sent_unless_the_policy_says_so(beat, app):
    entries = {"report": {"task": "reports.make", "schedule": every(3600)}}
    store = FaultyStore(open_store("memory://"))
    store.inject("claim", Refuse(), times=100)
    with Idempotency(store) as engine:
        closed, opened = beat(entries, engine), beat(entries, engine, policy=OPEN)
        with pytest.raises(StoreUnavailable):
            closed.apply_async(closed.schedule["report"])
        assert app.sent == []
        opened.apply_async(opened.schedule["report"])
    assert [task for task, _ in app.sent] == ["reports.make"]


def test_without_an_engine_it_is_the_default_one(app, idem, monkeypatch, tmp_path):
    monkeypatch.setattr(default._default, "_engine", idem)
    monkeypatch.setattr(app, "send_task", lambda *args, **options: "sent")
    app.conf.beat_schedule = {"report": {"task": "reports.make", "schedule": every(60)}}
    scheduler = OnceScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    with contextlib.closing(scheduler):
        assert scheduler.apply_async(scheduler.schedule["report"]) == "sent"
    assert len(list(idem.records(scope="celery.beat"))) == 1


def test_wrong_arguments_are_rejected(idem):
    for engine in ("memory://", AsyncIdempotency("memory://")):
        said = (
            r'scheduler_class needs an Idempotency, such as Idempotency\("redis://\.\.\."\), not '
        )
        with pytest.raises(ConfigError, match=said + type(engine).__name__):
            scheduler_class(engine)
    for base in (int, "Scheduler"):
        with pytest.raises(ConfigError, match=r"base must be a Scheduler class of celery\.beat"):
            scheduler_class(idem, base=base)
    with pytest.raises(ConfigError, match="policy must be"):
        scheduler_class(idem, policy="job")
    with pytest.raises(ConfigError, match="the length of every"):
        every(0)
