"""Who waits for the next batch, and who of them leaves with it.

This module decides. It sends nothing, and waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from msgspec import Struct

from semel.core.records import Identity
from semel.errors import StoreUnavailable

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Member(Struct, Generic[Ask, Answer], eq=False):
    """One request on its way, and the answer that its caller waits for."""

    ask: Ask
    identity: Identity
    weight: int
    """About how many bytes it adds to a batch."""
    answer: asyncio.Future[Answer]

    def succeed(self, answer: Answer) -> None:
        """Tell the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Tell the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Queue(Generic[Ask, Answer]):
    """The members of the next batches, in the order in which they came."""

    def __init__(self, *, most_members: int, most_bytes: int) -> None:
        """A batch ends with the member that fills it."""
        self._most_members = most_members
        self._most_bytes = most_bytes
        self._members: deque[Member[Ask, Answer]] = deque()

    def join(self, member: Member[Ask, Answer]) -> None:
        """Wait behind the others."""
        self._members.append(member)

    def next_batch(self) -> list[Member[Ask, Answer]]:
        """Take those who leave now; an identity is in a batch once."""
        batch: list[Member[Ask, Answer]] = []
        identities: set[Identity] = set()
        again: list[Member[Ask, Answer]] = []
        seats = self._seats()
        room = self._most_bytes
        while self._members and len(batch) < seats and room > 0:
            member = self._members.popleft()
            if member.answer.done():
                continue  # cancelled before it left
            if member.identity in identities:
                again.append(member)
                continue
            identities.add(member.identity)
            batch.append(member)
            room -= member.weight
        self._members.extendleft(reversed(again))
        return batch

    def _seats(self) -> int:
        # As many to each of the batches that it takes: after a full one, the few who are left
        # would come back alone, and go on to pay for a commit of their own.
        waiting = len(self._members)
        batches = _rounded_up(waiting, self._most_members)
        return _rounded_up(waiting, batches) if batches else 0

    def refuse(self, reason: str) -> None:
        """Let nobody wait any longer."""
        for member in self._members:
            member.fail(StoreUnavailable(reason))
        self._members.clear()


def _rounded_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
