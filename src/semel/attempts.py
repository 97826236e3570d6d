"""The running attempt: what the user's function may know about itself.

An attempt is in a context variable while it runs, so that code deep inside can ask for it.
"""

from __future__ import annotations

from contextvars import ContextVar
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, cast

from msgspec import UNSET, Struct, UnsetType

from semel.core.keys import derived
from semel.core.records import Identity
from semel.errors import DuplicateRequest, LeaseLost, about

if TYPE_CHECKING:
    from contextvars import Token

    from typing_extensions import TypeVar

    from semel.core.leases import Lease

    # `Attempt` without brackets is Attempt[Any]: Python itself knows such defaults from 3.13 on.
    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Result = TypeVar("Result")

_current: ContextVar[Attempt | None] = ContextVar("semel_current_attempt", default=None)

innermost = _current.get
"""Give the attempt that this context entered last, which may have ended; mostly there is none."""


class Attempt(Struct, Generic[Result], eq=False):
    """One try at an operation; `replayed` says that it was done before and nothing runs.

    Examples:
        >>> with idem.attempt("order:42", scope="payments") as attempt:
        ...     attempt.number, attempt.replayed, attempt.scope
        (1, False, 'payments')
    """

    identity: Identity
    number: int = 1
    """1 on the first try, growing with every claim of the record."""
    fence: int = 0
    """Fencing token: grows with every claim, even across deletion of the record."""
    owner: bytes = b""
    replayed: bool = False
    protected: bool = True
    """False when it runs without a record (store_error="open", bypassed)."""
    store: object = None
    lease: Lease | None = None
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
        """The operation's key."""
        return self.identity.key

    @property
    def result(self) -> Result:
        """The stored result of a replay, or what was set; None when nothing was."""
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
        return self.running and (self.lease is None or not self.lease.orphaned)

    @property
    def lost(self) -> bool:
        """True when the lease could not be kept: another attempt may be running."""
        # Asked of the clock, not of the timer: a process that was paused learns it at once.
        return self.lease is not None and self.lease.lost_at(monotonic())

    def derive(self, part: str) -> str:
        """Make a stable key for a downstream call: the same on every attempt of this operation.

        `part` names the call within the operation.

        Examples:
            >>> with idem.attempt("order:42") as attempt:
            ...     attempt.derive("capture")
            'capture-d74552dfc76f70017047060620334ccc'
        """
        return derived(self.identity, part)

    def derive_next(self, part: str) -> str:
        """Make a stable key for a call that may come several times: the n-th has its own.

        `part` names the call, as for `derive`, whose key is the first one. Every attempt counts
        anew, so calls that are made in the same order get the same keys.
        """
        # Both steps are atomic: threads of one attempt never get the same number.
        number = next(self._counts.setdefault(part, count(1)))
        if number == 1:
            return self.derive(part)
        # No operation has a key with a space in it, so no derived key of any other can meet this.
        return derived(Identity(self.scope, f"{self.key} {number}"), part)

    def check(self) -> None:
        """Raise LeaseLost when this attempt may have been replaced; call it before an effect."""
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
    """What `run` returns: the `value`, whether it was `replayed`, and the `attempt` behind it."""

    __slots__ = ("attempt", "replayed", "value")

    def __init__(self, value: Result, attempt: Attempt[Result]) -> None:
        self.value = value
        self.replayed = attempt.replayed
        self.attempt = attempt

    @classmethod
    def of(cls, attempt: Attempt[Result]) -> Outcome[Result]:
        """Give the outcome of an attempt that has its result."""
        return cls(attempt.result, attempt)

    def __repr__(self) -> str:
        return f"Outcome({self.value!r}, replayed={self.replayed})"


def current_attempt() -> Attempt | None:
    """Return the attempt that is running in this context, or None.

    Examples:
        >>> idem.execute("order:42", lambda: current_attempt().key)
        'order:42'
    """
    attempt = _current.get()
    # A task that outlives the attempt it was started in keeps the variable, not the attempt.
    while attempt is not None and not attempt.runs:
        attempt = attempt.outer
    return attempt


def is_nested(identity: Identity, store: object, around: Attempt | None) -> bool:
    """Tell whether a running attempt around this call already has this record."""
    attempt = around
    while attempt is not None:
        if attempt.runs and attempt.store is store and attempt.identity == identity:
            return True
        attempt = attempt.outer
    return False
