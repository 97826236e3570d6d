"""A Celery application with one entry, due every four seconds, for beats whose clocks differ.

Everything is told by the environment: SKEW is how wrong the clock of this beat is. If there is a
file DIES, this beat is killed at its first send, after it has claimed it and before the broker has
it; the file then has the id of the task.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

from celery import Celery
from celery.signals import before_task_publish

from semel import Idempotency, Policy
from semel.adapters.celery_beat import every, scheduler_class

told = os.environ


class App(Celery):
    """An application on a machine whose clock is wrong."""

    def now(self):
        return super().now() + timedelta(seconds=float(told["SKEW"]))


app = App("beats", broker=told["BROKER"])
app.conf.beat_schedule = {"report": {"task": "reports.make", "schedule": every(4)}}
app.conf.broker_connection_retry_on_startup = True

Beat = scheduler_class(Idempotency(told["URL"]), policy=Policy(lease=3.0))


@before_task_publish.connect
def die(headers, **_):
    if "DIES" in told:
        Path(told["DIES"]).write_text(headers["id"])
        os.kill(os.getpid(), signal.SIGKILL)
