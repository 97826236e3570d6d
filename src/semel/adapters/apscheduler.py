"""Executors for APScheduler 3: of all processes that schedule a job, one runs it at each run time.

Only an executor learns the time for which a run was scheduled. It is the key, together with the
job's id: `report@2026-11-17T03:00:00Z`. So the processes must agree about ids and times, and a job
of which that cannot be said is rejected with a `ConfigError`:

- a job without `id`, which gets another random one in each process;
- an interval without `start_date`, which begins when its process starts; and an interval among
  combined triggers, which goes on from the run times of the others;
- `jitter`, and a `next_run_time` that the trigger would not choose.

Jobs are checked when the scheduler starts. For one that is added later, `add_job` cannot raise the
error: the log says why the job does not run. A `date` trigger is not checked: it is a single run,
which often only one process knows of.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final
from urllib.parse import quote
from uuid import UUID

from msgspec import UNSET, Struct

from semel.aio import AsyncIdempotency
from semel.core.optional import Needed
from semel.core.policy import DAY, Duration, Policy, seconds
from semel.core.schedules import EARLY, EPOCH, in_utc, rules_of_slot
from semel.engine._sync.once_per import run_unless_taken
from semel.engine.colours.tasks import in_thread
from semel.engine.once_per import aio_run_unless_taken
from semel.engine.setup import Call, Setup
from semel.errors import ConfigError, InvalidKey
from semel.events import logger
from semel.sync import Idempotency

with Needed("semel[apscheduler]", by=__name__):
    from apscheduler.events import EVENT_JOB_ADDED, EVENT_JOB_MODIFIED, JobEvent
    from apscheduler.executors.asyncio import AsyncIOExecutor
    from apscheduler.executors.base import BaseExecutor
    from apscheduler.executors.pool import ThreadPoolExecutor
    from apscheduler.job import Job
    from apscheduler.schedulers.base import BaseScheduler
    from apscheduler.triggers.combining import BaseCombiningTrigger
    from apscheduler.triggers.cron import CronTrigger
    from apscheduler.triggers.date import DateTrigger
    from apscheduler.triggers.interval import IntervalTrigger

__all__ = ["AsyncOnceExecutor", "OnceExecutor", "Skipped"]

RANDOM_ID: Final = 4
"""The version of the UUID that APScheduler makes for a job without an id."""

TOLERANCE: Final = timedelta(milliseconds=1)
"""By how much the same run time may differ: APScheduler counts it in floating point numbers."""


class Skipped(Struct, frozen=True):
    """The `retval` that listeners get for a run that was done or is running elsewhere."""

    job_id: str
    run_time: datetime


class _OnceExecutor(BaseExecutor):
    """What both executors do: check jobs, and run each of their run times under its own key."""

    _engine_class: ClassVar[type[Idempotency | AsyncIdempotency]]
    _run: Callable[..., Any]

    def _configure(
        self,
        idempotency: object,
        scope: str,
        standby: Duration | bool,
        policy: Policy | None,
    ) -> None:
        if not isinstance(idempotency, self._engine_class):
            needed = self._engine_class.__name__
            raise ConfigError(
                f'{type(self).__name__} needs an {needed}, such as {needed}("redis://..."), '
                f"not {type(idempotency).__name__}"
            )
        self._setup: Setup = idempotency.internals.setup
        self._setup.rules(scope, policy)  # a wrong one is rejected now
        self._scope, self._policy = scope, policy
        self._standby = standby if isinstance(standby, bool) else seconds("standby", standby)

    def start(self, scheduler: BaseScheduler, alias: str) -> None:
        """Begin; a job that was added before and cannot run once is a `ConfigError` here."""
        super().start(scheduler, alias)
        for job in scheduler.get_jobs():
            if job.executor == alias:
                self.check(job)

        def changed(event: JobEvent) -> None:
            # An error raised here would not reach `add_job`.
            job = scheduler.get_job(event.job_id, event.jobstore)
            if job is not None and job.executor == alias:
                try:
                    self.check(job)
                except ConfigError as error:
                    logger.error("%s", error)

        scheduler.add_listener(changed, EVENT_JOB_ADDED | EVENT_JOB_MODIFIED)

    def check(self, job: Job) -> None:
        """Raise a `ConfigError` if processes would not agree about the id or times of this job."""
        self._check_key(job)
        trigger = job.trigger
        if isinstance(trigger, DateTrigger):
            return
        next_run_time = getattr(job, "next_run_time", None)
        problem = (
            _wrong_trigger(trigger)
            or ("it was added without an id: pass id=" if _is_random(job.id) else "")
            or ("" if next_run_time is None else _wrong_time(trigger, next_run_time))
        )
        if problem:
            raise ConfigError(
                f"the job {job.name!r} (id {job.id!r}) would run more than once: {problem}"
            )

    def _check_key(self, job: Job) -> None:
        try:
            self._setup.key_rules.check(_key_of(job, EPOCH + TOLERANCE))
        except InvalidKey as error:
            raise ConfigError(f"the id of the job {job.name!r} can't be a key: {error}") from error

    def _do_submit_job(self, job: Job, run_times: Sequence[datetime]) -> None:
        self.check(job)
        times = _RunTimes(run_times)
        super()._do_submit_job(_OnceJob(job, partial(self._run, job, times)), times)

    def _call(self, job: Job, run_time: datetime) -> Call:
        """Prepare the run of a job at one of its times."""
        setup = self._setup
        next_time = job.trigger.get_next_fire_time(run_time, run_time)
        gap = 0.0 if next_time is None else next_time.timestamp() - run_time.timestamp()
        return setup.call(
            _key_of(job, run_time),
            self._scope,
            UNSET,
            rules_of_slot(
                setup.rules(self._scope, self._policy),
                # A process may come as late as this and run it still.
                max(gap, job.misfire_grace_time or 0.0),
                self._waits_for(next_time),
            ),
            keeps_value=False,
        )

    def _waits_for(self, next_time: datetime | None) -> float | None:
        """Return how long to wait for a process that runs the job; None: not."""
        if not isinstance(self._standby, bool):
            return self._standby
        # The next run must find this one ended: `max_instances` is 1 by default.
        left = DAY if next_time is None else next_time.timestamp() - time.time() - EARLY
        return left if self._standby and left > 0 else None

    def _skipped(self, job: Job, run_time: datetime) -> Skipped:
        logger.info(
            "job %s of %s already ran or is running elsewhere; skipping it here",
            job.id,
            in_utc(run_time),
        )
        return Skipped(job.id, run_time)


class OnceExecutor(_OnceExecutor, ThreadPoolExecutor):
    """Runs jobs in a pool of threads, each run time in one process only.

    `idempotency` is an engine; `max_workers` and `pool_kwargs` are those of APScheduler's own
    `ThreadPoolExecutor`. `scope` keeps applications apart that share a store. With `standby`, a
    process that comes second waits for the running one, and runs the job if that fails or dies: so
    many seconds, or up to a second before the next run time (True). `policy` wins over the engine's
    policy.

    Examples:
        >>> from apscheduler.schedulers.background import BackgroundScheduler
        >>> scheduler = BackgroundScheduler(executors={"default": OnceExecutor(idem)})
        >>> job = scheduler.add_job(charge, "cron", hour=3, id="charge")
    """

    _engine_class = Idempotency

    def __init__(
        self,
        idempotency: Idempotency,
        max_workers: int = 10,
        pool_kwargs: Mapping[str, Any] | None = None,
        *,
        scope: str = "apscheduler",
        standby: Duration | bool = False,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(max_workers, pool_kwargs)
        self._configure(idempotency, scope, standby, policy)
        self._runs = idempotency.internals

    def check(self, job: Job) -> None:
        """Raise `ConfigError` if this `job` is async, or processes would not agree about it."""
        super().check(job)
        if inspect.iscoroutinefunction(job.func):
            raise ConfigError(
                f"the job {job.name!r} is async: run it with an AsyncIOScheduler and its "
                "AsyncOnceExecutor"
            )

    def _run(self, job: Job, times: _RunTimes, *args: Any, **kwargs: Any) -> Any:
        run_time, kept = times.current, _Kept()
        call = self._call(job, run_time)
        ran = run_unless_taken(self._runs, call, kept.call, job.func, *args, **kwargs)
        return self._skipped(job, run_time) if ran is None else kept.value


class AsyncOnceExecutor(_OnceExecutor, AsyncIOExecutor):
    """Runs jobs of an `AsyncIOScheduler`, each run time in one process only.

    Async functions run on the event loop, others in a thread. `idempotency` is an engine for
    asyncio; `scope`, `standby` and `policy` are those of `OnceExecutor`.
    """

    _engine_class = AsyncIdempotency

    def __init__(
        self,
        idempotency: AsyncIdempotency,
        *,
        scope: str = "apscheduler",
        standby: Duration | bool = False,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        self._configure(idempotency, scope, standby, policy)
        self._runs = idempotency.internals

    async def _run(self, job: Job, times: _RunTimes, *args: Any, **kwargs: Any) -> Any:
        run_time, kept = times.current, _Kept()
        is_async = inspect.iscoroutinefunction(job.func)
        fn = job.func if is_async else partial(in_thread, job.func)
        call = self._call(job, run_time)
        ran = await aio_run_unless_taken(self._runs, call, kept.aio_call, fn, *args, **kwargs)
        return self._skipped(job, run_time) if ran is None else kept.value


class _RunTimes:
    """The times for which a job is run in one go; a run learns which of them is its own."""

    def __init__(self, run_times: Sequence[datetime]) -> None:
        self._run_times = run_times
        self.current = run_times[0]

    def __iter__(self) -> Iterator[datetime]:
        for run_time in self._run_times:
            self.current = run_time
            yield run_time


class _OnceJob:
    """A job as APScheduler knows it, with another function."""

    def __init__(self, job: Job, func: Callable[..., Any]) -> None:
        self._job = job
        self.func = func

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def __str__(self) -> str:
        return str(self._job)


class _Kept:
    """Keeps what a job returns, for listeners; the record does not."""

    value: Any = None

    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self.value = fn(*args, **kwargs)

    async def aio_call(
        self, fn: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any
    ) -> None:
        self.value = await fn(*args, **kwargs)


# --- what processes would not agree about ----------------------------------------------------


def _is_random(job_id: str) -> bool:
    """Whether an id looks like those that APScheduler makes."""
    try:
        known = UUID(job_id)
    except ValueError:
        return False
    return known.version == RANDOM_ID and known.hex == job_id


def _wrong_trigger(trigger: Any) -> str:
    """Say why processes would not agree about the times of a trigger; "" if they do."""
    if getattr(trigger, "jitter", None):
        return "its jitter is another one in each process: leave jitter out"
    if isinstance(trigger, BaseCombiningTrigger):
        if any(isinstance(each, IntervalTrigger) for each in trigger.triggers):
            return (
                "an interval among combined triggers goes on from the run times of the others: use "
                "a cron trigger, or a job of its own"
            )
        return next(filter(None, map(_wrong_trigger, trigger.triggers)), "")
    start: Any = getattr(trigger, "start_date", None)
    if isinstance(trigger, IntervalTrigger):
        # The trigger keeps no trace of a missing start_date, except for its microseconds.
        return _no_start("in whole seconds") if start.microsecond else ""
    if isinstance(start, date) and not isinstance(start, datetime):
        # Counted in days, weeks or months from a date on; that of today if there was none.
        daily = (trigger.years, trigger.months, trigger.weeks, trigger.days) == (0, 0, 0, 1)
        today = datetime.now(trigger.timezone).date()
        return "" if daily or start < today else _no_start("in the past")
    return ""


def _no_start(how: str) -> str:
    return (
        "without start_date an interval begins when its process starts; pass a start_date "
        f"{how}, the same everywhere"
    )


def _wrong_time(trigger: Any, run_time: datetime) -> str:
    """Say whether a run time is none of the trigger's own; "" if it is."""
    own = True
    if isinstance(trigger, IntervalTrigger):
        start: Any = trigger.start_date
        # In UTC: in a time zone, the difference would be that of the clocks on the wall.
        since = (run_time.astimezone(UTC) - start.astimezone(UTC)) % trigger.interval
        own = since <= TOLERANCE or trigger.interval - since <= TOLERANCE
    elif isinstance(trigger, CronTrigger | BaseCombiningTrigger):
        own = run_time.microsecond == 0
    return "" if own else "its next_run_time is not a time of its trigger: leave next_run_time out"


def _key_of(job: Job, run_time: datetime) -> str:
    """Return the key of a job at one of its times."""
    return f"{quote(job.id, safe='/:')}@{in_utc(_rounded(run_time))}"


def _rounded(run_time: datetime) -> datetime:
    """The run time in UTC and in whole milliseconds."""
    later = run_time.astimezone(UTC) + TOLERANCE / 2
    return later - timedelta(microseconds=later.microsecond % 1000)
