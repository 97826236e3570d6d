"""Transactional mode: the record is written in the caller's own transaction, or not at all.

    dialects    the records, as a transaction reaches them on each database
    links       what is asked of a connection; savepoints; the links that both kinds have
    drivers     which connections are taken; the links of one kind
    db_errors   what a driver's error means here

Here is one block of `idem.transaction()`: what it takes, what it asks of the records, its steps,
its attempt. The steps do no I/O. Every decision is that of `semel.core.judge`, made by the verbs of
the store.

Nothing in here commits. A block works between two savepoints: the outer one undoes the whole block,
record included; the inner one is gone if the transaction has ended meanwhile, which is how its end
is noticed on every database. Until then the record says: held, and abandoned.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from semel.core import judge
from semel.core.attempts import Attempt, Result, current_attempt
from semel.core.policy import Rules
from semel.core.records import (
    Abandoned,
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Finished,
    Identity,
    Mismatch,
    Record,
    RenewRequest,
)
from semel.errors import ConfigError, about
from semel.stores.sql.verbs import Dialect, Statement, Verb
from semel.transactions.drivers import is_connection

T = TypeVar("T")

_NEEDED: Final[Mapping[type, str]] = {
    AbstractContextManager: "a context manager, such as sessionmaker(...).begin",
    AbstractAsyncContextManager: "an async context manager, such as async_sessionmaker(...).begin",
}
"""What `begin` has to give for threads and for tasks, in words."""


def check_keys(keys: object) -> None:
    """Raise a ConfigError unless these are several keys; a text would be read by letters."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise ConfigError(
            f"several keys are needed, such as a list of them, not {type(keys).__name__}; "
            "for one key there is idem.transaction()"
        )


def check_begin(begin: object) -> None:
    """Raise a ConfigError unless this begins a unit of work; some connections are callable."""
    if not callable(begin) or is_connection(begin):
        raise ConfigError(
            "begin must be a function that returns a context manager, such as Session.begin, "
            f"not {type(begin).__name__}"
        )


def enterable(given: T, kind: type, name: str) -> T:
    """Return what `begin` has given, if it can be entered; errors call the option by its `name`."""
    if not isinstance(given, kind):
        raise ConfigError(
            f"{name} must be a function that returns {_NEEDED[kind]}; it returned "
            f"{type(given).__name__}"
        )
    return given


def check_begun(session: object, name: str, identity: Identity) -> None:
    """Raise a ConfigError for a session of SQLAlchemy that `begin` has made, and not begun."""
    in_transaction = getattr(session, "in_transaction", None)
    if callable(in_transaction) and not in_transaction():
        text = f"{name} gave a session without an open transaction: pass Session.begin"
        raise about(ConfigError(text), identity)


# --- the records of a store, as a caller's transaction reaches them ------------------------


class Records(ABC):
    """The records of a store, as a caller's transaction reaches them."""

    waits_for_table = False
    """Whether a wait would be for the whole table: no other caller has the record's lock."""
    by_key = True
    """Whether a caller that waits, waits for a transaction with the same key."""
    rolls_back = False
    """Whether a wait that is too long ends the caller's transaction; known once prepared."""
    commits_each = False
    """Whether a statement after the transaction's end commits by itself; known once prepared."""
    bound: Any = None
    """How long the session waited for locks before; None = it waits as before, or undoing the block
    restores it. Noted before the session is asked to wait otherwise, and kept from the first."""
    outside: Any = None
    """The store on whose own connection `read` has to run; None = in the caller's transaction."""

    def __init__(self, verbs: Dialect, hold: str, digest: Callable[[Identity], object]) -> None:
        self.verbs = verbs
        """The verbs of the store, fit to run inside a transaction."""
        self._hold, self._digest = hold, digest

    @abstractmethod
    def read(self, identity: Identity) -> Verb[Record | None]:
        """Read what has been committed, without a lock; None = nothing was, or it is not known."""

    @abstractmethod
    def prepare(self, seconds: float, *, wait: bool) -> Verb[None]:
        """Reject a connection to another database; note the bound for locks, and bound the wait.

        Without `wait` the caller wants to know at once that another one has the record.
        """

    def restore(self) -> Verb[None]:
        """Bound the wait as before."""
        if self.bound is not None:
            yield self._restored(self.bound)
            self.bound = None

    @abstractmethod
    def _restored(self, bound: Any) -> Statement:
        """Make the statement that restores a bound."""

    @abstractmethod
    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:
        """Lock the record; False = another caller has it, and this one does not wait."""

    def hold(self, identity: Identity, owner: bytes, *, held: bool) -> Verb[None]:
        """Mark this owner's attempt as held, or as not held."""
        yield Statement(self._hold, (held, self._digest(identity), owner), writes=True)


