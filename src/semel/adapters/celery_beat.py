"""A scheduler for Celery beat: of all beats that run at the same time, one sends each due task.

    celery -A shop beat -S semel.adapters.celery_beat:OnceScheduler

The key is the name of the entry and the time at which it was due:
`report@2026-11-17T02:00:00Z`.
The id of the task is made from the same two, so that a task that was sent twice after all, because
a beat died between sending and saying so, is one task for its workers too.

The beats must agree about the times. They do about those of `crontab`, and of `every` in this
module. A plain interval is counted from when its beat started: it is rejected with a `ConfigError`
when beat starts, and so are solar schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID, uuid5

from msgspec import UNSET

from semel.core.optional import Needed
from semel.core.policy import Duration, Policy, seconds
from semel.core.records import MAX_KEY_LENGTH
from semel.core.schedules import EPOCH, in_utc, rules_of_slot
from semel.default import default_engine
from semel.engine._sync.once_per import run_unless_taken
from semel.errors import ConfigError
from semel.events import logger
from semel.sync import Idempotency

with Needed("semel[celery]", by=__name__):
    from celery.beat import PersistentScheduler, Scheduler
    from celery.schedules import crontab, schedstate, schedule

__all__ = ["OnceScheduler", "every", "scheduler_class"]

NAMESPACE: Final = UUID("5d2c4b7e-0f0a-4c52-9a83-6f3b6a1d9e21")
"""Of the ids of tasks: an entry and a due time always make the same id."""

SENDING: Final = Policy(lease=5.0)
"""What is claimed is a send, which takes milliseconds. A beat that died is noticed soon."""

STANDBY: Final = 15.0
"""Seconds for which a beat waits for another one that is sending the same task.

