"""The twin of `many`, for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.core.records import Claim, ClaimRequest, CompleteRequest, RenewRequest, Request
from semel.errors import StoreError
from semel.stores.batching import ALONE, Alone
from semel.stores.sql.postgres.aio_executor import AsyncExecutor
from semel.stores.sql.postgres.together import PostgresBatchVerbs, all_differ, each_its_own, parts
from semel.stores.sql.verbs import Operation

T = TypeVar("T")


class AsyncTogether:
    """The verbs for many, each one statement; ALONE stands for what that cannot tell."""

    def __init__(
        self, verbs: PostgresBatchVerbs, executor: AsyncExecutor, renewals: AsyncExecutor
    ) -> None:
        """`renewals` has a connection of its own: claims, however many, must not hold them up."""
        self._verbs = verbs
        self._executor = executor
        self._renewals = renewals

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        answer = _ANSWERS.get(kinds.pop()) if len(kinds) == 1 else None
        return [ALONE] * len(requests) if answer is None else await answer(self, requests)

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError | Alone]:
        """`claim` for each."""
        if self._verbs.has_own_columns:  # their types are the application's: no array has them
            return [ALONE] * len(asks)
        return await self._sent(self._executor, self._verbs.claim_together, asks)

    async def complete_many(
        self, asks: Sequence[CompleteRequest]
    ) -> list[bool | StoreError | Alone]:
        """`complete` for each."""
        return await self._sent(self._executor, self._verbs.complete_together, asks)

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError | Alone]:
        """`renew` for each, unless one is to be parked."""
        if any(ask.lease <= 0 for ask in asks):
            return [ALONE] * len(asks)
        return await self._sent(self._renewals, self._verbs.renew_together, asks)

    async def _sent(
        self,
        executor: AsyncExecutor,
        together: Callable[[Sequence[Any]], Operation[list[Any]]],
        asks: Sequence[Any],
    ) -> list[Any]:
        if not asks or not all_differ(asks):
            return [ALONE] * len(asks)
        answers: list[Any] = []
        for part in parts(asks):
            answers += each_its_own((await executor.run([together(part)]))[0], len(part))
        return answers


_ANSWERS: dict[type, Callable[..., Any]] = {
    ClaimRequest: AsyncTogether.claim_many,
    CompleteRequest: AsyncTogether.complete_many,
    RenewRequest: AsyncTogether.renew_many,
}
"""Not in the object itself: it would stay until the garbage collector runs."""