def records_of(store: object, dialect: str, table: str | None) -> Records:
    """Find the records; `table` names another one than the store's."""
    # In tiers SQL decides. The front learns of a record from the first question after the commit.
    behind = getattr(store, "behind", store)
    kind = getattr(behind, "dialect", None)
    if kind is None:
        raise ConfigError(
            "idem.transaction() needs an engine whose records are in SQL, and "
            f"{type(store).__name__} keeps them elsewhere: open it with the URL of the database "
            "that the connection is to"
        )
    if kind != dialect:
        raise ConfigError(
            f"the connection is to {dialect}, the engine keeps its records in {kind}: they could "
            "not be committed together"
        )
    from semel.transactions.dialects import RECORDS  # noqa: PLC0415 - it knows all databases

    return RECORDS[kind](behind, table)


# --- the steps of a block: generators that yield statements and receive replies -----------


LOCKED: Final = Busy(0.0)
"""An open transaction has the record, and this caller does not wait for its end.

Known by identity: a record that runs elsewhere under a lease is busy, too."""


def prepare(records: Records, rules: Rules, *, wait: bool, spent: float = 0.0) -> Verb[None]:
    """Bound the wait for the transaction of another caller.

    `spent` seconds of it have passed already.
    """
    bound = rules.store_timeout if rules.wait_timeout is None else rules.wait_timeout
    return records.prepare(max(0.0, bound - spent), wait=wait)


def look(records: Records, ask: ClaimRequest) -> Verb[Claim | None]:
    """Judge what has been committed, without a lock, so that replays do not wait for each other.

    None = only a claim can tell. That goes for an attempt that was abandoned or has failed, too: an
    open transaction may be running the next one.
    """
    record = yield from records.read(ask.identity)
    if record is None:
        return None
    answer, _ = judge.claim(record, ask, record.now)
    return answer if isinstance(answer, (Finished, Mismatch, Busy)) else None


def claim(
    records: Records, ask: ClaimRequest, *, wait: bool, counted: Claimed | None = None
) -> Verb[Claim]:
    """Claim the record: held, and with its lease at once past.

    A transaction that is committed too early then leaves a record whose outcome is unknown, never
    a success. Before its commit no other one sees the row. `counted` is the claim that this owner
    has made outside of the transaction, which goes on with it.
    """
    if records.outside is None and counted is None:
        known = yield from look(records, ask)
        if known is not None:
            return known
    if not (yield from records.lock(ask.identity, wait=wait)):
        return LOCKED
    if counted is not None:
        parking = RenewRequest(ask.identity, ask.owner, 0.0)
        if (yield from records.verbs.renew(parking).start()):
            yield from records.hold(ask.identity, ask.owner, held=True)
            return counted
    parked = replace(ask, lease=0.0)
    answer = yield from records.verbs.claim(replace(parked, hold=True)).start()
    if isinstance(answer, Abandoned) and not ask.hold:
        # Our own hold must not keep us from what this caller's policy lets it take over.
        answer = yield from records.verbs.claim(parked).start()
        if isinstance(answer, Claimed):
            yield from records.hold(ask.identity, ask.owner, held=True)
    return answer


def complete(records: Records, ask: CompleteRequest, rules: Rules) -> Verb[bool]:
    """Store the success, held only if the caller's policy says so: tiers copy no held record."""
    if not rules.hold:
        yield from records.hold(ask.identity, ask.owner, held=False)
    return (yield from records.verbs.complete(ask).start())


# --- the attempt of a block, and the warning to calls that do not belong to it ------------


_PACKAGE = __name__.partition(".")[0]


class TransactionAttempt(Attempt[Result]):
    """An attempt whose record is committed with the caller's transaction."""


class OutsideTransaction(UserWarning):
    """The ordinary API was used inside a transactional block: what it does commits by itself."""


def warn_inside(store: object) -> None:
    """Warn, once for each place in the caller's code."""
    attempt = current_attempt()
    while attempt is not None:
        if isinstance(attempt, TransactionAttempt) and attempt.store is store:
            warnings.warn(
                "this call does not belong to the block of idem.transaction() around it: what it "
                "writes is committed at once and stays when the transaction is rolled back, and it "
                "sees nothing of this transaction; use idem.transaction() for it too, or call it "
                "outside",
                OutsideTransaction,
                stacklevel=_users_frame(),
            )
            return
        attempt = attempt.outer


def _users_frame() -> int:
    """Count the frames up to the first that is not ours."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - `inspect` reads source files for it
    while frame.f_back is not None and _ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _ours(module: str) -> bool:
    return f"{module}.".startswith(f"{_PACKAGE}.")
