"""The attempts that run in this process: what a function may ask its own, and when leases are due.

An `Attempt` is in a context variable while it runs, so that code deep inside can ask for it. A
`Lease` is its right to be the only one, and `Leases` has all leases of an engine. Times are of the
monotonic clock, counted from before the claim was sent. But for `Attempt.lost`, time is an
argument: this module never waits and never touches a store. `OwnerIds` alone is random.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, cast

from msgspec import UNSET, Struct, UnsetType

from semel.core.records import OWNER_BYTES, ClaimRequest, CompleteRequest, Identity, RenewRequest
from semel.core.run_info import OwnRunInfo
from semel.errors import ConfigError, DuplicateRequest, LeaseLost, StoreError, about

if TYPE_CHECKING:
    from contextvars import Token
    from weakref import ReferenceType

    from typing_extensions import TypeVar

    from semel.core.policy import Failure

    # `Attempt` without brackets is Attempt[Any]: Python itself knows such defaults from 3.13 on.
    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Result = TypeVar("Result")

_current: ContextVar[Attempt | None] = ContextVar("semel_current_attempt", default=None)

innermost = _current.get
"""Return the attempt that this context entered last, which may have ended; mostly None."""


class Attempt(Struct, Generic[Result], eq=False):
    """One attempt at an operation; `replayed` is True if it was done before and nothing runs.

    Examples:
        >>> with idem.attempt("order:42", scope="payments") as attempt:
        ...     attempt.number, attempt.replayed, attempt.scope
        (1, False, 'payments')
    """

    identity: Identity
    number: int = 1
    """The number of the attempt, from 1, which grows with every claim of the record."""
    fence: int = 0
    """The fencing token, which grows with every claim, even after the record is removed."""
    owner: bytes = b""
    replayed: bool = False
    protected: bool = True
    """False if it runs without a record (store_error="open", bypassed)."""
    store: object = None
    lease: Lease | None = None
    holder: ReferenceType[object] | None = None
    """Without a lease: what ends the attempt. If it has been collected, the attempt has ended."""
    running: bool = False
    outer: Attempt | None = None
    _result: Result | UnsetType = UNSET
    _token: Token[Attempt | None] | None = None
    _counts: dict[str, count[int]] = {}

    @property
    def scope(self) -> str:
        """The kind of operation."""
        return self.identity.scope

    @property
    def key(self) -> str:
        """The key of the operation."""
        return self.identity.key

    @property
    def result(self) -> Result:
        """The stored result of a replay, or the result that you set; otherwise None."""
        return cast("Result", None) if self._result is UNSET else self._result

    @result.setter
    def result(self, value: Result) -> None:
        if self.replayed:
            done = DuplicateRequest(
                "this operation was done before: its result is kept and cannot be set again"
            )
            raise about(done, self.identity)
        self._result = value

    @property
    def runs(self) -> bool:
        """Whether it was entered and not left; one whose call was interrupted runs no more."""
        if self.lease is not None:
            return self.running and not self.lease.orphaned
        return self.running and (self.holder is None or self.holder() is not None)

    @property
    def lost(self) -> bool:
        """True if the lease is lost: another attempt may be running."""
        # Asked of the clock, not of the timer: a process that was paused learns it at once.
        return self.lease is not None and self.lease.lost_at(monotonic())

    def derive(self, part: str) -> str:
        """Return a key for a downstream call, the same on every attempt of this operation.

        `part` names the call within the operation.

        Examples:
            >>> with idem.attempt("order:42") as attempt:
            ...     attempt.derive("capture")
            'capture-d74552dfc76f70017047060620334ccc'
        """
        return self.identity.derive(part)

    def derive_next(self, part: str) -> str:
        """Return a key for a downstream call that may come several times: the n-th has its own.

        `part` names the call, as in `derive`, whose key is the first one. Every attempt counts
        anew, so calls in the same order get the same keys.
        """
        # Both steps are atomic: threads of one attempt never get the same number.
        return self.identity.derive(part, next(self._counts.setdefault(part, count(1))))

    def check(self) -> None:
        """Raise `LeaseLost` if this attempt may have been replaced; call it before an effect."""
        if self.lost:
            lost = LeaseLost("the lease of this attempt was lost; another attempt may be running")
            raise about(lost, self.identity)

    def __enter__(self) -> None:
        """Become the current attempt of this context (for the engines)."""
        self.outer = None if innermost() is None else current_attempt()
        self.running = True
        self._token = _current.set(self)
        if self.lease is not None:
            self.lease.entered = True  # The last step: interrupted before it, nothing has run.

    def __exit__(self, *_: object) -> None:
        self.running = False
        token, self._token = self._token, None
        try:
            if token is not None:
                _current.reset(token)
        except ValueError:
            # Left in another context than it was entered in; `running` already tells the truth.
            pass

    def __repr__(self) -> str:
        return f"<Attempt {self.number} of {self.identity.key_digest} in {self.scope!r}>"


class Outcome(Generic[Result]):
    """The return value of `run`: the `value`, whether it was `replayed`, and its `attempt`."""

    __slots__ = ("attempt", "replayed", "value")

    def __init__(self, value: Result, attempt: Attempt[Result]) -> None:
        self.value = value
        self.replayed = attempt.replayed
        self.attempt = attempt

    @classmethod
    def of(cls, attempt: Attempt[Result]) -> Outcome[Result]:
        """Return the outcome of an attempt that has its result."""
        return cls(attempt.result, attempt)

    def __repr__(self) -> str:
        return f"Outcome({self.value!r}, replayed={self.replayed})"


def current_attempt() -> Attempt | None:
    """Return the attempt that is running in this context, or None.

    Examples:
        >>> current_attempt() is None
        True
    """
    attempt = _current.get()
    # A task that outlives the attempt it was started in keeps the variable, not the attempt.
    while attempt is not None and not attempt.runs:
        attempt = attempt.outer
    return attempt


def require_attempt() -> Attempt:
    """Return the attempt that is running in this context.

    Outside an attempt it raises `ConfigError`; `current_attempt` returns None there.

    Examples:
        >>> idem.execute("order:42", lambda: require_attempt().derive("capture"))
        'capture-d74552dfc76f70017047060620334ccc'
    """
    attempt = current_attempt()
    if attempt is None:
        raise ConfigError(
            "no attempt is running here: call this inside a function, an endpoint, or a handler "
            "that semel protects, in the thread or task that semel started it in"
        )
    return attempt


def is_nested(identity: Identity, store: object, around: Attempt | None) -> bool:
    """Return whether a running attempt around this call already has this record."""
    attempt = around
    while attempt is not None:
        if attempt.runs and attempt.store is store and attempt.identity == identity:
            return True
        attempt = attempt.outer
    return False


# --- leases ---------------------------------------------------------------------------------

RENEWALS_PER_LEASE = 3
"""A lease is renewed after a third of it: two renewals may fail before it is in danger."""

DANGER = 0.1
"""The last part of a lease: not renewed by then, the attempt counts as lost."""

LOST_LOOK = 0.05
"""Seconds between two looks for leases that are lost: less than the last part of most leases."""

CHUNK = 256
"""How many leases one batch renews, so that no batch holds up the others for long."""

SLOWEST_RETRY = 1.0

DOUBT_ROUNDS = 6
"""How often a claim of unknown fate is looked for, at doubling intervals: for half a minute."""

MOST_DOUBTS = 10_000
"""Beyond these, claims of unknown fate are left to their leases: the store has been away long."""


GIVING_BACK = "giving back"
"""Key of the timer that gives back claims whose outcome is unknown; it runs beside the timers of
the servers."""


class Lease(Struct, eq=False, gc=False):
    """One running attempt's right to be the only one, as far as this process knows."""

    identity: Identity
    owner: bytes
    number: int
    seconds: float
    began: float
    """Before the claim was sent."""
    until: float = math.inf
    due: float = math.inf
    rejected: bool = False
    reported_lost: bool = False
    ending: bool = False
    """The end of the attempt is being saved: only the answer to that counts, not the answer to a
    renewal."""
    renewing: bool = False
    """A renewal is on its way."""
    stopped: bool = False
    """It ended and it is not known how: nothing is renewed anymore."""
    failed_saves: int = 0
    park_again: bool = False
    """It was parked while a renewal was on its way, which may come later and hide that."""
    unsaved: CompleteRequest | None = None
    """A result that could not be saved yet."""
    stored: bool = False
    """The store has the result."""
    failure: Failure | None = None
    """What the store has recorded of the failure."""
    server: Hashable = None
    """Which of a store's servers has the record, as it was found when the timer first looked;
    None = not asked yet, or the store has only one."""
    thread: int = 0
    """The thread that claimed it."""
    entered: bool = False
    """Whether the function may have begun to run."""
    handed_over: bool = False
    """Whether a step in the background ends the attempt."""
    holder: ReferenceType[object] | None = None
    """The call that runs the attempt. If it has been collected, no code is left that could end the
    attempt."""
    run_info: OwnRunInfo | None = None
    """What the record says about this process; None = nothing."""
    why: str = "interrupted"
    """What the record says when the attempt is parked: the type of the exception. It is unknown
    of a call that is gone."""

    def __post_init__(self) -> None:
        self.until = self.began + self.seconds
        self.due = self.began + self.seconds / RENEWALS_PER_LEASE

    def __repr__(self) -> str:
        # Neither the key nor a result has any business in a traceback.
        return f"<Lease of attempt {self.number} of {self.identity.key_digest}>"

    def begin(self, sent: float) -> None:
        """Count from `sent`: the store's lease cannot end before ours."""
        self.reported_lost = False
        self.until = sent + self.seconds
        self.due = sent + self.seconds / RENEWALS_PER_LEASE

    def stop(self) -> None:
        """Leave the attempt as it is: nothing is renewed anymore, and nothing is lost."""
        self.ending = self.stopped = True
        self.until = self.due = math.inf

    def retry(self, now: float) -> None:
        """The store could not be reached: come back soon."""
        self.due = min(self.due, now + min(SLOWEST_RETRY, self.seconds * DANGER / 2))

    @property
    def ends_here(self) -> bool:
        """True while only the call that runs the attempt can end it."""
        return self.unsaved is None and not self.handed_over

    @property
    def orphaned(self) -> bool:
        """True when no call is left that could end the attempt."""
        return self.holder is not None and self.holder() is None and self.ends_here

    def lost_at(self, now: float) -> bool:
        """Whether another attempt may have begun, with a margin to stop in time."""
        return self.rejected or now >= self.danger

    def outlived_at(self, now: float) -> bool:
        """Whether the store may give the key away, also of an attempt that is not renewed."""
        return self.lost_at(now) or (
            self.stopped and now >= self.began + self.seconds * (1 - DANGER)
        )

    @property
    def danger(self) -> float:
        """When it counts as lost, unless it is renewed before."""
        return self.until - self.seconds * DANGER

    @property
    def renewal(self) -> RenewRequest:
        """What to ask of the store."""
        return RenewRequest(self.identity, self.owner, self.seconds)

    @property
    def parking(self) -> RenewRequest:
        """What to ask of the store when the attempt may have taken effect."""
        said = None if self.run_info is None else self.run_info.parked(self.why)
        return RenewRequest(self.identity, self.owner, 0.0, said)


