"""How a store is doing: how many records there are, and how long the oldest has been stuck."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from semel.core.policy import Duration, seconds
from semel.repair.places import store_of
from semel.repair.steps import Steps, ask, run, run_async
from semel.stores.base import Counts

ALERT_AFTER = 300.0
"""Seconds after which an abandoned attempt is worth waking somebody."""


class Health(Struct, frozen=True):
    """What a monitor wants to know."""

    counts: Counts
    oldest: float | None
    """Seconds since the lease of the oldest abandoned attempt ended; None = nothing is stuck."""
    alert: bool
    """Something has been stuck for too long."""


def health(place: Any, *, alert_after: Duration = ALERT_AFTER) -> Health:
    """Look at a store, or at the store of an engine."""
    return run(_looked_at(place, seconds("alert_after", alert_after, zero=True)))


async def health_async(place: Any, *, alert_after: Duration = ALERT_AFTER) -> Health:
    """`health`, awaited."""
    return await run_async(_looked_at(place, seconds("alert_after", alert_after, zero=True)))


def _looked_at(place: Any, alert_after: float) -> Steps[Health]:
    store = store_of(place)
    counts = yield ask(store.counts)
    stuck = yield ask(store.stuck, limit=1)
    oldest = max((record.now - record.lease_until for record in stuck), default=None)
    return Health(counts, oldest, oldest is not None and oldest >= alert_after)
