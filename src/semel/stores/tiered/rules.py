"""What the front may answer, and what may be written to it.

This module decides. It never waits, reads a clock, or touches the front or the store behind.

    the front has    it answers
    a copy           Finished, to every payload that does not differ
    a hint           Busy, to the very same payload
    anything else    nothing, and SQL is asked: a miss never means "new"

It is not asked at all for a caller that holds or replaces, for an owner that asks again, and while
somebody here waits for the record to end: SQL tells that, and the front may not know it yet.

    SQL said         the front is told
    Claimed          nothing; a mark, if something older may be there
    Busy             a hint that ends with the lease, and after `HINTED` at the latest
    Finished         a copy of the record, which is read for the purpose
    complete, fail   a copy, or a mark where none may be
    park, put        a mark
    touch, forget    a mark above all fences

No copy is made of a failure that may run again, of a held record, and of what was claimed under
mismatch="replace". Copies are exact: they have the record's own fingerprint, number and fence. A
record in the caller's transaction does not come this way: it is copied once SQL shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeGuard

from msgspec import Struct

from semel.core.records import (
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    Record,
    RenewRequest,
    State,
)
from semel.errors import StoreError
from semel.stores.redis.commands import SMALLEST_LIMIT, Command
from semel.stores.tiered.calls import ABOVE_ALL, Calls, Found, Look
from semel.stores.tiered.entries import Kind, pack_body
from semel.stores.tiered.locks import ForkSafeLock
from semel.stores.tiered.notes import Note, Notes

UNKNOWN_FENCE: Final = 0

HINTED: Final = 1.0
"""Seconds that a hint lasts. Its owner takes it away when the attempt ends, unless the front is out
of its reach: then nobody would, and who waits for it would wait for the whole lease."""

_KINDS: Final = {State.SUCCEEDED: Kind.SUCCEEDED, State.FAILED: Kind.FAILED}
_STATES: Final = {kind: state for state, kind in _KINDS.items()}


class Judged(Struct, frozen=True):
    """SQL's answer to a claim, and what the front had said before."""

    ask: ClaimRequest
    look: Look | None
    claim: Claim | StoreError


