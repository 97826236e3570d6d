# Generated from stores/answering.py by `make generate`: change that file instead.
"""The verbs of a store that answers requests, for threads.

A store says how one request is answered (`ask`), and how many are at once (`send`); each verb here
is a request. Errors of single members of a `send` are values in its answers, in the order of the
requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class AnsweringStore(ABC):
    """A store for threads."""

    @abstractmethod
    def ask(self, request: Request[T]) -> T:
        """Answer one request."""

    @abstractmethod
    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests about single records, many in one round trip where that can be."""

    @abstractmethod
    def close(self) -> None:
        """Release what this store opened itself."""

    # --- about one record ----------------------------------------------------------------

    def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation; the answer says who may, and what is known."""
        return self.ask(ask)

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the lease from now; 0 or less parks the attempt, abandoned that long ago."""
        return self.ask(RenewRequest(identity, owner, lease))

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the success of this owner's attempt; False when it was replaced."""
        return self.ask(CompleteRequest(identity, owner, result, ttl))

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
        return self.ask(FailRequest(identity, owner, error, retryable, keep_fingerprint, ttl, ran))

    def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        return self.ask(GetRequest(identity))

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        return self.ask(PutRequest(identity, owner, result, ttl))

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; False when there is none."""
        return self.ask(TouchRequest(identity, ttl))

    def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state; False when there was none."""
        return self.ask(ForgetRequest(identity))

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not; None = nothing to do."""
        return self.ask(AdoptRequest(identity, owner, lease))

    # --- about many ----------------------------------------------------------------------

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each."""
        return self.send(asks)

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each."""
        return self.send(asks)

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each."""
        return self.send(asks)

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each; the first error is raised."""
        return all_or_error(self.send([GetRequest(each) for each in identities]))

    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each."""
        return self.send(asks)

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each; the first error is raised."""
        return all_or_error(self.send([ForgetRequest(each) for each in identities]))

    # --- about all -----------------------------------------------------------------------

    def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page; `prefix` is the beginning of the key. A page may be short."""
        return self.ask(ScanRequest(scope, prefix, state, limit, cursor))

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records whose lease ended at least `older_than` seconds ago, oldest first."""
        return self.ask(StuckRequest(older_than, limit))

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        return self.ask(PurgeRequest(limit, abandoned_after))

    def counts(self) -> Counts:
        """Count the records by state."""
        return self.ask(CountRequest())
