"""Metrics for Prometheus: what happens in this process, and what is stuck in a store.

| metric | kind | labels |
|---|---|---|
| `semel_events_total` | counter | `scope`, `event` |
| `semel_run_seconds` | histogram | `scope` |
| `semel_store_seconds` | histogram | `scope` |
| `semel_result_bytes_total` | counter | `scope` |
| `semel_stuck` | gauge | `scope`, `held` |
| `semel_stuck_oldest_seconds` | gauge | `scope` |
| `semel_store_up` | gauge | |

The first four are of this process and come from a hook, `prometheus_hook()`. The others are of a
store, as every process sees it, and come from a `StuckCollector`; if that watches several stores,
they have the label `store`, too. Nothing is written into a store.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Final, TypeVar

from msgspec import Struct

from semel.aio import AsyncIdempotency
from semel.core.observers import Log
from semel.core.optional import Needed, inside
from semel.core.policy import Duration, seconds
from semel.core.process import ForkAware, ForkSafeLock, follow_forks, notice_fork
from semel.core.records import AUDIT_SCOPE, Record, StuckRequest
from semel.errors import ConfigError, IdempotencyError
from semel.events import Event, Hook, Ran, Replayed
from semel.observe.tally import (
    EVENT_NAMES,
    RUN_BUCKETS,
    STORE_BUCKETS,
    Histogram,
    ScopeLabels,
    Tally,
)
from semel.stores.base import AsyncStore, Store
from semel.sync import Idempotency

with Needed("semel[prometheus]", by=__name__):
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client import Counter as PlainCounter
    from prometheus_client import Histogram as PlainHistogram
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )

__all__ = ["AsyncStuckCollector", "StuckCollector", "TallyCollector", "prometheus_hook"]

logger = Log("semel.observe")

T = TypeVar("T")

EVERY: Final = 15.0
"""Seconds between two questions to a store, at least: as often as Prometheus usually asks."""

MOST_STUCK: Final = 10_000
"""How many stuck records are read at most, the oldest first.

So many, because old ones that any call may take over must not hide a young one that is held."""

LONGEST_WAIT: Final = 5.0
"""Seconds that a reader of the metrics waits for a store: Prometheus itself waits for 10, and would
get none of the metrics of a process whose store hangs."""

SHOWN_FOR: Final = 4
"""For how many times `every` an answer is shown; then it says nothing about the store of now."""

# What each metric is called, and what it says of itself.
_EVENTS = "semel_events", "Outcomes of idempotent operations."
_RUN = (
    "semel_run_seconds",
    "Duration of runs whose result is stored, from before the claim until after the save.",
)
_STORE = "semel_store_seconds", "How long calls waited for the store."
_BYTES = "semel_result_bytes", "Bytes of results that were stored."
_STUCK = (
    "semel_stuck",
    f"Abandoned attempts, up to {MOST_STUCK:,}. Held ones wait for a resolver or a person.",
)
_OLDEST = "semel_stuck_oldest_seconds", "Age of the oldest abandoned attempt since its lease ended."
_UP = "semel_store_up", "Whether the store answered when it was last asked what is stuck."


def prometheus_hook(registry: CollectorRegistry = REGISTRY) -> Hook:
    """Return a hook that exports this process's metrics; use one for all engines of a registry.

    It is a `Tally` that `registry` reads. In multi-process mode (`PROMETHEUS_MULTIPROC_DIR` is
    set), where a registry sees the counters of one process only, it writes plain counters, which
    `MultiProcessCollector` of prometheus_client adds up.

    Examples:
        >>> hook = prometheus_hook(CollectorRegistry())
        >>> with Idempotency("memory://", hooks=[hook]) as engine:
        ...     engine.execute("order:42", lambda: "paid")
        'paid'
    """
    if inside("prometheus-client", "prometheus_client.values:ValueClass._multiprocess"):
        return _PlainCounters(registry)
    tally = Tally()
    registry.register(TallyCollector(tally))
    return tally


class TallyCollector:
    """Exports a `tally` to a registry: `registry.register(TallyCollector(tally))`.

    `prometheus_hook()` does that, and supports multi-process mode.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, for the registry."""
        return _families()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the tally."""
        totals = self._tally.totals()
        happened, run, store, stored = families = _families()
        for scope, counts in totals.events.items():
            for event, count in counts.items():
                happened.add_metric((scope, event), count)
        for family, by_scope in ((run, totals.run_seconds), (store, totals.store_seconds)):
            for scope, histogram in by_scope.items():
                family.add_metric((scope,), _buckets(histogram), histogram.sum)
        for scope, size in totals.result_bytes.items():
            stored.add_metric((scope,), size)
        return families