Longer than a lease, so that it sends in place of one that died."""


class every(schedule):  # noqa: N801 - schedules of Celery are called like functions
    """An interval with the same times on all beats: its multiples since 1970.

    `run_every` is its length: a number of seconds, or a timedelta. `relative`, `nowfun` and `app`
    are those of Celery's own schedules; an `every` is the same with and without `relative`.

    Examples:
        >>> every(timedelta(minutes=15))
        <freq: 15.00 minutes>
    """

    run_every: timedelta

    def __init__(
        self,
        run_every: Duration,
        relative: bool = False,
        nowfun: Callable[[], datetime] | None = None,
        app: Any = None,
    ) -> None:
        length = seconds("the length of every", run_every)
        super().__init__(length, relative, nowfun, app)

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """Return the time from now until the next time after the last run."""
        last: datetime = self.maybe_make_aware(last_run_at)
        now: datetime = self.maybe_make_aware(self.now())
        return self.latest(last) + self.run_every - now

    def is_due(self, last_run_at: datetime) -> Any:
        """Return whether to run now, and in how many seconds to ask again."""
        left = self.remaining_estimate(last_run_at).total_seconds()
        if left > 0:
            return schedstate(False, left)
        return schedstate(True, self.remaining_estimate(self.now()).total_seconds())

    def latest(self, now: datetime) -> datetime:
        """Return the last time that was due before `now`, or at that moment."""
        return EPOCH + (now - EPOCH) // self.run_every * self.run_every


class _OnceScheduler(Scheduler):
    """What a scheduler does beside what its base does; `scheduler_class` puts the two together."""

    _engine: Callable[[], Idempotency]
    _scope: str
    _policy: Policy | None

    def setup_schedule(self) -> None:
        """Read the schedule; an entry whose times the beats do not share is a `ConfigError`."""
        super().setup_schedule()
        entries: Any = self.schedule
        for entry in entries.values():
            check(entry)

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **options: Any
    ) -> Any:
        """Send the task of an entry that is due, unless another beat has sent it."""
        check(entry)
        due = latest_due(entry.schedule, entry.schedule.now())
        entry = self.reserve(entry) if advance else entry
        key = key_of(entry.name, due)
        task_id = str(uuid5(NAMESPACE, f"{self._scope}:{key}"))
        to_send = _copy(entry, options={"task_id": task_id, **entry.options})
        sent: list[Any] = []

        def send() -> None:
            sent.append(
                super(_OnceScheduler, self).apply_async(to_send, producer, advance=False, **options)
            )

        runs = self._engine().internals
        before = latest_due(entry.schedule, due - timedelta(seconds=1))
        rules = rules_of_slot(
            runs.setup.rules(self._scope, self._policy, SENDING),
            due.timestamp() - before.timestamp(),
            STANDBY,
        )
        call = runs.setup.call(key, self._scope, UNSET, rules, keeps_value=False)
        if run_unless_taken(runs, call, send) is None:
            logger.info(
                "task %s of %s already sent by another beat; skipping it here", entry.name, due
            )
            return self.app.AsyncResult(task_id)  # Celery logs the id of what it gets here
        return sent[0]


def scheduler_class(
    idempotency: Idempotency | None = None,
    *,
    base: type[Scheduler] = PersistentScheduler,
    scope: str = "celery.beat",
    policy: Policy | None = None,
) -> type[Scheduler]:
    """Return a scheduler class for beat that uses your engine.

    `idempotency` is the engine; the default is the default engine of the settings. `base` is the
    scheduler class to extend. `scope` keeps applications apart that share a store, and `policy`
    wins over the engine's policy.

    Examples:
        >>> Beat = scheduler_class(idem)  # celery -A shop beat -S shop.beat:Beat
    """
    if idempotency is not None and not isinstance(idempotency, Idempotency):
        raise ConfigError(
            'scheduler_class needs an Idempotency, such as Idempotency("redis://..."), '
            f"not {type(idempotency).__name__}"
        )
    if not (isinstance(base, type) and issubclass(base, Scheduler)):
        raise ConfigError(f"base must be a Scheduler class of celery.beat; got {base!r}")
    if idempotency is not None:
        idempotency.internals.setup.rules(scope, policy)  # a wrong one is rejected now
    engine = default_engine if idempotency is None else (lambda: idempotency)
    fields = {"_engine": staticmethod(engine), "_scope": scope, "_policy": policy}
    fields |= {"__doc__": base.__doc__, "__module__": __name__}
    return type("OnceScheduler", (_OnceScheduler, base), fields)


OnceScheduler = scheduler_class()
"""The scheduler class of beat on the default engine, which is made from the settings."""


# --- when an entry was due ---------------------------------------------------------------------


def check(entry: Any) -> None:
    """Raise a `ConfigError` if beats would not agree about the times of an entry."""
    if not isinstance(entry.schedule, crontab | every):
        raise ConfigError(
            f"the entry {entry.name!r} would be sent more than once: the times of its schedule "
            f"({entry.schedule!r}) are not the same for all beats. Use crontab(...), or "
            "semel.adapters.celery_beat.every(...), which counts an interval from 1970 on"
        )
    too_long = len(key_of(entry.name, EPOCH)) - MAX_KEY_LENGTH
    if too_long > 0:
        raise ConfigError(
            f"the name of the entry {entry.name[:40]!r}... is too long for the key of a record, by "
            f"{too_long} characters. Characters other than ASCII letters and digits count as three "
            "or more"
        )


def key_of(name: str, due: datetime) -> str:
    """Return the key of an entry that is due at this time, the same in every time zone."""
    wall = due.replace(tzinfo=None)
    exists = due.astimezone(UTC).astimezone(due.tzinfo).replace(tzinfo=None) == wall
    # In UTC, a time that the clocks leave out would have the name of a later one.
    return f"{quote(name, safe='/:')}@{in_utc(due) if exists else wall.isoformat()}"


def latest_due(timing: Any, now: datetime) -> datetime:
    """Return the last time that a schedule was due before `now`, or at that moment.

    Celery's own answer depends on when a beat sent the task last; this one is the same for all.
    """
    moment: datetime = timing.maybe_make_aware(now)
    if isinstance(timing, every):
        return timing.latest(moment)
    # By what the clock on the wall shows. So a time that comes twice when the clocks are set back
    # is one time, and one that they leave out is due when they show a later one.
    wall = moment.astimezone(timing.tz).replace(tzinfo=None)
    times = sorted(time(hour, minute) for hour in timing.hour for minute in timing.minute)
    day = wall.date()
    while True:
        if (
            day.month in timing.month_of_year
            and day.day in timing.day_of_month
            and day.isoweekday() % 7 in timing.day_of_week
        ):
            past = [each for each in times if datetime.combine(day, each) <= wall]
            if past:
                return datetime.combine(day, past[-1], timing.tz)
        day -= timedelta(days=1)


def _copy(thing: Any, **changes: Any) -> Any:
    """Return a copy of an entry with other attributes."""
    # Not by `copy`: that makes it as pickle does, without its app, and takes the schedule's away.
    made = object.__new__(type(thing))
    vars(made).update(vars(thing), **changes)
    return made
