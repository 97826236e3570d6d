"""What type checkers say of tally and exporters; mypy and pyright read this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

from prometheus_client import REGISTRY

from semel import AsyncIdempotency, Idempotency, open_async_store, open_store
from semel.events import Hook
from semel.observe import Histogram, Tally, Totals
from semel.observe.opentelemetry import OpenTelemetryHook
from semel.observe.prometheus import (
    AsyncStuckCollector,
    StuckCollector,
    TallyCollector,
    prometheus_hook,
)


def hooks(tally: Tally) -> None:
    Idempotency(hooks=[tally, prometheus_hook(), OpenTelemetryHook()])
    AsyncIdempotency(hooks=[tally, prometheus_hook(REGISTRY), OpenTelemetryHook()])
    assert_type(prometheus_hook(), Hook)
    assert_type(tally.totals(), Totals)
    assert_type(tally.totals().events, dict[str, dict[str, int]])
    assert_type(tally.totals().run_seconds["shop"], Histogram)


def collectors(idem: Idempotency, tally: Tally) -> None:
    REGISTRY.register(TallyCollector(tally))
    REGISTRY.register(StuckCollector(idem))
    REGISTRY.register(StuckCollector(open_store("memory://"), every=60))
    StuckCollector({"payments": idem, "orders": open_store("memory://")}, registry=REGISTRY)
    engines: dict[str, Idempotency] = {"payments": idem}
    StuckCollector(engines)
    StuckCollector("memory://")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def asynchronous(idem: AsyncIdempotency) -> None:
    stuck = AsyncStuckCollector(idem)
    REGISTRY.register(stuck)
    await stuck.update()
    AsyncStuckCollector(open_async_store("memory://"))
    AsyncStuckCollector({"web": idem, "payments": open_store("memory://")}, registry=REGISTRY)
    StuckCollector(idem)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
