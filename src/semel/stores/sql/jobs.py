"""A caller's operations on their way through a shared transaction."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from semel.stores.sql.verbs import Operation

PENDING: Final = object()
"""The outcome of an operation that has none yet."""


class Member(Struct):
    """One operation and, in the end, what became of it: its answer or its error.

    The collector follows it: an error knows the frames it came through, and they know the member.
    """

    operation: Operation[Any]
    outcome: Any = PENDING


class Job:
    """What one caller asked for, answered as a whole."""

    __slots__ = ("_ticket", "members")

    def __init__(self, operations: Sequence[Operation[Any]]) -> None:
        self.members = list(map(Member, operations))
        self._ticket = threading.Lock()

    def take(self) -> bool:
        """Decide its fate: the runner takes it to run it, a caller out of patience to drop it."""
        return self._ticket.acquire(blocking=False)

    @property
    def done(self) -> bool:
        """Whether every member has its outcome."""
        return all(member.outcome is not PENDING for member in self.members)

    @property
    def outcomes(self) -> list[Any]:
        """The outcomes, in the order of the operations."""
        return [member.outcome for member in self.members]
