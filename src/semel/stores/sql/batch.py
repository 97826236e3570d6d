"""The members of a batch: their order, their portions, and an answer for each.

This module sorts and counts. It touches no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from semel.core.records import Identity
from semel.errors import StoreError
from semel.stores.batching import ALONE, Alone, Request

A = TypeVar("A", bound=Request)
T = TypeVar("T")


def all_differ(asks: Sequence[Request]) -> bool:
    """Whether no identity is there twice: else their order matters, and one statement has none."""
    return len({ask.identity for ask in asks}) == len(asks)


def in_order(asks: Iterable[A], digest: Callable[[Identity], bytes]) -> dict[bytes, A]:
    """Sort by digest, the one order for everybody: two batches then never deadlock."""
    by_digest = {digest(ask.identity): ask for ask in asks}
    return {key: by_digest[key] for key in sorted(by_digest)}


def portions(
    asks: Iterable[A], weight: Callable[[A], int], *, most_members: int, most_bytes: int
) -> Iterator[list[A]]:
    """Cut a long batch into some that a server takes; one ends with the member that fills it."""
    portion: list[A] = []
    room = most_bytes
    for ask in asks:
        portion.append(ask)
        room -= weight(ask)
        if len(portion) == most_members or room <= 0:
            yield portion
            portion, room = [], most_bytes
    if portion:
        yield portion


def each_its_own(answers: Mapping[Identity, T], asks: Iterable[Request]) -> list[T | Alone]:
    """Return the answer of each member; one that has none must be asked for again, alone."""
    return [answers.get(ask.identity, ALONE) for ask in asks]


def left_open(asks: Sequence[T], answers: Sequence[object]) -> list[T]:
    """List the members that have to be asked for again."""
    return [ask for ask, answer in zip(asks, answers, strict=True) if answer is ALONE]


def filled_in(answers: Sequence[T | Alone], later: Iterable[T]) -> list[T]:
    """Put the later answers in the places that were left open."""
    rest = iter(later)
    return [next(rest) if answer is ALONE else answer for answer in answers]


def answers_or_error(outcomes: list[Any]) -> list[Any]:
    """Return the answers of what was run; the first error of any kind is raised."""
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


def by_digest(asks: Sequence[Any]) -> list[int]:
    """Put the members of a batch in one order for everybody: two batches then never deadlock."""
    return sorted(range(len(asks)), key=lambda place: _rank(asks[place].identity))


def _rank(identity: Identity) -> bytes:
    try:
        return identity.digest
    except UnicodeEncodeError:  # no database takes such a key; it is refused on its own turn
        return b""


def put_back(outcomes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Put each outcome in the place that its request had before `by_digest`."""
    return [outcome for _, outcome in sorted(zip(order, outcomes, strict=True), key=itemgetter(0))]
