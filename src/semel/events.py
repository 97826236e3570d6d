"""What happened, as frozen values, and the one-method hook that is called with it.

A hook is any callable that takes an event. It runs in the caller's thread or task, should be
quick, and can never break the call: what it raises is logged and dropped (`semel.core.observers`).

    Event
    ├── Ran                 the function ran and its result is stored
    │   └── RanInTransaction    ... and is stored when, and if, the caller commits
    ├── Replayed            a duplicate got the stored result (`waited`: after the first one ended)
    ├── RejectedBusy        the key was running elsewhere and this caller does not wait (any more)
    ├── RejectedDuplicate   reject mode rejected a duplicate
    ├── RejectedFailure     the key failed for good before
    ├── RejectedUnknown     an abandoned record is held
    ├── RejectedExhausted   no attempts are left
    ├── Mismatched          the same key came with another payload
    ├── TakenOver           this attempt replaces an abandoned one
    ├── Failed              the function raised; `verdict` says what was recorded
    ├── FailureUndecided    ... because the policy's `failure` function did not decide
    ├── Parked              it may have taken effect; the record waits for a resolver
    ├── LostLease           another attempt may have replaced this one
    ├── RenewalFailed       one renewal failed; it is tried again
    ├── ResultOmitted       done, but the result could not be kept (size, type)
    ├── ResultNotStored     done, but not stored yet; it is tried again
    ├── ResultStoredLate    ... and now it was
    ├── StoreFailed         a store call failed
    └── RanUnprotected      the store was down and the policy says to run anyway
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeAlias

from msgspec import Struct

from semel.core.observers import Log, unheard
from semel.core.records import Identity
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    IdempotencyError,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    TooManyWaiting,
    WaitTimeout,
)


class Event(Struct, frozen=True, kw_only=True, gc=False):
    """An event of one operation."""

    level: ClassVar[int] = logging.DEBUG
    """The level of its line in a log."""

    identity: Identity
    number: int | None = None
    """The number of the attempt, from 1; None if there is none, or it is unknown."""

    @property
    def name(self) -> str:
        """The event's name in logs and metrics."""
        return type(self).__name__

    @property
    def scope(self) -> str:
        """The scope of the operation."""
        return self.identity.scope

    @property
    def key(self) -> str:
        """The key of the operation; it may be a secret, so log `key_digest`."""
        return self.identity.key

    @property
    def key_digest(self) -> str:
        """The digest of scope and key, for logs and metrics: the raw key may be a secret."""
        return self.identity.key_digest


class Ran(Event, frozen=True, kw_only=True):
    """The function ran and its result is stored."""

    seconds: float
    """From before the claim until after the save."""
    size: int
    """Bytes stored."""
    store_seconds: float | None = None
    """Seconds that the call waited for the store; measured only if there are hooks."""


class RanInTransaction(Ran, frozen=True, kw_only=True):
    """The function ran; its record is stored if the caller commits."""


class Replayed(Event, frozen=True, kw_only=True):
    """A duplicate got the stored result."""

    level = logging.INFO
    waited: bool
    store_seconds: float | None = None
    """As in `Ran`; None if this process had the result and did not ask the store."""


class RejectedBusy(Event, frozen=True, kw_only=True):
    """The key was running elsewhere, and this caller doesn't wait, or no longer."""

    level = logging.INFO


class RejectedDuplicate(Event, frozen=True, kw_only=True):
    """Reject mode rejected a duplicate."""

    level = logging.INFO


class RejectedFailure(Event, frozen=True, kw_only=True):
    """The key failed for good before."""

    level = logging.INFO


class RejectedUnknown(Event, frozen=True, kw_only=True):
    """The record is held; a resolver or a person has to decide what happened."""

    level = logging.WARNING


class RejectedExhausted(Event, frozen=True, kw_only=True):
    """The policy allows no further attempt."""

    level = logging.WARNING


class Mismatched(Event, frozen=True, kw_only=True):
    """The same key came with another payload."""

    level = logging.WARNING


class TakenOver(Event, frozen=True, kw_only=True):
    """This attempt replaces an abandoned one."""

    level = logging.WARNING


