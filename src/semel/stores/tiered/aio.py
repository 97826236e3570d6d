"""Redis in front, SQL behind, for asyncio.

This module is thin on purpose: `rules` says what the front may answer and what it is told,
`aio_front` sends it. `store` is its twin.
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
from semel.stores.base import AsyncNotifying, AsyncStore, AsyncWatch, Counts, OnFile, Page
from semel.stores.redis import AsyncRedisStore
from semel.stores.redis import open_async_store as open_redis
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT, open_async_store
from semel.stores.tiered.aio_front import AsyncFront
from semel.stores.tiered.breaker import Breaker
from semel.stores.tiered.opening import (
    FRONT_TIMEOUT,
    FRONT_TTL,
    AsyncBehind,
    check_behind_url,
    check_front_url,
    checked_behind,
    checked_front,
)
from semel.stores.tiered.rules import Judged, Tier


class AsyncTieredStore:
    """SQL decides, Redis saves work.

    `front` and `behind` are URLs, or stores of the application, which also closes them. What is
    opened by URL gets `prefix`; the store behind `timeout`, the front `front_timeout` and further
    options of redis-py. A store given as `front` keeps the time-outs it was opened with.
    """

    def __init__(
        self,
        front: str | AsyncRedisStore,
        behind: str | AsyncStore,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        front_ttl: Duration = FRONT_TTL,
        front_timeout: Duration = FRONT_TIMEOUT,
        **options: Any,
    ) -> None:
        longest = seconds("front_ttl", front_ttl)
        patience = seconds("front_timeout", front_timeout)
        self._opened: list[AsyncStore] = []
        if isinstance(front, str):
            check_front_url(front)
            front = open_redis(front, prefix=prefix, timeout=patience, **options)
            self._opened.append(front)
        else:
            front = checked_front(front, AsyncRedisStore, options)
        if isinstance(behind, str):
            check_behind_url(behind)
            behind = open_async_store(behind, prefix=prefix, timeout=timeout)
            self._opened.append(behind)
        self._behind: AsyncBehind = checked_behind(behind, asynchronous=True)
        transport = front.transport
        self._front = AsyncFront(transport, Breaker(transport.where, patience))
        self._tier = Tier(front.keys.prefix, longest)
        if isinstance(self._behind, AsyncNotifying):
            self._notifying: AsyncNotifying = self._behind
            self.watch = self._watch  # else nothing is to be heard, and there is no such method

    def __repr__(self) -> str:
        return f"<AsyncTieredStore in front of {self._behind!r}>"

    @property
    def path(self) -> str | None:
        """See `OnFile.path`: the records are in the store behind."""
        return self._behind.path if isinstance(self._behind, OnFile) else None

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation; the front answers if it may, else SQL."""
        (look,) = await self._front.look([self._tier.question(ask)])
        known = self._tier.answer(ask, look)
        if known is not None:
            return known
        self._tier.sending(ask)
        sent = monotonic()
        claim = await self._behind.claim(ask)
        await self._tell([Judged(ask, look, claim)], sent)
        return claim

    async def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the lease from now; 0 parks the attempt (abandoned from now on)."""
        renewed = await self._behind.renew(identity, owner, lease)
        if renewed:
            await self._front.tell(self._tier.renewed(RenewRequest(identity, owner, lease)))
        return renewed

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the success of this owner's attempt; False when it was replaced."""
        note = self._tier.ending(identity, owner)
        sent = monotonic()
        done = await self._behind.complete(identity, owner, result, ttl)
        if done:
            ask = CompleteRequest(identity, owner, result, ttl)
            await self._front.tell([self._tier.completed(note, ask, sent)])
        return done

    async def fail(
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
        done = await self._behind.fail(
            identity,
            owner,
            error,
            retryable=retryable,
            keep_fingerprint=keep_fingerprint,
            ttl=ttl,
            ran=ran,
        )
        if done and (retryable or not keep_fingerprint or not ran):
            await self._front.tell([self._tier.closed(note, identity)])
        elif done:
            await self._front.tell([self._tier.failed(note, identity, error, ttl, sent)])
        return done

    async def get(self, identity: Identity) -> Record | None:
        """Read the record as SQL has it."""
        return await self._behind.get(identity)

    async def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        done = await self._behind.put(identity, result, ttl, owner=owner)
        if done:
            await self._front.tell([self._tier.closed(None, identity)])
        return done

    async def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; False when there is none.

        A front that cannot be told may answer for as long as it would have before; but to be kept
        for 0 is to be forgotten, and raises if the front did not confirm, before and after.
        """
        if ttl <= 0:
            mark = self._tier.forgotten(identity)
            await self._front.confirm([mark])
            gone = await self._behind.touch(identity, ttl)
            await self._front.confirm([mark])
            return gone
        touched = await self._behind.touch(identity, ttl)
        if touched:
            await self._front.tell([self._tier.forgotten(identity)])
        return touched

    async def forget(self, identity: Identity) -> bool:
        """Remove the record; raises if the front did not confirm, before and after."""
        return (await self.forget_many([identity]))[0]

    async def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt; no hint outlives its lease."""
        return await self._behind.adopt(identity, owner, lease)

    async def close(self) -> None:
        """Close what was opened by URL."""
        for store in self._opened:
            await store.close()

    @contextmanager
    def _watch(self, identity: Identity) -> Iterator[AsyncWatch]:
        """Listen to SQL, and ask it alone meanwhile: the front may still say busy after the end."""
        with self._tier.asking_sql(identity), self._notifying.watch(identity) as watch:
            yield watch

    # --- Batching ------------------------------------------------------------------------

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each: one round trip to the front, one to SQL for what is left."""
        looks = await self._front.look([self._tier.question(ask) for ask in asks])
        known = [self._tier.answer(ask, look) for ask, look in zip(asks, looks, strict=True)]
        left = [place for place, answer in enumerate(known) if answer is None]
        for place in left:
            self._tier.sending(asks[place])
        sent = monotonic()
        claims = await self._behind.claim_many([asks[place] for place in left]) if left else []
        answers: dict[int, Claim | StoreError] = dict(zip(left, claims, strict=True))
        await self._tell(
            [Judged(asks[place], looks[place], answers[place]) for place in left], sent
        )
        return [answers[place] if each is None else each for place, each in enumerate(known)]

    async def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each, in one commit."""
        notes = [self._tier.ending(ask.identity, ask.owner) for ask in asks]
        sent = monotonic()
        answers = await self._behind.complete_many(asks)
        await self._front.tell(
            [
                self._tier.completed(note, ask, sent)
                for note, ask, answer in zip(notes, asks, answers, strict=True)
                if answer is True
            ]
        )
        return answers

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, in one commit."""
        answers = await self._behind.renew_many(asks)
        done = [ask for ask, answer in zip(asks, answers, strict=True) if answer is True]
        await self._front.tell([call for ask in done for call in self._tier.renewed(ask)])
        return answers

    async def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each."""
        return await self._behind.get_many(identities)

    async def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each, in one commit."""
        answers = await self._behind.put_many(asks)
        done = [ask for ask, answer in zip(asks, answers, strict=True) if answer is True]
        await self._front.tell([self._tier.closed(None, ask.identity) for ask in done])
        return answers

    async def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each; raises if the front did not confirm, before and after."""
        marks = [self._tier.forgotten(identity) for identity in identities]
        await self._front.confirm(marks)
        gone = await self._behind.forget_many(identities)
        await self._front.confirm(marks)
        return gone

    # --- Scannable -----------------------------------------------------------------------

    async def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page, as SQL has them."""
        return await self._behind.scan(
            scope=scope, prefix=prefix, state=state, limit=limit, cursor=cursor
        )

    async def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records, oldest first."""
        return await self._behind.stuck(older_than=older_than, limit=limit)

    async def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records from SQL; the front's entries go by themselves."""
        return await self._behind.purge(limit=limit, abandoned_after=abandoned_after)

    async def counts(self) -> Counts:
        """Count the records by state."""
        return await self._behind.counts()

    # --- what the front is told of claims --------------------------------------------------

    async def _tell(self, answered: Sequence[Judged], sent: float) -> None:
        await self._front.tell(
            [call for each in answered for call in self._tier.judged(each, sent)]
        )
        wanted = [each for each in answered if self._tier.wants_copy(each)]
        if wanted:
            await self._copy(wanted)

    async def _copy(self, wanted: Sequence[Judged]) -> None:
        sent = monotonic()
        with suppress(StoreError):  # the claim is answered; a copy is for those who come next
            records = await self._behind.get_many([each.ask.identity for each in wanted])
            await self._front.tell(self._tier.copies(wanted, records, sent))
