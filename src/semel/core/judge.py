"""The law of the record: what each verb does to it, for stores that judge in Python.

This module judges. It takes the record as it is and the time as an argument, and returns the
answer with the record as it should become. It never waits, reads a clock or touches a store.
The Redis scripts (`stores/redis/lua`) follow the same law in Lua; one contract suite proves both.
What an engine then does with the answer is in `semel.core.decide`.

`claim` judges in this order, and the first line that fits is the answer. Another payload is a
mismatch (strict), or replaces the old one (loose: the policy says mismatch="replace"):

    own        PROCESSING by this very owner           -> Claimed again, lease refreshed
    ended      this owner's attempt has ended          -> Finished, never a new claim
    mismatch   another payload (strict)                -> Mismatch
               a payload that was replaced (loose)     -> Mismatch(superseded)
    finished   SUCCEEDED, or FAILED for good           -> Finished (loose: claimed by a new payload)
    busy       PROCESSING, lease in the future         -> Busy
    held       abandoned, held by record or caller     -> Abandoned
    exhausted  as many attempts as the caller allows   -> Exhausted (not for a new payload)
    otherwise  absent, FAILED retryable, abandoned     -> Claimed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard, TypeVar, cast

from msgspec.structs import replace

from semel.core.records import (
    FAILED,
    PROCESSING,
    SUCCEEDED,
    SUPERSEDED_LIMIT,
    Abandoned,
    AdoptRequest,
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Exhausted,
    FailRequest,
    Finished,
    ForgetRequest,
    GetRequest,
    Mismatch,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    State,
    TouchRequest,
    checked_run_info,
)

T = TypeVar("T")

NEXT: dict[State | None, dict[str, State | None]] = {
    None: {"claim": PROCESSING, "put": SUCCEEDED},
    PROCESSING: {
        "claim": PROCESSING,  # again by its owner, or taken over when abandoned
        "renew": PROCESSING,
        "complete": SUCCEEDED,
        "fail": FAILED,
        "put": SUCCEEDED,  # only when abandoned and not held
        "adopt": PROCESSING,  # only when abandoned
        "forget": None,
    },
    SUCCEEDED: {
        "claim": PROCESSING,  # only by another payload under mismatch="replace"
        "complete": SUCCEEDED,  # the same owner, sent twice: the same answer
        "put": SUCCEEDED,  # the same owner, sent twice: the same answer
        "touch": SUCCEEDED,
        "forget": None,
    },
    FAILED: {
        "claim": PROCESSING,  # retryable, or another payload under mismatch="replace"
        "fail": FAILED,  # the same owner, sent twice: the same answer
        "put": SUCCEEDED,  # only when retryable
        "touch": FAILED,
        "forget": None,
    },
}
"""Which state each verb may lead to; None is "no record". Verbs left out are rejected."""


def answer(stored: Record | None, request: Request[T], now: float) -> tuple[T, Record | None]:
    """Judge a `request` about one record: return its answer, and the record as it should become.

    `stored` is the record that the store has, or None; `now` is the time on the store's clock. If
    the second value is `stored` itself, there is nothing to write. If it is None, remove the
    record, or there was none. Requests about all records (`LISTINGS`) are not judged here.
    """
    judged: Any
    match request:
        case ClaimRequest():
            judged, record = claim(stored, request, now)
        case GetRequest():
            found = present(stored, now)
            judged, record = None if found is None else replace(found, now=now), None
        case ForgetRequest():
            return cast("T", present(stored, now) is not None), None
        case AdoptRequest():
            judged = record = adopt(stored, request, now)
        case _:
            record = _WRITES[type(request)](stored, request, now)
            judged = record is not None
    return judged, stored if record is None else record


def present(record: Record | None, now: float) -> Record | None:
    """Expired means absent, whether or not a purge ran."""
    if record is None or (record.expires_at is not None and record.expires_at <= now):
        return None
    return record


def claim(  # noqa: C901 - one line of the law is one branch
    stored: Record | None, request: ClaimRequest, now: float
) -> tuple[Claim, Record | None]:
    """Judge a claim; the second value is the record to write, None when nothing changes."""
    record = present(stored, now)
    if record is None:
        return _claimed(None, request, now, fence_after=stored.fence if stored else 0)
    if record.owner == request.owner:
        return _own(record, request, now)
    replacing = False
    if _differ(record.fingerprint, request.fingerprint):
        if not request.replace:
            return Mismatch(), None
        replacing = True
    if request.replace and request.fingerprint in record.superseded:
        return Mismatch(superseded=True), None
    if _ended_for_good(record) and not replacing:
        return _finished(record, now), None
    if record.state is PROCESSING:
        if record.lease_until is not None and record.lease_until > now:
            return Busy(record.lease_until - now, record.owner), None
        if record.hold or request.hold:
            return Abandoned(record.number), None
    exhausted = request.max_attempts is not None and record.number >= request.max_attempts
    if exhausted and not replacing:
        return Exhausted(record.number), None
    return _claimed(record, request, now, fence_after=record.fence)


def first_claim(request: ClaimRequest, now: float) -> tuple[Claim, Record]:
    """Judge a claim of a key that was never used."""
    return _claimed(None, request, now, fence_after=0)


def renew(stored: Record | None, request: RenewRequest, now: float) -> Record | None:
    """Extend the owner's lease; 0 parks it from now on, less that long ago. None = rejected."""
    if not _running(stored, request.owner):
        return None
    run_info = stored.run_info if request.run_info is None else request.run_info
    lease_until = now + request.lease
    return replace(stored, lease_until=lease_until, updated_at=now, now=now, run_info=run_info)


