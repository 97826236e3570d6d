"""How an engine handles a store's answers and the end of a function, and the events of both.

This module answers. It never waits and never touches the store.
"""

from __future__ import annotations

import math
from _thread import get_ident
from collections.abc import Iterator, Sequence
from random import random
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast
from weakref import WeakSet, ref

from msgspec.structs import replace

from semel import events
from semel.core.attempts import (
    DANGER,
    SLOWEST_RETRY,
    Attempt,
    Lease,
    Leases,
    OwnerIds,
    current_attempt,
    is_nested,
)
from semel.core.codec import StoredResult, decode_result, encode_failure, encode_result, omitted
from semel.core.decide import (
    Reject,
    UnstoredResponse,
    Wait,
    decide,
    outcome_unknown,
    verdict,
    waited_too_long,
)
from semel.core.policy import Rules
from semel.core.process import in_forked_child
from semel.core.records import (
    OMITTED,
    SUCCEEDED,
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    Record,
)
from semel.engine.colours.leaders import NoTimer, forget_shared_runs
from semel.engine.setup import CLOSED, Call, Digests, Setup, WaitingCalls, checked_store
from semel.errors import (
    ConfigError,
    IdempotencyError,
    LeaseLost,
    NestedCall,
    OutcomeUnknown,
    SerializationError,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TooManyWaiting,
    ValueRejected,
    about,
)
from semel.transactions import warn_inside

if TYPE_CHECKING:
    from semel.core.cache import FinishedCache
    from semel.core.policy import Failure


S = TypeVar("S")

T = TypeVar("T")


OUTAGES = (StoreUnavailable, StoreFull)
"""Errors for which `store_error="open"` runs unprotected. Any other error is permanent: the store
is reachable and rejects the call."""


ENDINGS_KEPT = 256
"""How many held attempts of its own an engine remembers the ending of."""


START_AGAIN = 0.1
"""Seconds after which a timer that could not be started is tried again."""


SAVE_FOR = 2.0
"""Seconds for which a call tries to save its result before the timer takes over."""


MOST_CLAIMS = 3
"""How often one claim is sent when the answers come so late that its lease is used up."""


RENEWAL_LOOK = 0.005
"""Seconds between two looks whether a renewal that is on its way has been answered."""

STORED_LOOK = 0.05
"""Seconds between two looks whether a result was stored late."""
CLOSING_LOOK = 5.0
"""Seconds for which that is looked after the engine was closed."""


UNWANTED_LEASE = 2.0
"""Seconds after which an unwanted claim is free if giving it back fails half-way."""


UNWANTED_TTL = 300.0
"""Seconds for which the store remembers that an unwanted claim was given back."""


class LeaseEvents:
    """What becomes of leases: it is announced, and a lease that has ended is dropped."""

    def __init__(self, announce: events.Announcer, leases: Leases) -> None:
        self._announce = announce
        self._leases = leases

    def announce(self, kind: type[events.Event], lease: Lease, **details: object) -> None:
        """Announce an event of the attempt that has this lease."""
        self._announce(kind(identity=lease.identity, number=lease.number, **details))

    def lost(self, lease: Lease) -> None:
        """Announce that another attempt may have replaced this one."""
        if not lease.rejected:  # else it was announced when the store rejected the renewal
            self.announce(events.LostLease, lease)

    def store_failed(self, lease: Lease, verb: str, error: Exception) -> None:
        """Announce that a call of the store failed."""
        self.announce(events.StoreFailed, lease, verb=verb, error=str(error))

    def renewed(self, lease: Lease, answer: bool | StoreError, sent: float) -> None:
        """Note the store's answer to a renewal, and announce a lease that is lost by it."""
        if isinstance(answer, StoreError):
            self.announce(events.RenewalFailed, lease, error=str(answer))
        if self._leases.renewed(lease, answer, sent=sent, now=monotonic()):
            self.announce(events.LostLease, lease)

    def without_value(self, lease: Lease, result: Encoded, error: Exception) -> Encoded | None:
        """What to store instead of a result that the store rejected; None = that is not the reason.

        The effect is done: a key that stays open for the sake of its result would run it again.
        """
        if not isinstance(error, ValueRejected) or result.codec == OMITTED:
            return None
        self.announce(events.ResultOmitted, lease, reason=f"the store rejected it: {error}")
        # Without the error's text, which names the server: duplicates may be anybody's.
        return omitted(f"the store rejected its {len(result.data)} bytes")

    def rejected_for_good(self, lease: Lease, error: Exception) -> None:
        """The store rejects the end of the attempt even without its result: do not try again."""
        self._leases.drop(lease)
        self.announce(
            events.ResultNotStored,
            lease,
            error=f"{error}. It is rejected even without the result and not tried again: when the "
            "lease ends, the key counts as abandoned",
        )


