"""What the store classes ask of a database: every verb, with its arguments, as an `Operation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from semel.core.records import (
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    FailRequest,
    ForgetRequest,
    GetRequest,
    PutRequest,
    Record,
    RenewRequest,
    TouchRequest,
)
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
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

    def fail(self, ask: FailRequest) -> Operation[bool]:
        """Store the owner's failure."""
        ...

    def get(self, ask: GetRequest) -> Operation[Record | None]:
        """Read the record; expired is absent."""
        ...

    def put(self, ask: PutRequest) -> Operation[bool]:
        """Mark as done without running."""
        ...

    def touch(self, ask: TouchRequest) -> Operation[bool]:
        """Keep a finished record for `ttl` from now."""
        ...

    def forget(self, ask: ForgetRequest) -> Operation[bool]:
        """Remove the record, whatever its state."""
        ...

    def adopt(self, ask: AdoptRequest) -> Operation[Record | None]:
        """Give an abandoned attempt to a resolver."""
        ...

    def page(self, ask: ScanRequest) -> Operation[Page]:
        """List records by key, then scope."""
        ...

    def stuck(self, ask: StuckRequest) -> Operation[list[Record]]:
        """Abandoned records, oldest first."""
        ...

    def purge(self, ask: PurgeRequest) -> Operation[int]:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        ...

    def counts(self, ask: CountRequest, /) -> Operation[Counts]:
        """Count the records by state."""
        ...


def operations_of(verbs: Dialect) -> dict[type, Callable[[Any], Operation[Any]]]:
    """Map each request to the verb that answers it."""
    return {
        ClaimRequest: verbs.claim,
        RenewRequest: verbs.renew,
        CompleteRequest: verbs.complete,
        FailRequest: verbs.fail,
        GetRequest: verbs.get,
        PutRequest: verbs.put,
        TouchRequest: verbs.touch,
        ForgetRequest: verbs.forget,
        AdoptRequest: verbs.adopt,
        ScanRequest: verbs.page,
        StuckRequest: verbs.stuck,
        PurgeRequest: verbs.purge,
        CountRequest: verbs.counts,
    }
