"""Counts what happens in this process: events, seconds and bytes, by scope.

A `Tally` is a hook that needs no other package. Exporters read it when they are asked, so that an
event costs one short lock and no call of theirs.

- A label is a scope or the name of an event, never a key or its digest. The first `MOST_SCOPES`
  scopes are counted by name, all later ones together: scopes that a program makes up, one for each
  tenant, do not fill the memory of a monitor.
- A scope that was seen has a number for every event, 0 too: an alert on "one more than before"
  needs the number from before.
- A forked child begins with nothing. What its parent has counted, the parent shows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from msgspec import Struct

from semel import events
from semel.core.process import ForkSafeLock, notice_fork
from semel.events import Event, Ran, RanInTransaction, Replayed

MOST_SCOPES: Final = 100
"""How many scopes are counted by name."""

OTHER: Final = "(other)"
"""What all further scopes are counted as."""

RUN_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper bounds in seconds, for functions from a quick update to a job."""

STORE_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
"""Upper bounds in seconds, for stores from memory to a server that hardly answers."""


class Histogram(Struct, frozen=True):
    """The number of values in each bucket, and their sum."""

    bounds: tuple[float, ...]
    """The upper bounds of the buckets, ascending; the last bucket has none."""
    counts: tuple[int, ...]
    """The number of values in each bucket, without those of smaller ones."""
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def cumulative(self) -> tuple[int, ...]:
        """Return the number of values in each bucket and all smaller ones, as Prometheus counts."""
        return tuple(accumulate(self.counts))


class Totals(Struct, frozen=True):
    """The counts of a tally since the process began, by scope."""

    events: dict[str, dict[str, int]]
    """The number of each event: `events["payments"]["Replayed"]`."""
    run_seconds: dict[str, Histogram]
    """Seconds that stored runs took, from before the claim until after the save."""
    store_seconds: dict[str, Histogram]
    """Seconds that calls waited for the store: those that ran, and replays that asked it."""
    result_bytes: dict[str, int]
    """Bytes of stored results."""


class Tally:
    """A hook that counts the events of any number of engines, for exporters and `totals()`.

    Examples:
        >>> tally = Tally()
        >>> with Idempotency("memory://", hooks=[tally]) as engine:
        ...     engine.execute("order:42", lambda: "paid", scope="payments")
        'paid'
        >>> tally.totals().events["payments"]["Ran"]
        1
    """

    __slots__ = ("_counted", "_scopes")

    def __init__(self) -> None:
        self._counted = _Counted()
        self._scopes = self._counted.scopes  # by a name of their own: every event uses them

    def __call__(self, event: Event) -> None:
        """Count one event."""
        scope = event.identity.scope
        # By `type`, and with nothing called that can be written here: every call of a user pays.
        # Each statement is one step for a signal handler, which may count, too.
        with self._counted.lock:
            counted = self._scopes.get(scope)
            if counted is None:
                counted = self._counted.add(scope)
            counted.events[type(event)] += 1
            if type(event) is Replayed:
                asked = event.store_seconds
            elif type(event) is Ran or type(event) is RanInTransaction:
                asked = event.store_seconds
                counted.run_counts[bisect_left(RUN_BUCKETS, event.seconds)] += 1
                counted.run_sum += event.seconds
                counted.result_bytes += event.size
            else:
                return
            if asked is not None:
                counted.store_counts[bisect_left(STORE_BUCKETS, asked)] += 1
                counted.store_sum += asked

    def totals(self) -> Totals:
        """Return all counts at one moment."""
        notice_fork()
        with self._counted.lock:
            # Copies: a signal handler may begin a scope, or an event, while this reads.
            scopes = self._scopes.copy()
            ran = {scope: one for scope, one in scopes.items() if any(one.run_counts)}
            asked = {scope: one for scope, one in scopes.items() if any(one.store_counts)}
            return Totals(
                events={scope: one.by_name() for scope, one in scopes.items()},
                run_seconds={scope: one.run_seconds() for scope, one in ran.items()},
                store_seconds={scope: one.store_seconds() for scope, one in asked.items()},
                result_bytes={scope: one.result_bytes for scope, one in ran.items()},
            )


class _Counted(ForkSafeLock):
    """The scopes of a tally and their lock, which a signal handler may take in its own thread."""

    def __init__(self) -> None:
        super().__init__(reentrant=True)
        self.scopes: dict[str, _Scope] = {}

    def add(self, scope: str) -> _Scope:
        """Begin to count a scope, or count it with the others if there are so many already."""
        label = scope if len(self.scopes) < MOST_SCOPES else OTHER
        return self.scopes.setdefault(label, _Scope())

    def after_fork_in_child(self) -> None:
        """Begin with nothing."""
        self.scopes.clear()
        super().after_fork_in_child()


class _Scope:
    """What was counted of one scope."""

    __slots__ = ("events", "result_bytes", "run_counts", "run_sum", "store_counts", "store_sum")

    def __init__(self) -> None:
        self.events: defaultdict[type[Event], int] = defaultdict(int)
        self.run_counts = [0] * (len(RUN_BUCKETS) + 1)
        self.run_sum = 0.0
        self.store_counts = [0] * (len(STORE_BUCKETS) + 1)
        self.store_sum = 0.0
        self.result_bytes = 0

    def by_name(self) -> dict[str, int]:
        counts = dict.fromkeys(EVENT_NAMES, 0)
        return counts | {kind.__name__: count for kind, count in self.events.copy().items()}

    def run_seconds(self) -> Histogram:
        return Histogram(RUN_BUCKETS, tuple(self.run_counts), self.run_sum)

    def store_seconds(self) -> Histogram:
        return Histogram(STORE_BUCKETS, tuple(self.store_counts), self.store_sum)


# --- for exporters ---------------------------------------------------------------------------


def _subclasses(kind: type[Event]) -> Iterator[type[Event]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


EVENT_NAMES: Final = tuple(
    sorted(kind.__name__ for kind in _subclasses(Event) if kind.__module__ == events.__name__)
)
"""Every event that semel announces, by name."""


class ScopeLabels:
    """Names the label of each scope for an exporter that has counters of its own.

    `begin` is called with a label when it is named for the first time.
    """

    def __init__(self, begin: Callable[[str], object] = lambda _: None) -> None:
        self._begin = begin
        self._known: set[str] = set()
        self._lock = ForkSafeLock(reentrant=True)

    def __call__(self, scope: str) -> str:
        """Name the label of this scope."""
        return scope if scope in self._known else self._named(scope)

    def _named(self, scope: str) -> str:
        with self._lock.lock:
            # Asked again: another thread may have named the last one that there is space for.
            known = scope in self._known or len(self._known) < MOST_SCOPES
            label = scope if known else OTHER
            if label not in self._known:
                self._known.add(label)
                self._begin(label)
            return label
