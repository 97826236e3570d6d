"""`once_per` on both engines: who runs, who does not, who takes over; and what wrong use says."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

import semel
from engines.facade import PATIENCE, wait_until
from engines.test_once import Shop
from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    ConfigError,
    Idempotency,
    InvalidKey,
    OutcomeUnknown,
    Policy,
    PreviousFailure,
    current_attempt,
)
from semel.core.records import ClaimRequest, Identity
from semel.errors import WaitTimeout
from semel.testing import FakeClock

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC).timestamp()
DAY = 86400.0


class Jobs(Shop):
    """Scheduled functions of either kind, on machines whose clocks are moved by hand."""

    def __init__(self, world) -> None:
        super().__init__(world)
        self.clock = FakeClock(NOON)
        self.pool = ThreadPoolExecutor()

    def once_per(self, period="day", *, engine=None, scope="report", **options):
        idem = self.idem if engine is None else engine
        options.setdefault("clock", self.clock)
        decorate = idem.once_per(period, scope=scope, **options)
        return lambda fn: decorate(self.kindly(fn))

    def job(self, run=None, **options):
        """A job that counts its runs."""

        def report():
            self.runs.append(current_attempt().key)
            return None if run is None else run()

        return self.once_per(**options)(report)

    def machine(self, run=None, **options):
        """The same job on another machine."""
        return self.job(run, engine=self.world.engine().engine, **options)

    def kindly(self, fn):
        """The function itself, or an async one that does not block its loop."""
        if self.world.name == "threads":
            return fn
        if isinstance(fn, classmethod | staticmethod):
            return type(fn)(self.kindly(fn.__func__))

        @functools.wraps(fn)
        async def awaited(*args, **kwargs):
            return await asyncio.to_thread(fn, *args, **kwargs)

        return awaited

    def start(self, job) -> Future[bool]:
        """Start a job in a thread or task of its own."""
        return self.pool.submit(self.call, job)


@pytest.fixture
def jobs(memory_world) -> Iterator[Jobs]:
    made = Jobs(memory_world)
    with made.pool:
        yield made


# --- who runs ------------------------------------------------------------------------------


def test_the_first_start_of_a_slot_runs_and_the_others_are_told_that_it_was_done(jobs):
    machines = [jobs.machine() for _ in range(3)]
    assert [jobs.call(job) for job in machines] == [True, False, False]
    jobs.clock.advance(DAY)
    assert [jobs.call(job) for job in reversed(machines)] == [True, False, False]
    assert jobs.runs == ["2026-11-17", "2026-11-18"]


def test_a_start_while_another_one_runs_returns_false_at_once(jobs):
    started, may_end = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert may_end.wait(PATIENCE)

    running = jobs.start(jobs.machine(slow))
    assert started.wait(PATIENCE)
    assert jobs.call(jobs.machine()) is False
    may_end.set()
    assert running.result(PATIENCE) is True
    assert len(jobs.runs) == 1


def test_clocks_that_differ_by_two_seconds_make_one_run(jobs):
    midnight = NOON + DAY / 2
    clocks = [FakeClock(midnight + skew) for skew in (0.0, -2.0, 2.0)]
    machines = [jobs.machine(clock=clock) for clock in clocks]
    # Cron starts each of them when its own clock shows midnight.
    results = []
    for job, clock, wait in zip(machines, clocks, (0.0, 2.0, 0.0), strict=True):
        clock.advance(wait)
        results.append(jobs.call(job))
    assert results == [True, False, False]
    # Started at the same moment, in the middle of the slot, they agree too.
    for clock in clocks:
        clock.advance(DAY)
    assert [jobs.call(job) for job in machines] == [True, False, False]
    assert jobs.runs == ["2026-11-18", "2026-11-19"]


@pytest.mark.parametrize(
    ("start", "hours"),
    [("2026-03-28T23:00:00", 23), ("2026-10-24T22:00:00", 25)],
    ids=["spring", "autumn"],
)
def test_a_job_that_starts_every_half_hour_runs_once_on_the_days_of_changed_clocks(
    jobs, start, hours
):
    midnight = datetime.fromisoformat(start).replace(tzinfo=UTC).timestamp()
    clock = FakeClock(midnight - 24 * 3600)
    job = jobs.machine(tz="Europe/Berlin", clock=clock)
    for _ in range(2 * (24 + hours + 24)):
        jobs.call(job)
        clock.advance(1800)
    day = datetime.fromtimestamp(midnight + 12 * 3600, UTC).date()
    around = (day - timedelta(days=1), day, day + timedelta(days=1))
    assert jobs.runs == [str(each) for each in around]


def test_a_function_may_name_the_slots(jobs):
    def shift(now: datetime) -> str:
        return f"{now:%Y-%m-%d}-{'early' if now.hour < 14 else 'late'}"

    job = jobs.job(period=shift, tz="Europe/Berlin", ttl=2 * DAY)
    assert [jobs.call(job), jobs.call(job)] == [True, False]
    jobs.clock.advance(3600)
    assert jobs.call(job) is True
    assert jobs.runs == ["2026-11-17-early", "2026-11-17-late"]


# --- failures, crashes and standby ---------------------------------------------------------


def test_a_failure_reaches_the_caller_and_a_later_start_of_the_slot_runs(jobs):
    failing = jobs.machine(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jobs.call(failing)
    assert jobs.call(jobs.machine()) is True
    assert jobs.call(failing) is False


def test_a_crashed_run_is_taken_over_by_a_start_after_its_lease(jobs):
    crash(jobs)
    assert jobs.call(jobs.machine()) is False, "its lease still runs"
    wait_until(lambda: jobs.call(jobs.machine()))
    assert len(jobs.runs) == 1


def crash(jobs) -> None:
    """Leave a claim behind, as a process does that was killed: nobody renews it."""
    store = jobs.idem.internals.store.store
    request = ClaimRequest(Identity("report", "2026-11-17"), b"d" * 16, None, lease=0.5, ttl=DAY)
    jobs.world.kind.finish(store.ask, request)


def test_on_standby_a_loser_takes_over_after_a_crash(jobs):
    crash(jobs)
    assert jobs.call(jobs.machine(standby=PATIENCE)) is True
    assert len(jobs.runs) == 1


def test_on_standby_a_loser_takes_over_after_a_failure(jobs):
    started, may_fail = threading.Event(), threading.Event()

    def fails():
        started.set()
        assert may_fail.wait(PATIENCE)
        raise ValueError

    failing = jobs.start(jobs.machine(fails))
    assert started.wait(PATIENCE)
    waiting = jobs.start(jobs.machine(standby=True))
    may_fail.set()
    assert waiting.result(PATIENCE) is True
    with pytest.raises(ValueError):
        failing.result(PATIENCE)


def test_on_standby_a_loser_is_told_that_the_other_one_succeeded(jobs):
    started, may_end = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert may_end.wait(PATIENCE)

    running = jobs.start(jobs.machine(slow))
    assert started.wait(PATIENCE)
    waiting = jobs.start(jobs.machine(standby=timedelta(seconds=PATIENCE)))
    assert not waiting.done()
    may_end.set()
    assert (running.result(PATIENCE), waiting.result(PATIENCE)) == (True, False)


@pytest.mark.parametrize("standby", [0.05, True], ids=["so-long", "to-the-end"])
def test_standby_ends(jobs, standby):
    started, may_end = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert may_end.wait(PATIENCE)

    running = jobs.start(jobs.machine(slow))
    assert started.wait(PATIENCE)
    # By the second clock the slot is over in a twentieth of a second.
    clock = FakeClock(NOON + DAY / 2 - 1.05)
    ends = iter([clock(), clock() + 1.0])
    late = jobs.machine(standby=standby, clock=lambda: next(ends))
    assert jobs.call(late) is False
    may_end.set()
    assert running.result(PATIENCE) is True


def test_errors_about_other_operations_are_not_taken_for_our_own(jobs):
    for error in (ConcurrentRequest(), WaitTimeout("elsewhere")):

        def fails(error=error):
            raise error

        with pytest.raises(type(error)):
            jobs.call(jobs.machine(fails))


def test_policies_hold_in_a_slot(jobs):
    final = jobs.job(lambda: 1 / 0, policy=Policy(failure="final", failed_ttl=0.01))
    with pytest.raises(ZeroDivisionError):
        jobs.call(final)
    with pytest.raises(PreviousFailure):  # for the whole slot, whatever failed_ttl says
        jobs.call(final)
    held = jobs.job(lambda: 1 / 0, scope="held", policy=Policy(abandoned="hold"))
    with pytest.raises(ZeroDivisionError):
        jobs.call(held)
    with pytest.raises(OutcomeUnknown):
        jobs.call(held)


def test_guard_mode_makes_no_error_of_a_second_start(jobs):
    job = jobs.job(policy=Policy(duplicate="reject"))
    assert [jobs.call(job), jobs.call(job)] == [True, False]


def test_it_is_remembered_for_two_slots(jobs):
    job = jobs.job(ttl=60, policy=Policy(ttl=30))
    assert jobs.call(job)
    record = jobs.call(job.peek)
    assert record.identity.key == job.key_for() == job.slot().name == "2026-11-17"
    assert record.scope == job.scope
    assert record.remaining > 2 * DAY
    short = jobs.job(period=timedelta(minutes=15), scope="short")
    assert jobs.call(short)
    assert 86000 < jobs.call(short.peek).remaining <= DAY, "the policy's own ttl is longer"


def test_a_slot_that_is_forgotten_runs_again(jobs):
    job = jobs.job()
    assert jobs.call(job)
    assert jobs.call(job.forget) is True
    assert jobs.call(job) is True


# --- arguments, methods and names ----------------------------------------------------------


def test_arguments_are_part_of_the_key(jobs):
    @jobs.once_per("day")
    def report(tenant, *, dry=False):
        jobs.runs.append(tenant)

    assert [jobs.call(report, each) for each in ("a", "b", "a")] == [True, True, False]
    assert report.key_for("a").startswith("2026-11-17:args-")

    @jobs.once_per("day", key="{tenant}")
    def named(tenant, note=""):
        jobs.runs.append(note)

    assert named.key_for("a", "first") == named.key_for("a") == "2026-11-17:a"


def test_methods_class_methods_and_static_methods_can_be_scheduled(jobs):
    once_per = jobs.once_per

    class Reports:
        name = "sales"

        @once_per("day", key="{self.name}")
        def one(self):
            jobs.runs.append(self.name)

        @classmethod
        @once_per("day", scope="class")
        def every(cls):
            jobs.runs.append(cls.__name__)

        @once_per("day", scope="class-inside")
        @classmethod
        def inside(cls):
            jobs.runs.append(cls.__name__)

        @staticmethod
        @once_per("day", scope="static")
        def plain():
            jobs.runs.append("plain")

        @once_per("day", scope="static-inside")
        @staticmethod
        def plain_inside():
            jobs.runs.append("plain")

    reports = Reports()
    methods = [reports.one, reports.every, reports.inside, reports.plain, reports.plain_inside]
    for method in methods:
        assert [jobs.call(method), jobs.call(method)] == [True, False]
    assert jobs.call(Reports.one, reports) is False
    assert jobs.runs == ["sales", "Reports", "Reports", "plain", "plain"]
    assert str(inspect.signature(reports.one)) == "()"


def test_the_scope_is_the_name_of_the_function():
    with Idempotency("memory://") as idem:
        job = idem.once_per("day")(module_level)
        assert job()
        (record,) = idem.records()
    assert record.identity.scope == f"{__name__}.module_level"


def module_level() -> None:
    """A job, for its name."""


@pytest.mark.parametrize(
    ("file", "module", "scope"),
    [
        ("/opt/shop/billing.py", None, "billing.main"),
        ("/opt/shop/cleanup.py", None, "cleanup.main"),
        ("/opt/shop/jobs/billing.py", "jobs.billing", "jobs.billing.main"),
        ("/opt/shop/jobs/__main__.py", "jobs.__main__", "jobs.main"),
        (None, None, "__main__.main"),  # python -c, or a prompt
    ],
)
def test_the_scope_in_a_script_names_the_script(monkeypatch, file, module, scope):
    program = ModuleType("__main__")
    if file is not None:
        program.__file__ = file
    if module is not None:
        program.__spec__ = ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with Idempotency("memory://") as idem:

        def main() -> None:
            """What every script has."""

        main.__module__, main.__qualname__ = "__main__", "main"
        assert idem.once_per("day")(main)()
        (record,) = idem.records()
        assert record.identity.scope == scope
        main.__qualname__ = "<lambda>"
        with pytest.raises(ConfigError, match="no name of its own"):
            idem.once_per("day")(main)


def test_a_key_counts_for_a_job_without_arguments_too():
    tenants = ["acme", "globex", "acme"]
    with Idempotency("memory://") as idem:
        job = idem.once_per("day", key=lambda: tenants[0])(module_level)
        ran = []
        while tenants:
            ran.append(job())
            del tenants[0]
    assert ran == [True, True, False]


@semel.once_per("day")
def by_default() -> int:
    return 1


def test_the_default_engine_is_asked_for_at_each_call(monkeypatch):
    monkeypatch.setattr(semel.default._default, "_engine", None)
    with semel.configure("memory://"):
        assert [by_default(), by_default()] == [True, False]
    assert pickle.loads(pickle.dumps(by_default)) is by_default  # noqa: S301 - our own


async def test_a_decorated_coroutine_function_is_known_as_one():
    async with AsyncIdempotency("memory://") as idem:

        @idem.once_per("day")
        async def job():
            return None

        assert inspect.iscoroutinefunction(job)
        assert job.__reduce__() == job.__qualname__


# --- wrong use -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "options", "said"),
    [
        ("fortnight", {}, "no period is called"),
        ("day", {"tz": "Mars"}, "no time zone"),
        ("day", {"standby": 0}, "standby of once_per must be more than zero"),
        ("day", {"standby": "long"}, "standby of once_per must be a number"),
        (str, {}, "pass ttl="),
        (str, {"ttl": 60, "standby": True}, "pass standby="),
        ("day", {"policy": "job"}, "policy must be a Policy"),
    ],
)
def test_wrong_options_are_rejected_at_decoration(period, options, said):
    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match=said):
        idem.once_per(period, **options)


def test_a_job_of_the_other_kind_is_rejected():
    async def job():
        return None

    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match="is async"):
        idem.once_per("day")(job)


def test_a_job_without_a_period_is_rejected():
    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match=r'@once_per\("day"\)'):
        idem.once_per(module_level)


def test_a_name_that_is_no_key_is_rejected_before_anything_runs(jobs):
    job = jobs.job(period=lambda now: "two words", ttl=DAY)
    with pytest.raises(InvalidKey):
        jobs.call(job)
    assert jobs.runs == []
