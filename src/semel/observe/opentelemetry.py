"""Metrics and span attributes for OpenTelemetry, by a hook.

| metric | kind | attributes |
|---|---|---|
| `semel.events` | counter | `scope`, `event` |
| `semel.run.duration` | histogram, seconds | `scope` |
| `semel.store.duration` | histogram, seconds | `scope` |
| `semel.result.size` | histogram, bytes | `scope` |

The span of the caller, if it is recorded, gets `semel.event`, `semel.scope`, `semel.attempt` and
`semel.key_digest`; of several events, the last one stays. The raw key is in neither.
"""

from __future__ import annotations

from typing import Final

from semel.core.optional import Needed
from semel.events import Event, Ran, Replayed
from semel.observe.tally import RUN_BUCKETS, STORE_BUCKETS, ScopeLabels

with Needed("semel[opentelemetry]", by=__name__):
    from opentelemetry.metrics import MeterProvider, get_meter
    from opentelemetry.trace import get_current_span

__all__ = ["OpenTelemetryHook"]

SIZE_BUCKETS: Final = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
"""Upper bounds in bytes."""


class OpenTelemetryHook:
    """A hook that records metrics and adds events to the caller's span.

    `meter_provider` defaults to the global one, which you can set after you create this hook.

    Examples:
        >>> with Idempotency("memory://", hooks=[OpenTelemetryHook()]) as engine:
        ...     engine.execute("order:42", lambda: "paid")
        'paid'
    """

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        meter = get_meter("semel", meter_provider=meter_provider)
        self._events = meter.create_counter(
            "semel.events", unit="{event}", description="Outcomes of idempotent operations."
        )
        self._run = meter.create_histogram(
            "semel.run.duration",
            unit="s",
            description="Duration of runs whose result is stored, with claim and save.",
            explicit_bucket_boundaries_advisory=RUN_BUCKETS,
        )
        self._store = meter.create_histogram(
            "semel.store.duration",
            unit="s",
            description="How long calls waited for the store.",
            explicit_bucket_boundaries_advisory=STORE_BUCKETS,
        )
        self._size = meter.create_histogram(
            "semel.result.size",
            unit="By",
            description="Sizes of results that were stored.",
            explicit_bucket_boundaries_advisory=SIZE_BUCKETS,
        )
        # Without a 0 for each event of a scope: the SDK keeps 2,000 sets of attributes, not more.
        self._label = ScopeLabels()

    def __call__(self, event: Event) -> None:
        """Measure one event."""
        scope = self._label(event.scope)
        self._events.add(1, {"scope": scope, "event": event.name})
        if isinstance(event, Ran):
            self._run.record(event.seconds, {"scope": scope})
            self._size.record(event.size, {"scope": scope})
        if isinstance(event, Ran | Replayed) and event.store_seconds is not None:
            self._store.record(event.store_seconds, {"scope": scope})
        span = get_current_span()
        if span.is_recording():
            span.set_attribute("semel.event", event.name)
            span.set_attribute("semel.scope", event.scope)
            span.set_attribute("semel.key_digest", event.key_digest)
            if event.number is not None:
                span.set_attribute("semel.attempt", event.number)
