"""Records in the memory of one process, for threads.

Every decision is `semel.core.judge`'s; this module holds the lock around each that may change
something. The lock is never held while anything else of the application runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from msgspec.structs import replace

from semel.core import judge
from semel.core.records import (
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Counts,
    Encoded,
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
from semel.stores.base import Store
from semel.stores.forking import follow_forks
from semel.stores.memory import listing
from semel.stores.memory.shelf import Shelf
from semel.stores.urls import whole_number

T = TypeVar("T")
Change = TypeVar(
    "Change", RenewRequest, CompleteRequest, FailRequest, PutRequest, TouchRequest, AdoptRequest
)

Clock: TypeAlias = Callable[[], float]
Decision: TypeAlias = Callable[[Record | None, Change, float], Record | None]

DEFAULT_MAX_RECORDS = 100_000


def steady_clock() -> Clock:
    """Seconds since the epoch that never jump: the wall clock once, then the monotonic one."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class MemoryStore(Store):
    """A store for threads.

    Holds at most `max_records`. When it is full, records that have expired go first, and
    abandoned ones that nobody holds once their ttl has passed too; then, with
    `evict="finished"`, the record that ended first; else a new key is refused with `StoreFull`
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
        self._shelf = Shelf(whole_number("max_records", max_records), evicts=self._evict_finished)
        self._find = self._shelf.find
        self._clock = steady_clock() if clock is None else clock
        self._lock = threading.Lock()
        follow_forks(self)

    def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        return cast("T", self._ANSWERS[type(request)](self, request))

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer each request; a member's refusal is its own."""
        return [self._own_answer(request) for request in requests]

    def _own_answer(self, request: Request[T]) -> T | StoreError:
        try:
            return self.ask(request)
        except StoreError as refused:
            return refused

    # --- about one record ----------------------------------------------------------------

    def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
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

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success; straight, for every first execution ends here."""
        return self._complete(CompleteRequest(identity, owner, result, ttl))

    def _renew(self, ask: RenewRequest) -> bool:
        return self._change(ask, judge.renew) is not None

    def _complete(self, ask: CompleteRequest) -> bool:
        with self._lock:  # the same as `_change`, written out
            now, stored = self._clock(), self._find(ask.identity)
            record = judge.complete(stored, ask, now)
            if record is None:
                return False
            self._shelf.place(record)
            return True

    def _fail(self, ask: FailRequest) -> bool:
        return self._change(ask, judge.fail) is not None

    def _get(self, ask: GetRequest) -> Record | None:
        with self._lock:
            now = self._clock()
            record = judge.present(self._find(ask.identity), now)
            return None if record is None else replace(record, now=now)

    def _put(self, ask: PutRequest) -> bool:
        return self._change(ask, judge.put) is not None

    def _touch(self, ask: TouchRequest) -> bool:
        return self._change(ask, judge.touch) is not None

    def _forget(self, ask: ForgetRequest) -> bool:
        with self._lock:
            known = judge.present(self._find(ask.identity), self._clock()) is not None
            self._shelf.drop(ask.identity)
            return known

    def _adopt(self, ask: AdoptRequest) -> Record | None:
        return self._change(ask, judge.adopt)

    def close(self) -> None:
        """Nothing was opened; the records stay as long as the store object does."""

    def _change(self, ask: Change, decide: Decision[Change]) -> Record | None:
        with self._lock:
            now, stored = self._clock(), self._find(ask.identity)
            record = decide(stored, ask, now)
            if record is not None:
                self._save(record, stored, now)
            return record

    def _save(
        self, record: Record, stored: Record | None, now: float, ttl: float | None = None
    ) -> None:
        if stored is None:
            self._make_room(now)
        self._shelf.place(record, ttl)

    def _make_room(self, now: float) -> None:
        if self._shelf.has_room(now):
            return
        if self._evict_finished and self._shelf.drop_oldest_finished():
            return
        raise StoreFull(
            f"the memory store holds {self._shelf.room} records and none may go: "
            "raise max_records, shorten the ttl, or ask for evict=finished"
        )

    # --- about many ----------------------------------------------------------------------

    def _scan(self, ask: ScanRequest) -> Page:
        with self._lock:
            records = listing.present(self._shelf, self._clock())
            return listing.page(
                records,
                scope=ask.scope,
                prefix=ask.prefix,
                state=ask.state,
                limit=ask.limit,
                cursor=ask.cursor,
            )

    def _stuck(self, ask: StuckRequest) -> list[Record]:
        with self._lock:
            records = listing.present(self._shelf, self._clock())
            return listing.stuck(records, ask.older_than, ask.limit)

    def _purge(self, ask: PurgeRequest) -> int:
        with self._lock:
            removable = listing.removable(self._shelf, self._clock(), ask.abandoned_after)
            gone = [record.identity for record in islice(removable, ask.limit)]
            for identity in gone:
                self._shelf.drop(identity)
            return len(gone)

    def _counts(self, _: CountRequest) -> Counts:
        with self._lock:
            return listing.counts(listing.present(self._shelf, self._clock()))

    # --- forks ---------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Hold the lock across the fork, so that the child's copy is whole."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Let the other threads go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Go on with a copy that is the child's own."""
        self._lock = threading.Lock()

    _ANSWERS: ClassVar[dict[type, Callable[..., Any]]] = {
        ClaimRequest: lambda store, ask: store.claim(ask),  # a subclass may have its own
        RenewRequest: _renew,
        CompleteRequest: _complete,
        FailRequest: _fail,
        GetRequest: _get,
        PutRequest: _put,
        TouchRequest: _touch,
        ForgetRequest: _forget,
        AdoptRequest: _adopt,
        ScanRequest: _scan,
        StuckRequest: _stuck,
        PurgeRequest: _purge,
        CountRequest: _counts,
    }
    """Of the class: bound methods would keep a store until the garbage collector runs."""
