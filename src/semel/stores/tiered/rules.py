"""What the front may answer, and what may be written to it.

This module decides. It never waits, reads a clock, or touches the front or the store behind.

    the front has    it answers
    a copy           Finished, to every payload that does not differ
    a hint           Busy, to the very same payload
    anything else    nothing, and SQL is asked: a miss never means "new"

It is not asked at all for a caller that holds or replaces, for an owner that asks again, and while
a call here waits for the record to end: SQL tells that, and the front may not know it yet.

    SQL said         sent to the front
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
from typing import Any, Final, TypeAlias, TypeGuard

from msgspec import Struct
from msgspec.structs import replace

from semel.core.process import ForkSafeLock
from semel.core.records import (
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    Finished,
    ForgetRequest,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    State,
    TouchRequest,
)
from semel.errors import StoreError, StoreUnavailable
from semel.stores.redis.commands import SMALLEST_LIMIT, Command
from semel.stores.tiered.front import ABOVE_ALL, Calls, Found, Kind, Look, pack_body

LIMIT: Final = 100_000
"""The oldest note goes first; its attempt then ends without a copy in the front, no more."""

Key: TypeAlias = tuple[Identity, bytes]


class Note(Struct, frozen=True):
    """A claim that was given."""

    fence: int
    number: int
    fingerprint: bytes | None
    lease: float
    look: Look | None
    """What the front said before; None when its outcome must not be copied there."""


class Notes:
    """What a store remembers of the claims it has sent, until they end, by identity and owner.

    A claim is noted before it is sent: an owner whose answer was lost asks again, and must then be
    answered by SQL, not by a hint that another caller left in the front.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = ForkSafeLock()
        self._notes: dict[Key, Note | None] = {}
        """None: sent, and not answered yet."""

    def __contains__(self, key: Key) -> bool:
        return key in self._notes

    def sent(self, ask: ClaimRequest) -> None:
        """A claim is about to be sent."""
        with self._lock.lock:
            self._notes.setdefault((ask.identity, ask.owner), None)
            if len(self._notes) > self._limit:
                del self._notes[next(iter(self._notes))]

    def given(self, ask: ClaimRequest, claimed: Claimed, look: Look | None) -> bool:
        """The claim was given; tells whether this owner had it before."""
        known = self.find(ask.identity, ask.owner)
        had_it = known is not None and known.fence == claimed.fence
        if known is not None and had_it:
            # Only its lease is new: the record keeps what its first claim said.
            note = replace(known, lease=ask.lease)
        else:
            # Without a payload the record may have kept the one of an earlier attempt.
            exact = claimed.number == 1 or ask.fingerprint is not None
            copied = look if exact else None
            note = Note(claimed.fence, claimed.number, ask.fingerprint, ask.lease, copied)
        with self._lock.lock:
            self._notes[ask.identity, ask.owner] = note
        return had_it

    def find(self, identity: Identity, owner: bytes) -> Note | None:
        """Return the note of a claim that was given."""
        return self._notes.get((identity, owner))

    def take(self, identity: Identity, owner: bytes) -> Note | None:
        """Return the note of a claim that was given, and remove it."""
        with self._lock.lock:
            return self._notes.pop((identity, owner), None)


UNKNOWN_FENCE: Final = 0

HINTED: Final = 1.0
"""Seconds that a hint lasts. Its owner takes it away when the attempt ends, unless the front is out
of its reach: then no process would, and a waiting caller would wait for the whole lease."""

_KIND_OF: Final = {State.SUCCEEDED: Kind.SUCCEEDED, State.FAILED: Kind.FAILED}
_STATES: Final = {kind: state for state, kind in _KIND_OF.items()}

_CONCERNING: Final = frozenset(
    {
        ClaimRequest,
        RenewRequest,
        CompleteRequest,
        FailRequest,
        PutRequest,
        TouchRequest,
        ForgetRequest,
    }
)