class Outcomes(Generic[S]):
    """Turns answers into attempts, results, errors and events; and what it knows for that."""

    shared_runs: Any  # `SharedRuns` and the renewer of the engine's own kind
    renewer: Any

    def __init__(self, setup: Setup, store: S) -> None:
        self.setup = setup
        self.store = store
        self.owns_store = setup.opening is not None
        """True when the store was opened here: then it is closed here, too."""
        self.announce = setup.announce
        self.timed = setup.announce.timed
        """Whether calls measure how long the store takes: only if a hook listens to it."""
        self.cache = setup.cache
        self.closed = False
        self.reset()
        _engines.add(self)

    def reset(self) -> None:
        """Begin with nothing running."""
        self.owners = OwnerIds()
        self.leases = Leases()
        self.lease_events = LeaseEvents(self.announce, self.leases)
        self.waiting = WaitingCalls(self.setup.max_waiting)
        self.in_background: set[Any] = set()
        self._endings: dict[Identity, tuple[int, str]] = {}
        """How held attempts of this engine ended: the number of each, and what happened."""

    def use_store(self, store: S) -> dict[str, Any]:
        """Go on with another store, as an engine that has just been made; for tests.

        Returns the state to go back to: everything that the engine knew of its own store.
        """
        store = checked_store(store, asynchronous=self.setup.asynchronous)
        if self.leases.running() or self.leases.claims():
            raise ConfigError(
                "this engine has calls that still run: its store can only be exchanged while none "
                "does, as a call must not claim in one store and save in the other"
            )
        before = vars(self)
        cache = None if self.cache is None else self.cache.emptied()
        fresh = {"store": store, "owns_store": False, "closed": False, "cache": cache}
        object.__setattr__(self, "__dict__", {**before, **fresh})
        self.reset()
        return before

    # --- before the claim ----------------------------------------------------------------

    def check_usable(self, call: Call) -> Attempt | None:
        """Reject a call that could only wait for itself, or that comes after the end.

        Gives the attempt around it, if any.
        """
        if self.closed:
            raise about(StoreUnavailable(CLOSED), call.identity)
        around = current_attempt()
        if around is not None and is_nested(call.identity, self.store, around):
            nested = NestedCall(
                "the running attempt asked for its own key; it would wait for itself for ever"
            )
            raise about(nested, call.identity)
        return around

    def _wait_limit(self, call: Call) -> float | None:
        """How long a call may wait in all, if it is usable; None = as long as its caller does."""
        limit = call.rules.wait_timeout
        if self.check_usable(call) is None:
            return limit
        warn_inside(self.store)
        # Two attempts that wait for each other's keys must not hang for ever.
        return call.rules.lease if limit is None else limit

    def _wait_here(self, call: Call) -> Wait:
        """Let a call wait for an attempt of its key that has not ended in this engine."""
        step = decide(Busy(SLOWEST_RETRY), call.rules)
        if isinstance(step, Reject):
            self.reject(call, step.error)
        return cast("Wait", step)

    # --- after the claim -----------------------------------------------------------------

    def _started(self, call: Call, owner: bytes, claimed: Claimed, sent: float) -> Attempt:
        """Begin an attempt that owns its record; its lease is counted from before the claim."""
        rules = call.rules
        lease = Lease(
            call.identity,
            owner,
            claimed.number,
            rules.lease,
            sent,
            thread=get_ident(),
            holder=ref(call),
            run_info=rules.run_info,
        )
        call.lease = lease  # First: an interruption from now on finds here what to give back.
        self.leases.add(lease)
        try:
            if self.closed:  # After `add`: `close` sets it first, and then looks at the leases.
                raise NoTimer(f"{CLOSED}; nothing ran")  # noqa: TRY301 - its lease is dropped below
            timer, watch = self.renewer.timer, self.renewer.watch
            if lease.due < timer.next:
                timer.due(lease.due)
            # Renewals may hang for longer than the lease: the watch reports its loss in time.
            if lease.danger < watch.next:
                watch.due(lease.danger)
            if claimed.takeover:
                self.announce(events.TakenOver(identity=call.identity, number=claimed.number))
            self.leases.claiming.pop(owner, None)
            return Attempt(
                call.identity, claimed.number, claimed.fence, owner, store=self.store, lease=lease
            )
        except BaseException:
            # It cannot be renewed, or a signal handler raised: nothing runs that has to be renewed.
            self.leases.drop(lease)
            raise

    def _replayed(self, call: Call, finished: Finished, *, waited: bool) -> Attempt:
        """Answer with a finished operation, if the rules permit that."""
        return self.answered(call, self._permitted(call, finished), waited=waited, asked=False)

    def _found(self, call: Call, finished: Finished, *, waited: bool) -> Attempt:
        """Answer with what the store has, and pass it to the calls here that wait for it."""
        self._share(call, finished)
        if self.cache is not None:
            self._remember(self.cache, call, finished)
        return self.answered(call, finished, waited=waited, asked=True)

    def answered(self, call: Call, finished: Finished, *, waited: bool, asked: bool) -> Attempt:
        """Return the result of a finished operation, which the rules permit.

        `asked` says that this call has asked the store: else the answer was known in this process.
        """
        value = (
            decode_result(
                finished.outcome, call.identity, call.returns, call.rules.codec, self.setup.codecs
            )
            if call.keeps_value
            else None
        )
        if self.announce.reaches(events.Replayed.level):
            self.announce(
                events.Replayed(
                    identity=call.identity,
                    number=finished.number,
                    waited=waited,
                    store_seconds=self.store_seconds(call) if asked else None,
                )
            )
        return Attempt(call.identity, finished.number, finished.fence, replayed=True, _result=value)

    def store_seconds(self, call: Call) -> float | None:
        """How long a call has waited for the store, which it has asked; None = not measured."""
        return call.store_seconds if self.timed else None

    def reject(self, call: Call, error: IdempotencyError, number: int | None = None) -> NoReturn:
        """Reject the call; `number` is of the attempt that is in its way."""
        if isinstance(error, OutcomeUnknown) and number is not None:
            known, ending = self._endings.get(call.identity, (number, None))
            ending = ending if known == number else None
            error = outcome_unknown(number, ending)
        self.announce(events.rejection(error, call.identity, number))
        raise about(error, call.identity)

    def _wait_timed_out(self, call: Call, retry_after: float) -> NoReturn:
        self.reject(call, waited_too_long(call.rules, retry_after))

    def too_many(self, call: Call, retry_after: float) -> NoReturn:
        """Reject the call, because so many wait already."""
        self.reject(call, TooManyWaiting(call.rules.message or "", retry_after=retry_after))

    def _left(self, call: Call, busy: Wait, end: float) -> float:
        """How many seconds this call may still wait."""
        left = end - monotonic()
        if left <= 0:
            self._wait_timed_out(call, busy.retry_after)
        return left

    def _permitted(self, call: Call, finished: Finished) -> Finished:
        """Return an outcome that the store was not asked for now, unless the rules reject it."""
        step = decide(finished, call.rules)
        if isinstance(step, Reject):
            self.reject(call, step.error, step.number)
        return finished

    def _without_store(self, call: Call, error: StoreError) -> Attempt:
        """The claim could not be made: fail, or run unprotected with a warning."""
        self.announce(events.StoreFailed(identity=call.identity, verb="claim", error=str(error)))
        # A closed engine runs nothing, not even unprotected.
        if self.closed or call.rules.store_error == "closed" or not isinstance(error, OUTAGES):
            # Without the traceback: that of an error which was shared is of another caller.
            raise about(error, call.identity).with_traceback(None)
        attempt: Attempt = Attempt(call.identity, protected=False)
        self.announce(events.RanUnprotected(identity=call.identity, number=attempt.number))
        return attempt

    def _not_claiming(self, call: Call, request: ClaimRequest) -> None:
        """The claim was answered, or it is given back."""
        self.leases.claiming.pop(request.owner, None)
        call.open_claim = None

    def claiming_here(self) -> list[bytes]:
        """Owners of the claims that the caller, a signal handler, has interrupted."""
        thread = None if self.setup.asynchronous else get_ident()
        claiming = tuple(self.leases.claiming.items())
        return [owner for owner, (claimant, _) in claiming if claimant == thread]

    def held_here(self) -> list[Lease]:
        """Return the leases of attempts that the caller runs inside: they wait for it to return."""
        found = []
        attempt = current_attempt()
        while attempt is not None:
            found.append(attempt.lease)
            attempt = attempt.outer
        thread = None if self.setup.asynchronous else get_ident()
        return [
            lease
            for lease in self.leases.running()
            if lease.thread == thread or any(lease is one for one in found)
        ]

    # --- after the function --------------------------------------------------------------

    def result_to_store(self, call: Call, attempt: Attempt, value: T) -> StoredResult[T]:
        """Encode the result of an attempt; one that cannot be kept is announced."""
        rules = call.rules
        # A message has no result to replay: only that it was done is kept.
        wanted = value if call.keeps_value else cast("T", None)
        kept = encode_result(
            wanted, rules.codec, call.identity, call.returns, rules.max_result_bytes
        )
        if kept.problem is not None:
            self.announce(
                events.ResultOmitted(
                    identity=call.identity, number=attempt.number, reason=kept.problem
                )
            )
        return kept

    def _saved(
        self, call: Call, attempt: Attempt, lease: Lease, result: Encoded, *, saved: bool
    ) -> None:
        """The store has answered: share the stored result with the calls that wait in this process.

        Or announce the loss, when the store did not take it.
        """
        self.leases.drop(lease)
        if not saved:
            self._lost(call, lease)
        lease.stored = True
        ttl = call.rules.ttl
        finished = Finished(SUCCEEDED, result, attempt.number, attempt.fence, ttl)
        if self.cache is not None:
            self._remember(self.cache, call, finished)
        self._share(call, finished)
        if self.announce.reaches(events.Ran.level):
            self.announce(
                events.Ran(
                    identity=call.identity,
                    number=attempt.number,
                    seconds=monotonic() - lease.began,
                    size=len(result.data),
                    store_seconds=self.store_seconds(call),
                )
            )

    def _not_stored(self, call: Call, lease: Lease, result: Encoded, error: Exception) -> None:
        """The result cannot be saved now: the timer keeps the lease and retries the save."""
        lease.unsaved = CompleteRequest(call.identity, lease.owner, result, call.rules.ttl)
        lease.retry(monotonic())
        remind(self.renewer.timer, lease.due)
        self._pass_on(call)
        self.lease_events.announce(events.ResultNotStored, lease, error=str(error))

    def _lost(self, call: Call, lease: Lease) -> NoReturn:
        self._pass_on(call)
        self.leases.drop(lease)
        self.lease_events.lost(lease)
        lost = LeaseLost(
            "another attempt replaced this one, or its record was removed: its result is not kept"
        )
        raise about(lost, call.identity)

    def _verdict(self, call: Call, lease: Lease, error: BaseException) -> Failure:
        """What to record of a failure; a policy that cannot say so is announced."""
        found = verdict(error, call.rules)
        if found.problem is not None:
            self.lease_events.announce(
                events.FailureUndecided, lease, verdict=found.outcome, problem=found.problem
            )
        return found.outcome

    def _announce_failure(
        self, lease: Lease, decision: str, error: BaseException, *, recorded: bool
    ) -> None:
        name = type(error).__name__
        if not recorded:
            self.lease_events.lost(lease)
        elif decision == "unknown":
            self._note_ending(lease, error)
            self.lease_events.announce(events.Parked, lease, error=name)
        else:
            self.lease_events.announce(events.Failed, lease, verdict=decision, error=name)

    def _note_ending(self, lease: Lease, error: BaseException) -> None:
        """Remember how a held attempt ended, for later calls with its key in this process."""
        if len(self._endings) >= ENDINGS_KEPT:
            self._endings.clear()
        ending = f"its function raised {type(error).__name__} in this process"
        if isinstance(error, UnstoredResponse):
            ending = f"it {error}"
        self._endings[lease.identity] = lease.number, ending

    # --- sharing and remembering ---------------------------------------------------------

    def _share(self, call: Call, answer: Finished | StoreError) -> None:
        """Pass the answer to the calls of this process that wait for it."""
        if call.shared_as is not None:
            waiting = self.shared_runs.end(call.shared_as, answer)
            if waiting:
                self.shared_runs.give(waiting, answer)

    def _pass_on(self, call: Call) -> None:
        if call.shared_as is not None:
            self.shared_runs.pass_on(call.shared_as, call)

    def _remembered(self, call: Call) -> Finished | None:
        """Ask the local cache."""
        if self.cache is None or call.rules.replace:
            return None
        return self.cache.get(call.identity, call.fingerprint, monotonic(), call.generation)

    def forgotten(self, identity: Identity) -> None:
        """Do not return results from before this `forget` to later calls."""
        self.shared_runs.forgets.add(identity)
        self._endings.pop(identity, None)
        if self.cache is not None:
            self.cache.drop(identity)

    def _remember(self, cache: FinishedCache, call: Call, finished: Finished) -> None:
        """Keep an answer that just came from the store; one from the cache is no younger."""
        if call.rules.replace:
            cache.drop(call.identity)
            return
        cache.add(call.identity, call.fingerprint, finished, monotonic(), call.generation)


