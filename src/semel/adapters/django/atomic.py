"""Django's transactions: those that are open around a view, and `@idempotent(atomic="default")`.

A view may run inside a transaction that ends only after it: with ATOMIC_REQUESTS, or in a block of
`transaction.atomic()` around it. Its response is recorded when that transaction has ended: a record
that was saved before would survive a failing COMMIT, and a retry would get a response whose effect
is lost.

With `atomic=`, record and rows are in one transaction: the view runs inside `transaction.atomic()`
of that database. A response that is stored commits with the view's rows, or neither does; an
exception, or a response that is not stored, rolls back both. That holds behind other integrations,
too: they have a record of their own, in a transaction of its own, which could not keep this
promise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import ref

from django.db import connections, transaction

from semel.adapters._sync.integration import Integration
from semel.adapters.check_decorators import claimed_outside, owners_around
from semel.adapters.django.bodies import Body, lines_of, read, rendered, response_of
from semel.aio import AsyncIdempotency
from semel.core.optional import have
from semel.engine._sync.transactions import TransactionContext
from semel.engine.setup import Call
from semel.errors import ConfigError, IdempotencyError, StoreError, about
from semel.http.rules import Rejected, RouteRules
from semel.http.storing import is_event_stream
from semel.sync import Idempotency
from semel.transactions import db_errors

# --- the transactions of this thread -------------------------------------------------------------

# Whether a transaction is that of a TestCase is not public.
have("django", transaction.atomic(), "_from_testcase")


def open_transactions() -> list[Any]:
    """Return the connections of this thread that have a transaction open.

    The transaction of a TestCase does not count: it never ends while the test runs, and nothing is
    committed there.
    """
    return [
        each
        for each in connections.all(initialized_only=True)
        if each.in_atomic_block and not each.atomic_blocks[0]._from_testcase  # noqa: SLF001 - has no other name
    ]


def when_ended(
    committed: Callable[[], Any], rolled_back: Callable[[bool], Any], *, partly: bool = False
) -> Any:
    """Call one of them when no transaction is open any more; at once if none is.

    `rolled_back` gets True if rows may be committed after all: those of another database
    (`partly`), or those of a COMMIT whose answer was lost.
    """
    for connection in open_transactions():
        if connection.closed_in_transaction:
            return rolled_back(partly)  # by the database itself; Django calls no hook any more
        ending = _Ending(connection, committed, rolled_back, partly=partly)
        transaction.on_commit(ending, using=connection.alias, robust=True)
        # First: a hook of the application that raises would keep the others from being called.
        connection.run_on_commit.insert(0, connection.run_on_commit.pop())
        return None
    return committed()


class _Ending:
    """Notices how a transaction ends.

    Django has no hook for a rollback, also not for one after a failing COMMIT: it drops the hooks
    for the commit. So this hook is either called (committed) or dropped (rolled back).
    """

    def __init__(
        self,
        connection: Any,
        committed: Callable[[], Any],
        rolled_back: Callable[[bool], Any],
        *,
        partly: bool,
    ) -> None:
        # With a callback: only then every version of Python clears it before `__del__` is called.
        self._connection = ref(connection, _ignore)
        self._committed, self._rolled_back, self._partly = committed, rolled_back, partly
        self._called = False

    def __call__(self) -> None:
        self._called = True
        when_ended(self._committed, self._rolled_back, partly=True)

    def __del__(self) -> None:
        connection = self._connection()
        if self._called or connection is None:
            # Without its connection, the garbage collector calls this, at any line of any thread,
            # also where the engine holds a lock. The engine's timer releases the key: it notices
            # that nothing is left which could end the attempt.
            return
        # An error that Django has not reset, and no block any more: the COMMIT, or the rollback
        # after it, has lost the connection.
        lost = connection.errors_occurred and not connection.in_atomic_block
        with suppress(Exception):  # as with every save that fails, a retry runs again
            self._rolled_back(self._partly or lost)


def _ignore(_gone: object) -> None:
    """Do nothing."""


def reject_transactions(engine: Idempotency | AsyncIdempotency) -> None:
    """Raise a ConfigError where this thread's own transaction is in the way of a claim.

    The store has connections of its own. In an SQLite file that a transaction may have locked, they
    would wait for a commit that waits for them.
    """
    for connection in connections.all(initialized_only=True):
        alias = connection.alias
        if _is_open_by_hand(connection):
            raise ConfigError(
                f"the database {alias!r} has autocommit switched off around this request, and "
                "Django does not tell when such a transaction ends, so that a record could be "
                "saved before a COMMIT that fails: use transaction.atomic() instead, or "
                f"@idempotent(atomic={alias!r})"
            )
        if connection.in_atomic_block and shares_file(engine, connection):
            raise ConfigError(
                f"the records are in the same SQLite file as the database {alias!r}, which has a "
                "transaction open around this request (ATOMIC_REQUESTS, transaction.atomic() or a "
                f"TestCase), so that they would wait for each other: use @idempotent(atomic="
                f"{alias!r}); or, in tests, a TransactionTestCase or another URL in settings.SEMEL"
            )


def _is_open_by_hand(connection: Any) -> bool:
    """Return whether a connection has no autocommit, and no block of `atomic()` either."""
    if connection.in_atomic_block:
        return False
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def shares_file(engine: Idempotency | AsyncIdempotency, connection: Any) -> bool:
    """Return whether an engine keeps its records in the SQLite file of a Django database."""
    store = engine.internals.store
    if connection.vendor != "sqlite" or store.path is None:
        return False
    try:
        return Path(store.path).samefile(connection.settings_dict["NAME"])
    except OSError:  # not there yet: `manage.py check` also runs before the first `migrate`
        return Path(store.path).resolve() == Path(connection.settings_dict["NAME"]).resolve()


# --- atomic= -------------------------------------------------------------------------------------


class _NotStored(Exception):
    """Rolls back what was done for an answer that is not stored; it never leaves this module."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def run_view(
    integration: Integration, rules: RouteRules, request: Any, view: Callable[[], Any], alias: str
) -> Any:
    """Answer one request: by the view, in a transaction, or by what is known of its key."""
    body = Body(request, rules.max_body)
    try:
        call = integration.prepare(rules, body.request, body.read)
    except (IdempotencyError, Rejected) as error:
        return response_of(rules.rejection(error))
    together: Any = transaction.atomic(using=alias)
    if call is None:
        with together:
            return view()
    failure: Exception | None = None
    try:
        with (
            together,
            TransactionContext(integration.engine.internals, call, alias, None) as attempt,
        ):
            if attempt.replayed:
                return response_of(rules.replay(attempt.result, call.identity))
            try:
                response = rendered(view(), request)
                attempt.result = _stored(rules, request, response)
            except Exception as error:
                failure = error
                raise
            return response
    except _NotStored as undone:
        return undone.response
    except IdempotencyError as error:
        if error is failure:
            raise
        return response_of(rules.rejection(_explained(integration, call, error)))
    except Exception as error:
        # The COMMIT itself may fail in a way that asks for another try; nothing was done then.
        if error is failure or not call.must_retry(error):
            raise
        return response_of(rules.rejection(about(db_errors.retry_error(), call.identity)))


def _explained(integration: Integration, call: Call, error: IdempotencyError) -> IdempotencyError:
    """Say that it is an integration around this one that has the record which rejects it."""
    owners = owners_around(call.identity)
    if owners:
        with suppress(StoreError):
            record = integration.engine.internals.store.get(call.identity)
            if record is not None and record.owner in owners:
                return claimed_outside("atomic", call.identity)
    return error


def _stored(rules: RouteRules, request: Any, response: Any) -> bytes:
    """Return what is stored of a response, or roll back."""
    response.headers.pop(rules.choices.replayed_header, None)
    status, lines = response.status_code, lines_of(response)
    if rules.decide(status, lines) != "store":
        rules.log_redirect(status, request, rolled_back=True)
        raise _NotStored(response)
    if is_event_stream(lines):
        # Its rows are committed, so it must not run again; it is only not kept.
        return rules.stored(status, lines, None)
    return rules.stored(*read(response, rules.max_response))
