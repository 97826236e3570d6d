"""Every error that semel raises, in one tree.

    IdempotencyError
    ├── ConfigError            a setting, URL, policy, or decorator is invalid
    ├── InvalidKey             the key, or the expression that makes it, is invalid
    ├── ConcurrentRequest      the same key is running elsewhere, and this caller doesn't wait
    │   └── TooManyWaiting     it would wait, but `max_waiting` calls wait already
    ├── DuplicateRequest       the key was used before (reject mode)
    ├── NestedCall             the running attempt asked for its own key
    ├── PayloadMismatch        the same key came with another payload
    ├── OutcomeUnknown         an attempt may have taken effect; its record is held
    ├── PreviousFailure        the key failed for good before
    ├── AttemptsExhausted      the policy allows no further attempt
    ├── LeaseLost              another attempt replaced this one
    ├── ResultUnavailable      the operation succeeded, but its result can't be returned
    ├── WaitTimeout            the running attempt did not end in time (a TimeoutError too)
    ├── SerializationError     a value can't be encoded or read back
    ├── RetryTransaction       the database asked to repeat the whole unit of work
    └── StoreError             the store could not do its work
        ├── StoreUnavailable   the store is unreachable, or did not respond in time
        │   └── StoreRefused   it rejected the login, or a database or permission is missing
        ├── StoreFull          the store has no room for a new key
        ├── ValueRejected      the store can never take this value: too large, or of a wrong kind
        └── RecordUnreadable   a record exists but can't be read

Each class says whether the same call may succeed later (`retry_helps`) and how it looks from
outside (`code`, `http_status`, `grpc_status`), so that all integrations agree. The error of a
call names its operation: `scope` and `key_digest`.

Each can be made again from its `args`, the text: result backends of Celery know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from shlex import quote
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar


class Operation(Protocol):
    """The operation that an error is about."""

    @property
    def scope(self) -> str:
        """The kind of operation."""
        ...

    @property
    def key_digest(self) -> str:
        """The digest of scope and key."""
        ...


class IdempotencyError(Exception):
    """The base class of every error that semel raises."""

    code: ClassVar[str] = "idempotency_error"
    retry_helps: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    scope: str | None = None
    """The scope of the operation; None where no operation is known."""
    key_digest: str | None = None
    """The digest of the key, as in events, logs, and `semel show`: a key may be a secret."""

    @property
    def text(self) -> str:
        """The message without the operation that `str` adds."""
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
    """A setting, URL, policy, or decorator is invalid; the message says what to do.

    `Idempotency` also raises it for a function that returns a coroutine. Unless the coroutine was
    begun, `nothing_ran` is True, and the key may be used again at once under any policy.
    """

    code = "config_error"
    nothing_ran: bool = False
    """True if the function was called and has certainly done nothing."""


class InvalidKey(IdempotencyError, ValueError):
    """The key, or the expression that makes it, is invalid."""

    code = "invalid_key"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ConcurrentRequest(IdempotencyError):
    """The same key is running elsewhere, and this caller doesn't wait for it.

    `message` is the policy's text, if it has one. `retry_after` is the most seconds that the
    running attempt has left, if the store knows.
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

    Nothing ran, and the caller may try again. HTTP and gRPC respond as for any
    `ConcurrentRequest`, whose `message` and `retry_after` it has.
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
    """The key was used before, and the policy rejects duplicates (reject mode).

    `message` is the policy's text, if it has one.
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

    `superseded` says that a newer payload has replaced this one (mismatch="replace"). `message`
    replaces the text.
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
    """An attempt may have taken effect: it raised, or its process stopped.

    Its record is held until you decide what happened. The message has the command that decides.
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
    """The policy allows no further attempt; `number` is how many there were."""

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
    """The running attempt did not end within the time that this caller waits.

    `retry_after` is the most seconds that it has left, if the store knows. `message` replaces the
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
    """The text without any part of the value; None if it is not known what the text quotes."""


class RetryTransaction(IdempotencyError):
    """The database asked to repeat the whole unit of work."""

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
    """The store is unreachable, or did not respond in time."""

    code = "store_unavailable"


class StoreRefused(StoreUnavailable):
    """The store rejected the login, or a database or permission is missing."""

    code = "store_refused"
    retry_helps = False


class StoreFull(StoreError):
    """The store has no room for a new key; nothing ran."""

    code = "store_full"


class ValueRejected(StoreError):
    """The store can never take this value: beyond a limit of the server, or of a wrong kind.

    Sending it again doesn't help. If it is the result of a function that ran, semel leaves it out:
    the key is done, and duplicates get `ResultUnavailable`.
    """

    code = "value_rejected"
    retry_helps = False
    http_status = 500
    grpc_status = "INTERNAL"


class RecordUnreadable(StoreError):
    """A record exists but can't be read, for this `reason`; nothing ran."""

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
