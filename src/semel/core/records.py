"""The record of one operation, and the answers a store may give about it.

This module holds values. It decides nothing, reads no clock and touches no store.
Times are seconds since the epoch on the store's clock; durations are seconds.
No value here can be part of a cycle, so the garbage collector is spared them (gc=False).
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

from msgspec import Struct

from semel.errors import ConfigError, InvalidKey

AnswerT_co = TypeVar("AnswerT_co", covariant=True)

LONGEST = 100 * 365 * 86400.0
"""A hundred years: beyond it a duration is a mistake, and some stores cannot hold it."""

OWNER_BYTES = 12
"""Random bytes that name one attempt; 96 bits never meet twice."""

FINGERPRINT_BYTES = 16

MAX_KEY_LENGTH = 255
"""Characters that every store has room for."""

SUPERSEDED_LIMIT = 8
"""How many replaced fingerprints a record remembers (mismatch="replace")."""

RUN_INFO_BYTES = 200
"""The most that a running record says about its attempt (`semel.core.run_info`)."""

AUDIT_SCOPE: Final = "semel.audit"
"""The scope of the audit trail (`semel.repair.audit`). Its records are written by `put` alone, and
kept until they expire. No call may use it, and listings and counts leave it out unless they name
it."""


def reject_audit_scope(scope: object) -> None:
    """Raise `InvalidKey` for the scope of the audit trail."""
    if scope == AUDIT_SCOPE:
        raise InvalidKey(
            f"the scope {AUDIT_SCOPE} is reserved for the audit trail, whose entries cannot be "
            "used, changed or removed; `semel audit` lists them"
        )


def check_text(what: str, text: object, max_length: int = MAX_KEY_LENGTH) -> None:
    """Raise `InvalidKey` unless `text` may be a key, a scope, or a part; `what` names it."""
    # isprintable() rejects every control character and every whitespace but the plain space.
    if not (
        isinstance(text, str)
        and 0 < len(text) <= max_length
        and text.isprintable()
        and " " not in text
    ):
        raise InvalidKey(text_fault(what, text, max_length))


def text_fault(what: str, text: object, max_length: int) -> str:
    """Return what is wrong with a text; it never repeats the text, which may be a secret."""
    if not isinstance(text, str):
        return f"the {what} must be a str, not {type(text).__name__}"
    if text == "":
        return f"the {what} is empty"
    if len(text) > max_length:
        return f"the {what} has {len(text)} characters, at most {max_length} are allowed"
    position = first_bad_character(text)
    return (
        f"the {what} ({len(text)} characters) has whitespace or a character that is not printable "
        f"at position {position}"
    )


def first_bad_character(text: str) -> int | None:
    """Position of the first character that no key may hold; None if all are fine."""
    return next((at for at, char in enumerate(text) if char == " " or not char.isprintable()), None)


def hex_digest(data: bytes) -> str:
    """Return the 128 bits that end a derived key, as text."""
    return hashlib.sha256(data).hexdigest()[:32]


class State(enum.IntEnum):
    """The state of an operation; an abandoned one is PROCESSING, and its lease has ended."""

    PROCESSING = 0
    SUCCEEDED = 1
    FAILED = 2


# By these names on the way of every call: until Python 3.12 an enum looks its members up slowly.
PROCESSING, SUCCEEDED, FAILED = State


class Identity(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The scope and the key that identify one operation."""

    scope: str
    key: str

    @property
    def encoded(self) -> bytes:
        """Scope and key as bytes with lengths, so ("a:b", "c") and ("a", "b:c") differ."""
        return f"{len(self.scope)}:{self.scope}:{self.key}".encode()

    @property
    def digest(self) -> bytes:
        """The digest of scope and key, 128 bits, for a short name without secrets."""
        return hashlib.sha256(self.encoded).digest()[:16]

    @property
    def key_digest(self) -> str:
        """The digest as errors, events, logs, and the command line show it."""
        return self.digest.hex()

    # Events and records show it, and they are logged: a key may be a secret.

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("scope", self.scope), ("key_digest", self.key_digest)]

    def __repr__(self) -> str:
        return f"Identity(scope={self.scope!r}, key_digest={self.key_digest!r})"

    def derive(self, part: str, nth: int = 1) -> str:
        """Return the key of the `nth` downstream call that `part` names.

        It is the same on every attempt, and another in every scope.
        """
        check_text("part of a derived key", part)
        # No operation has a key with a space in it, so no derived key of another can meet this one.
        whole = self if nth == 1 else Identity(self.scope, f"{self.key} {nth}")
        # The identity's digest has a fixed length, so the part cannot run into it.
        tail = "-" + hex_digest(whole.digest + part.encode())
        return part[: MAX_KEY_LENGTH - len(tail)] + tail


