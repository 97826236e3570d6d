"""What the stores of all SQL databases share, for asyncio: a request becomes an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

from semel.core.records import ClaimRequest, Request
from semel.errors import StoreError
from semel.stores.base import AsyncStore, PurgeRequest
from semel.stores.sql.batch import answers_or_error, by_digest, own_errors, put_back
from semel.stores.sql.errors import RecordLocked, busy_if_locked
from semel.stores.sql.verbs import Dialect, Operation, operations_of

T = TypeVar("T")


class AsyncExecutor(Protocol):
    """Runs operations for tasks; each outcome is an answer or an error."""

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations; the outcomes come in their order."""
        ...

    async def close(self) -> None:
        """Release what was opened."""
        ...


class AsyncSQLStore(AsyncStore):
    """A store for asyncio."""

    def __init__(
        self, verbs: Dialect, executor: AsyncExecutor, upkeep: AsyncExecutor | None = None
    ) -> None:
        self._verbs = verbs
        self._operations = operations_of(verbs)
        self._executor = executor
        self._upkeep = executor if upkeep is None else upkeep
        """Runs what can wait, beside the calls where the database gains by that."""

    async def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        operation = self._operations[type(request)](request)
        if isinstance(request, PurgeRequest):
            return cast("T", answers_or_error(await self._upkeep.run([operation]))[0])
        try:
            return cast("T", await self._run(operation))
        except RecordLocked as locked:
            if isinstance(request, ClaimRequest):
                return cast("T", busy_if_locked(locked))
            raise

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests about single records, in one transaction."""
        order = by_digest(requests)
        ordered = [requests[place] for place in order]
        outcomes = await self._executor.run([self._operations[type(ask)](ask) for ask in ordered])
        answers = [
            busy_if_locked(outcome) if isinstance(ask, ClaimRequest) else outcome
            for ask, outcome in zip(ordered, outcomes, strict=True)
        ]
        return own_errors(put_back(answers, order))

    async def close(self) -> None:
        """Release what this store opened itself."""
        if self._upkeep is not self._executor:
            await self._upkeep.close()
        await self._executor.close()

    async def _run(self, operation: Operation[T]) -> T:
        return cast("T", answers_or_error(await self._executor.run([operation]))[0])