_engines: WeakSet[Any] = WeakSet()


@in_forked_child
def _start_engines_afresh() -> None:
    forget_shared_runs()
    for engine in tuple(_engines):
        engine.after_fork()


# --- rules of a call that is under way -----------------------------------------------------


def claim_request(call: Call, owner: bytes, digest: bytes | None) -> ClaimRequest:
    """Make the claim of a call for a new owner; `digest` is the fingerprint as stored."""
    rules = call.rules
    return ClaimRequest(
        call.identity,
        owner,
        digest,
        rules.lease,
        rules.ttl,
        rules.hold,
        rules.replace,
        rules.max_attempts,
        rules.run_info.claim,
    )


def known_digest(digests: Digests, record: Record | None) -> Digests:
    """Return the digest that a record knows, as its own or as superseded; else the first one.

    Under mismatch="replace" a claim with another digest would replace the record, so the digests of
    older secrets cannot be tried one after the other.
    """
    known = () if record is None else (record.fingerprint, *record.superseded)
    return (next((digest for digest in digests if digest in known), digests[0]),)


def came_late(request: ClaimRequest, late: Sequence[Claimed], spent: float) -> bool:
    """Whether a claim has to be sent again because its answer came so late.

    The same owner gets the claim again, with a new lease; or, if it was replaced meanwhile, the
    answer that everybody gets. The first answer may use up a third of the lease, after which it
    would be renewed. A repeated one is taken unless its lease counts as lost: more requests do not
    make a slow store faster. No function starts on a lease that is lost.
    """
    if late and spent < request.lease * (1 - DANGER):
        return False
    tries = len(late) + 1
    if tries == MOST_CLAIMS:
        raise StoreUnavailable(
            f"the store took {spent:.3g} s to answer a claim whose lease is {request.lease:g} s, "
            f"after {tries} tries; nothing ran. Find out why it is slow, or use a longer lease"
        )
    return True


