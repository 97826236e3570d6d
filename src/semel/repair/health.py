"""How a store is doing: how many records there are, and how long the oldest has been stuck."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from semel.core.policy import Duration, seconds
from semel.repair.places import listing, listing_async
from semel.repair.steps import Steps, ask, run, run_async
from semel.stores.base import Counts

ALERT_AFTER = 300.0
"""Seconds after which an abandoned attempt is worth waking somebody."""


class Health(Struct, frozen=True):
    """What a monitor wants to know."""

    counts: Counts
    oldest: float | None
    """Seconds since the oldest abandoned attempt was abandoned; None = nothing is stuck.

    Resolvers that found nothing out do not make it younger.
    """
    alert: bool
    """Something has been stuck for too long."""


def health(place: Any, *, alert_after: Duration = ALERT_AFTER) -> Health:
    """Look at the store of a `place`: an engine, a store or a URL (None: from the settings).

    The answer has an alert when something has been stuck for `alert_after` seconds.

    Examples:
        >>> health(idem).alert
        False
    """
    patience = seconds("alert_after", alert_after, zero=True)
    with listing(place) as store:
        return run(_looked_at(store, patience))


async def health_async(place: Any, *, alert_after: Duration = ALERT_AFTER) -> Health:
    """`health`, awaited."""
    patience = seconds("alert_after", alert_after, zero=True)
    async with listing_async(place) as store:
        return await run_async(_looked_at(store, patience))


def _looked_at(store: Any, alert_after: float) -> Steps[Health]:
    counts = yield ask(store.counts)
    stuck = yield ask(store.stuck, limit=1)
    oldest = max((record.now - record.lease_until for record in stuck), default=None)
    return Health(counts, oldest, oldest is not None and oldest >= alert_after)
