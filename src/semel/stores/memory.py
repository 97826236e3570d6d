"""`memory://`: records in one process, for tests, development and programs that run alone.

`memory://?max_records=10000&evict=finished` sets its bounds. Each opening makes a store of its
own; engines share records by sharing the store object. Every decision is `semel.core.judge`'s; a
lock is held around each that may change something, and never while anything else of the application
runs.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeAlias, TypeVar

from msgspec.structs import replace

from semel.core import judge
from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.records import (
    AUDIT_SCOPE,
    PROCESSING,
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Counts,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    Page,
    PurgeRequest,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    ScanRequest,
    StuckRequest,
    TouchRequest,
)
from semel.errors import ConfigError, StoreError, StoreFull
from semel.stores.base import AsyncStore, Store
from semel.stores.urls import (
    cursor_after,
    merge_options,
    position,
    reject_in_url,
    split_url,
    whole_number,
)

__all__ = ["AsyncMemoryStore", "MemoryStore", "open_async_store", "open_store"]

T = TypeVar("T")

Clock: TypeAlias = Callable[[], float]

DEFAULT_MAX_RECORDS = 100_000

OPTIONS = frozenset({"max_records", "evict", "clock"})

SWEEP = 2
"""Due records dropped by each new one: memory shrinks again, and no call pays for it all."""

SLACK = 1000
"""Entries the agenda may hold beyond twice the records before it is built anew."""


def steady_clock() -> Clock:
    """Seconds since the epoch that never jump: the wall clock once, then the monotonic one."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> MemoryStore:
    """Open a store for threads.

    Prefix and timeout have nothing to act on: no other program sees the records, no call waits.
    """
    del prefix, timeout
    return MemoryStore(**_arguments(url, options))


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncMemoryStore:
    """Open a store for asyncio; see `open_store`."""
    del prefix, timeout
    return AsyncMemoryStore(**_arguments(url, options))


def _arguments(url: str, options: dict[str, Any]) -> dict[str, Any]:
    address, in_url = split_url(url)
    if address not in {"", "/"}:
        raise ConfigError(f"memory:// has no address; got {address!r}")
    reject_in_url(in_url, clock="a function")
    return merge_options("memory", in_url, options, OPTIONS)


