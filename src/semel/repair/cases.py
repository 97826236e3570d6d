"""The open cases of one reconciler: since when, how often each was tried, when to try again.

This module remembers, in memory alone: a restarted reconciler tries everything anew.
"""

from __future__ import annotations

from random import random

from msgspec import Struct

from semel.core.records import Identity, Record, State

LONGEST_PAUSE = 3600.0
"""Seconds between two tries, at most."""

_NOW = float("-inf")
_NEVER = float("inf")


class Case(Struct):
    """One abandoned attempt that is not resolved so far."""

    identity: Identity
    number: int
    created_at: float
    """With the number: the same key, forgotten and used again, is another case."""
    abandoned_at: float
    """When it was first seen to have no owner any more, on the store's clock."""
    tries: int = 0
    again_at: float = _NOW
    """On the caller's clock; never, once a person has to decide."""


class Cases:
    """The cases that stay open between two runs."""

    def __init__(self, max_tries: int, backoff: float) -> None:
        self._max_tries = max_tries
        self._backoff = backoff
        self._open: dict[Identity, Case] = {}

    def due(self, now: float) -> list[Identity]:
        """List what was looked into before and should be looked into again by now."""
        return [identity for identity, case in self._open.items() if case.again_at <= now]

    def is_ready(self, record: Record, now: float) -> bool:
        """Tell whether a record is new here, or its time has come."""
        case = self._case(record)
        return case is None or case.again_at <= now

    def open(self, record: Record) -> Case:
        """Give the case of a record, or begin one."""
        case = self._case(record)
        if case is None:
            assert record.lease_until is not None  # noqa: S101 - cases are PROCESSING
            # A record that was adopted just now has a lease of ours, which is no sign of life.
            abandoned_at = min(record.lease_until, record.now)
            case = Case(record.identity, record.number, record.created_at, abandoned_at)
            self._open[record.identity] = case
        return case

    def tried(self, record: Record, now: float) -> tuple[int, bool]:
        """Note a try in vain; tells how many there were, and whether that was the last one."""
        case = self.open(record)
        case.tries += 1
        last = case.tries >= self._max_tries
        pause = min(self._backoff * 2 ** (case.tries - 1), LONGEST_PAUSE)
        # Jitter: a hundred records of one outage should not be asked about in one burst.
        case.again_at = _NEVER if last else now + pause * (0.5 + random() / 2)  # noqa: S311 - no secret
        return case.tries, last

    def leave(self, record: Record) -> None:
        """Leave a record to a person."""
        self.open(record).again_at = _NEVER

    def close(self, identity: Identity) -> None:
        """Forget a case: it was decided."""
        del self._open[identity]

    def is_over(self, record: Record | None) -> bool:
        """Tell whether there is nothing left to decide: decided, gone, or another attempt."""
        return record is None or record.state is not State.PROCESSING or self._case(record) is None

    def waiting(self) -> list[Identity]:
        """List the cases that a person has to decide."""
        return [identity for identity, case in self._open.items() if case.again_at == _NEVER]

    def _case(self, record: Record) -> Case | None:
        case = self._open.get(record.identity)
        if case is None or (case.number, case.created_at) != (record.number, record.created_at):
            return None
        return case