def complete(stored: Record | None, request: CompleteRequest, now: float) -> Record | None:
    """Store the owner's success. None = rejected; an unchanged record = it was stored before."""
    record = present(stored, now)
    if record is None or record.owner != request.owner:
        return None
    if record.state is SUCCEEDED:
        return record
    if record.state is not PROCESSING:
        return None
    return _ended(record, SUCCEEDED, request.result, request.ttl, now)


def fail(stored: Record | None, request: FailRequest, now: float) -> Record | None:
    """Store the owner's failure. None = rejected; an unchanged record = it was stored before.

    With ran=False the function was never called: the attempt's number is given back.
    """
    record = present(stored, now)
    if record is not None and record.state is FAILED and record.owner == request.owner:
        return record
    if not _running(record, request.owner):
        return None
    ended = _ended(record, FAILED, request.error, request.ttl, now)
    return replace(
        ended,
        retryable=request.retryable,
        fingerprint=record.fingerprint if request.keep_fingerprint else None,
        number=record.number if request.ran else record.number - 1,
    )


def put(stored: Record | None, request: PutRequest, now: float) -> Record | None:
    """Mark as done without running. None = rejected; an unchanged record = it was put before."""
    record = present(stored, now)
    if record is None:
        fence_after, number, created_at = (stored.fence if stored else 0), 1, now
        superseded: tuple[bytes, ...] = ()
    elif record.owner == request.owner and record.state is SUCCEEDED:
        return record
    elif _ended_for_good(record) or (
        record.state is PROCESSING and (record.hold or _leased(record, now))
    ):
        return None
    else:
        fence_after, number, created_at = record.fence, record.number + 1, record.created_at
        superseded = record.superseded
    return Record(
        identity=request.identity,
        state=SUCCEEDED,
        owner=request.owner,
        number=number,
        fence=_next_fence(fence_after, now),
        hold=False,
        created_at=created_at,
        updated_at=now,
        superseded=superseded,
        expires_at=now + request.ttl,
        outcome=request.result,
        now=now,
    )


def adopt(stored: Record | None, request: AdoptRequest, now: float) -> Record | None:
    """Assign an abandoned attempt, held or not, to a resolver. None = there is nothing to resolve.

    The fence grows, so that a revived owner comes second everywhere; the number does not, because
    a resolver finds out what an attempt did and makes none of its own.
    """
    record = present(stored, now)
    if record is None or record.state is not PROCESSING:
        return None
    if record.owner != request.owner and _leased(record, now):
        return None
    fence = record.fence if record.owner == request.owner else _next_fence(record.fence, now)
    return replace(
        record,
        owner=request.owner,
        fence=fence,
        lease_until=now + request.lease,
        updated_at=now,
        now=now,
    )


def touch(stored: Record | None, request: TouchRequest, now: float) -> Record | None:
    """Keep a finished record for the `ttl` from now. None = there is none."""
    record = present(stored, now)
    if record is None or record.state is PROCESSING:
        return None
    return replace(record, expires_at=now + request.ttl, now=now)


_WRITES: Final[dict[type, Callable[[Record | None, Any, float], Record | None]]] = {
    RenewRequest: renew,
    CompleteRequest: complete,
    FailRequest: fail,
    PutRequest: put,
    TouchRequest: touch,
}


def _own(record: Record, request: ClaimRequest, now: float) -> tuple[Claim, Record | None]:
    if record.state is not PROCESSING:
        # A repeated command of an attempt that has ended: its caller is gone.
        return _finished(record, now), None
    refreshed = replace(record, lease_until=now + request.lease, updated_at=now, now=now)
    return Claimed(record.number, record.fence), refreshed


def _claimed(
    record: Record | None, request: ClaimRequest, now: float, *, fence_after: int
) -> tuple[Claim, Record]:
    number = 1 if record is None else record.number + 1
    fence = _next_fence(fence_after, now)
    previous = None if record is None else record.fingerprint
    superseded = () if record is None else record.superseded
    if previous is not None and _differ(previous, request.fingerprint):
        # A new payload is a new operation: the attempts of the old one do not count.
        number = 1
        superseded = (*superseded, previous)[-SUPERSEDED_LIMIT:]
    claimed = Record(
        identity=request.identity,
        state=PROCESSING,
        owner=request.owner,
        number=number,
        fence=fence,
        hold=request.hold,
        created_at=now if record is None else record.created_at,
        updated_at=now,
        # A caller without a payload does not erase what the key was first used for.
        fingerprint=previous if request.fingerprint is None else request.fingerprint,
        superseded=superseded,
        lease_until=now + request.lease,
        now=now,
        run_info=checked_run_info(request.run_info),
    )
    takeover = record is not None and record.state is PROCESSING
    return Claimed(number, fence, takeover), claimed


def _finished(record: Record, now: float) -> Finished:
    expires_at = now if record.expires_at is None else record.expires_at
    return Finished(
        record.state, record.outcome, record.number, record.fence, max(0.0, expires_at - now)
    )


def _ended(record: Record, state: State, outcome: Encoded, ttl: float, now: float) -> Record:
    return replace(
        record,
        state=state,
        outcome=outcome,
        lease_until=None,
        expires_at=now + ttl,
        updated_at=now,
        now=now,
        run_info=b"",
    )


def _running(record: Record | None, owner: bytes) -> TypeGuard[Record]:
    return record is not None and record.state is PROCESSING and record.owner == owner


def _leased(record: Record, now: float) -> bool:
    return record.lease_until is not None and record.lease_until > now


def _ended_for_good(record: Record) -> bool:
    return record.state is SUCCEEDED or (record.state is FAILED and not record.retryable)


def _differ(one: bytes | None, other: bytes | None) -> bool:
    """Absent on either side means not compared."""
    return one is not None and other is not None and one != other


def _next_fence(previous: int, now: float) -> int:
    return max(previous + 1, int(now * 1_000_000))