class Tier:
    """The rules of one store, with its notes."""

    def __init__(self, prefix: str, front_ttl: float) -> None:
        self._calls = Calls(prefix, front_ttl)
        self._notes = Notes()
        self._lock = ForkSafeLock()
        self._waiting: Counter[Identity] = Counter()

    @contextmanager
    def asking_sql(self, identity: Identity) -> Iterator[None]:
        """Somebody waits for the record: the front is not asked of it for so long."""
        with self._lock.lock:
            self._waiting[identity] += 1
        try:
            yield
        finally:
            with self._lock.lock:
                self._waiting[identity] -= 1
                if not self._waiting[identity]:
                    del self._waiting[identity]

    # --- claim ---------------------------------------------------------------------------

    def question(self, ask: ClaimRequest) -> Command[Found] | None:
        """What to ask the front; None when only SQL may answer."""
        if ask.hold or ask.replace or (ask.identity, ask.owner) in self._notes:
            return None
        if ask.identity in self._waiting:
            return None
        return self._calls.get(ask.identity)

    def answer(self, ask: ClaimRequest, look: Look | None) -> Finished | Busy | None:
        """What the front may answer by itself; None = ask SQL."""
        if look is None or look.found.entry is None:
            return None
        entry = look.found.entry
        left = (entry.expires - look.found.now) / 1e6
        if left <= 0 or entry.kind is Kind.CLOSED:
            return None
        if entry.kind is Kind.HINT:
            return Busy(left) if entry.fingerprint == ask.fingerprint else None
        if ask.fingerprint is not None and entry.fingerprint not in (None, ask.fingerprint):
            return None
        return Finished(_STATES[entry.kind], entry.outcome, entry.number, entry.fence, left)

    def sending(self, ask: ClaimRequest) -> None:
        """SQL is about to be asked."""
        self._notes.sent(ask)

    def judged(self, answered: Judged, sent: float) -> list[Command[bool]]:
        """What to tell the front of SQL's answer to a claim that was sent at `sent`."""
        ask, look, claim = answered.ask, answered.look, answered.claim
        if isinstance(claim, StoreError):
            return []  # perhaps it was applied: the note stays
        if isinstance(claim, Claimed):
            had_it = self._notes.given(ask, claim, look)
            # A payload that replaces another one is counted from 1 again.
            older = claim.number > 1 or ask.replace or _has_entry(look)
            return [self._calls.mark(ask.identity, claim.fence)] if had_it or older else []
        self._notes.take(ask.identity, ask.owner)
        if look is None or not isinstance(claim, Busy):
            return []
        body = pack_body(0, ask.fingerprint)
        valid = min(claim.retry_after, HINTED)
        identity, fence = ask.identity, UNKNOWN_FENCE
        return [
            self._calls.put(identity, Kind.HINT, fence, body, look=look, sent=sent, valid=valid)
        ]

    def wants_copy(self, answered: Judged) -> bool:
        """Whether the front could have a copy of this record and has none."""
        look, claim = answered.look, answered.claim
        if look is None or not isinstance(claim, Finished) or not _fits(claim.outcome):
            return False
        entry = look.found.entry
        return entry is None or entry.rank < (claim.fence, _KINDS[claim.state])

    def copies(
        self, wanted: Sequence[Judged], records: Sequence[Record | None], sent: float
    ) -> list[Command[bool]]:
        """Copy records; the question that read them was sent at `sent`."""
        return [
            self._copy(
                record.identity,
                Note(record.fence, record.number, record.fingerprint, 0.0, answered.look),
                record.state,
                record.outcome,
                valid=record.remaining,
                sent=sent,
            )
            for answered, record in zip(wanted, records, strict=True)
            if record is not None and _may_be_copied(record)
        ]

    # --- the other verbs -----------------------------------------------------------------

    def ending(self, identity: Identity, owner: bytes) -> Note | None:
        """Give the note of an attempt whose end is about to be sent, for the first time only.

        What SQL answers to a repetition may have been stored long ago, with another result.
        """
        return self._notes.take(identity, owner)

    def completed(self, note: Note | None, ask: CompleteRequest, sent: float) -> Command[bool]:
        """What to tell the front of a success."""
        return self._copy(ask.identity, note, State.SUCCEEDED, ask.result, valid=ask.ttl, sent=sent)

    def failed(
        self, note: Note | None, identity: Identity, error: Encoded, ttl: float, sent: float
    ) -> Command[bool]:
        """What to tell the front of a failure for good."""
        return self._copy(identity, note, State.FAILED, error, valid=ttl, sent=sent)

    def closed(self, note: Note | None, identity: Identity) -> Command[bool]:
        """What to tell the front of an end that it must not answer with."""
        return self._calls.mark(identity, UNKNOWN_FENCE if note is None else note.fence)

    def renewed(self, ask: RenewRequest) -> list[Command[bool]]:
        """What to tell the front of a renewal: only a lease that ends sooner than a hint says."""
        note = self._notes.find(ask.identity, ask.owner)
        if note is not None and ask.lease >= note.lease:
            return []
        return [self.closed(note, ask.identity)]

    def forgotten(self, identity: Identity) -> Command[bool]:
        """What to tell the front of a record that is gone, or ends at another time."""
        return self._calls.mark(identity, ABOVE_ALL)

    def _copy(
        self,
        identity: Identity,
        note: Note | None,
        state: State,
        outcome: Encoded | None,
        *,
        valid: float | None,
        sent: float,
    ) -> Command[bool]:
        if note is None or note.look is None or valid is None or not _fits(outcome):
            return self.closed(note, identity)
        body = pack_body(note.number, note.fingerprint, outcome)
        return self._calls.put(
            identity, _KINDS[state], note.fence, body, look=note.look, sent=sent, valid=valid
        )


def _fits(outcome: Encoded | None) -> TypeGuard[Encoded]:
    """Whether every front takes it: one that does not would hang up, and be taken for down."""
    return outcome is not None and len(outcome.data) <= SMALLEST_LIMIT


def _may_be_copied(record: Record) -> bool:
    ended = record.state is not State.PROCESSING and not record.retryable
    return ended and not record.hold and not record.superseded


def _has_entry(look: Look | None) -> bool:
    return look is not None and look.found.entry is not None
