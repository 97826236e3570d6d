"""Redis in front, SQL behind, for threads.

This module is thin on purpose: `rules` says what the front may answer and what it is told, `front`
sends it. `aio` is its twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from semel.core.policy import Duration, seconds
from semel.core.records import (
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
from semel.errors import StoreError
from semel.stores.base import Counts, Creating, Notifying, OnFile, Page, Store, Watch
from semel.stores.redis import RedisStore
from semel.stores.redis import open_store as open_redis
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT, open_store
from semel.stores.tiered.breaker import Breaker
from semel.stores.tiered.front import Front
from semel.stores.tiered.opening import (
    FRONT_TIMEOUT,
    FRONT_TTL,
    Behind,
    check_behind_url,
    check_front_url,
    checked_behind,
    checked_front,
)
from semel.stores.tiered.rules import Judged, Tier


class TieredStore:
    """SQL decides, Redis saves work.

    `front` and `behind` are URLs, or stores of the application, which also closes them. What is
    opened by URL gets `prefix`; the store behind `timeout`, the front `front_timeout` and further
    options of redis-py. A store given as `front` keeps the time-outs it was opened with.
    """

    def __init__(
        self,
        front: str | RedisStore,
        behind: str | Store,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        front_ttl: Duration = FRONT_TTL,
        front_timeout: Duration = FRONT_TIMEOUT,
        **options: Any,
    ) -> None:
        longest = seconds("front_ttl", front_ttl)
        patience = seconds("front_timeout", front_timeout)
        self._opened: list[Store] = []
        if isinstance(front, str):
            check_front_url(front)
            front = open_redis(front, prefix=prefix, timeout=patience, **options)
            self._opened.append(front)
        else:
            front = checked_front(front, RedisStore, options)
        if isinstance(behind, str):
            check_behind_url(behind)
            behind = open_store(behind, prefix=prefix, timeout=timeout)
            self._opened.append(behind)
        self._behind: Behind = checked_behind(behind, asynchronous=False)
        transport = front.transport
        self._front = Front(transport, Breaker(transport.where, patience))
        self._tier = Tier(front.keys.prefix, longest)
        if isinstance(self._behind, Notifying):
            self._notifying: Notifying = self._behind
            self.watch = self._watch  # else nothing is to be heard, and there is no such method

    def __repr__(self) -> str:
        return f"<TieredStore in front of {self._behind!r}>"

    @property
    def path(self) -> str | None:
        """See `OnFile.path`: the records are in the store behind."""
        return self._behind.path if isinstance(self._behind, OnFile) else None

    def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation; the front answers if it may, else SQL."""
        (look,) = self._front.look([self._tier.question(ask)])
        known = self._tier.answer(ask, look)
        if known is not None:
            return known
        self._tier.sending(ask)
        sent = monotonic()
        claim = self._behind.claim(ask)
        self._tell([Judged(ask, look, claim)], sent)
        return claim

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the lease from now; 0 parks the attempt (abandoned from now on)."""
        renewed = self._behind.renew(identity, owner, lease)
        if renewed:
            self._front.tell(self._tier.renewed(RenewRequest(identity, owner, lease)))
        return renewed

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the success of this owner's attempt; False when it was replaced."""
        note = self._tier.ending(identity, owner)
        sent = monotonic()
        done = self._behind.complete(identity, owner, result, ttl)
        if done:
            ask = CompleteRequest(identity, owner, result, ttl)
            self._front.tell([self._tier.completed(note, ask, sent)])
        return done

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
        """Store the failure of this owner's attempt; False when it was replaced."""
        note = self._tier.ending(identity, owner)
        sent = monotonic()
        done = self._behind.fail(
            identity,
            owner,
            error,
            retryable=retryable,
            keep_fingerprint=keep_fingerprint,
            ttl=ttl,
            ran=ran,
        )
        if done and (retryable or not keep_fingerprint or not ran):
            self._front.tell([self._tier.closed(note, identity)])
        elif done:
            self._front.tell([self._tier.failed(note, identity, error, ttl, sent)])
        return done

    def get(self, identity: Identity) -> Record | None:
        """Read the record as SQL has it."""
        return self._behind.get(identity)

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        done = self._behind.put(identity, result, ttl, owner=owner)
        if done:
            self._front.tell([self._tier.closed(None, identity)])
        return done

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; False when there is none.

        A front that cannot be told may answer for as long as it would have before; but to be kept
        for 0 is to be forgotten, and raises if the front did not confirm, before and after.
        """
        if ttl <= 0:
            mark = self._tier.forgotten(identity)
            self._front.confirm([mark])
            gone = self._behind.touch(identity, ttl)
            self._front.confirm([mark])
            return gone
        touched = self._behind.touch(identity, ttl)
        if touched:
            self._front.tell([self._tier.forgotten(identity)])
        return touched

    def forget(self, identity: Identity) -> bool:
        """Remove the record; raises if the front did not confirm, before and after."""
        return self.forget_many([identity])[0]

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt; no hint outlives its lease."""
        return self._behind.adopt(identity, owner, lease)

    def create_nothing(self) -> None:
        """Let the store behind create no table, if it is one that does."""
        if isinstance(self._behind, Creating):
            self._behind.create_nothing()

    def close(self) -> None:
        """Close what was opened by URL."""
        for store in self._opened:
            store.close()

    @contextmanager
    def _watch(self, identity: Identity) -> Iterator[Watch]:
        """Listen to SQL, and ask it alone meanwhile: the front may still say busy after the end."""
        with self._tier.asking_sql(identity), self._notifying.watch(identity) as watch:
            yield watch

    # --- Batching ------------------------------------------------------------------------

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each: one round trip to the front, one to SQL for what is left."""
        looks = self._front.look([self._tier.question(ask) for ask in asks])
        known = [self._tier.answer(ask, look) for ask, look in zip(asks, looks, strict=True)]
        left = [place for place, answer in enumerate(known) if answer is None]
        for place in left:
            self._tier.sending(asks[place])
        sent = monotonic()
        claims = self._behind.claim_many([asks[place] for place in left]) if left else []
        answers: dict[int, Claim | StoreError] = dict(zip(left, claims, strict=True))
        self._tell([Judged(asks[place], looks[place], answers[place]) for place in left], sent)
        return [answers[place] if each is None else each for place, each in enumerate(known)]

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each, in one commit."""
        notes = [self._tier.ending(ask.identity, ask.owner) for ask in asks]
        sent = monotonic()
        answers = self._behind.complete_many(asks)
        self._front.tell(
            [
                self._tier.completed(note, ask, sent)
                for note, ask, answer in zip(notes, asks, answers, strict=True)
                if answer is True
            ]
        )
        return answers

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, in one commit."""
        answers = self._behind.renew_many(asks)
        done = [ask for ask, answer in zip(asks, answers, strict=True) if answer is True]
        self._front.tell([call for ask in done for call in self._tier.renewed(ask)])
        return answers

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each."""
        return self._behind.get_many(identities)

    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each, in one commit."""
        answers = self._behind.put_many(asks)
        done = [ask for ask, answer in zip(asks, answers, strict=True) if answer is True]
        self._front.tell([self._tier.closed(None, ask.identity) for ask in done])
        return answers

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each; raises if the front did not confirm, before and after."""
        marks = [self._tier.forgotten(identity) for identity in identities]
        self._front.confirm(marks)
        gone = self._behind.forget_many(identities)
        self._front.confirm(marks)
        return gone

    # --- Scannable -----------------------------------------------------------------------

    def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page, as SQL has them."""
        return self._behind.scan(
            scope=scope, prefix=prefix, state=state, limit=limit, cursor=cursor
        )

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records, oldest first."""
        return self._behind.stuck(older_than=older_than, limit=limit)

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records from SQL; the front's entries go by themselves."""
        return self._behind.purge(limit=limit, abandoned_after=abandoned_after)

    def counts(self) -> Counts:
        """Count the records by state."""
        return self._behind.counts()

    # --- what the front is told of claims --------------------------------------------------

    def _tell(self, answered: Sequence[Judged], sent: float) -> None:
        self._front.tell([call for each in answered for call in self._tier.judged(each, sent)])
        wanted = [each for each in answered if self._tier.wants_copy(each)]
        if wanted:
            self._copy(wanted)

    def _copy(self, wanted: Sequence[Judged]) -> None:
        sent = monotonic()
        with suppress(StoreError):  # the claim is answered; a copy is for those who come next
            records = self._behind.get_many([each.ask.identity for each in wanted])
            self._front.tell(self._tier.copies(wanted, records, sent))
