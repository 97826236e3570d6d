"""The open cases of one reconciler: how often each was tried, and when to try again.

This module remembers, in memory alone: a restarted reconciler tries everything anew.
"""

from __future__ import annotations

from random import random

from msgspec import Struct

from semel.core.records import Identity, Record

LONGEST_PAUSE = 3600.0
"""Seconds between two tries, at most."""

_NEVER = float("inf")


class Case(Struct):
    """One abandoned attempt that could not be resolved so far."""

    number: int
    created_at: float
    """With the number: the same key, forgotten and used again, is another case."""
    tries: int = 0
    again_at: float = _NEVER
    """On the caller's clock; never, once a person has to decide."""


class Cases:
    """The cases that stay open between two runs."""

    def __init__(self, max_tries: int, backoff: float) -> None:
        self._max_tries = max_tries
        self._backoff = backoff
        self._open: dict[Identity, Case] = {}

    def due(self, now: float) -> list[Identity]:
        """List what was tried before and should be tried again by now."""
        return [identity for identity, case in self._open.items() if case.again_at <= now]

    def is_ready(self, record: Record, now: float) -> bool:
        """Tell whether a record is new here, or its time has come."""
        case = self._case(record)
        return case is None or case.again_at <= now

    def tried(self, record: Record, now: float) -> tuple[int, bool]:
        """Note a try in vain; tells how many there were, and whether that was the last one."""
        case = self._case(record) or Case(record.number, record.created_at)
        case.tries += 1
        last = case.tries >= self._max_tries
        pause = min(self._backoff * 2 ** (case.tries - 1), LONGEST_PAUSE)
        # Jitter: a hundred records of one outage should not be asked about in one burst.
        case.again_at = _NEVER if last else now + pause * (0.5 + random() / 2)  # noqa: S311 - no secret
        self._open[record.identity] = case
        return case.tries, last

    def leave(self, record: Record) -> None:
        """Leave a record to a person."""
        self._open[record.identity] = Case(record.number, record.created_at)

    def close(self, identity: Identity) -> None:
        """Forget a case: it was resolved, or it is somebody else's now."""
        self._open.pop(identity, None)

    def waiting(self) -> int:
        """Count the cases that a person has to decide."""
        return sum(case.again_at == _NEVER for case in self._open.values())

    def _case(self, record: Record) -> Case | None:
        case = self._open.get(record.identity)
        if case is None or (case.number, case.created_at) != (record.number, record.created_at):
            return None
        return case
