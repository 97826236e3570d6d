"""What an engine does with a store's answer, and with the end of a function.

This module decides. It never waits, reads a clock or touches a store. Which answer a claim gets is
judged in `semel.core.judge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, assert_never, final

from msgspec import Struct
from msgspec.structs import replace

from semel.core.codec import decode_failure
from semel.core.policy import CHOICES, Failure
from semel.core.records import (
    FAILED,
    SUCCEEDED,
    Abandoned,
    Busy,
    Claim,
    Claimed,
    Exhausted,
    Finished,
    Mismatch,
)
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    IdempotencyError,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    WaitTimeout,
)

if TYPE_CHECKING:
    from semel.core.policy import Rules


@final
class Wait(Struct, frozen=True, gc=False):
    """Ask again, at the latest when the running attempt's lease ends."""

    retry_after: float


@final
class Reject(Struct, frozen=True):
    """Raise this error to the caller; nothing runs."""

    error: IdempotencyError
    number: int | None = None
    """The attempt that is in the way, where the store says which."""


Step: TypeAlias = Claimed | Finished | Wait | Reject
"""Run the function; return the stored result; ask again; raise an error."""


def decide(claim: Claim, rules: Rules) -> Step:
    """Turn the store's answer into the next step under these rules."""
    # The two of every call first, by their exact type: an isinstance check that fails takes Python
    # longer than all the rest.
    if type(claim) is Claimed:
        return claim
    if type(claim) is Finished:
        if claim.state is SUCCEEDED and rules.replays:
            return claim
        return Reject(_no_replay(claim, rules), claim.number)
    match claim:
        case Busy(retry_after=retry_after):
            if rules.concurrent == "reject":
                return Reject(ConcurrentRequest(rules.message or "", retry_after=retry_after))
            return Wait(retry_after)
        case Mismatch(superseded=superseded):
            return Reject(PayloadMismatch(superseded=superseded))
        case Abandoned(number=number):
            return Reject(outcome_unknown(number), number)
        case Exhausted(number=number):
            return Reject(AttemptsExhausted(number), number)
        case _:
            assert_never(claim)


def outcome_unknown(number: int, ending: str | None = None) -> OutcomeUnknown:
    """The error of a held record; `ending` says how the attempt ended, where that is known."""
    how = "its function raised, or its process stopped" if ending is None else ending
    return OutcomeUnknown(f"attempt {number} may have taken effect: {how}, and its record is held")


def _no_replay(claim: Finished, rules: Rules) -> IdempotencyError:
    """Why a duplicate gets no result: there is none, or the rules keep it."""
    if claim.state is not FAILED:
        return DuplicateRequest(rules.message or "")
    outcome = claim.outcome
    described = ("Unknown", "") if outcome is None else decode_failure(outcome)
    return PreviousFailure(*described)


def waited_too_long(rules: Rules, retry_after: float) -> IdempotencyError:
    """The error of a caller that has waited as long as it may."""
    if rules.duplicate == "reject":
        return ConcurrentRequest(rules.message or "", retry_after=retry_after)
    return WaitTimeout(retry_after=retry_after)


class UnstoredResponse(Exception):
    """An attempt that ended with a response that is not stored, though nothing was raised.

    Integrations use it for a response such as "500" or "not found". `outcome` says what is
    recorded, None leaves that to the policy, as for any other failure.
    """

    def __init__(self, reason: str, outcome: Failure | None = None) -> None:
        super().__init__(reason)
        self.outcome: Failure | None = outcome


class NothingRan(Exception):
    """An attempt that ended before anything was done: its key is free, and it is not counted."""


def named(error: BaseException) -> str:
    """Say in a word or two how an attempt ended: the type of the exception, or the response."""
    return str(error) if isinstance(error, UnstoredResponse) else type(error).__name__


class Verdict(Struct, frozen=True):
    """What is recorded of a failure."""

    outcome: Failure
    problem: str | None = None
    """What was wrong with the policy's `failure` function, which should have said it."""


def verdict(error: BaseException, rules: Rules) -> Verdict:
    """What is recorded when the function ends with this error."""
    default = Verdict("unknown" if rules.hold else "forget")
    if isinstance(error, (*rules.not_done, NothingRan)):
        return Verdict("forget")
    if isinstance(error, ConfigError) and error.nothing_ran:
        return Verdict("forget")
    if not isinstance(error, Exception):
        # Interrupted, cancelled, exiting: the function did not decide anything.
        return default
    if isinstance(error, UnstoredResponse) and error.outcome is not None:
        return Verdict(error.outcome)
    if not callable(rules.failure):
        return default if rules.failure is None else Verdict(rules.failure)
    try:
        chosen = rules.failure(error)
    except Exception as broken:  # noqa: BLE001 - the business error must reach the caller
        return replace(default, problem=f"it raised {type(broken).__name__}")
    if chosen not in CHOICES["failure"]:
        return replace(default, problem=f"it answered none of {', '.join(CHOICES['failure'])}")
    return Verdict(chosen)