def as_first_told(step: Claimed, late: Sequence[Claimed]) -> Claimed:
    """Only the first answer to a claim says whether it was a takeover, not a repeated one."""
    return next((first for first in late if first.number == step.number), step)


def pauses(rules: Rules) -> Iterator[float]:
    """Seconds between two questions: doubling up to a longest one, each with jitter."""
    pause = rules.wait_interval
    while True:
        yield pause * (0.5 + random() / 2)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 2, rules.wait_interval_max)


def remind(timer: Any, at: float) -> float:
    """Schedule a timer; return when to try again if its thread cannot start, else infinity.

    Not to be raised: the caller has its own answer, and the next attempt starts the timer too.
    """
    try:
        timer.due(at)
    except NoTimer:
        return monotonic() + START_AGAIN
    return math.inf


class SaveBackoff:
    """When a call tries again to save its result, after the first failure."""

    def __init__(self, rules: Rules, now: float) -> None:
        self._end = now + SAVE_FOR
        self._pauses = pauses(rules)

    def pause(self, now: float) -> float | None:
        """Seconds until the next try; None = the timer takes over."""
        pause = next(self._pauses)
        return None if now + pause > self._end else pause


# --- unwanted claims -----------------------------------------------------------------------


def unwanted(request: ClaimRequest) -> ClaimRequest:
    """The claim that asks only for what its owner has already, or for a key that is free.

    No call uses this claim, so it must not replace a result or an attempt. Its short lease
    frees the key if giving it back fails.
    """
    # max_attempts=0: even a record whose number is 0 must not be claimed.
    lease = min(request.lease, UNWANTED_LEASE)
    return replace(request, lease=lease, hold=False, replace=False, max_attempts=0)


GIVEN_BACK = encode_failure(InterruptedError("no caller waits for this claim anymore"))
"""The outcome of a claim that was given back before its function ran."""


def given_back(answer: Claim) -> bool:
    """Whether a late command of an unwanted claim can no longer be granted: its owner has ended."""
    return type(answer) is Claimed or (type(answer) is Finished and answer.outcome == GIVEN_BACK)


# --- values and errors ---------------------------------------------------------------------


def stored_form(value: object, identity: Identity, rules: Rules) -> Encoded:
    """Encode a value that nothing has run for: what cannot be kept is rejected, not omitted."""
    kept = encode_result(value, rules.codec, identity, None, rules.max_result_bytes)
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
