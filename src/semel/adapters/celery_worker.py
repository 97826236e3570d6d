"""Celery's side of idempotent tasks in a worker: acknowledging, stopping, and wrong settings.

A message is acknowledged when its record is finished. Celery's defaults acknowledge it earlier, or
although nothing was recorded: what is needed instead is in `DEFAULTS`, and a worker that starts
with something else says so in its log.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from semel.core.optional import Needed
from semel.events import logger
from semel.messages import JITTER, LONGEST, described

with Needed("semel[celery]", by=__name__):
    from celery.exceptions import InvalidTaskError, Reject, TimeLimitExceeded
    from celery.utils.imports import symbol_by_name

DEFAULTS: Final = {"acks_late": True, "reject_on_worker_lost": True, "acks_on_timeout": False}
"""What an idempotent task needs; Celery before 5.7 does not know the last one."""

VISIBILITY: Final = {"redis": 3600.0, "sqs": 1800.0}
"""Seconds after which a broker that notices no lost worker delivers a message again, by default."""


# --- acknowledging -------------------------------------------------------------------------------


class DeliveredAgain:
    """Part of a task's `Request`: how its message gets to be delivered again.

    After a hard time limit it is given back. Celery marks such a task as failed although it comes
    back, so that its chord fails, and before 5.7 it drops the message.
    """

    task: Any
    name: str
    id: str

    def __init__(self, message: Any, **options: Any) -> None:
        try:
            super().__init__(message, **options)  # type: ignore[call-arg]  # of Request
            if not options.get("decoded"):
                _check_body(message.payload)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if not _raised_by_a_reader(error):
                raise  # the program is wrong: an own Request class, or another version of Celery
            # The message is wrong: Celery rejects it. With any other error the worker would end.
            raise InvalidTaskError(f"a message cannot be read: {described(error)}") from error
        # Not every broker has it among the properties, and a message may have to be sent again.
        request: dict[str, Any] = self.request_dict  # type: ignore[attr-defined]  # of Request
        request["properties"] = {**request["properties"], "content_type": message.content_type}

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Reject the message of a task that has exceeded its hard time limit: it comes again."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, TimeLimitExceeded) and self._comes_again:
            return self._give_back()
        return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]  # of Request

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Reject the message of a task that has exceeded its hard time limit: it comes again."""
        if soft or not self._comes_again:
            return super().on_timeout(soft, timeout)  # type: ignore[misc]  # of Request
        logger.error(
            "hard time limit (%s s) exceeded for %s [%s]; its message will be redelivered",
            timeout,
            self.name,
            self.id,
        )
        return self._give_back()

    def _give_back(self) -> None:
        # Imported here: it loads all of a worker. A second call changes nothing.
        from celery.worker.state import task_ready  # noqa: PLC0415

        task_ready(self)
        self.reject(requeue=True)  # type: ignore[attr-defined]  # of Request

    @property
    def _comes_again(self) -> bool:
        return bool(self.task.acks_late and not self.task.acks_on_timeout)


def request_class(base: Any) -> type[Any]:
    """Make the `Request` of an idempotent task from the one that the task has."""
    return _request_class(symbol_by_name(base))


_READERS: Final = ("celery", "kombu")


def _raised_by_a_reader(error: BaseException) -> bool:
    """Whether an error came from inside the code that reads a message."""
    *_, (where, _line) = traceback.walk_tb(error.__traceback__)
    package = where.f_globals.get("__name__", "").partition(".")[0]
    return package in _READERS or where.f_code is _check_body.__code__


def _check_body(payload: Any) -> None:
    args, kwargs, options = payload
    if not (
        isinstance(args, Sequence)
        and not isinstance(args, str | bytes)
        and isinstance(kwargs, Mapping)
        and isinstance(options, Mapping | None)
    ):
        raise TypeError("its body is not a list of arguments, keyword arguments and options")


@cache
def _request_class(base: type[Any]) -> type[Any]:
    if issubclass(base, DeliveredAgain):
        return base
    return type("Request", (DeliveredAgain, base), {})


