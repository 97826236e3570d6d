"""The twin of `store`, for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
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
from semel.stores.sql.store import all_or_error, by_digest, named, own_errors, put_back
from semel.stores.sql.verbs import Operation

T = TypeVar("T")


class AsyncExecutor(Protocol):
    """Runs operations for tasks; each outcome is an answer or an error."""

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations; the outcomes come in their order."""
        ...

    async def close(self) -> None:
        """Release what was opened."""
        ...


class AsyncSQLStore:
    """A store for asyncio: the same verbs, awaited."""

    def __init__(
        self, verbs: Dialect, executor: AsyncExecutor, upkeep: AsyncExecutor | None = None
    ) -> None:
        self._verbs = verbs
        self._executor = executor
        self._upkeep = executor if upkeep is None else upkeep
        """Runs what can wait, beside the calls where the database gains by that."""

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
        try:
            return await self._run(self._verbs.claim(ask))
        except RecordLocked as locked:
            return busy_if_locked(locked)

    async def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the owner's lease from now."""
        return await self._run(self._verbs.renew(RenewRequest(identity, owner, lease)))

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        return await self._run(self._verbs.complete(CompleteRequest(identity, owner, result, ttl)))

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
        return await self._run(
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

    async def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        return await self._run(self._verbs.get(identity))

    async def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running."""
        return await self._run(self._verbs.put(PutRequest(identity, owner, result, ttl)))

    async def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now."""
        return await self._run(self._verbs.touch(identity, ttl))

    async def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state."""
        return await self._run(self._verbs.forget(identity))

    async def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not."""
        return await self._run(self._verbs.adopt(RenewRequest(identity, owner, lease)))

    async def close(self) -> None:
        """Release what this store opened itself."""
        if self._upkeep is not self._executor:
            await self._upkeep.close()
        await self._executor.close()

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each, in one transaction."""
        answers = await self._run_many([self._verbs.claim(ask) for ask in asks], named(asks))
        return [busy_if_locked(answer) for answer in answers]

    async def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each, in one transaction."""
        return await self._run_many([self._verbs.complete(ask) for ask in asks], named(asks))

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, in one transaction."""
        return await self._run_many([self._verbs.renew(ask) for ask in asks], named(asks))

    async def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get` for each."""
        return await self._run_all([self._verbs.get(identity) for identity in identities])

    async def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put` for each, in one transaction."""
        return await self._run_many([self._verbs.put(ask) for ask in asks], named(asks))

    async def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget` for each, in one transaction."""
        operations = [self._verbs.forget(identity) for identity in identities]
        return all_or_error(await self._run_many(operations, identities))

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
        return await self._run(self._verbs.page(scope, prefix, state, limit, cursor))

    async def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records, oldest first."""
        return await self._run(self._verbs.stuck(older_than, limit))

    async def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        purging = self._verbs.purge(limit, abandoned_after)
        removed: int = all_or_error(await self._upkeep.run([purging]))[0]
        return removed

    async def counts(self) -> Counts:
        """Count the records by state."""
        return await self._run(self._verbs.counts())

    async def _run(self, operation: Operation[T]) -> T:
        return (await self._run_all([operation]))[0]

    async def _run_all(self, operations: Sequence[Operation[T]]) -> list[T]:
        return all_or_error(await self._executor.run(operations))

    async def _run_many(
        self, operations: Sequence[Operation[T]], identities: Sequence[Identity]
    ) -> list[T | StoreError]:
        order = by_digest(identities)
        outcomes = await self._executor.run([operations[place] for place in order])
        return own_errors(put_back(outcomes, order))
