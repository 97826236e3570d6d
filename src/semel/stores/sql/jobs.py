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

    __slots__ = ("_ticket", "members", "served")

    def __init__(self, operations: Sequence[Operation[Any]]) -> None:
        self.members = list(map(Member, operations))
        self._ticket = threading.Lock()
        self.served = False
        """Whether the runner has taken it."""

    def take(self) -> bool:
        """Decide its fate: the runner takes it to run it, a caller out of patience to drop it."""
        return self._ticket.acquire(blocking=False)

    def serve(self) -> bool:
        """Take it to run it; False when its caller has dropped it."""
        self.served = self.take()
        return self.served

    @property
    def done(self) -> bool:
        """Whether every member has its outcome."""
        return all(member.outcome is not PENDING for member in self.members)

    @property
    def outcomes(self) -> list[Any]:
        """The outcomes, in the order of the operations."""
        return [member.outcome for member in self.members]