class Asked(Struct, frozen=True):
    """A request that SQL is asked, and what was known before."""

    request: Request[Any]
    look: Look | None = None
    """What the front had said of a claim."""
    note: Note | None = None
    """What was noted of the attempt that an end is the end of."""

    @property
    def identity(self) -> Identity:
        """The identity that the request is about."""
        named: Identity = self.request.identity  # type: ignore[attr-defined]
        return named


class Tier:
    """The rules of one store, with its notes."""

    def __init__(self, prefix: str, front_ttl: float) -> None:
        self._calls = Calls(prefix, front_ttl)
        self._notes = Notes()
        self._lock = ForkSafeLock()
        self._waiting: Counter[Identity] = Counter()

    @contextmanager
    def asking_sql(self, identity: Identity) -> Iterator[None]:
        """While a caller waits for the record, the front is not asked about it."""
        with self._lock.lock:
            self._waiting[identity] += 1
        try:
            yield
        finally:
            with self._lock.lock:
                self._waiting[identity] -= 1
                if not self._waiting[identity]:
                    del self._waiting[identity]

    # --- what the front may answer -------------------------------------------------------

    def concerns(self, request: Request[Any]) -> bool:
        """Whether the front has to do with a request at all; SQL is asked of every other."""
        return type(request) in _CONCERNING

    def question(self, request: Request[Any]) -> Command[Found] | None:
        """What to ask the front; None when only SQL may answer."""
        if not isinstance(request, ClaimRequest) or request.hold or request.replace:
            return None
        if (request.identity, request.owner) in self._notes or request.identity in self._waiting:
            return None
        return self._calls.get(request.identity)

    def answer(self, request: Request[Any], look: Look | None) -> Finished | Busy | None:
        """What the front may answer by itself; None = ask SQL."""
        if not isinstance(request, ClaimRequest) or look is None or look.found.entry is None:
            return None
        entry = look.found.entry
        left = (entry.expires - look.found.now) / 1e6
        if left <= 0 or entry.kind is Kind.CLOSED:
            return None
        if entry.kind is Kind.HINT:
            return Busy(left) if entry.fingerprint == request.fingerprint else None
        if request.fingerprint is not None and entry.fingerprint not in (None, request.fingerprint):
            return None
        return Finished(_STATES[entry.kind], entry.outcome, entry.number, entry.fence, left)

    # --- what SQL is asked ---------------------------------------------------------------

    def sending(self, request: Request[Any], look: Look | None) -> Asked:
        """Note what is about to be sent to SQL.

        An end takes the note of its attempt, so that it is there for the first time only: what SQL
        answers to a repetition may have been stored long ago, with another result.
        """
        if isinstance(request, ClaimRequest):
            self._notes.sent(request)
        if isinstance(request, CompleteRequest | FailRequest):
            return Asked(request, look, self._notes.take(request.identity, request.owner))
        return Asked(request, look)

    def to_confirm(self, asked: Asked) -> list[Command[bool]]:
        """What the front has to confirm, before SQL is asked and again after it.

        To be kept for 0 seconds is to be forgotten. Of any other touch, a front that is not reached
        may answer for as long as it would have before.
        """
        match asked.request:
            case ForgetRequest(identity):
                return [self._forgotten(identity)]
            case TouchRequest(identity, ttl) if ttl <= 0:
                return [self._forgotten(identity)]
        return []

    # --- what is sent to the front ----------------------------------------------------------

    def updates(self, asked: Asked, answer: object, sent: float) -> list[Command[bool]]:
        """What to tell the front of SQL's answer to what was sent at `sent`."""
        if isinstance(asked.request, ClaimRequest):
            return self._claimed(asked.request, asked.look, answer, sent)
        if answer is not True:
            return []  # an error, too: perhaps it was applied, and the note stays
        match asked.request:
            case RenewRequest() as renewal:
                return self._renewed(renewal)
            case CompleteRequest(identity, _, result, ttl):
                outcome = State.SUCCEEDED, result
                return [self._copy(identity, asked.note, *outcome, valid=ttl, sent=sent)]
            case FailRequest(identity, _, error) as failure:
                if failure.retryable or not failure.keep_fingerprint or not failure.ran:
                    return [self._closed(asked.note, identity)]
                outcome = State.FAILED, error
                return [self._copy(identity, asked.note, *outcome, valid=failure.ttl, sent=sent)]
            case PutRequest(identity):
                return [self._closed(None, identity)]
            case TouchRequest(identity, ttl) if ttl > 0:
                return [self._forgotten(identity)]
        return []

    def _claimed(
        self, ask: ClaimRequest, look: Look | None, answer: object, sent: float
    ) -> list[Command[bool]]:
        if isinstance(answer, StoreError):
            return []  # perhaps it was applied: the note stays
        if isinstance(answer, Claimed):
            had_it = self._notes.given(ask, answer, look)
            # A payload that replaces another one is counted from 1 again.
            older = answer.number > 1 or ask.replace or _has_entry(look)
            return [self._calls.mark(ask.identity, answer.fence)] if had_it or older else []
        self._notes.take(ask.identity, ask.owner)
        if look is None or not isinstance(answer, Busy):
            return []
        body = pack_body(0, ask.fingerprint)
        valid = min(answer.retry_after, HINTED)
        identity, fence = ask.identity, UNKNOWN_FENCE
        return [
            self._calls.put(identity, Kind.HINT, fence, body, look=look, sent=sent, valid=valid)
        ]

    def _renewed(self, ask: RenewRequest) -> list[Command[bool]]:
        """Only a lease that ends sooner than a hint says matters."""
        note = self._notes.find(ask.identity, ask.owner)
        if note is not None and ask.lease >= note.lease:
            return []
        return [self._closed(note, ask.identity)]

    def wants_copy(self, asked: Asked, answer: object) -> bool:
        """Whether the front could have a copy of this record and has none."""
        look = asked.look
        if look is None or not isinstance(answer, Finished) or not _fits(answer.outcome):
            return False
        entry = look.found.entry
        return entry is None or entry.rank < (answer.fence, _KIND_OF[answer.state])

    def copies(
        self, wanted: Sequence[Asked], records: Sequence[Record | None], sent: float
    ) -> list[Command[bool]]:
        """Copy records; the question that read them was sent at `sent`."""
        return [
            self._copy(
                record.identity,
                Note(record.fence, record.number, record.fingerprint, 0.0, asked.look),
                record.state,
                record.outcome,
                valid=record.remaining,
                sent=sent,
            )
            for asked, record in zip(wanted, records, strict=True)
            if record is not None and _may_be_copied(record)
        ]

    def _closed(self, note: Note | None, identity: Identity) -> Command[bool]:
        """Of an end that the front must not answer with."""
        return self._calls.mark(identity, UNKNOWN_FENCE if note is None else note.fence)

    def _forgotten(self, identity: Identity) -> Command[bool]:
        """Of a record that is gone, or ends at another time."""
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
            return self._closed(note, identity)
        body = pack_body(note.number, note.fingerprint, outcome)
        return self._calls.put(
            identity, _KIND_OF[state], note.fence, body, look=note.look, sent=sent, valid=valid
        )


def not_confirmed(where: str) -> StoreUnavailable:
    """The error of a caller whose change may not have reached the front."""
    return StoreUnavailable(
        f"{where} did not confirm that this key is forgotten, and may answer with it until "
        "front_ttl has passed; forget it again when the front is back"
    )


def _fits(outcome: Encoded | None) -> TypeGuard[Encoded]:
    """Whether every front takes it: one that does not would hang up, and be taken for down."""
    return outcome is not None and len(outcome.data) <= SMALLEST_LIMIT


def _may_be_copied(record: Record) -> bool:
    ended = record.state is not State.PROCESSING and not record.retryable
    return ended and not record.hold and not record.superseded


def _has_entry(look: Look | None) -> bool:
    return look is not None and look.found.entry is not None
