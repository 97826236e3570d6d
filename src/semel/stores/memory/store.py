"""Records in the memory of one process, for threads.

Every decision is `semel.core.judge`'s; this module holds the lock around each that may change
something. The lock is never held while anything else of the application runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from semel.core import judge
from semel.core.records import (
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    State,
)
from semel.errors import ConfigError, StoreError, StoreFull
from semel.stores.base import Counts, Page
from semel.stores.forking import follow_forks
from semel.stores.memory import listing
from semel.stores.memory.shelf import Shelf
from semel.stores.urls import whole_number

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")

Clock: TypeAlias = Callable[[], float]
Decision: TypeAlias = Callable[[Record | None, float], Record | None]

DEFAULT_MAX_RECORDS = 100_000


def steady_clock() -> Clock:
    """Seconds since the epoch that never jump: the wall clock once, then the monotonic one."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class MemoryStore:
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

    # --- the verbs -----------------------------------------------------------------------

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

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the owner's lease from now."""
        ask = RenewRequest(identity, owner, lease)
        return self._change(identity, lambda stored, now: judge.renew(stored, ask, now))

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        with self._lock:  # the same as `_change`, written out: every first execution ends here
            now, stored = self._clock(), self._find(identity)
            ask = CompleteRequest(identity, owner, result, ttl)
            record = judge.complete(stored, ask, now)
            if record is None:
                return False
            self._shelf.place(record)
            return True

    def fail(
        self,
        identity: Identity,
        owner: bytes,
        error: Encoded,
        *,
        retryable: bool,
        keep_fingerprint: bool,
        ttl: float,
        ran: bool = True,
    ) -> bool:
        """Store the owner's failure."""
        return self._change(
            identity,
            lambda stored, now: judge.fail(
                stored,
                owner,
                error,
                retryable=retryable,
                keep_fingerprint=keep_fingerprint,
                ttl=ttl,
                ran=ran,
                now=now,
            ),
        )

    def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        with self._lock:
            now = self._clock()
            record = judge.present(self._find(identity), now)
            return None if record is None else replace(record, now=now)

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running."""
        ask = PutRequest(identity, owner, result, ttl)
        return self._change(identity, lambda stored, now: judge.put(stored, ask, now))

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now."""
        return self._change(identity, lambda stored, now: judge.touch(stored, ttl, now))

    def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state."""
        with self._lock:
            known = judge.present(self._find(identity), self._clock()) is not None
            self._shelf.drop(identity)
            return known

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not."""
        ask = AdoptRequest(identity, owner, lease)
        return self._changed(identity, lambda stored, now: judge.adopt(stored, ask, now))

    def close(self) -> None:
        """Nothing was opened; the records stay as long as the store object does."""

    def _change(self, identity: Identity, decide: Decision) -> bool:
        return self._changed(identity, decide) is not None

    def _changed(self, identity: Identity, decide: Decision) -> Record | None:
        with self._lock:
            now, stored = self._clock(), self._find(identity)
            record = decide(stored, now)
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

    # --- many at once --------------------------------------------------------------------

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each; a member's refusal is its own."""
        return [_answer(self.claim, ask) for ask in asks]

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each."""
        return [self.complete(ask.identity, ask.owner, ask.result, ask.ttl) for ask in asks]

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each."""
        return [self.renew(ask.identity, ask.owner, ask.lease) for ask in asks]

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each."""
        return [self.get(identity) for identity in identities]

    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each; a member's refusal is its own."""
        return [
            _answer(lambda one: self.put(one.identity, one.result, one.ttl, owner=one.owner), ask)
            for ask in asks
        ]

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each."""
        return [self.forget(identity) for identity in identities]

    # --- listings ------------------------------------------------------------------------

    def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records by key, then scope."""
        with self._lock:
            records = listing.present(self._shelf, self._clock())
            return listing.page(
                records, scope=scope, prefix=prefix, state=state, limit=limit, cursor=cursor
            )

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records, oldest first."""
        with self._lock:
            records = listing.present(self._shelf, self._clock())
            return listing.stuck(records, older_than, limit)

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        with self._lock:
            removable = listing.removable(self._shelf, self._clock(), abandoned_after)
            gone = [record.identity for record in islice(removable, limit)]
            for identity in gone:
                self._shelf.drop(identity)
            return len(gone)

    def counts(self) -> Counts:
        """Count the records by state."""
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


def _answer(verb: Callable[[Ask], Answer], ask: Ask) -> Answer | StoreError:
    try:
        return verb(ask)
    except StoreError as refused:
        return refused
