"""Looks after a whole store: its `health`, and records that go (`purge`, `forget_finished`).

The target of both is what a caller has at hand: an engine, a store, a URL, or None for the
settings. What is opened here is closed here. A store that can only be empty, because it belongs to
this process or because opening it would create it, is rejected by its URL: it would look healthy.

How long a record is kept is its policy's ttl. A store treats an expired record as absent whether
or not it was removed; purging only frees the space. Redis and Valkey do that by themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from msgspec import Struct

from semel.aio import AsyncIdempotency
from semel.core.keys import KeyRules
from semel.core.policy import Duration, seconds
from semel.core.records import LISTINGS, Counts, Record, ScanRequest, State, TouchRequest
from semel.core.settings import Settings, load_settings
from semel.engine.colours.tasks import sleep
from semel.errors import ConfigError, StoreError
from semel.repair.audit import AsyncAuditTrail
from semel.stores.urls import split_url, whole_number
from semel.sync import Idempotency

ALERT_AFTER = 300.0
"""Seconds after which an abandoned attempt is worth waking a person."""

BATCH = 50
"""Records of one transaction: so few that a claim behind it waits for about one more commit."""
FORGOTTEN_AT_ONCE = 500
"""Records of one page, and of one batch that ends their retention."""
PAUSE = 0.01
"""Seconds between two batches, for everybody else."""


class Health(Struct, frozen=True):
    """The health of a store, for a monitor."""

    counts: Counts
    oldest: float | None
    """Seconds since the oldest stuck attempt was abandoned; None if nothing is stuck.

    A resolver that returned `Unknown` doesn't make it younger.
    """
    alert: bool
    """True if an attempt has been stuck for too long."""


async def health_async(place: Any, *, alert_after: Duration = ALERT_AFTER) -> Health:
    """Return the health of a store; `place` is an engine, a store, a URL, or None (the settings).

    `alert` is True if an attempt has been stuck for `alert_after` seconds.

    Examples:
        >>> found = await health_async(idem)
        >>> found.alert
        False
    """
    longest = seconds("alert_after", alert_after, zero=True)
    async with open_async_target(place) as store:
        counts = await store.counts()
        stuck = await store.stuck(limit=1)
    oldest = max((record.abandoned_for for record in stuck), default=None)
    return Health(counts, oldest, oldest is not None and oldest >= longest)


async def purge_async(
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
        >>> await purge_async(idem)
        0
    """
    async with open_async_target(place) as store:
        limit = whole_number("batch", batch)
        after = None if abandoned_after is None else seconds("abandoned_after", abandoned_after)
        least = seconds("pause", pause, zero=True)
        end = None if max_seconds is None else monotonic() + seconds("max_seconds", max_seconds)
        trail = AsyncAuditTrail(store, name=name)
        kinds = "expired" if after is None else f"expired, and abandoned for {after:g} s"
        await trail.write("purge", details=kinds, reason=reason)
        removed = 0
        while True:
            began = monotonic()
            gone: int = await store.purge(limit=limit, abandoned_after=after)
            took = monotonic() - began
            removed += gone
            if progress is not None:
                progress(removed)
            # A store that answers slowly is busy: it is left alone for at least half of the time.
            rest = 0.0 if least == 0 else max(least, took)
            # A batch that is not full was the last one: what expires meanwhile waits for the next.
            if gone < limit or (end is not None and monotonic() + rest > end):
                return removed
            await sleep(rest)


async def forget_finished_async(
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
        >>> await forget_finished_async(idem, "orders.pay", older_than=30 * 86400)
        0
    """
    KeyRules().check_scope(scope)
    async with open_async_target(place) as store:
        limit, least = whole_number("batch", batch), seconds("pause", pause, zero=True)
        age = seconds("older_than", older_than, zero=True)
        trail = AsyncAuditTrail(store, name=name)
        await trail.write("forget", scope=scope, details=f"finished for {age:g} s", reason=reason)
        forgotten, cursor = 0, None
        while True:
            page = await store.scan(scope=scope, limit=limit, cursor=cursor)
            # Not `forget`: what began to run since it was listed must stay.
            ended = [TouchRequest(each.identity, 0.0) for each in ended_before(page.records, age)]
            for answer in await store.send(ended) if ended else ():
                if isinstance(answer, StoreError):
                    raise answer
                forgotten += answer
            if progress is not None:
                progress(forgotten)
            cursor = page.cursor
            if cursor is None:
                return forgotten
            await sleep(least)


def ended_before(records: Iterable[Record], age: float) -> Iterator[Record]:
    """Pick the records that ended at least so many seconds ago."""
    for record in records:
        if record.state is not State.PROCESSING and record.now - record.updated_at >= age:
            yield record


# --- targets -------------------------------------------------------------------------------------


@asynccontextmanager
async def open_async_target(target: Any) -> AsyncIterator[Any]:
    """Return the store of a target; it lists its records."""
    check_target(target)
    if target is None or isinstance(target, str):
        async with AsyncIdempotency(target) as engine:
            yield store_of(engine)
    else:
        yield store_of(target)


def store_of(target: Any) -> Any:
    """Return the store of an engine, or the store itself, if it lists its records."""
    store = target.internals.store if isinstance(target, Idempotency | AsyncIdempotency) else target
    if ScanRequest in getattr(store, "unsupported", LISTINGS):  # of what is no store, all
        raise ConfigError(f"{type(store).__name__} cannot list its records")
    return store


def check_target(target: Any) -> None:
    """Reject a URL, or one of the settings, behind which nothing can be; objects are taken."""
    if isinstance(target, str):
        reject_empty_stores(load_settings(url=target))
    elif target is None:
        reject_empty_stores(load_settings())


def reject_empty_stores(settings: Settings) -> None:
    """Reject what an engine of these settings would find empty whatever others have written."""
    for url in (settings.url, settings.behind):
        if url is not None:
            reject_memory(url)
            path = Path(split_url(url)[0][1:]) if url.startswith("sqlite:///") else None
            if path is not None and not path.exists():
                raise ConfigError(
                    f"there is no SQLite database {path.absolute()}: is the path right? The first "
                    "call of a program makes it"
                )


def reject_memory(url: str) -> None:
    """Reject a store that no other process can have written to."""
    if url.startswith("memory:"):
        raise ConfigError(
            "memory:// belongs to one process; other processes cannot see its records. In the same "
            "process, pass its engine or its store"
        )
