"""Sends many members as one statement, for threads. `aio_many` is the twin of this module.

Batches have connections of their own, on which nothing waits for a lock: what an open transaction
has is asked for alone, so that the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.core.records import Claim, ClaimRequest, CompleteRequest, RenewRequest, Request
from semel.errors import StoreError
from semel.stores.batching import ALONE, Alone, weight_of_claim, weight_of_complete
from semel.stores.sql.members import each_its_own, filled_in, left_open, own_errors
from semel.stores.sql.mysql.errors import is_locked
from semel.stores.sql.mysql.threads import Executor
from semel.stores.sql.mysql.verbs import MySQLBatchVerbs, cut, told, weight_of_renewal

T = TypeVar("T")


class Together:
    """The verbs for many, each one statement; ALONE stands for what that cannot tell."""

    def __init__(self, verbs: MySQLBatchVerbs, batches: Executor, renewals: Executor) -> None:
        """`renewals` has a connection of its own: claims, however many, must not hold them up."""
        self._verbs = verbs
        self._claim = verbs.claim_together
        self._batches = batches
        self._renewals = renewals

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        answer = _ANSWERS.get(kinds.pop()) if len(kinds) == 1 else None
        return [ALONE] * len(requests) if answer is None else answer(self, requests)

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError | Alone]:
        """`claim` for each; with one of them locked, only what a look can tell."""
        parts = cut(asks, weight_of_claim)
        outcomes = self._batches.run([self._claim(part) for part in parts])
        met = list(zip(parts, outcomes, strict=True))
        again = [part for part, outcome in met if is_locked(outcome)]
        looks = self._batches.run([self._verbs.look_together(part) for part in again])
        return each_its_own(told([*met, *zip(again, looks, strict=True)]), asks)

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError | Alone]:
        """`complete` for each."""
        parts = cut(asks, weight_of_complete)
        outcomes = self._batches.run([self._verbs.complete_together(part) for part in parts])
        return each_its_own(told(zip(parts, outcomes, strict=True)), asks)

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, if need be one by one; nothing waits for a lock."""
        parts = cut(asks, weight_of_renewal)
        outcomes = self._renewals.run([self._verbs.renew_together(part) for part in parts])
        answers = each_its_own(told(zip(parts, outcomes, strict=True)), asks)
        rest = [self._verbs.renew(ask) for ask in left_open(asks, answers)]
        return filled_in(answers, own_errors(self._renewals.run(rest)))

    def close(self) -> None:
        """Close the connections."""
        self._batches.close()
        self._renewals.close()


_ANSWERS: dict[type, Callable[..., Any]] = {
    ClaimRequest: Together.claim_many,
    CompleteRequest: Together.complete_many,
    RenewRequest: Together.renew_many,
}
"""Not in the object itself: it would stay until the garbage collector runs."""
