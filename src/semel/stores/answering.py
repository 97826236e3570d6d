"""The verbs of a store that answers requests, for asyncio.

A store says how one request is answered (`ask`), and how many are at once (`send`); each verb here
is a request. Errors of single members of a `send` are values in its answers, in the order of the
requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from semel.core.records import (
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    State,
    TouchRequest,
)
from semel.errors import StoreError
from semel.stores.base import (
    CountRequest,
    Counts,
    Page,
    PurgeRequest,
    ScanRequest,
    StuckRequest,
    all_or_error,
)

T = TypeVar("T")


class AsyncAnsweringStore(ABC):
    """A store for asyncio."""

    @abstractmethod
    def ask(self, request: Request[T]) -> Awaitable[T]:
        """Answer one request."""

    @abstractmethod
    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests about single records, many in one round trip where that can be."""

    @abstractmethod
    async def close(self) -> None:
        """Release what this store opened itself."""

    # --- about one record ----------------------------------------------------------------

    def claim(self, ask: ClaimRequest) -> Awaitable[Claim]:
        """Ask to run the operation; the answer says who may, and what is known."""
        return self.ask(ask)

    async def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the lease from now; 0 or less parks the attempt, abandoned that long ago."""
        return await self.ask(RenewRequest(identity, owner, lease))

    def complete(
        self, identity: Identity, owner: bytes, result: Encoded, ttl: float
    ) -> Awaitable[bool]:
        """Store the success of this owner's attempt; False when it was replaced."""
        return self.ask(CompleteRequest(identity, owner, result, ttl))

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
        return await self.ask(
            FailRequest(identity, owner, error, retryable, keep_fingerprint, ttl, ran)
        )

    async def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        return await self.ask(GetRequest(identity))

    async def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        return await self.ask(PutRequest(identity, owner, result, ttl))

    async def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; False when there is none."""
        return await self.ask(TouchRequest(identity, ttl))

    async def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state; False when there was none."""
        return await self.ask(ForgetRequest(identity))

    async def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not; None = nothing to do."""
        return await self.ask(AdoptRequest(identity, owner, lease))

    # --- about many ----------------------------------------------------------------------

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each."""
        return await self.send(asks)

    async def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each."""
        return await self.send(asks)

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each."""
        return await self.send(asks)

    async def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each; the first error is raised."""
        return all_or_error(await self.send([GetRequest(each) for each in identities]))

    async def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each."""
        return await self.send(asks)

    async def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each; the first error is raised."""
        return all_or_error(await self.send([ForgetRequest(each) for each in identities]))

    # --- about all -----------------------------------------------------------------------

    async def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page; `prefix` is the beginning of the key. A page may be short."""
        return await self.ask(ScanRequest(scope, prefix, state, limit, cursor))

    async def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records whose lease ended at least `older_than` seconds ago, oldest first."""
        return await self.ask(StuckRequest(older_than, limit))

    async def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        return await self.ask(PurgeRequest(limit, abandoned_after))

    async def counts(self) -> Counts:
        """Count the records by state."""
        return await self.ask(CountRequest())