class MemoryStore(Store, ForkAware):
    """A store for threads.

    Holds at most `max_records`. When it is full, records that have expired go first, and
    abandoned ones that are not held once their ttl has passed too; then, with
    `evict="finished"`, the record that ended first; else a new key is rejected with `StoreFull`
    before anything runs. Keys that exist are always served.
    """

    def __init__(
        self,
        *,
        max_records: int = DEFAULT_MAX_RECORDS,
        evict: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        if evict not in {None, "finished"}:
            raise ConfigError(f'evict must be "finished" or left out, not {evict!r}')
        self._evict_finished = evict == "finished"
        self._max_records = whole_number("max_records", max_records)
        self._begin()
        self._clock = steady_clock() if clock is None else clock
        follow_forks(self)

    def _begin(self) -> None:
        self._records = Records(self._max_records, evicts=self._evict_finished)
        self._find = self._records.find
        self._lock = threading.Lock()
        self._held_for_fork = False

    def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        notice_fork()
        answer: T = self._ANSWERS[type(request)](self, request)
        return answer

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer each request; the error of one is its answer."""
        return [self._own_answer(request) for request in requests]

    def _own_answer(self, request: Request[T]) -> T | StoreError:
        try:
            return self.ask(request)
        except StoreError as error:
            return error

    def close(self) -> None:
        """Nothing was opened; the records stay as long as the store object does."""

    # --- about one record ----------------------------------------------------------------

    def _claim(self, ask: ClaimRequest) -> Claim:
        if self._find(ask.identity) is not None:
            # A duplicate mostly changes nothing, and then it needs no lock: what is found is a
            # record as it is at that moment, whole and never changed in place. The clock is read
            # before: by a later time an attempt that is renewed meanwhile would seem abandoned.
            now, known = self._clock(), self._find(ask.identity)
            answer, record = judge.claim(known, ask, now)
            if record is None:
                return answer
        with self._lock:
            now, stored = self._clock(), self._find(ask.identity)
            answer, record = judge.claim(stored, ask, now)
            if record is not None:
                self._save(record, stored, now, ttl=ask.ttl)
            return answer

    def _complete(self, ask: CompleteRequest) -> bool:
        with self._lock:  # the same as `_judge`, written out: every first execution ends here
            now, stored = self._clock(), self._find(ask.identity)
            record = judge.complete(stored, ask, now)
            if record is None:
                return False
            self._records.place(record)
            return True

    def _judge(self, ask: Any) -> Any:
        with self._lock:
            now, stored = self._clock(), self._find(ask.identity)
            answer, record = judge.answer(stored, ask, now)
            if record is None:
                self._records.drop(ask.identity)
            elif record is not stored:
                self._save(record, stored, now)
            return answer

    def _save(
        self, record: Record, stored: Record | None, now: float, ttl: float | None = None
    ) -> None:
        if (
            stored is None
            and not self._records.has_room(now)
            and not (self._evict_finished and self._records.drop_oldest_finished())
        ):
            raise StoreFull(
                f"the memory store holds {self._records.room} records and can remove none: "
                "raise max_records, shorten the ttl, or ask for evict=finished"
            )
        self._records.place(record, ttl)

    # --- about all: what has expired is absent ---------------------------------------------

    def _present(self) -> Iterator[Record]:
        now = self._clock()
        for record in self._records:
            if judge.present(record, now) is not None:
                yield replace(record, now=now)

    def _scan(self, ask: ScanRequest) -> Page:
        whole_number("limit", ask.limit)
        after = None if ask.cursor is None else position(ask.cursor)
        with self._lock:
            found = heapq.nsmallest(
                ask.limit + 1,
                (
                    record
                    for record in self._present()
                    if ask.covers(record.scope)
                    and record.key.startswith(ask.prefix)
                    and (ask.state is None or record.state is ask.state)
                    and (after is None or _place(record) > after)
                ),
                key=_place,
            )
        shown = tuple(found[: ask.limit])
        more = len(found) > ask.limit
        return Page(shown, cursor_after(shown[-1].identity) if more else None)

    def _stuck(self, ask: StuckRequest) -> list[Record]:
        with self._lock:
            stuck = [record for record in self._present() if _left(record) >= ask.older_than]
        return heapq.nlargest(ask.limit, stuck, key=_left)

    def _purge(self, ask: PurgeRequest) -> int:
        with self._lock:
            now = self._clock()
            may_go = (
                record.identity
                for record in self._records
                if record.scope != AUDIT_SCOPE
                and (
                    judge.present(record, now) is None
                    or (
                        ask.abandoned_after is not None
                        and not record.hold
                        and _left(replace(record, now=now)) >= ask.abandoned_after
                    )
                )
            )
            gone = list(islice(may_go, ask.limit))
            entries = (
                record.identity
                for record in self._records
                if record.scope == AUDIT_SCOPE and judge.present(record, now) is None
            )
            for identity in [*gone, *entries]:
                self._records.drop(identity)
        return len(gone)

    def _counts(self, _: CountRequest) -> Counts:
        with self._lock:
            tally = Counter(
                "abandoned" if record.abandoned else record.state.name.lower()
                for record in self._present()
                if record.scope != AUDIT_SCOPE
            )
        return Counts(**{name: tally[name] for name in Counts.__struct_fields__})

    # --- forks ---------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Hold the lock across the fork, so that the child's copy is whole."""
        self._held_for_fork = self._lock.acquire()

    def after_fork(self) -> None:
        """Let the other threads go on."""
        if self._held_for_fork:
            self._held_for_fork = False
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Continue with a copy that is the child's own, unless it was being changed."""
        if self._lock.locked():
            self._begin()

    _ANSWERS: ClassVar[dict[type, Callable[..., Any]]] = {
        ClaimRequest: _claim,
        CompleteRequest: _complete,
        RenewRequest: _judge,
        FailRequest: _judge,
        GetRequest: _judge,
        PutRequest: _judge,
        TouchRequest: _judge,
        ForgetRequest: _judge,
        AdoptRequest: _judge,
        ScanRequest: _scan,
        StuckRequest: _stuck,
        PurgeRequest: _purge,
        CountRequest: _counts,
    }
    """Of the class: bound methods would keep a store until the garbage collector runs."""


def _place(record: Record) -> tuple[str, str]:
    return record.key, record.scope


def _left(record: Record) -> float:
    """For how long it has been abandoned; less than nothing if it is not."""
    if record.lease_until is None or not record.abandoned:
        return -math.inf
    return record.now - record.lease_until


class AsyncMemoryStore(AsyncStore):
    """A store for asyncio: a `MemoryStore` behind it, which never waits for anything.

    Its lock stays for what changes a record: loops in several threads may share one store.
    """

    def __init__(
        self,
        *,
        max_records: int = DEFAULT_MAX_RECORDS,
        evict: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = MemoryStore(max_records=max_records, evict=evict, clock=clock)

    async def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        return self._store.ask(request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer each request; the error of one is its answer."""
        return self._store.send(requests)

    async def close(self) -> None:
        """Nothing was opened; the records stay as long as the store object does."""
        self._store.close()


class Records:
    """At most `room` records, in any order, with an agenda of when each may go.

        ended           when it expires
        abandoned       its lease plus the ttl of its claim, unless it is held
        held, running   never

    It judges no request, reads no clock and takes no lock. An exception of a signal handler may
    come between two lines: the agenda may then have an entry too many, which means nothing, but
    never one too few, by which a record would stay for ever.
    """

    def __init__(self, room: int, *, evicts: bool = False) -> None:
        """`evicts`: it will be asked to drop the oldest that has ended."""
        self.room = room
        self._evicts = evicts
        self._records: dict[Identity, Record] = {}
        self.find = self._records.get  # not wrapped in a function: every verb begins with it
        """Look a record up as it was stored last, expired or not."""
        self._ttls: dict[Identity, float] = {}
        """What the claim of a running record asked for; it counts once the lease has ended."""
        self._finished: OrderedDict[Identity, None] = OrderedDict()
        """If it evicts, oldest first. A dict finds its first key slowly once many are gone."""
        self._due: dict[Identity, float] = {}
        """The agenda's one valid entry for each record that may go."""
        self._agenda: list[tuple[float, str, str]] = []
        """A heap of (due, key, scope). Entries that `_due` does not confirm are stale."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def has_room(self, now: float) -> bool:
        """Whether one more record fits, after a few that may go by now have gone."""
        if self._agenda and self._agenda[0][0] <= now:
            self._drop_due(now)
        return len(self._records) < self.room

    def place(self, record: Record, ttl: float | None = None) -> None:
        """Store a record; `ttl` comes with a claim."""
        identity = record.identity
        running = record.state is PROCESSING
        if ttl is not None:
            self._ttls[identity] = ttl
        self._schedule(identity, self._first_look_at(record) if running else record.expires_at)
        self._records[identity] = record
        if not running:
            self._ttls.pop(identity, None)
        if self._evicts:
            self._finished.pop(identity, None)
            if not running:
                self._finished[identity] = None

    def drop(self, identity: Identity) -> bool:
        """Remove a record, whatever its state."""
        found = self._records.pop(identity, None)
        self._ttls.pop(identity, None)
        self._finished.pop(identity, None)
        self._due.pop(identity, None)
        return found is not None

    def _drop_due(self, now: float) -> None:
        dropped = 0
        while dropped < SWEEP and self._agenda and self._agenda[0][0] <= now:
            due, key, scope = self._agenda[0]
            identity = Identity(scope, key)
            if self._due.get(identity) == due:
                record = self._records.get(identity)
                at = now if record is None else self._may_go_at(record)
                if at is None:  # held since it was put on the agenda
                    del self._due[identity]
                elif at > now:  # renewed, or touched
                    self._plan(identity, at)
                else:
                    self.drop(identity)
                    dropped += 1
            else:
                heapq.heappop(self._agenda)  # last: what is planned or dropped by now is stale

    def drop_oldest_finished(self) -> bool:
        """Remove the record that ended first; False when none has."""
        return bool(self._finished) and self.drop(next(iter(self._finished)))

    def _may_go_at(self, record: Record) -> float | None:
        if record.state is not PROCESSING:
            return record.expires_at
        if record.hold or record.lease_until is None:
            return None
        return record.lease_until + self._ttls[record.identity]

    def _first_look_at(self, record: Record) -> float | None:
        """Return when to see whether a running one may go: before it may.

        It will most likely end, and then go sooner than it may now: with one early look at it,
        its end needs no place of its own on the agenda.
        """
        if record.hold or record.lease_until is None:
            return None
        return min(record.lease_until, record.updated_at) + self._ttls[record.identity]

    def _schedule(self, identity: Identity, at: float | None) -> None:
        planned = self._due.get(identity)
        if at is None or (planned is not None and planned <= at):
            # Never, or not before the entry that exists: that one is set right when its time comes.
            return
        self._plan(identity, at)

    def _plan(self, identity: Identity, at: float) -> None:
        heapq.heappush(self._agenda, (at, identity.key, identity.scope))
        self._due[identity] = at
        if len(self._agenda) > 2 * len(self._records) + SLACK:
            # Mostly stale (a key forgotten and claimed in a loop): memory must stay bounded.
            agenda = [(due, one.key, one.scope) for one, due in self._due.items()]
            heapq.heapify(agenda)
            self._agenda = agenda
