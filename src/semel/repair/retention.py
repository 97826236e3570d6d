"""Removes records past their time, in small batches with pauses between them.

How long a record is kept is its policy's ttl. A store counts an expired record as absent whether
or not it was removed; purging only gives the room back. Redis and Valkey do that by themselves.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from semel.core.policy import Duration, seconds
from semel.repair.places import store_of
from semel.repair.steps import Pause, Steps, ask, run, run_async
from semel.stores.urls import whole_number

BATCH = 1000
PAUSE = 0.05
"""Seconds between two batches, for everybody else."""


def purge(
    place: Any,
    *,
    batch: int = BATCH,
    pause: Duration = PAUSE,
    abandoned_after: Duration | None = None,
    max_seconds: Duration | None = None,
) -> int:
    """Remove expired records of a store, or of an engine's store; tells how many went.

    With `abandoned_after`, also attempts abandoned that long ago which nobody holds. Live and held
    records are never removed. It ends with the first batch that is not full, or after
    `max_seconds`.
    """
    return run(
        _purged(
            place,
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
    return await run_async(
        _purged(
            place,
            batch=batch,
            pause=pause,
            abandoned_after=abandoned_after,
            max_seconds=max_seconds,
        )
    )


def _purged(
    place: Any,
    *,
    batch: int,
    pause: Duration,
    abandoned_after: Duration | None,
    max_seconds: Duration | None,
) -> Steps[int]:
    store, limit = store_of(place), whole_number("batch", batch)
    after = None if abandoned_after is None else seconds("abandoned_after", abandoned_after)
    rest = seconds("pause", pause, zero=True)
    end = None if max_seconds is None else monotonic() + seconds("max_seconds", max_seconds)
    removed = 0
    while True:
        gone: int = yield ask(store.purge, limit=limit, abandoned_after=after)
        removed += gone
        # A batch that is not full was the last one: what expires meanwhile can wait for the next.
        if gone < limit or (end is not None and monotonic() + rest > end):
            return removed
        yield Pause(rest)
