"""Django's transactions, and its sync and async functions, as the integration sees them.

A view may run inside a transaction that ends only after it: with ATOMIC_REQUESTS, or in a block of
`transaction.atomic()` around it. Its answer is recorded when that transaction has ended. A record
that was saved before would survive a failing COMMIT, and the retry would get an answer whose effect
is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction

from semel.adapters.aio_integration import AsyncIntegration
from semel.adapters.integration import Exchange, Integration
from semel.aio import AsyncIdempotency
from semel.core.decide import Undone
from semel.core.extras import have
from semel.engine.setup import Call
from semel.errors import ConfigError
from semel.http.messages import Answer, HeaderLine, Request
from semel.http.rules import BODY, RouteRules, Waiting
from semel.stores.base import OnFile
from semel.sync import Idempotency

# --- the transactions of this thread -------------------------------------------------------------

# Whether a transaction is that of a TestCase is not public.
have("django", transaction.atomic(), "_from_testcase")


def open_transactions() -> list[Any]:
    """Give the connections of this thread that have a transaction open.

    The transaction of a TestCase does not count: it never ends while the test runs, and nothing is
    committed there.
    """
    return [
        each
        for each in connections.all(initialized_only=True)
        if each.in_atomic_block and not each.atomic_blocks[0]._from_testcase
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


def refuse_transactions(engine: Idempotency | AsyncIdempotency) -> None:
    """Refuse to claim where this thread's own transaction is in the way.

    The store has connections of its own. In an SQLite file that a transaction may have locked, they
    would wait for a commit that waits for them.
    """
    for connection in connections.all(initialized_only=True):
        alias = connection.alias
        if _is_open_by_hand(connection):
            raise ConfigError(
                f"the database {alias!r} has autocommit switched off around this request, and "
                "Django does not tell when such a transaction ends, so that a record could be "
                "saved before a COMMIT that fails: use transaction.atomic() in its place, or "
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
    """Tell whether a connection has no autocommit, and no block of `atomic()` either."""
    if connection.in_atomic_block:
        return False
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def shares_file(engine: Idempotency | AsyncIdempotency, connection: Any) -> bool:
    """Tell whether an engine keeps its records in the SQLite file of one of Django's databases."""
    store = engine._store
    if connection.vendor != "sqlite" or not isinstance(store, OnFile) or store.path is None:
        return False
    try:
        return Path(store.path).samefile(connection.settings_dict["NAME"])
    except OSError:  # not there yet: `manage.py check` also runs before the first `migrate`
        return Path(store.path).resolve() == Path(connection.settings_dict["NAME"]).resolve()


# --- on threads ----------------------------------------------------------------------------------


class DjangoExchange(Exchange):
    """One request that runs, whose end is recorded when the transactions around it have ended."""

    def answered(
        self, status: int, lines: Iterable[HeaderLine], body: bytes | None
    ) -> Answer | None:
        """Record an answer; one that was to be stored has failed if it is rolled back."""
        lines = [*lines]
        answered = partial(super().answered, status, lines, body)
        instead: Answer | None = self._settle(
            answered, partial(self._rolled_back, status, lines, answered)
        )
        return instead

    def unprotected(self) -> None:
        """Free the key."""
        unprotected = super().unprotected
        self._settle(unprotected, lambda _: unprotected())

    def raised(self, error: BaseException) -> None:
        """Record that the view raised."""
        raised = partial(super().raised, error)
        self._settle(raised, lambda _: raised())

    def _rolled_back(
        self, status: int, lines: list[HeaderLine], answered: Callable[[], Any], in_doubt: bool
    ) -> None:
        # What a view raises rolls back its rows by itself, and is its answer all the same.
        if self.raises or self.rules.decide(status, lines) != "store":
            answered()
            return
        told = "the transaction around the view was rolled back"
        error: Exception = transaction.TransactionManagementError(told)
        if in_doubt and self.rules.policy.hold:
            # Nothing that the policy says of database errors: these rows may be committed.
            error = Undone("nobody knows whether the transaction was committed", "unknown")
        super().raised(error)

    def _settle(self, committed: Callable[[], Any], rolled_back: Callable[[bool], Any]) -> Any:
        instead = when_ended(committed, rolled_back)
        self._leave()  # Also where the end comes later: what runs until then is not the view.
        return instead


class DjangoIntegration(Integration):
    """The integration of views on threads; the application's functions may be async."""

    exchange = DjangoExchange

    def before_claim(self) -> None:
        """Refuse what would wait for itself."""
        refuse_transactions(self.engine)

    def awaited(self, given: Any) -> Any:
        """Give what an async function of the application gives: one setting serves both servers."""
        return async_to_sync(partial(_itself, given))()


async def _itself(given: Awaitable[Any]) -> Any:
    return await given


# --- on asyncio ----------------------------------------------------------------------------------


class AsyncDjangoIntegration(AsyncIntegration):
    """The integration of async views; the application's plain functions may ask the database."""

    def before_claim(self) -> None:
        """Refuse what would wait for itself."""
        refuse_transactions(self.engine)

    async def called(
        self, rules: RouteRules, request: Request, read: Callable[[], Awaitable[bytes]]
    ) -> Call | None:
        """Prepare the call of a request, on a thread where the application has a part in it."""
        chosen = rules.choices
        if chosen.tenant is None and chosen.key is None and not callable(chosen.payload):
            return await super().called(rules, request, read)
        step, waiting, given = sync_to_async(_step), rules.ask(request), None
        while True:
            ended, need = await step(waiting, given)
            if ended:
                return None if need is None else Call(need.identity, need.fingerprint, rules.policy)
            given = await read() if need is BODY else await self.awaited(need)


def _step(waiting: Waiting, given: Any) -> tuple[bool, Any]:
    """Go on with a request; a StopIteration cannot leave a thread."""
    try:
        return False, waiting.send(given)
    except StopIteration as end:
        return True, end.value
