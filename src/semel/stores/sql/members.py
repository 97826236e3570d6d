"""The members of a batch: their order, their portions, and an answer for each.

This module sorts and counts. It touches no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from semel.core.records import Identity
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


def each_its_own(told: Mapping[Identity, T], asks: Iterable[Request]) -> list[T | Alone]:
    """Give each member its answer; who has none has to be asked for again, alone."""
    return [told.get(ask.identity, ALONE) for ask in asks]


def left_open(asks: Sequence[A], answers: Sequence[object]) -> list[A]:
    """List the members that have to be asked for again."""
    return [ask for ask, answer in zip(asks, answers, strict=True) if answer is ALONE]


def filled_in(answers: Sequence[T | Alone], later: Iterable[T]) -> list[T]:
    """Put the later answers in the places that were left open."""
    rest = iter(later)
    return [next(rest) if answer is ALONE else answer for answer in answers]
