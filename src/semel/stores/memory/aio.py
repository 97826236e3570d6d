"""Records in the memory of one process, for asyncio."""

from __future__ import annotations

from collections.abc import Sequence

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
from semel.stores.base import Counts, Page
from semel.stores.memory.store import DEFAULT_MAX_RECORDS, Clock, MemoryStore


class AsyncMemoryStore:
    """A store for asyncio: a `MemoryStore` behind it, whose verbs never wait for anything.

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

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
        return self._store.claim(ask)

    async def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the owner's lease from now."""
        return self._store.renew(identity, owner, lease)

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        return self._store.complete(identity, owner, result, ttl)

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
        """Store the owner's failure."""
        return self._store.fail(
            identity,
            owner,
            error,
            retryable=retryable,
            keep_fingerprint=keep_fingerprint,
            ttl=ttl,
            ran=ran,
        )

    async def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        return self._store.get(identity)

    async def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running."""
        return self._store.put(identity, result, ttl, owner=owner)

    async def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now."""
        return self._store.touch(identity, ttl)

    async def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state."""
        return self._store.forget(identity)

    async def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not."""
        return self._store.adopt(identity, owner, lease)

    async def close(self) -> None:
        """Nothing was opened; the records stay as long as the store object does."""
        self._store.close()

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each; a member's refusal is its own."""
        return self._store.claim_many(asks)

    async def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each."""
        return self._store.complete_many(asks)

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each."""
        return self._store.renew_many(asks)

    async def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each."""
        return self._store.get_many(identities)

    async def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each; a member's refusal is its own."""
        return self._store.put_many(asks)

    async def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each."""
        return self._store.forget_many(identities)

    async def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records by key, then scope."""
        return self._store.scan(scope=scope, prefix=prefix, state=state, limit=limit, cursor=cursor)

    async def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records, oldest first."""
        return self._store.stuck(older_than=older_than, limit=limit)

    async def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        return self._store.purge(limit=limit, abandoned_after=abandoned_after)

    async def counts(self) -> Counts:
        """Count the records by state."""
        return self._store.counts()
