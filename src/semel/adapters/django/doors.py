"""The doors of Django: what they know of its transactions, and of its two kinds of functions.

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

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction

from semel.adapters.aio_door import AsyncDoor
from semel.adapters.door import Door, Exchange
from semel.aio import AsyncIdempotency
from semel.engine.call import Call
from semel.errors import ConfigError
from semel.http.messages import Answer, HeaderLine, Request
from semel.http.rulebook import BODY, Rulebook, Waiting
from semel.sync import Idempotency

# --- the transactions of this thread -------------------------------------------------------------


def open_transactions() -> list[Any]:
    """Give the connections of this thread that have a transaction open.

    That of a TestCase is none: it never ends while the test runs, and nothing is committed there.
    """
    return [each for each in _in_blocks() if not each.atomic_blocks[0]._from_testcase]


def _in_blocks() -> list[Any]:
    return [each for each in connections.all(initialized_only=True) if each.in_atomic_block]


def when_ended(committed: Callable[[], Any], rolled_back: Callable[[], Any]) -> Any:
    """Call one of them when no transaction is open any more; at once if none is."""
    for connection in open_transactions():
        if connection.closed_in_transaction:
            return rolled_back()  # by the database itself, and Django calls no hook any more
        transaction.on_commit(_Ending(committed, rolled_back), using=connection.alias, robust=True)
        # First: a hook of the application that raises would keep the others from being called.
        connection.run_on_commit.insert(0, connection.run_on_commit.pop())
        return None
    return committed()


class _Ending:
    """Hears how a transaction ends.

    Django has no hook for a rollback, also not for one after a failing COMMIT: it drops the hooks
    for the commit. So this one is called, or it is let go.
    """

    def __init__(self, committed: Callable[[], Any], rolled_back: Callable[[], Any]) -> None:
        self._committed, self._rolled_back = committed, rolled_back
        self._called = False

    def __call__(self) -> None:
        self._called = True
        when_ended(self._committed, self._rolled_back)

    def __del__(self) -> None:
        if not self._called:
            with suppress(Exception):  # as with every save that fails, a retry runs again
                self._rolled_back()


def refuse_own_lock(engine: Idempotency | AsyncIdempotency) -> None:
    """Refuse to claim in an SQLite file that this thread's own transaction may have locked.

    The store has connections of its own, which would wait for a commit that waits for them.
    """
    for connection in _in_blocks():
        if shares_file(engine, connection):
            alias = connection.alias
            raise ConfigError(
                f"the records are in the same SQLite file as the database {alias!r}, which has a "
                "transaction open around this request (ATOMIC_REQUESTS, transaction.atomic() or a "
                f"TestCase), so that they would wait for each other: use @idempotent(atomic="
                f"{alias!r}); or, in tests, a TransactionTestCase or another URL in settings.SEMEL"
            )


def shares_file(engine: Idempotency | AsyncIdempotency, connection: Any) -> bool:
    """Tell whether an engine keeps its records in the SQLite file of one of Django's databases."""
    store = engine._store
    path = getattr(getattr(store, "_behind", store), "path", None)
    if path is None or connection.vendor != "sqlite":
        return False
    try:
        return Path(path).samefile(connection.settings_dict["NAME"])
    except OSError:  # one of them is no file, or not yet
        return False


# --- on threads ----------------------------------------------------------------------------------


class DjangoExchange(Exchange):
    """One request that runs, whose end is recorded when the transactions around it have ended."""

    def answered(
        self, status: int, lines: Iterable[HeaderLine], body: bytes | None
    ) -> Answer | None:
        """Record an answer; one that was to be stored has failed if it is rolled back."""
        answered = partial(super().answered, status, [*lines], body)
        instead: Answer | None = self._settle(
            answered, partial(self._rolled_back, status, answered)
        )
        return instead

    def unprotected(self) -> None:
        """Free the key."""
        unprotected = super().unprotected
        self._settle(unprotected, unprotected)

    def raised(self, error: BaseException) -> None:
        """Record that the view raised."""
        raised = partial(super().raised, error)
        self._settle(raised, raised)

    def _rolled_back(self, status: int, answered: Callable[[], Any]) -> None:
        # What a view raises rolls back its rows by itself, and is its answer all the same.
        if self.raises or self.book.keeping(status) != "store":
            answered()
        else:
            error = transaction.TransactionManagementError(
                "the transaction around the view was rolled back"
            )
            super().raised(error)

    def _settle(self, committed: Callable[[], Any], rolled_back: Callable[[], Any]) -> Any:
        instead = when_ended(committed, rolled_back)
        self._leave()  # Also where the end comes later: what runs until then is not the view.
        return instead


class DjangoDoor(Door):
    """The door of views on threads; the application's functions may be async."""

    exchange = DjangoExchange

    def before_claim(self) -> None:
        """Refuse what would wait for itself."""
        refuse_own_lock(self.engine)

    def awaited(self, given: Any) -> Any:
        """Give what an async function of the application gives: one setting serves both servers."""
        return async_to_sync(partial(_itself, given))()


async def _itself(given: Awaitable[Any]) -> Any:
    return await given


# --- on asyncio ----------------------------------------------------------------------------------


class AsyncDjangoDoor(AsyncDoor):
    """The door of async views; the application's plain functions may ask the database."""

    def before_claim(self) -> None:
        """Refuse what would wait for itself."""
        refuse_own_lock(self.engine)

    async def called(
        self, book: Rulebook, request: Request, read: Callable[[], Awaitable[bytes]]
    ) -> Call | None:
        """Prepare the call of a request, on a thread where the application has a part in it."""
        chosen = book.choices
        if chosen.tenant is None and chosen.key is None and not callable(chosen.payload):
            return await super().called(book, request, read)
        step, waiting, given = sync_to_async(_step), book.ask(request), None
        while True:
            ended, need = await step(waiting, given)
            if ended:
                return None if need is None else Call(need.identity, need.fingerprint, book.rules)
            given = await read() if need is BODY else await self.awaited(need)


def _step(waiting: Waiting, given: Any) -> tuple[bool, Any]:
    """Go on with a request; a StopIteration cannot leave a thread."""
    try:
        return False, waiting.send(given)
    except StopIteration as end:
        return True, end.value