class Encoded(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Encoded bytes, and the name of the codec that wrote them; stores never decode them."""

    codec: str
    data: bytes


OMITTED = "omitted"
"""Codec name of a success whose value was not kept; the data then tells why."""

FAILURE = "failure"
"""Codec name of a recorded failure: type name and message."""


class Record(Struct, frozen=True, kw_only=True, gc=False):
    """All that is stored about one identity, as read at `now` on the store's clock."""

    identity: Identity
    state: State
    owner: bytes
    number: int
    fence: int
    hold: bool
    created_at: float
    updated_at: float
    now: float
    fingerprint: bytes | None = None
    superseded: tuple[bytes, ...] = ()
    lease_until: float | None = None
    """When the lease ends, while PROCESSING; in the past, the attempt is abandoned."""
    expires_at: float | None = None
    """When the record expires, once the operation has ended; PROCESSING never expires."""
    outcome: Encoded | None = None
    """The result of a success, or the description of a failure."""
    retryable: bool = False
    run_info: bytes = b""
    """Who runs the attempt, as sent with the claim, while PROCESSING; empty if unknown.
    `semel.core.run_info` reads it."""

    @property
    def scope(self) -> str:
        """The kind of operation."""
        return self.identity.scope

    @property
    def key(self) -> str:
        """The key of the operation."""
        return self.identity.key

    def derive(self, part: str, nth: int = 1) -> str:
        """Return the key that the attempts of this operation derive for a downstream call.

        `Attempt.derive(part)` returns the same, and with `nth` the n-th `derive_next(part)`. Ask
        the downstream system by this key what an attempt did. For a call that semel's HTTP clients
        sent, `semel.http.part_of_call` returns the part.
        """
        return self.identity.derive(part, nth)

    @property
    def abandoned(self) -> bool:
        """True if the attempt is PROCESSING and its lease has ended."""
        return self.lease_until is not None and self.lease_until <= self.now

    @property
    def abandoned_for(self) -> float:
        """Seconds since the lease ended; 0 unless the attempt is abandoned."""
        return 0.0 if self.lease_until is None else max(0.0, self.now - self.lease_until)

    @property
    def remaining(self) -> float | None:
        """Seconds until the record expires; None while PROCESSING."""
        return None if self.expires_at is None else max(0.0, self.expires_at - self.now)


# --- what `claim` may answer -------------------------------------------------------------


@final
class Claimed(Struct, frozen=True, gc=False):
    """The caller owns the operation now, and is the only one to run it."""

    number: int
    fence: int
    takeover: bool = False
    """True when the previous attempt was abandoned."""


@final
class Finished(Struct, frozen=True, gc=False):
    """The operation has ended: SUCCEEDED, or FAILED for good."""

    state: State
    outcome: Encoded | None
    number: int
    fence: int
    remaining: float
    """Seconds until the record expires."""


class Busy(Struct, frozen=True, gc=False):
    """Another attempt is running; its lease ends in `retry_after` seconds unless renewed."""

    retry_after: float
    owner: bytes | None = None
    """The owner of the running attempt; None if it is unknown."""


class Mismatch(Struct, frozen=True, gc=False):
    """The record belongs to another payload."""

    superseded: bool = False
    """True when this payload was replaced by a newer one (mismatch="replace")."""


class Abandoned(Struct, frozen=True, gc=False):
    """An attempt was abandoned and the record is held: it may have taken effect."""

    number: int


class Exhausted(Struct, frozen=True, gc=False):
    """The operation may run again, but not for a caller with this limit of attempts."""

    number: int


Claim: TypeAlias = Claimed | Finished | Busy | Mismatch | Abandoned | Exhausted


# --- what a caller may ask ---------------------------------------------------------------


class Request(Struct, Generic[AnswerT_co], frozen=True, gc=False, forbid_unknown_fields=True):
    """A request to a store, with the type of its answer.

    A service that reads one rejects a field that it does not know (`semel.stores.remote.wire`).
    """


class ClaimRequest(Request[Claim], frozen=True, gc=False):
    """Ask whether this owner may run the operation."""

    identity: Identity
    owner: bytes
    fingerprint: bytes | None
    lease: float
    ttl: float
    """How long a store with key expiry keeps an abandoned record that may be taken over."""
    hold: bool = False
    replace: bool = False
    max_attempts: int | None = None
    run_info: bytes = b""
    """Who runs the attempt, for operators; stores keep it while PROCESSING, and don't decode it.
    They reject more than `RUN_INFO_BYTES`, because every call sends one."""


class RenewRequest(Request[bool], frozen=True, gc=False):
    """Extend the owner's lease from now; 0 or less parks the attempt, abandoned that long ago."""

    identity: Identity
    owner: bytes
    lease: float
    run_info: bytes | None = None
    """The new run_info; None keeps that of the claim."""

    def __post_init__(self) -> None:
        if self.run_info is not None:
            checked_run_info(self.run_info)


def checked_run_info(run_info: bytes) -> bytes:
    """Return what a record can keep; more raises `ConfigError`."""
    if len(run_info) > RUN_INFO_BYTES:
        raise ConfigError(
            f"run_info has {len(run_info)} bytes, and a record keeps at most {RUN_INFO_BYTES}: "
            "semel.core.run_info.build cuts it to that"
        )
    return run_info


class CompleteRequest(Request[bool], frozen=True, gc=False):
    """Store the owner's success."""

    identity: Identity
    owner: bytes
    result: Encoded
    ttl: float


class FailRequest(Request[bool], frozen=True, gc=False):
    """Store the owner's failure; with ran=False the attempt's number is given back."""

    identity: Identity
    owner: bytes
    error: Encoded
    retryable: bool
    keep_fingerprint: bool
    ttl: float
    ran: bool = True


class GetRequest(Request["Record | None"], frozen=True, gc=False):
    """Read a record."""

    identity: Identity


class PutRequest(Request[bool], frozen=True, gc=False):
    """Mark as done without running."""

    identity: Identity
    owner: bytes
    result: Encoded
    ttl: float


class TouchRequest(Request[bool], frozen=True, gc=False):
    """Keep a finished record for `ttl` from now; an entry of the audit trail cannot be touched."""

    identity: Identity
    ttl: float

    def __post_init__(self) -> None:
        reject_audit_scope(self.identity.scope)


class ForgetRequest(Request[bool], frozen=True, gc=False):
    """Remove a record, whatever its state; an entry of the audit trail cannot be removed."""

    identity: Identity

    def __post_init__(self) -> None:
        # Here, since every way to remove a record, in every store, begins with this value.
        reject_audit_scope(self.identity.scope)


class AdoptRequest(Request["Record | None"], frozen=True, gc=False):
    """Make a resolver the owner of an abandoned attempt, held or not; None = nothing to do."""

    identity: Identity
    owner: bytes
    lease: float


# --- what an operator may ask about all records ------------------------------------------


class Page(Struct, frozen=True):
    """A page of a listing; pass `cursor` to get the next one. None: this was the last."""

    records: tuple[Record, ...]
    cursor: str | None


class Counts(Struct, frozen=True):
    """The number of records by state."""

    processing: int
    """Running, with a live lease."""
    abandoned: int
    succeeded: int
    failed: int


class ScanRequest(Request[Page], frozen=True, gc=False):
    """List records page by page; a page may be short, and the last one has no cursor.

    An unreadable record is left out, and a warning names it.
    """

    scope: str | None = None
    """The scope; None lists all but the audit trail."""
    prefix: str = ""
    """The beginning of the key."""
    state: State | None = None
    limit: int = 100
    """The most records of a page."""
    cursor: str | None = None
    """The cursor of the page before."""

    def covers(self, scope: str) -> bool:
        """Return whether records of this scope are asked for."""
        return scope != AUDIT_SCOPE if self.scope is None else scope == self.scope


class StuckRequest(Request[list[Record]], frozen=True, gc=False):
    """List abandoned records whose lease ended `older_than` seconds ago or before, oldest first."""

    older_than: float = 0.0
    limit: int = 100


class PurgeRequest(Request[int], frozen=True, gc=False):
    """Remove at most `limit` expired records; the answer is how many.

    Expired entries of the audit trail go too, once no other record is left that has expired; they
    are not counted.

    With `abandoned_after`, also abandoned records that are not held and whose lease ended that many
    seconds ago. Live and held PROCESSING records are never removed.
    """

    limit: int = 1000
    abandoned_after: float | None = None


class CountRequest(Request[Counts], frozen=True, gc=False):
    """Count the records by state, without the audit trail."""


LISTINGS: Final[frozenset[type[Request[Any]]]] = frozenset(
    {ScanRequest, StuckRequest, PurgeRequest, CountRequest}
)
"""Requests about all records: a store may leave them out (`Store.unsupported`)."""

VERBS: Final[dict[type[Request[Any]], str]] = {
    ClaimRequest: "claim",
    RenewRequest: "renew",
    CompleteRequest: "complete",
    FailRequest: "fail",
    GetRequest: "get",
    PutRequest: "put",
    TouchRequest: "touch",
    ForgetRequest: "forget",
    AdoptRequest: "adopt",
    ScanRequest: "scan",
    StuckRequest: "stuck",
    PurgeRequest: "purge",
    CountRequest: "counts",
}
"""What each request is called: by the methods of a store, by SQL's verbs and in tests."""
