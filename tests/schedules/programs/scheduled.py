"""A process with an APScheduler, of threads or of asyncio; it tells what became of each run time.

Everything is told by the environment. SKEW is how wrong the clock of APScheduler is in it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from datetime import datetime, timedelta

import apscheduler.executors.base
import apscheduler.schedulers.base
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from semel import AsyncIdempotency, Idempotency, Policy, current_attempt
from semel.adapters.apscheduler import AsyncOnceExecutor, OnceExecutor, Skipped

told = os.environ
SKEW = timedelta(seconds=float(told["SKEW"]))


class Shifted(datetime):
    """Where `now` is asked of a wrong clock."""

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + SKEW


apscheduler.executors.base.datetime = Shifted
apscheduler.schedulers.base.datetime = Shifted


def say(*words: object) -> None:
    print(*words, flush=True)


def effect() -> str:
    attempt = current_attempt()
    if told.get("FIRST") == "hangs" and attempt.number == 1:
        say("started", attempt.key)
        time.sleep(600)
    say("ran", attempt.key)
    return attempt.key


async def later() -> str:
    return await asyncio.to_thread(effect)


def heard(event) -> None:
    if event.exception is not None:
        say("failed", repr(event.exception))
    elif isinstance(event.retval, Skipped):
        say("skipped", event.retval.run_time.timestamp())


def begin(scheduler, function) -> None:
    scheduler.add_listener(heard, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    start = datetime.fromtimestamp(float(told["START"])).astimezone()
    scheduler.add_job(
        function,
        "interval",
        seconds=int(told["EVERY"]),
        start_date=start,
        next_run_time=start,  # however long it took to get here
        id="report",
        misfire_grace_time=None,
        coalesce=False,
        max_instances=99,
    )
    scheduler.start()
    say("scheduling")


options = {"standby": "STANDBY" in told, "policy": Policy(lease=float(told.get("LEASE", "60")))}


def in_threads() -> None:
    with Idempotency(told["URL"]) as idem:
        scheduler = BackgroundScheduler(executors={"default": OnceExecutor(idem, **options)})
        begin(scheduler, effect)
        threading.Thread(
            target=lambda: (sys.stdin.read(), scheduler.shutdown()), daemon=True
        ).start()
        while scheduler.running:
            time.sleep(0.05)


async def on_a_loop() -> None:
    async with AsyncIdempotency(told["URL"]) as idem:
        scheduler = AsyncIOScheduler(executors={"default": AsyncOnceExecutor(idem, **options)})
        begin(scheduler, later)
        await asyncio.to_thread(sys.stdin.read)
        scheduler.shutdown()


if told["KIND"] == "threads":
    in_threads()
else:
    asyncio.run(on_a_loop())