def _families() -> tuple[
    CounterMetricFamily, HistogramMetricFamily, HistogramMetricFamily, CounterMetricFamily
]:
    return (
        CounterMetricFamily(*_EVENTS, labels=("scope", "event")),
        HistogramMetricFamily(*_RUN, labels=("scope",)),
        HistogramMetricFamily(*_STORE, labels=("scope",)),
        CounterMetricFamily(*_BYTES, labels=("scope",)),
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = (*map(str, histogram.bounds), "+Inf")
    return list(zip(bounds, histogram.cumulative(), strict=True))


class _PlainCounters:
    """The hook of multi-process mode: counters that prometheus_client keeps in files."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._events = PlainCounter(*_EVENTS, ("scope", "event"), registry=registry)
        self._run = PlainHistogram(*_RUN, ("scope",), buckets=RUN_BUCKETS, registry=registry)
        self._store = PlainHistogram(*_STORE, ("scope",), buckets=STORE_BUCKETS, registry=registry)
        self._bytes = PlainCounter(*_BYTES, ("scope",), registry=registry)
        self._label = ScopeLabels(self._begin)
        # prometheus_client's own lock stays taken in a child that is forked while a thread has it.
        self._lock = ForkSafeLock(reentrant=True)

    def _begin(self, label: str) -> None:
        for name in EVENT_NAMES:
            self._events.labels(label, name)

    def __call__(self, event: Event) -> None:
        label = self._label(event.scope)  # outside: a fork takes both locks, in any order
        with self._lock.lock:
            self._events.labels(label, event.name).inc()
            if isinstance(event, Ran):
                self._run.labels(label).observe(event.seconds)
                self._bytes.labels(label).inc(event.size)
            if isinstance(event, Ran | Replayed) and event.store_seconds is not None:
                self._store.labels(label).observe(event.store_seconds)


# --- what is stuck -------------------------------------------------------------------------------


class StuckCollector:
    """Exports what is stuck in a store: `StuckCollector(idem, registry=REGISTRY)`.

    `store` is an engine or a store for threads. The collector asks it when Prometheus reads the
    metrics, at most once in `every` seconds, and shows the last values in between. It asks only for
    abandoned records, which every store finds without reading the others. It shows a store that
    does not respond within 5 seconds as down.

    A registry takes one collector; a second one raises `ConfigError`. If a process has several
    stores, pass all of them by name: `StuckCollector({"payments": idem, "orders": other})`. The
    metrics then have the label `store`.

    With `registry` the collector registers itself; `registry.register(collector)` does the same.

    Examples:
        >>> with Idempotency("memory://") as engine, Idempotency("memory://") as other:
        ...     one = StuckCollector(engine, registry=CollectorRegistry())
        ...     two = StuckCollector({"payments": engine, "orders": other}, every=60)
    """

    def __init__(
        self,
        store: Idempotency | Store | Mapping[str, Idempotency | Store],
        *,
        registry: CollectorRegistry | None = None,
        every: Duration = EVERY,
    ) -> None:
        stores = _named(store, "StuckCollector")
        self._stores: dict[_Name, _ForThreads] = {}
        for name, one in stores.items():
            if not isinstance(one, Idempotency | Store):
                raise _wrong_kind(one, "StuckCollector", "Idempotency or open_store(url)")
            self._stores[name] = _ForThreads(one, name, every)
        _register(self, registry)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, for the registry; this asks no store."""
        return _stuck_families(self._stores)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, and ask the stores if it is time to."""
        asked = [store for store in self._stores.values() if store.due()]
        for store in asked:
            store.start()
        deadline = monotonic() + LONGEST_WAIT
        for store in asked:
            store.wait(deadline)
        return _shown(self._stores)


class AsyncStuckCollector:
    """A `StuckCollector` whose `store` is an engine or a store for asyncio: `update()` asks it.

    prometheus_client awaits nothing, so await `update()` before it writes the metrics. Values older
    than four times `every` are not shown.

    Of several stores by name, some can be engines or stores for threads: a thread asks them.

    Examples:
        >>> stuck = AsyncStuckCollector(idem)
        >>> await stuck.update()
        >>> [metric.name for metric in stuck.collect()]
        ['semel_stuck', 'semel_stuck_oldest_seconds', 'semel_store_up']
    """

    def __init__(
        self,
        store: AsyncIdempotency
        | AsyncStore
        | Mapping[str, AsyncIdempotency | AsyncStore | Idempotency | Store],
        *,
        registry: CollectorRegistry | None = None,
        every: Duration = EVERY,
    ) -> None:
        stores = _named(store, "AsyncStuckCollector")
        self._stores: dict[_Name, _ForTasks | _ForThreads] = {}
        for name, one in stores.items():
            if isinstance(one, AsyncIdempotency | AsyncStore):
                self._stores[name] = _ForTasks(one, name, every)
            elif name and isinstance(one, Idempotency | Store):
                self._stores[name] = _ForThreads(one, name, every)
            else:
                wanted = "AsyncIdempotency or open_async_store(url)"
                raise _wrong_kind(one, "AsyncStuckCollector", wanted)
        _register(self, registry)

    async def update(self) -> None:
        """Ask the stores, if it is time to."""
        due = [store for store in self._stores.values() if store.due()]
        await asyncio.gather(*(store.ask_async() for store in due))

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, for the registry."""
        return _stuck_families(self._stores)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last update."""
        return _shown(self._stores)


_Name = tuple[str, ...]
"""The value of the label `store`, or nothing: the only store of a collector has no such label."""


def _named(given: T | Mapping[str, T], collector: str) -> dict[_Name, T]:
    if not isinstance(given, Mapping):
        return {(): given}
    if not given:
        raise ConfigError(f"{collector} needs a store")
    for name in given:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{collector}: the name of a store is a string, not {name!r}")
    return {(name,): store for name, store in given.items()}


def _wrong_kind(given: object, collector: str, wanted: str) -> ConfigError:
    return ConfigError(f"{collector} needs {wanted}, not {type(given).__name__}")


def _register(
    collector: StuckCollector | AsyncStuckCollector, registry: CollectorRegistry | None
) -> None:
    if registry is None:
        return
    try:
        registry.register(collector)
    except ValueError as error:
        kind = type(collector).__name__
        raise ConfigError(
            f"the registry has a collector of these metrics, and takes only one: give all stores "
            f'to it, each with a name, as in {kind}({{"payments": idem, "orders": other}})'
        ) from error


class _Answer(Struct, frozen=True):
    """What a store said when it was asked."""

    at: float
    up: bool
    counts: dict[tuple[str, str], int] = {}
    """How many are stuck, by scope and whether they are held."""
    oldest: dict[str, float] = {}
    """For how many seconds, by scope."""


class _Answers:
    """When to ask a store, and its last answer."""

    def __init__(self, store: Store | AsyncStore, name: _Name, every: Duration) -> None:
        if StuckRequest in store.unsupported:
            raise ConfigError(f"{type(store).__name__} can't list what is stuck")
        self._name = name
        self._every = seconds("every", every)
        self._next = -math.inf
        self._asked = math.inf  # so far, it was not
        # Held for a moment, never while the store is asked: a fork must not wait for a store.
        self._lock = ForkSafeLock()
        self._label = ScopeLabels(self._begin)
        self._last: _Answer | None = None
        self._nothing: dict[tuple[str, str], int] = {}

    def due(self) -> bool:
        """Whether to ask now; who is told so asks, all others show the last answer."""
        notice_fork()
        with self._lock.lock:
            now = monotonic()
            if now < self._next:
                return False
            self._asked, self._next = now, now + self._every
            return True

    def found(self, records: Iterable[Record]) -> None:
        """Keep an answer; a scope in which something was stuck is shown from then on, if with 0."""
        stuck = [
            (self._label(record.scope), "true" if record.hold else "false", record.abandoned_for)
            for record in records
            if record.scope != AUDIT_SCOPE
        ]
        counts = self._nothing.copy()
        oldest = {scope: 0.0 for scope, _ in counts}
        for scope, held, age in stuck:
            counts[scope, held] += 1
            oldest[scope] = max(age, oldest[scope])
        self._last = _Answer(monotonic(), up=True, counts=counts, oldest=oldest)

    def failed(self, error: IdempotencyError) -> None:
        """The store did not answer: what is stuck is not known."""
        which = " ".join(("the store", *self._name))
        logger.warning("%s could not list what is stuck: %s", which, error)
        self._last = _Answer(monotonic(), up=False)

    def recent(self) -> _Answer | None:
        """The last answer, unless it is old, or that there is none."""
        asked, last = self._asked, self._last
        answered = last is not None and last.at >= asked
        if not answered and monotonic() - asked >= LONGEST_WAIT:
            return _Answer(asked, up=False)
        if last is not None and monotonic() - last.at <= SHOWN_FOR * self._every:
            return last
        return None

    def _begin(self, scope: str) -> None:
        self._nothing |= {(scope, "true"): 0, (scope, "false"): 0}


class _ForThreads(_Answers, ForkAware):
    """The answers of a store for threads."""

    def __init__(self, target: Idempotency | Store, name: _Name, every: Duration) -> None:
        self._target = target
        self.after_fork_in_child()
        super().__init__(self._store, name, every)
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Ask anew: the thread that asked exists only in the parent."""
        self._asking = threading.Thread()  # which has not begun

    def due(self) -> bool:
        notice_fork()
        return not self._asking.is_alive() and super().due()

    def start(self) -> None:
        """Ask in a thread of its own, because a store may take longer than its timeout.

        A cluster whose nodes all hang has one for each of them.
        """
        asking = threading.Thread(target=self._ask, name="semel-stuck", daemon=True)
        asking.start()
        self._asking = asking

    def wait(self, deadline: float) -> None:
        """Wait for the answer, but not for ever."""
        self._asking.join(max(0.0, deadline - monotonic()))

    async def ask_async(self) -> None:
        self.start()
        await asyncio.to_thread(self.wait, monotonic() + LONGEST_WAIT)

    def _ask(self) -> None:
        try:
            self.found(self._store.stuck(limit=MOST_STUCK))
        except IdempotencyError as error:
            self.failed(error)

    @property
    def _store(self) -> Store:
        # Looked up each time: in a forked process, an engine has another one.
        target = self._target
        return target.internals.store if isinstance(target, Idempotency) else target


class _ForTasks(_Answers):
    """The answers of a store for asyncio."""

    def __init__(self, target: AsyncIdempotency | AsyncStore, name: _Name, every: Duration) -> None:
        self._target = target
        super().__init__(self._store, name, every)

    async def ask_async(self) -> None:
        try:
            self.found(await self._store.stuck(limit=MOST_STUCK))
        except IdempotencyError as error:
            self.failed(error)

    @property
    def _store(self) -> AsyncStore:
        target = self._target
        return target.internals.store if isinstance(target, AsyncIdempotency) else target


def _shown(stores: Mapping[_Name, _Answers]) -> Iterable[Metric]:
    stuck, oldest, up = families = _stuck_families(stores)
    for name, answers in stores.items():
        last = answers.recent()
        if last is not None:
            for labels, count in last.counts.items():
                stuck.add_metric((*name, *labels), count)
            for scope, age in last.oldest.items():
                oldest.add_metric((*name, scope), age)
            up.add_metric(name, last.up)
    return families


def _stuck_families(
    stores: Mapping[_Name, _Answers],
) -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    store = () if () in stores else ("store",)
    return (
        GaugeMetricFamily(*_STUCK, labels=(*store, "scope", "held")),
        GaugeMetricFamily(*_OLDEST, labels=(*store, "scope")),
        GaugeMetricFamily(*_UP, labels=store),
    )
