"""Every error semel raises, in one tree.

    IdempotencyError
    ├── ConfigError            a setting, URL, policy or decorator is wrong
    ├── InvalidKey             the key (or the expression that makes it) is not acceptable
    ├── ConcurrentRequest      the same key is running elsewhere and this caller does not wait
    │   └── TooManyWaiting     it would wait, but `max_waiting` calls wait already
    ├── DuplicateRequest       the key was used before (guard mode)
    ├── NestedCall             the running attempt asked for its own key
    ├── PayloadMismatch        the same key came with another payload
    ├── OutcomeUnknown         nobody knows whether an attempt took effect; its record is held
    ├── PreviousFailure        the key failed for good before
    ├── AttemptsExhausted      the key was tried as often as its policy allows
    ├── LeaseLost              another attempt replaced this one
    ├── ResultUnavailable      the operation succeeded, its result cannot be given back
    ├── WaitTimeout            the running attempt did not end in time (a TimeoutError too)
    ├── SerializationError     a value cannot be encoded or read back
    ├── RetryTransaction       the database asked for the whole unit of work to be repeated
    └── StoreError             the store could not do its work
        ├── StoreUnavailable   it cannot be reached, or did not answer in time
        │   └── StoreRefused   it does not let us in, until somebody changes something
        ├── StoreFull          it has no room for a new key
        ├── ValueRejected      it can never take this value: too large, or of a wrong kind
        └── RecordUnreadable   a record is there but cannot be understood

Each class says whether the same call may succeed later (`retry_helps`) and how it looks from
outside (`code`, `http_status`, `grpc_status`), so that every integration answers alike. The error
of a call names its operation: `scope` and `key_digest`.

Each can be made again from its `args`, the text: result backends of Celery know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from shlex import quote
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar


class Operation(Protocol):
    """What an error is about."""

    @property
    def scope(self) -> str:
        """The kind of operation."""
        ...

    @property
    def key_digest(self) -> str:
        """Stands for scope and key."""
        ...


class IdempotencyError(Exception):
    """The root of the tree; catches everything semel raises by itself."""

    code: ClassVar[str] = "idempotency_error"
    retry_helps: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    scope: str | None = None
    """The kind of operation that it is about; None where no operation is known."""
    key_digest: str | None = None
    """Which operation, as in events, logs and `semel show`: the key itself may be a secret."""

    @property
    def text(self) -> str:
        """The message alone, without the operation that `str` adds to it."""
        return super().__str__()

    def __str__(self) -> str:
        if self.key_digest is None:
            return self.text
        return f"{self.text} [scope={self.scope} key_digest={self.key_digest}]"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pools of processes send errors as pickles, which would call __init__ with the message.
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[IdempotencyError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError, as WaitTimeout is one, takes them from __init__ alone
    error.__dict__.update(state)
    return error


E = TypeVar("E", bound=IdempotencyError)


def about(error: E, operation: Operation) -> E:
    """Return this error with its operation; one that names an operation already is unchanged.

    It is a copy: stores give one error to many callers, and each caller names its own operation.
    """
    if error.key_digest is not None:
        return error
    own = copy(error)
    own.scope, own.key_digest = operation.scope, operation.key_digest
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        own.__notes__ = [*error.__notes__]
    return own.with_traceback(error.__traceback__)


def raise_about(error: IdempotencyError, operation: Operation) -> NoReturn:
    """Raise this error, which is being handled, with its operation."""
    own, context = about(error, operation), error.__context__
    try:
        raise own
    finally:
        own.__context__ = context  # not the error that it is a copy of
        # Its traceback has this frame: the two would keep each other, and all frames with them,
        # until the garbage collector runs.
        del error, own


class ConfigError(IdempotencyError, ValueError):
    """A setting, URL, policy or decorator is wrong; the message names it and the way out.

    So is a function that returns a coroutine to `Idempotency`. Unless the coroutine was begun,
    `nothing_ran` is True, and the key may be used again at once under any policy.
    """

    code = "config_error"
    nothing_ran: bool = False
    """The function was called, and it is certain that it has done nothing."""


class InvalidKey(IdempotencyError, ValueError):
    """The key, or the expression that should have made it, is not acceptable."""

    code = "invalid_key"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ConcurrentRequest(IdempotencyError):
    """The same key is running elsewhere, and this caller does not wait for it.

    `message` is the text of the policy, if it has one; `retry_after` is how many seconds the
    running attempt has at most, if the store says so.
    """

    code = "concurrent_request"
    retry_helps = True
    http_status = 409
    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str = "", *, retry_after: float = 0.0) -> None:
        super().__init__(message or "this operation is running elsewhere; try again later")
        self.retry_after = retry_after


class TooManyWaiting(ConcurrentRequest):
    """The same key is running, and `max_waiting` calls of this engine wait already.

    Nothing ran, and the caller may try again. HTTP and gRPC answer it as any `ConcurrentRequest`,
    whose `message` and `retry_after` it has.
    """

    code = "too_many_waiting"

    def __init__(self, message: str = "", *, retry_after: float = 0.0) -> None:
        super().__init__(
            message
            or (
                "this operation is running elsewhere, and max_waiting calls of this engine wait "
                "already; try again later. If the pools have room for more waiting calls, raise "
                "max_waiting (None: no bound); if calls should not wait at all, use "
                'Policy(concurrent="reject")'
            ),
            retry_after=retry_after,
        )


class DuplicateRequest(IdempotencyError):
    """The key was used before, and the policy rejects duplicates (guard mode).

    `message` is the text of the policy, if it has one.
    """

    code = "duplicate_request"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "this operation was done before")


class NestedCall(IdempotencyError):
    """The running attempt asked for its own key: waiting would never end."""

    code = "nested_call"


class PayloadMismatch(IdempotencyError):
    """The same key came with another payload; nothing ran and the record is unchanged.

    `superseded` says that a newer payload has replaced this one (mismatch="replace"); `message` is
    another text.
    """

    code = "payload_mismatch"
    http_status = 422
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, message: str = "", *, superseded: bool = False) -> None:
        super().__init__(
            message
            or (
                "this payload was replaced by a newer one"
                if superseded
                else "this key was used with another payload"
            )
        )
        self.superseded = superseded


class OutcomeUnknown(IdempotencyError):
    """Nobody knows whether an attempt took effect: it raised, or its process stopped.

    Its record is held until somebody finds out; the message has the command that decides.
    """

    code = "outcome_unknown"
    http_status = 409
    grpc_status = "ABORTED"

    def __str__(self) -> str:
        if self.scope is None or self.key_digest is None:
            return self.text
        command = f"semel resolve --digest {quote(self.scope)} {self.key_digest}"
        return (
            f"{self.text}. Find out what happened, then run `{command} --succeeded JSON` "
            "(or `--failed TEXT`, with `--retryable` if the next call may run) "
            f"[scope={self.scope} key_digest={self.key_digest}]"
        )


class PreviousFailure(IdempotencyError):
    """The key failed for good before; `type_name` and `message` are those of that failure."""

    code = "previous_failure"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, type_name: str, message: str | None = None) -> None:
        start = "this operation failed before: "
        if message is None:  # made again, from its text
            type_name, _, message = type_name.removeprefix(start).partition(": ")
        super().__init__(f"{start}{type_name}: {message}")
        self.type_name = type_name
        self.message = message


class AttemptsExhausted(IdempotencyError):
    """The key was tried as often as its policy allows; `number` is how often."""

    code = "attempts_exhausted"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, number: int | str) -> None:
        start, end = "this operation was tried ", " times, which is all its policy allows"
        number = int(str(number).removeprefix(start).removesuffix(end))
        super().__init__(f"{start}{number}{end}")
        self.number = number


class LeaseLost(IdempotencyError):
    """Another attempt replaced this one; its outcome was rejected."""

    code = "lease_lost"
    retry_helps = True
    http_status = 409
    grpc_status = "ABORTED"


class ResultUnavailable(IdempotencyError):
    """The operation succeeded, but its result cannot be returned; `reason` says why."""

    code = "result_unavailable"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, reason: str) -> None:
        start = "no result is available: "
        self.reason = reason.removeprefix(start)
        super().__init__(f"{start}{self.reason}")


class WaitTimeout(IdempotencyError, TimeoutError):
    """The running attempt did not end within the time this caller waits.

    `retry_after` is how many seconds it has at most, if the store says so; `message` is another
    text.
    """

    code = "wait_timeout"
    retry_helps = True
    http_status = 409
    grpc_status = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "", *, retry_after: float = 0.0) -> None:
        super().__init__(
            message or "the running attempt did not end within the time this call waits"
        )
        self.retry_after = retry_after


class SerializationError(IdempotencyError):
    """A value cannot be encoded, or stored bytes cannot be read back."""

    code = "serialization_error"
    outline: str | None = None
    """The text without any part of the value; None: it is not known what the text quotes."""


class RetryTransaction(IdempotencyError):
    """The database asked for the whole unit of work to be repeated."""

    code = "retry_transaction"
    retry_helps = True
    http_status = 503
    grpc_status = "ABORTED"


class StoreError(IdempotencyError):
    """The store could not do its work."""

    code = "store_error"
    retry_helps = True
    http_status = 503
    grpc_status = "UNAVAILABLE"


class StoreUnavailable(StoreError):
    """The store cannot be reached, or did not answer in time."""

    code = "store_unavailable"


class StoreRefused(StoreUnavailable):
    """The store does not let us in: a wrong login, no such database, a right that is missing."""

    code = "store_refused"
    retry_helps = False


class StoreFull(StoreError):
    """The store has no room for a new key; nothing ran."""

    code = "store_full"


class ValueRejected(StoreError):
    """The store can never take this value: beyond a limit of the server, or of a wrong kind.

    Sending it again does not help. The result of a function that ran is left out instead: its key
    is done, and duplicates get `ResultUnavailable`.
    """

    code = "value_rejected"
    retry_helps = False
    http_status = 500
    grpc_status = "INTERNAL"


class RecordUnreadable(StoreError):
    """A record is there but cannot be understood, for this `reason`; nothing ran."""

    code = "record_unreadable"
    retry_helps = False

    def __init__(self, reason: str) -> None:
        start = "a stored record cannot be read: "
        end = (
            "; nothing ran. Upgrade this process, or remove the record with forget() once it is "
            "known what happened"
        )
        super().__init__(f"{start}{reason.removeprefix(start).removesuffix(end)}{end}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Name the options that a mistyped one may have meant, for the end of a message."""
    from difflib import get_close_matches  # noqa: PLC0415 - few mistype, and all would load it

    near = get_close_matches(name, sorted(known))
    return f"; did you mean {' or '.join(near)}?" if near else ""
