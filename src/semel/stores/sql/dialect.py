"""What the store classes ask of a database: every verb, with its arguments, as an `Operation`."""

from __future__ import annotations

from typing import Protocol

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
from semel.stores.base import Counts, Page
from semel.stores.sql.verbs import Operation


class Dialect(Protocol):
    """The verbs of the store SPI on one table. `Verbs` is one that judges in Python."""

    def claim(self, ask: ClaimRequest) -> Operation[Claim]:
        """Ask to run the operation."""
        ...

    def renew(self, ask: RenewRequest) -> Operation[bool]:
        """Extend the owner's lease from now."""
        ...

    def complete(self, ask: CompleteRequest) -> Operation[bool]:
        """Store the owner's success."""
        ...

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
    ) -> Operation[bool]:
        """Store the owner's failure."""
        ...

    def get(self, identity: Identity) -> Operation[Record | None]:
        """Read the record; expired is absent."""
        ...

    def put(self, ask: PutRequest) -> Operation[bool]:
        """Mark as done without running."""
        ...

    def touch(self, identity: Identity, ttl: float) -> Operation[bool]:
        """Keep a finished record for `ttl` from now."""
        ...

    def forget(self, identity: Identity) -> Operation[bool]:
        """Remove the record, whatever its state."""
        ...

    def adopt(self, ask: RenewRequest) -> Operation[Record | None]:
        """Give an abandoned attempt to a resolver."""
        ...

    def page(
        self, scope: str | None, prefix: str, state: State | None, limit: int, cursor: str | None
    ) -> Operation[Page]:
        """List records by key, then scope."""
        ...

    def stuck(self, older_than: float, limit: int) -> Operation[list[Record]]:
        """Abandoned records, oldest first."""
        ...

    def purge(self, limit: int, abandoned_after: float | None) -> Operation[int]:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        ...

    def counts(self) -> Operation[Counts]:
        """Count the records by state."""
        ...
