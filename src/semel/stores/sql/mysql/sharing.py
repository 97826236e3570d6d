"""How members share a statement: who may, how many at once, and what its outcome is for each.

This module decides. It touches no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from semel.core.records import Identity, RenewRequest
from semel.stores.batching import MOST_MEMBERS, Request
from semel.stores.sql.members import all_differ, portions
from semel.stores.sql.mysql.errors import concerns_every_member

A = TypeVar("A", bound=Request)

MOST_BYTES: Final = 1 << 18
"""A batch ends with the member that fills it."""

HEAVY: Final = 1 << 17
"""Who weighs more goes alone. Quoting may double what is sent, and with these two limits it still
fits into a megabyte, the least `max_allowed_packet` in use: a server hangs up on larger packets,
and all members would be told of a lost connection."""


def cut(asks: Sequence[A], weight: Callable[[A], int]) -> list[list[A]]:
    """List the batches that are sent for these members; who is in none is asked for alone."""
    if not all_differ(asks):
        return []
    if len(asks) <= MOST_MEMBERS and sum(map(weight, asks)) <= HEAVY:
        return [list(asks)] if asks else []  # as those are that the batcher sends
    light = (ask for ask in asks if weight(ask) <= HEAVY)
    return list(portions(light, weight, most_members=MOST_MEMBERS, most_bytes=MOST_BYTES))


def weight_of_renewal(ask: RenewRequest) -> int:
    """Guess how much a renewal adds to a batch."""
    return 100 + len(ask.owner)


def told(outcomes: Iterable[tuple[Sequence[Request], Any]]) -> dict[Identity, Any]:
    """Turn the outcomes of batches into answers; who is not among them is asked for alone."""
    answers: dict[Identity, Any] = {}
    for asks, outcome in outcomes:
        if not isinstance(outcome, Exception):
            answers |= outcome
        elif concerns_every_member(outcome):
            answers |= {ask.identity: _copied(outcome) for ask in asks}
        # else the member that it belongs to meets it again
    return answers


def _copied(error: Exception) -> Exception:
    """Raised for many, one error would gather all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