def counts_chord_parts_twice(backend: Any) -> bool:
    """Return whether a result backend counts a part of a chord whenever its task ends."""
    if getattr(backend, "implements_incr", False):
        return True
    # Redis: a list counts twice, a sorted set does not; newer versions look at the task's id.
    kind = type(backend)
    if not hasattr(kind, "_chord_zset") or hasattr(kind, "_chord_part_return_script"):
        return False
    options = backend.app.conf.result_backend_transport_options
    return not options.get("result_chord_ordered", True)


# --- stopping ------------------------------------------------------------------------------------


class Program:
    """The worker's main process, if this is a worker or one of its children."""

    pid: int | None = None


def stop_worker(task: Any, request: Any, error: Exception) -> Exception:
    """Stop the worker: the program is wrong, and not the message, which returns to its queue.

    Returns what the task has to raise.
    """
    if Program.pid is None or request.is_eager:
        return error
    logger.critical(
        "worker stopping; the message of %s [%s] stays in its queue: %s",
        task.name,
        request.id,
        error,
        exc_info=error,
    )
    os.kill(Program.pid, signal.SIGTERM)
    given_back: Exception = Reject(error, requeue=True)
    return given_back


# --- settings ------------------------------------------------------------------------------------


def check_worker(worker: Any, tasks: Sequence[Any]) -> None:
    """Log what is wrong with the settings of a worker that starts, once for each task."""
    Program.pid = os.getpid()
    with worker.app.connection_for_read() as connection:  # which does not connect yet
        broker, options = connection.transport.driver_type, connection.transport_options
    visibility = VISIBILITY.get(broker)
    if visibility is not None:
        visibility = float(options.get("visibility_timeout") or visibility)
    for task in tasks:
        for problem in problems(task, broker, visibility, worker.time_limit):
            logger.warning("Celery task %s: %s", task.name, problem)


def problems(
    task: Any, broker: str, visibility: float | None, time_limit: float | None
) -> Iterator[str]:
    """Say what is wrong with the settings of an idempotent task on this broker."""
    if not task.acks_late:
        yield (
            "acks_late is off: a message is acknowledged before it is handled, and is lost if the "
            "worker stops"
        )
    if not task.reject_on_worker_lost:
        yield (
            "reject_on_worker_lost is off: a message is lost if the process that handles it is "
            "killed"
        )
    limit = task.time_limit or time_limit
    if task.acks_on_timeout:
        yield "acks_on_timeout is on: a message is lost if its task exceeds the hard time limit"
    elif limit and task.semel_delivery.policy.max_attempts is None:
        yield (
            f"it has a time limit of {limit:g} s and no max_attempts: a task that always exceeds "
            "its limit is delivered again without end. Give it Policy(max_attempts=...)"
        )
    if task.semel_delivery.dead_letters and broker != "amqp":
        yield (
            f"dead_letters is on, and the broker ({broker}) has no dead-letter exchange: the "
            "message of a task that fails is dropped"
        )
    if visibility is not None:
        countdown = _longest_countdown(task)
        longest = max(float(limit or 0), countdown)
        if visibility < longest:
            what = "waits for a countdown of" if longest == countdown else "has a time limit of"
            yield (
                f"the visibility timeout of the broker is {visibility:g} s: what a worker holds "
                f"longer is delivered again meanwhile, and a message of this task {what} up to "
                f"{longest:g} s. Raise visibility_timeout in broker_transport_options"
            )


def _longest_countdown(task: Any) -> float:
    """Return how long a message of this task may wait in a worker that holds it."""
    lease: float = task.semel_delivery.policy.lease
    waits = [LONGEST, lease * (1 + JITTER)]
    if task.max_retries != 0:
        waits.append(float(task.default_retry_delay))
        if getattr(task, "autoretry_for", ()) and getattr(task, "retry_backoff", False):
            waits.append(float(getattr(task, "retry_backoff_max", 600)))
    return max(waits)
