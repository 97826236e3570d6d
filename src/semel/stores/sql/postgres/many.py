"""Sends many members as one statement, for threads. `aio_many` is the twin of this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.core.records import Claim, ClaimRequest, CompleteRequest, RenewRequest, Request
from semel.errors import StoreError
from semel.stores.batching import ALONE, Alone
from semel.stores.sql.postgres.executor import Executor
from semel.stores.sql.postgres.together import PostgresBatchVerbs, all_differ, each_its_own, parts
from semel.stores.sql.verbs import Operation

T = TypeVar("T")


class Together:
    """The verbs for many, each one statement; ALONE stands for what that cannot tell."""

    def __init__(self, verbs: PostgresBatchVerbs, executor: Executor, renewals: Executor) -> None:
        """`renewals` has a connection of its own: claims, however many, must not hold them up."""
        self._verbs = verbs
        self._executor = executor
        self._renewals = renewals

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        answer = _ANSWERS.get(kinds.pop()) if len(kinds) == 1 else None
        return [ALONE] * len(requests) if answer is None else answer(self, requests)

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError | Alone]:
        """`claim` for each."""
        if self._verbs.has_own_columns:  # their types are the application's: no array has them
            return [ALONE] * len(asks)
        return self._sent(self._executor, self._verbs.claim_together, asks)

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError | Alone]:
        """`complete` for each."""
        return self._sent(self._executor, self._verbs.complete_together, asks)

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError | Alone]:
        """`renew` for each, unless one is to be parked."""
        if any(ask.lease <= 0 for ask in asks):
            return [ALONE] * len(asks)
        return self._sent(self._renewals, self._verbs.renew_together, asks)

    def _sent(
        self,
        executor: Executor,
        together: Callable[[Sequence[Any]], Operation[list[Any]]],
        asks: Sequence[Any],
    ) -> list[Any]:
        if not asks or not all_differ(asks):
            return [ALONE] * len(asks)
        answers: list[Any] = []
        for part in parts(asks):
            answers += each_its_own((executor.run([together(part)]))[0], len(part))
        return answers


_ANSWERS: dict[type, Callable[..., Any]] = {
    ClaimRequest: Together.claim_many,
    CompleteRequest: Together.complete_many,
    RenewRequest: Together.renew_many,
}
"""Not in the object itself: it would stay until the garbage collector runs."""
