"""One call, prepared, and the small rules that both engines follow while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from random import random
from weakref import WeakSet

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from semel.core.codec import encode_failure
from semel.core.decide import Wait
from semel.core.leases import DANGER, Lease
from semel.core.policy import Rules
from semel.core.records import (
    Claim,
    Claimed,
    ClaimRequest,
    Encoded,
    Ended,
    Finished,
    Identity,
)
from semel.core.results import keep
from semel.errors import SerializationError, StoreError, StoreUnavailable

SAVE_PATIENCE = 2.0
"""How long a call goes on telling the store its result before the timer takes over."""

MOST_CLAIMS = 3
"""How often one claim is sent when the answers come so late that its lease is used up."""

WAITING_IN_TRANSACTION = 2
"""How many calls may wait in their callers' transactions, unless `max_waiting` says so.

With the one that they wait for they take three connections. The smallest pool that people have
without a choice of their own (psycopg's) has four."""

RENEWAL_LOOK = 0.005
"""Seconds between two looks whether a renewal that is on its way has been answered."""

UNWANTED_LEASE = 2.0
"""Seconds after which a claim that nobody wants is free if its giving back fails half-way."""

UNWANTED_TTL = 300.0
"""How long it is remembered that a claim which nobody wanted was given back."""


class Call(Struct, eq=False, weakref=True):
    """What to do, for which payload, under which rules; and what it may have to give back."""

    identity: Identity
    fingerprint: bytes | None
    rules: Rules
    returns: object = None
    keeps_value: bool = True
    """False for `consume`: only that it was done is stored."""
    asked: ClaimRequest | None = None
    """The claim that the store may hold for this call."""
    lease: Lease | None = None
    """The lease of the claim that the store gave."""
    generation: int = 0
    """Of its identity when the call began: an execution is not shared over a `forget`."""
    shares: bool = True
    """False for a call that may not wait for others of its process: too many do."""

    @property
    def place(self) -> tuple[Identity, bytes | None, int] | None:
        """Calls of a process with the same place share one execution; None = this one does not."""
        if self.keeps_value and self.rules.waits and self.shares:
            return self.identity, self.fingerprint, self.generation
        return None

    def ask(self, owner: bytes) -> ClaimRequest:
        """Make the claim of this call for a new owner."""
        rules = self.rules
        return ClaimRequest(
            self.identity,
            owner,
            self.fingerprint,
            rules.lease,
            rules.ttl,
            rules.hold,
            rules.replace,
            rules.max_attempts,
        )


class WaitingCalls:
    """Counts the calls of an engine that wait for another one, and bounds how many may.

    The bound is for all keys together: waiting calls of any key take connections of the same pool.
    """

    def __init__(self, most: int | UnsetType | None) -> None:
        self.in_transaction = WAITING_IN_TRANSACTION if most is UNSET else most
        """The bound for calls that wait inside their caller's transaction; None = no bound."""
        self.elsewhere = None if most is UNSET else most
        """The bound for all other calls, which hold no connection while they wait."""
        # Weakly, and by call: one whose end was interrupted must not count for ever.
        self._calls: WeakSet[Call] = WeakSet()
        # A signal handler may make a call while its thread holds the lock.
        self._lock = threading.RLock()

    def join(self, call: Call, most: int | None) -> bool:
        """Count this call, once; False = so many wait already."""
        if most is None:
            return True
        with self._lock:
            if call not in self._calls and len(self._calls) >= most:
                return False
            self._calls.add(call)
            return True

    def leave(self, call: Call) -> None:
        """Count this call no more, if it was counted."""
        self._calls.discard(call)


def came_late(ask: ClaimRequest, late: Sequence[Claimed], spent: float) -> bool:
    """Whether a claim has to be sent again because its answer came so late.

    The same owner gets the claim again, with a new lease; or, if it was replaced meanwhile, the
    answer that everybody gets. The first answer may use up a third of the lease, after which it
    would be renewed. A repeated one is taken unless its lease counts as lost: more requests do not
    make a slow store faster. No function starts on a lease that is lost.
    """
    if late and spent < ask.lease * (1 - DANGER):
        return False
    tries = len(late) + 1
    if tries == MOST_CLAIMS:
        raise StoreUnavailable(
            f"the store took {spent:.3g} s to answer a claim whose lease is {ask.lease:g} s, after "
            f"{tries} tries; nothing ran. Find out why it is slow, or use a longer lease"
        )
    return True


def as_first_told(step: Claimed, late: Sequence[Claimed]) -> Claimed:
    """Only the first answer to a claim tells whether it was a takeover, not a repeated one."""
    return next((first for first in late if first.number == step.number), step)


def unwanted(ask: ClaimRequest) -> ClaimRequest:
    """The claim that asks only for what its owner has already, or for a key that nobody uses.

    Given to nobody's benefit, it must replace no result and take over no attempt; and if even its
    end is lost, the key must not stay held.
    """
    # No attempt at all: a record that no attempt counts in yet belongs to somebody, too.
    lease = min(ask.lease, UNWANTED_LEASE)
    return replace(ask, lease=lease, hold=False, replace=False, max_attempts=0)


GIVEN_BACK = encode_failure(InterruptedError("nobody waited for this claim any more"))
"""The outcome of a claim that was given back before its function ran."""


def given_back(answer: Claim) -> bool:
    """Whether a late command of an unwanted claim can no longer be granted: its owner has ended."""
    return type(answer) is Claimed or (type(answer) is Finished and answer.outcome == GIVEN_BACK)


def pauses(rules: Rules) -> Iterator[float]:
    """Seconds between two questions: doubling up to a longest one, each with jitter."""
    pause = rules.wait_interval
    while True:
        yield pause * (0.5 + random() / 2)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 2, rules.wait_interval_max)


def heard(ended: Ended | None, busy: Wait, call: Call) -> Finished | None:
    """What a wake-up answers this call with; None = only the store can.

    It counts only as the end of the very attempt that the store said was running: then the store's
    judgement of the payload still holds, and no stale or foreign message can be taken for it.
    """
    if ended is None or ended.owner != busy.owner or call.rules.replace:
        return None
    if None not in (ended.fingerprint, call.fingerprint) and ended.fingerprint != call.fingerprint:
        return None
    return ended.finished


class SavePatience:
    """How a call goes on telling the store its result, after the first failure."""

    def __init__(self, rules: Rules, now: float) -> None:
        self._end = now + SAVE_PATIENCE
        self._pauses = pauses(rules)

    def pause(self, now: float) -> float | None:
        """Seconds until the next try; None = the timer takes over."""
        pause = next(self._pauses)
        return None if now + pause > self._end else pause


def stored_form(value: object, identity: Identity, rules: Rules) -> Encoded:
    """Encode a value that nothing has run for: what cannot be kept is refused, not omitted."""
    kept = keep(value, rules.codec, identity, None, rules.max_result_bytes)
    if kept.interruption is not None:
        raise kept.interruption
    if kept.problem is not None:
        raise SerializationError(kept.problem)
    return kept.encoded


def as_store_error(error: Exception) -> StoreError:
    """A store should raise only its own kind of error; another one is treated alike."""
    if isinstance(error, StoreError):
        return error
    return StoreError(f"{type(error).__name__}: {error}")