class Failed(Event, frozen=True, kw_only=True):
    """The function raised."""

    level = logging.INFO
    verdict: str
    """What was recorded: forget, retryable, or final."""
    error: str
    """The type of the exception; its text may hold a secret."""


class FailureUndecided(Event, frozen=True, kw_only=True):
    """The policy's `failure` function raised or returned an unknown value.

    The safe default was recorded.
    """

    level = logging.ERROR
    verdict: str
    """What was recorded instead: unknown under hold, else forget."""
    problem: str


class Parked(Event, frozen=True, kw_only=True):
    """The attempt may have taken effect; its record waits for a resolver or a person."""

    level = logging.WARNING
    error: str


class LostLease(Event, frozen=True, kw_only=True):
    """Another attempt may have replaced this one: the store rejected it, or its lease ran out."""

    level = logging.ERROR


class RenewalFailed(Event, frozen=True, kw_only=True):
    """A renewal failed; semel repeats it until the lease ends."""

    level = logging.WARNING
    error: str


class ResultOmitted(Event, frozen=True, kw_only=True):
    """Done, but the result could not be kept; a duplicate gets `ResultUnavailable`."""

    level = logging.ERROR
    reason: str


class ResultNotStored(Event, frozen=True, kw_only=True):
    """Done, but not stored yet; semel retries in the background, unless `error` rules that out."""

    level = logging.ERROR
    error: str


class ResultStoredLate(Event, frozen=True, kw_only=True):
    """A result that could not be stored at first is stored now."""

    level = logging.WARNING


class StoreFailed(Event, frozen=True, kw_only=True):
    """A store call failed."""

    level = logging.ERROR
    verb: str
    error: str


class RanUnprotected(Event, frozen=True, kw_only=True):
    """The store was down, and the function ran anyway (store_error="open")."""

    level = logging.ERROR


Hook: TypeAlias = Callable[[Event], object]

_REJECTIONS: dict[type[IdempotencyError], type[Event]] = {
    ConcurrentRequest: RejectedBusy,
    TooManyWaiting: RejectedBusy,
    WaitTimeout: RejectedBusy,
    DuplicateRequest: RejectedDuplicate,
    PreviousFailure: RejectedFailure,
    OutcomeUnknown: RejectedUnknown,
    AttemptsExhausted: RejectedExhausted,
    PayloadMismatch: Mismatched,
}


def rejection(error: IdempotencyError, identity: Identity, number: int | None = None) -> Event:
    """Return the event of this rejection; `number` is that of the attempt in its way."""
    return _REJECTIONS[type(error)](identity=identity, number=number)


class Announcer:
    """Calls every hook, and logs to `semel`; what a hook raises is logged and dropped."""

    __slots__ = ("_hooks", "reaches", "timed")

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self._use(hooks)
        self.timed = bool(hooks)
        """Whether calls measure how long the store takes: without a hook it would be lost."""

    def _use(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = hooks
        # The logger's own answer, without a function of ours around it: every call asks.
        self.reaches: Callable[[int], bool] = (
            (lambda _: True) if hooks else logger.logger.isEnabledFor
        )
        """Whether an event of this level reaches anybody; asked where every call makes one."""

    @contextmanager
    def also(self, hook: Hook) -> Iterator[None]:
        """Call this hook, too, while the block runs."""
        self._use((*self._hooks, hook))
        try:
            yield
        finally:
            self._use(tuple(each for each in self._hooks if each is not hook))

    def __call__(self, event: Event) -> None:
        """Report one event."""
        if logger.isEnabledFor(event.level):
            log_event(event)
        for hook in self._hooks:
            raised = unheard(hook, event)
            if raised is not None:
                logger.error("a hook failed on %s", event.name, exc_info=raised)


logger = Log("semel")


def log_event(event: Event) -> None:
    """Write one structured log record; the raw key is never in it."""
    fields: dict[str, object] = {"scope": event.scope, "key_digest": event.key_digest}
    fields |= {name: getattr(event, name) for name in event.__struct_fields__ if name != "identity"}
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    extra = {"semel": {"event": event.name, **fields}}
    logger.log(event.level, "%s %s", event.name, text, extra=extra)