class Doubt(Struct, gc=False):
    """A claim whose answer never came: no call waits for it, but the store may still apply it."""

    request: ClaimRequest
    due: float
    rounds: int = 0
    """How often the store had another answer for it."""


class Leases:
    """All running attempts of one engine.

    Single dictionary operations are atomic in CPython, so callers and the timer share it
    without a lock.
    """

    __slots__ = ("_replaced", "_running", "_unsure", "_unsure_due", "claiming", "look_at")

    def __init__(self) -> None:
        self.claiming: dict[bytes, tuple[int, ReferenceType[object]]] = {}
        """Claims that are not answered yet, by owner: the thread and the call of each."""
        self.look_at = -math.inf
        """When to ask `is_overdue` again; until then no lease is lost, and no claim in doubt."""
        self._running: dict[bytes, Lease] = {}
        self._replaced: dict[bytes, Lease] = {}
        """Attempts that have not ended, although the store has given their keys to others."""
        self._unsure: dict[bytes, Doubt] = {}
        self._unsure_due = math.inf

    def __len__(self) -> int:
        return len(self._running)

    def running(self, among: Sequence[Lease] | None = None) -> list[Lease]:
        """Attempts (of these) that have not ended yet, as far as a call can end them."""
        known = tuple(self._running.values())
        return [
            lease
            for lease in known
            if lease.unsaved is None
            and not lease.orphaned
            and (among is None or any(lease is one for one in among))
        ]

    def claims(self, among: Sequence[bytes] | None = None) -> list[bytes]:
        """Owners (of these) whose claims are not answered, or not given back, yet."""
        return [
            owner
            for owner, (_, call) in tuple(self.claiming.items())
            if call() is not None and (among is None or owner in among)
        ]

    def __contains__(self, lease: Lease | None) -> bool:
        return lease is not None and self._running.get(lease.owner) is lease

    def add(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        self._running[lease.owner] = lease

    def drop(self, lease: Lease) -> None:
        """The attempt has ended; nothing is renewed any more, and nothing can be lost."""
        self._running.pop(lease.owner, None)
        self._replaced.pop(lease.owner, None)
        lease.until = math.inf

    def place(self, server_of: Callable[[Identity], Hashable]) -> dict[Hashable, float]:
        """Find the server of each lease; returns when each of several has to be asked next."""
        earliest: dict[Hashable, float] = {}
        for lease in tuple(self._running.values()):
            if lease.server is None:
                lease.server = server_of(lease.identity)
                if lease.server is None:
                    return {}  # the store has only one: the others need not be asked for
            earliest[lease.server] = min(earliest.get(lease.server, math.inf), lease.due)
        return earliest

    def due(self, now: float, server: Hashable = None) -> list[list[Lease]]:
        """Leases to renew now, in chunks; those that are nearly due come along."""
        due = [
            lease
            for lease in tuple(self._running.values())
            if lease.server == server
            and not lease.stopped
            and lease.due <= now + lease.seconds / RENEWALS_PER_LEASE / 4
        ]
        return [due[start : start + CHUNK] for start in range(0, len(due), CHUNK)]

    def orphans(self, server: Hashable = None) -> list[Lease]:
        """Leases on a server whose calls ended without saying so: interrupted while cleaning up."""
        running = tuple(self._running.values())
        return [lease for lease in running if lease.orphaned and lease.server == server]

    def unsaved(self) -> list[tuple[Lease, CompleteRequest]]:
        """Ended attempts, each with the result that the store does not know yet."""
        running = sorted(self._running.values(), key=lambda lease: lease.failed_saves)
        return [(lease, lease.unsaved) for lease in running if lease.unsaved is not None]

    def put_off(self, lease: Lease, now: float) -> None:
        """Its result could not be saved: try again soon, but after those that failed less often."""
        lease.failed_saves += 1
        lease.retry(now)

    def doubt(self, request: ClaimRequest, now: float) -> float:
        """Remember a claim that may have been applied; returns when to give it back."""
        known = self._unsure.get(request.owner)
        if known is not None or len(self._unsure) < MOST_DOUBTS:
            soon = now + SLOWEST_RETRY
            self._unsure_due = min(self._unsure_due, soon) if self._unsure else soon
            # At the end: one that cannot be given back must not stand in the way of the others.
            self._unsure.pop(request.owner, None)
            self._unsure[request.owner] = Doubt(request, soon, 0 if known is None else known.rounds)
            self.look_at = -math.inf
        return self._unsure_due

    def doubtful(self, now: float) -> list[ClaimRequest]:
        """Claims to give back now."""
        if not self._unsure or now < self._unsure_due:
            return []
        # Not the earliest of those known now: another thread may doubt a claim at this very moment.
        self._unsure_due = now + SLOWEST_RETRY
        due = [doubt for doubt in tuple(self._unsure.values()) if doubt.due <= now]
        for doubt in due:
            doubt.due = now + SLOWEST_RETRY
        return [doubt.request for doubt in due]

    def not_found(self, request: ClaimRequest, now: float) -> float:
        """The store has something else: the claim was never applied, or its command is late.

        Remember it for some time, because a late command could still be granted; returns when to
        ask again, infinity when not at all.
        """
        known = self._unsure.get(request.owner)
        rounds = 1 if known is None else known.rounds + 1
        if rounds >= DOUBT_ROUNDS:
            self.settled(request)
            return math.inf
        due = self.doubt(request, now)
        doubt = self._unsure.get(request.owner)
        if doubt is not None:
            doubt.rounds, doubt.due = rounds, now + SLOWEST_RETRY * 2 ** (rounds - 1)
        return due

    def settled(self, request: ClaimRequest) -> None:
        """A doubtful claim was given back, or was never given."""
        # When to come back is left as it is: another thread may doubt a claim at this very moment.
        self._unsure.pop(request.owner, None)

    def newly_lost(self, now: float) -> list[Lease]:
        """Leases that are lost by the clock alone, each reported once."""
        lost = [
            lease
            for lease in tuple(self._running.values())
            if not lease.reported_lost and lease.lost_at(now)
        ]
        for lease in lost:
            lease.reported_lost = True
        return lost

    def is_overdue(self, identity: Identity, now: float) -> bool:
        """Whether an attempt of this key has not ended here, although its lease may have."""
        running = (*self._running.values(), *self._replaced.values())
        lost = [lease for lease in running if lease.outlived_at(now) and not lease.orphaned]
        if not lost and not self._unsure:
            self.look_at = now + LOST_LOOK
        return any(lease.identity == identity for lease in lost)

    def doubts(self, identity: Identity) -> list[ClaimRequest]:
        """Claims of this key that may have been applied, and that no call wants."""
        requests = [doubt.request for doubt in tuple(self._unsure.values())]
        return [request for request in requests if request.identity == identity]

    def next_danger(self) -> float:
        """When the next lease is lost unless it is renewed; infinity when none can be."""
        running = tuple(self._running.values())
        return min(
            (lease.danger for lease in running if not lease.reported_lost),
            default=math.inf,
        )

    def next_renewal(self, server: Hashable = None) -> float:
        """When the next lease of this server is due; infinity when nothing runs there."""
        running = tuple(self._running.values())
        return min(
            (lease.due for lease in running if lease.server == server and not lease.stopped),
            default=math.inf,
        )

    def next_doubt(self) -> float:
        """When the next claim has to be given back; infinity when there is none."""
        return self._unsure_due if self._unsure else math.inf

    def next_due(self) -> float:
        """When the timer has to come back; infinity when there is nothing to do."""
        return min(self.next_doubt(), self.next_renewal())

    def renewed(self, lease: Lease, answer: bool | StoreError, *, sent: float, now: float) -> bool:
        """Note what the store said; True when the lease is lost by this (reported once)."""
        if lease not in self or lease.stopped:
            return False  # The attempt ended meanwhile.
        if answer is True:
            already_reported = lease.reported_lost
            lease.begin(sent)
            # An answer that took longer than the lease does not end a loss that was already
            # reported.
            lease.reported_lost = already_reported and lease.lost_at(now)
            return False
        if answer is False and lease.unsaved is None:
            if lease.ending:
                # It may have ended before the renewal came: only the answer to that decides.
                lease.until = lease.due = math.inf
                return False
            lease.rejected = True
            self.drop(lease)
            self._replaced[lease.owner] = lease
            self.look_at = -math.inf
        else:
            # The next try decides. Rejected with a result to save, it may have been saved before
            # without our knowing: then nothing was lost, and only the save can show it.
            lease.due = math.inf
            lease.retry(now)
        # It may have ended between two renewals as well as during one: the clock alone decides.
        already_reported, lease.reported_lost = lease.reported_lost, lease.lost_at(now)
        return lease.reported_lost and not already_reported


_IDS_PER_BLOCK = 341
"""About 4 KiB of randomness at once: one system call for 341 attempts instead of one for each."""


class OwnerIds:
    """Hands out the random ids that name attempts; safe for threads without a lock."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: list[bytes] = []

    def next(self) -> bytes:
        """Return an id that no other attempt has."""
        try:
            # list.pop is atomic, with and without the GIL: no id is ever given twice.
            return self._ids.pop()
        except IndexError:
            block = os.urandom(_IDS_PER_BLOCK * OWNER_BYTES)
            fresh = [block[at : at + OWNER_BYTES] for at in range(0, len(block), OWNER_BYTES)]
            mine = fresh.pop()
            # Threads that refill together each made a block of their own; one of them is lost.
            self._ids = fresh
            return mine

    def reset(self) -> None:
        """Drop the ids made so far: after a fork the parent gives out the same ones."""
        self._ids = []
