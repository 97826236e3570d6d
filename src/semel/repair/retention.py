"""Removes records past their time, in small batches with rests between them: others come first.

How long a record is kept is its policy's ttl. A store counts an expired record as absent whether
or not it was removed; purging only gives the room back. Redis and Valkey do that by themselves.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from semel.core.policy import Duration, seconds
from semel.repair.places import listing, listing_async
from semel.repair.steps import Pause, Steps, ask, run, run_async
from semel.stores.urls import whole_number

BATCH = 50
"""Records of one transaction: so few that a claim behind it waits for about one more commit."""
PAUSE = 0.01
"""Seconds between two batches, for everybody else."""


def purge(
    place: Any,
    *,
    batch: int = BATCH,
    pause: Duration = PAUSE,
    abandoned_after: Duration | None = None,
    max_seconds: Duration | None = None,
) -> int:
    """Remove expired records, `batch` at a time; returns how many went.

    `place` is an engine, a store or a URL; None: what the settings say. With `abandoned_after`,
    also attempts abandoned that long ago which nobody holds. Live and held records are never
    removed. After each batch it rests for `pause`, or for as long as the batch took if that is
    longer; with a `pause` of 0 it never rests. It ends with the first batch that is not full, or
    after `max_seconds`.

    Examples:
        >>> purge(idem)
        0
    """
    with listing(place) as store:
        return run(
            _purged(
                store,
                batch=batch,
                pause=pause,
                abandoned_after=abandoned_after,
                max_seconds=max_seconds,
            )
        )


async def purge_async(
    place: Any,
    *,
    batch: int = BATCH,
    pause: Duration = PAUSE,
    abandoned_after: Duration | None = None,
    max_seconds: Duration | None = None,
) -> int:
    """`purge`, awaited."""
    async with listing_async(place) as store:
        return await run_async(
            _purged(
                store,
                batch=batch,
                pause=pause,
                abandoned_after=abandoned_after,
                max_seconds=max_seconds,
            )
        )


def _purged(
    store: Any,
    *,
    batch: int,
    pause: Duration,
    abandoned_after: Duration | None,
    max_seconds: Duration | None,
) -> Steps[int]:
    limit = whole_number("batch", batch)
    after = None if abandoned_after is None else seconds("abandoned_after", abandoned_after)
    least = seconds("pause", pause, zero=True)
    end = None if max_seconds is None else monotonic() + seconds("max_seconds", max_seconds)
    removed = 0
    while True:
        began = monotonic()
        gone: int = yield ask(store.purge, limit=limit, abandoned_after=after)
        took = monotonic() - began
        removed += gone
        # A store that answers slowly is busy: it is left alone for at least half of the time.
        rest = 0.0 if least == 0 else max(least, took)
        # A batch that is not full was the last one: what expires meanwhile can wait for the next.
        if gone < limit or (end is not None and monotonic() + rest > end):
            return removed
        yield Pause(rest)
