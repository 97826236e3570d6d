# Generated from repair/maintenance.py by `make generate`: change that file instead.
"""Looks after a whole store: its `health`, and records that go (`purge`, `forget_finished`).

The target of both is what a caller has at hand: an engine, a store, a URL, or None for the
settings. What is opened here is closed here. A store that can only be empty, because it belongs to
this process or because opening it would create it, is rejected by its URL: it would look healthy.

How long a record is kept is its policy's ttl. A store treats an expired record as absent whether
or not it was removed; purging only frees the space. Redis and Valkey do that by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from semel.core.keys import KeyRules
from semel.core.policy import Duration, seconds
from semel.core.records import TouchRequest
from semel.engine.colours.threads import sleep
from semel.errors import StoreError
from semel.repair._sync.audit import AuditTrail
from semel.repair.maintenance import (
    Health,
    check_target,
    ended_before,
    store_of,
)
from semel.stores.urls import whole_number
from semel.sync import Idempotency

ALERT_AFTER = 300.0
"""Seconds after which an abandoned attempt is worth waking a person."""

BATCH = 50
"""Records of one transaction: so few that a claim behind it waits for about one more commit."""
FORGOTTEN_AT_ONCE = 500
"""Records of one page, and of one batch that ends their retention."""
PAUSE = 0.01
"""Seconds between two batches, for everybody else."""


def health(place: Any, *, alert_after: Duration = ALERT_AFTER) -> Health:
    """Return the health of a store; `place` is an engine, a store, a URL, or None (the settings).

    `alert` is True if an attempt has been stuck for `alert_after` seconds.

    Examples:
        >>> found = health(idem)
        >>> found.alert
        False
    """
    longest = seconds("alert_after", alert_after, zero=True)
    with open_target(place) as store:
        counts = store.counts()
        stuck = store.stuck(limit=1)
    oldest = max((record.abandoned_for for record in stuck), default=None)
    return Health(counts, oldest, oldest is not None and oldest >= longest)


def purge(
    place: Any,
    *,
    batch: int = BATCH,
    pause: Duration = PAUSE,
    abandoned_after: Duration | None = None,
    max_seconds: Duration | None = None,
    name: str | None = None,
    reason: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Remove expired records, `batch` at a time, and return how many.

    `place` is an engine, a store, a URL, or None (the settings). With `abandoned_after`, also
    remove attempts that are not held and were abandoned that long ago. Running and held records
    always stay. After each batch it rests for `pause`, or for as long as the batch took if that is
    longer; with a `pause` of 0 it never rests. It ends with the first batch that is not full, or
    after `max_seconds`. semel calls `progress` after each batch with the number so far.

    `name` and `reason` are who purges, and why. semel writes an entry to the audit trail first; if
    it can't, it removes nothing. It also removes entries older than 400 days, and doesn't count
    them.

    Examples:
        >>> purge(idem)
        0
    """
    with open_target(place) as store:
        limit = whole_number("batch", batch)
        after = None if abandoned_after is None else seconds("abandoned_after", abandoned_after)
        least = seconds("pause", pause, zero=True)
        end = None if max_seconds is None else monotonic() + seconds("max_seconds", max_seconds)
        trail = AuditTrail(store, name=name)
        kinds = "expired" if after is None else f"expired, and abandoned for {after:g} s"
        trail.write("purge", details=kinds, reason=reason)
        removed = 0
        while True:
            began = monotonic()
            gone: int = store.purge(limit=limit, abandoned_after=after)
            took = monotonic() - began
            removed += gone
            if progress is not None:
                progress(removed)
            # A store that answers slowly is busy: it is left alone for at least half of the time.
            rest = 0.0 if least == 0 else max(least, took)
            # A batch that is not full was the last one: what expires meanwhile waits for the next.
            if gone < limit or (end is not None and monotonic() + rest > end):
                return removed
            sleep(rest)


def forget_finished(
    place: Any,
    scope: str,
    *,
    older_than: Duration,
    batch: int = FORGOTTEN_AT_ONCE,
    pause: Duration = PAUSE,
    name: str | None = None,
    reason: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Remove the finished records of a `scope` that ended `older_than` ago, and return how many.

    The next call with one of their keys runs again. Running, abandoned, and held records stay.
    `place`, `batch`, `pause`, `name`, `reason`, and `progress` are those of `purge`. semel writes
    an entry to the audit trail first; if it can't, it removes nothing.

    Examples:
        >>> forget_finished(idem, "orders.pay", older_than=30 * 86400)
        0
    """
    KeyRules().check_scope(scope)
    with open_target(place) as store:
        limit, least = whole_number("batch", batch), seconds("pause", pause, zero=True)
        age = seconds("older_than", older_than, zero=True)
        trail = AuditTrail(store, name=name)
        trail.write("forget", scope=scope, details=f"finished for {age:g} s", reason=reason)
        forgotten, cursor = 0, None
        while True:
            page = store.scan(scope=scope, limit=limit, cursor=cursor)
            # Not `forget`: what began to run since it was listed must stay.
            ended = [TouchRequest(each.identity, 0.0) for each in ended_before(page.records, age)]
            for answer in store.send(ended) if ended else ():
                if isinstance(answer, StoreError):
                    raise answer
                forgotten += answer
            if progress is not None:
                progress(forgotten)
            cursor = page.cursor
            if cursor is None:
                return forgotten
            sleep(least)


# --- targets -------------------------------------------------------------------------------------


@contextmanager
def open_target(target: Any) -> Iterator[Any]:
    """Return the store of a target; it lists its records."""
    check_target(target)
    if target is None or isinstance(target, str):
        with Idempotency(target) as engine:
            yield store_of(engine)
    else:
        yield store_of(target)
