"""The executors for APScheduler: which jobs they reject, and what becomes of each run time."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from engines.facade import PATIENCE, wait_until
from semel import AsyncIdempotency, ConfigError, Idempotency, Policy, current_attempt
from semel.adapters.apscheduler import AsyncOnceExecutor, OnceExecutor, Skipped
from semel.core.records import ClaimRequest, Identity, State

START = datetime(2026, 1, 1, tzinfo=UTC)
YESTERDAY = date.today() - timedelta(days=1)  # noqa: DTZ011 - as APScheduler asks for it


def noop() -> None:
    """A job."""


async def aio_noop() -> None:
    """An async one."""


@pytest.fixture
def idem():
    with Idempotency("memory://") as engine:
        yield engine


class Heard:
    """Listens to a scheduler: what became of each run."""

    def __init__(self, scheduler) -> None:
        self.events = []
        self._news = threading.Event()
        scheduler.add_listener(self._hear, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED)

    def _hear(self, event) -> None:
        self.events.append(event)

    def wait(self, count: int):
        wait_until(lambda: len(self.events) >= count)
        return self.events


@pytest.fixture
def background(idem):
    """Make schedulers of threads, each as if in another process."""
    made = []

    def scheduler(*, engine=idem, **options) -> BackgroundScheduler:
        executor = OnceExecutor(engine, **options)
        made.append(BackgroundScheduler(timezone=UTC, executors={"default": executor}))
        return made[-1]

    yield scheduler
    for each in made:
        if each.running:
            each.shutdown()


# --- jobs about which processes would not agree --------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "said"),
    [
        (IntervalTrigger(minutes=5), "without start_date"),
        (IntervalTrigger(minutes=5, start_date=START, jitter=3), "jitter"),
        (CronTrigger(hour=3, jitter=3), "jitter"),
        (OrTrigger([CronTrigger(hour=3), CronTrigger(hour=4, jitter=1)]), "jitter"),
        (AndTrigger([CronTrigger(hour=3)], jitter=5), "jitter"),
        (OrTrigger([CronTrigger(hour=3), IntervalTrigger(hours=1, start_date=START)]), "combined"),
    ],
)
def test_a_job_whose_times_differ_between_processes_stops_the_scheduler_at_its_start(
    background, trigger, said
):
    scheduler = background()
    scheduler.add_job(noop, trigger, id="report")
    with pytest.raises(ConfigError, match=f"(?s)'report'.*{said}"):
        scheduler.start()


@pytest.mark.parametrize(
    "trigger",
    [
        IntervalTrigger(minutes=5, start_date=START),
        CronTrigger(hour=3),
        OrTrigger([CronTrigger(hour=3), CronTrigger(hour=4)]),
    ],
)
def test_a_job_with_the_same_times_everywhere_is_taken(background, trigger):
    scheduler = background()
    job = scheduler.add_job(noop, trigger, id="report", executor="default")
    scheduler.start(paused=True)
    assert scheduler.get_job("report") is job


def test_weeks_that_are_counted_from_today_on_are_rejected(background):
    calendar = pytest.importorskip(
        "apscheduler.triggers.calendarinterval", reason="APScheduler 3.11"
    )
    right, wrong = background(), background()
    right.add_job(noop, calendar.CalendarIntervalTrigger(days=1), id="daily")
    weeks = calendar.CalendarIntervalTrigger(weeks=2, start_date=YESTERDAY)
    right.add_job(noop, weeks, id="every second week")
    right.start(paused=True)
    wrong.add_job(noop, calendar.CalendarIntervalTrigger(weeks=2), id="report")
    with pytest.raises(ConfigError, match="start_date in the past"):
        wrong.start()


def test_a_job_without_an_id_is_rejected_unless_it_runs_on_a_date(background):
    scheduler = background()
    scheduler.add_job(noop, "date", run_date=datetime(2100, 1, 1, tzinfo=UTC))
    scheduler.add_job(noop, "cron", hour=3, id="0123456789abcdef0123456789abcdef")  # no version 4
    scheduler.add_job(noop, "cron", hour=3, id="a report of thirty-two characters"[:32])
    scheduler.add_job(noop, "cron", hour=3)
    with pytest.raises(ConfigError, match="pass id="):
        scheduler.start()


@pytest.mark.parametrize("job_id", ["r" * 240, "ä" * 50])
def test_an_id_that_cannot_be_a_key_is_rejected_before_the_job_is_due(background, job_id):
    scheduler = background()
    scheduler.add_job(noop, "cron", hour=3, id=job_id)
    with pytest.raises(ConfigError, match="can't be a key"):
        scheduler.start()


@pytest.mark.parametrize(
    "trigger", [CronTrigger(hour=3), IntervalTrigger(hours=1, start_date=START)]
)
def test_a_first_run_that_the_trigger_did_not_choose_is_rejected(background, trigger):
    scheduler = background()
    scheduler.add_job(
        noop, trigger, id="report", next_run_time=datetime(2100, 1, 1, 0, 0, 0, 7000, UTC)
    )
    with pytest.raises(ConfigError, match="next_run_time"):
        scheduler.start()


def test_an_interval_is_counted_over_a_change_of_the_clocks(background):
    berlin = ZoneInfo("Europe/Berlin")
    trigger = IntervalTrigger(hours=7, start_date=datetime(2026, 1, 1, tzinfo=berlin))
    summer = trigger.get_next_fire_time(None, datetime(2026, 7, 1, tzinfo=berlin))
    scheduler = background()
    scheduler.add_job(noop, trigger, id="report", next_run_time=summer)
    scheduler.start(paused=True)


def test_jobs_of_other_executors_are_not_looked_at(background):
    scheduler = background()
    scheduler.add_executor("threadpool", "plain")
    scheduler.add_job(noop, "interval", minutes=5, executor="plain")
    scheduler.start(paused=True)
    scheduler.add_job(noop, "interval", minutes=5, executor="plain")


def test_a_wrong_job_that_is_added_later_is_told_of_in_the_log_and_never_runs(background, caplog):
    scheduler = background()
    scheduler.start()
    ran = threading.Event()
    with caplog.at_level(logging.ERROR):
        scheduler.add_job(ran.set, "interval", seconds=0.02, id="report")
        assert any("without start_date" in text for text in [*caplog.messages])
        wait_until(lambda: any("Error submitting job" in text for text in [*caplog.messages]))
        scheduler.remove_job("report")  # whose errors the scheduler's thread goes on to log
        caplog.clear()
        scheduler.add_job(noop, "cron", hour=3, id="later")
        scheduler.reschedule_job("later", trigger="interval", hours=1)
        assert any("without start_date" in text for text in [*caplog.messages])
    assert not ran.is_set()
    scheduler.add_job(noop, "date", run_date=datetime(2100, 1, 1, tzinfo=UTC), id="gone")
    scheduler.remove_job("gone")


def test_an_async_job_needs_the_async_executor(background):
    scheduler = background()
    scheduler.add_job(aio_noop, "cron", hour=3, id="report")
    with pytest.raises(ConfigError, match="AsyncOnceExecutor"):
        scheduler.start()


def test_an_engine_of_the_other_kind_and_wrong_options_are_rejected(idem):
    with pytest.raises(
        ConfigError,
        match=r'OnceExecutor needs an Idempotency, such as Idempotency\("redis:.* not AsyncIdem',
    ):
        OnceExecutor(AsyncIdempotency("memory://"))
    with pytest.raises(ConfigError, match=r'such as Idempotency\("redis://\.\.\."\), not str'):
        OnceExecutor("memory://")
    with pytest.raises(ConfigError, match="AsyncOnceExecutor needs an AsyncIdempotency"):
        AsyncOnceExecutor(idem)
    with pytest.raises(ConfigError, match="standby"):
        OnceExecutor(idem, standby=-1)
    with pytest.raises(ConfigError, match="policy must be"):
        OnceExecutor(idem, policy="job")


# --- what becomes of each run time ---------------------------------------------------------


def due(scheduler, function, **options):
    """Add a job that was due three seconds, two and one second ago."""
    now = datetime.now(UTC).replace(microsecond=0)
    options = {"misfire_grace_time": 60, "coalesce": False, "id": "sales report"} | options
    return scheduler.add_job(
        function,
        "interval",
        seconds=1,
        start_date=now - timedelta(seconds=3),
        end_date=now - timedelta(seconds=1),
        next_run_time=now - timedelta(seconds=3),
        **options,
    )


def test_each_run_time_is_a_run_of_its_own_and_the_second_process_skips_them(background):
    runs = []

    def report() -> int:
        runs.append(current_attempt().key)
        return len(runs)

    first, second = background(), background()
    for scheduler in (first, second):
        due(scheduler, report)
    heard = Heard(first)
    first.start()
    events = heard.wait(3)
    assert [event.retval for event in events] == [1, 2, 3]
    heard = Heard(second)
    second.start()
    skipped = [event.retval for event in heard.wait(3)]
    assert [each.run_time for each in skipped] == [event.scheduled_run_time for event in events]
    assert {each.job_id for each in skipped} == {"sales report"}
    assert len(runs) == len(set(runs)) == 3
    assert all(key.startswith("sales%20report@20") and key.endswith("Z") for key in runs)


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_on_the_days_on_which_the_clocks_change_three_processes_run_each_time_once(
    idem, background, day
):
    ran = []
    berlin = ZoneInfo("Europe/Berlin")
    trigger = CronTrigger(hour="1-3", minute=30, timezone=berlin)
    at = datetime.fromisoformat(day).replace(tzinfo=berlin)
    run_times = []
    while at.date() == date.fromisoformat(day):
        at = trigger.get_next_fire_time(at, at)
        run_times.append(at)
    executors = []
    for _ in range(3):
        scheduler = background()
        job = scheduler.add_job(
            lambda: ran.append(current_attempt().key),
            trigger,
            id="report",
            max_instances=99,
            misfire_grace_time=None,
        )
        scheduler.start(paused=True)
        executors.append(OnceExecutor(idem))
        executors[-1].start(scheduler, "by hand")
        executors[-1].submit_job(job, run_times)
    for executor in executors:
        executor.shutdown()
    assert sorted(ran) == sorted(
        f"report@{each.astimezone(UTC):%Y-%m-%dT%H:%M:%S}Z" for each in run_times
    )
    assert len(set(ran)) == len(run_times) >= 3


def test_run_times_that_are_coalesced_are_the_last_one_and_missed_ones_do_not_run(background, idem):
    scheduler = background(scope="shop")
    heard = Heard(scheduler)
    due(scheduler, noop, coalesce=True)
    due(scheduler, noop, id="missed", misfire_grace_time=None, coalesce=True)
    late = due(scheduler, noop, id="late", coalesce=False)
    late.misfire_grace_time = 1
    scheduler.start()
    events = heard.wait(5)
    by_id = {event.job_id: event.code for event in events}
    assert by_id["sales report"] == by_id["missed"] == EVENT_JOB_EXECUTED
    assert EVENT_JOB_MISSED in {event.code for event in events if event.job_id == "late"}
    keys = [record.identity.key for record in idem.records(scope="shop")]
    assert len([key for key in keys if key.startswith("sales%20report@")]) == 1


def test_a_failure_reaches_the_listeners_and_frees_the_run_time(background, idem):
    scheduler, again = background(), background()
    broken = threading.Event()

    def fails() -> str:
        if not broken.is_set():
            broken.set()
            raise ValueError("no paper")
        return "printed"

    now = datetime.now(UTC).replace(microsecond=0)
    for each in (scheduler, again):
        each.add_job(fails, "date", run_date=now, id="report", misfire_grace_time=60)
    heard = Heard(scheduler)
    scheduler.start()
    assert str(heard.wait(1)[0].exception) == "no paper"
    heard = Heard(again)
    again.start()
    assert heard.wait(1)[0].retval == "printed"


def abandoned(idem, run_time: datetime, lease: float) -> None:
    """A run of another process that will never end."""
    key = f"report@{run_time:%Y-%m-%dT%H:%M:%S}Z"
    idem.internals.store.ask(
        ClaimRequest(Identity("apscheduler", key), b"d" * 16, None, lease=lease, ttl=60.0)
    )


@pytest.mark.parametrize("trigger", ["date", "interval"])
@pytest.mark.parametrize("standby", [True, PATIENCE])
def test_on_standby_a_process_takes_over(background, idem, standby, trigger):
    now = datetime.now(UTC).replace(microsecond=0)
    abandoned(idem, now, 0.3)
    scheduler = background(standby=standby)
    times = {"run_date": now}
    if trigger == "interval":
        times = {"start_date": now, "hours": 1, "next_run_time": now}
    scheduler.add_job(lambda: 7, trigger, id="report", misfire_grace_time=60, **times)
    heard = Heard(scheduler)
    scheduler.start()
    assert heard.wait(1)[0].retval == 7


def test_standby_ends_before_the_next_run_time(background, idem):
    now = datetime.now(UTC).replace(microsecond=0)
    abandoned(idem, now, PATIENCE)
    scheduler = background(standby=True)
    trigger = IntervalTrigger(seconds=1, start_date=now)
    scheduler.add_job(noop, trigger, id="report", misfire_grace_time=60, next_run_time=now)
    heard = Heard(scheduler)
    scheduler.start()
    assert isinstance(heard.wait(1)[0].retval, Skipped)


def test_a_run_is_remembered_as_long_as_a_process_may_come_late(background, idem):
    scheduler = background(policy=Policy(ttl=60))
    now = datetime.now(UTC).replace(microsecond=0)
    scheduler.add_job(noop, "date", run_date=now, id="report", misfire_grace_time=10**6)
    heard = Heard(scheduler)
    scheduler.start()
    heard.wait(1)
    (record,) = idem.records()
    assert record.remaining > 10**6


def test_a_run_is_remembered_for_two_intervals(background, idem):
    scheduler = background(policy=Policy(ttl=60))
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    scheduler.add_job(
        noop,
        "interval",
        hours=7,
        start_date=now,
        next_run_time=now,
        id="report",
        misfire_grace_time=None,
    )
    heard = Heard(scheduler)
    scheduler.start()
    heard.wait(1)
    (record,) = idem.records()
    assert record.state is State.SUCCEEDED
    assert 13 * 3600 < record.remaining <= 14 * 3600


async def test_async_and_plain_jobs_run_once_on_asyncio():
    runs = []

    async def later(word: str) -> str:
        runs.append(current_attempt().key)
        return word

    def plain() -> bool:
        runs.append(current_attempt().key)
        return threading.current_thread() is threading.main_thread()

    now = datetime.now(UTC).replace(microsecond=0)
    async with AsyncIdempotency("memory://") as idem:
        for expected in ({"later": "word", "plain": False}, None):
            scheduler = AsyncIOScheduler(
                timezone=UTC, executors={"default": AsyncOnceExecutor(idem, policy=Policy(ttl=60))}
            )
            heard = Heard(scheduler)
            options = {"run_date": now, "misfire_grace_time": 60}
            scheduler.add_job(later, "date", args=["word"], id="later", **options)
            scheduler.add_job(plain, "date", id="plain", **options)
            scheduler.start()
            await asyncio.to_thread(heard.wait, 2)
            scheduler.shutdown()
            given = {event.job_id: event.retval for event in heard.events}
            if expected is None:
                assert {type(each) for each in given.values()} == {Skipped}
            else:
                assert given == expected
    assert len(runs) == 2


async def test_a_plain_job_that_finds_nothing_fails_on_asyncio_as_any_other():
    """A StopIteration cannot leave a thread for a loop: its task would wait for ever."""
    now = datetime.now(UTC).replace(microsecond=0)

    def report() -> object:
        return next(iter(()))

    async with AsyncIdempotency("memory://") as idem:
        scheduler = AsyncIOScheduler(timezone=UTC, executors={"default": AsyncOnceExecutor(idem)})
        heard = Heard(scheduler)
        scheduler.add_job(report, "date", run_date=now, misfire_grace_time=60, id="report")
        scheduler.start()
        await asyncio.to_thread(heard.wait, 1)
        scheduler.shutdown()
        (event,) = heard.events
        assert event.code == EVENT_JOB_ERROR
        assert isinstance(event.exception.__cause__, StopIteration)
        [record] = [record async for record in idem.records()]
        assert record.state is State.FAILED
