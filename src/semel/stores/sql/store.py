"""The store classes of every SQL database: each verb becomes an operation, an executor runs it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Protocol, TypeVar

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
from semel.stores.sql.dialect import Dialect
from semel.stores.sql.locks import RecordLocked, busy_if_locked
from semel.stores.sql.verbs import Operation

T = TypeVar("T")


class Executor(Protocol):
    """Runs operations for threads; each outcome is an answer or an error."""

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations; the outcomes come in their order."""
        ...

    def close(self) -> None:
        """Release what was opened."""
        ...


class SQLStore:
    """A store for threads."""

    def __init__(self, verbs: Dialect, executor: Executor, upkeep: Executor | None = None) -> None:
        self._verbs = verbs
        self._executor = executor
        self._upkeep = executor if upkeep is None else upkeep
        """Runs what can wait, beside the calls where the database gains by that."""

    def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
        try:
            return self._run(self._verbs.claim(ask))
        except RecordLocked as locked:
            return busy_if_locked(locked)

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the owner's lease from now."""
        return self._run(self._verbs.renew(RenewRequest(identity, owner, lease)))

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        return self._run(self._verbs.complete(CompleteRequest(identity, owner, result, ttl)))

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
        return self._run(
            self._verbs.fail(
                identity,
                owner,
                error,
                retryable=retryable,
                keep_fingerprint=keep_fingerprint,
                ttl=ttl,
                ran=ran,
            )
        )

    def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        return self._run(self._verbs.get(identity))

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running."""
        return self._run(self._verbs.put(PutRequest(identity, owner, result, ttl)))

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now."""
        return self._run(self._verbs.touch(identity, ttl))

    def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state."""
        return self._run(self._verbs.forget(identity))

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not."""
        return self._run(self._verbs.adopt(RenewRequest(identity, owner, lease)))

    def close(self) -> None:
        """Release what this store opened itself."""
        if self._upkeep is not self._executor:
            self._upkeep.close()
        self._executor.close()

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each, in one transaction."""
        answers = self._run_many([self._verbs.claim(ask) for ask in asks], named(asks))
        return [busy_if_locked(answer) for answer in answers]

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each, in one transaction."""
        return self._run_many([self._verbs.complete(ask) for ask in asks], named(asks))

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, in one transaction."""
        return self._run_many([self._verbs.renew(ask) for ask in asks], named(asks))

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each."""
        return self._run_all([self._verbs.get(identity) for identity in identities])

    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each, in one transaction."""
        return self._run_many([self._verbs.put(ask) for ask in asks], named(asks))

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each, in one transaction."""
        operations = [self._verbs.forget(identity) for identity in identities]
        return all_or_error(self._run_many(operations, identities))

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
        return self._run(self._verbs.page(scope, prefix, state, limit, cursor))

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records, oldest first."""
        return self._run(self._verbs.stuck(older_than, limit))

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        purging = self._verbs.purge(limit, abandoned_after)
        removed: int = all_or_error(self._upkeep.run([purging]))[0]
        return removed

    def counts(self) -> Counts:
        """Count the records by state."""
        return self._run(self._verbs.counts())

    def _run(self, operation: Operation[T]) -> T:
        return self._run_all([operation])[0]

    def _run_all(self, operations: Sequence[Operation[T]]) -> list[T]:
        return all_or_error(self._executor.run(operations))

    def _run_many(
        self, operations: Sequence[Operation[T]], identities: Sequence[Identity]
    ) -> list[T | StoreError]:
        order = by_digest(identities)
        outcomes = self._executor.run([operations[place] for place in order])
        return own_errors(put_back(outcomes, order))


def all_or_error(outcomes: list[Any]) -> list[Any]:
    """Answers only: the first error is raised."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def own_errors(outcomes: list[Any]) -> list[Any]:
    """Answers and store errors, each its member's own; anything else is raised."""
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, StoreError):
            raise outcome
    return outcomes


class _Asks(Protocol):
    @property
    def identity(self) -> Identity: ...


def named(asks: Sequence[_Asks]) -> list[Identity]:
    """List the identities that the requests are about."""
    return [ask.identity for ask in asks]


def by_digest(identities: Sequence[Identity]) -> list[int]:
    """Put the members of a batch in one order for everybody: two batches then never deadlock."""
    return sorted(range(len(identities)), key=lambda place: _rank(identities[place]))


def _rank(identity: Identity) -> bytes:
    try:
        return identity.digest
    except UnicodeEncodeError:  # no database takes such a key; it is refused on its own turn
        return b""


def put_back(outcomes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Give each outcome the place that its request had before `by_digest`."""
    return [outcome for _, outcome in sorted(zip(order, outcomes, strict=True), key=itemgetter(0))]
