# Generated from engine/transactions.py by `make generate`: change that file instead.
"""Transactional mode on a thread: the record is written in the caller's own transaction.

Nothing here commits or rolls back more than a savepoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Generic, TypeVar, assert_never
from weakref import ref

from semel import events, transactions
from semel.core.attempts import Attempt, Result
from semel.core.decide import Reject, Wait, decide
from semel.core.process import notice_fork
from semel.core.records import (
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Finished,
    Mismatch,
)
from semel.engine._sync.runs import Runs
from semel.engine.colours.threads import finished, sleep
from semel.engine.outcomes import claim_request, pauses
from semel.engine.setup import Call
from semel.errors import (
    ConcurrentRequest,
    ConfigError,
    IdempotencyError,
    LeaseLost,
    about,
    raise_about,
)
from semel.events import logger
from semel.stores.sql.verbs import Verb
from semel.transactions import LOCKED, Records, TransactionAttempt, db_errors, records_of
from semel.transactions._sync.links import Link, Nested, Savepoint
from semel.transactions.drivers import link_to

S = TypeVar("S")
T = TypeVar("T")
V = TypeVar("V")

RETRIES = 3
"""How often a transaction is repeated where the database asks for it."""


class TransactionContext(Generic[Result]):
    """One attempt in the caller's transaction; made by `transaction()`."""

    _link: Link
    _records: Records
    _nested: Nested
    _marker: Savepoint

    def __init__(self, runs: Runs, call: Call, connection: object, table: str | None) -> None:
        call.around = sys.exception()
        self._runs = runs
        self._call = call
        self._connection = connection
        self._table = table
        self._attempt: Attempt[Result] = Attempt(call.identity, protected=False)
        """The one without a record, until the record is claimed or read."""

    def __enter__(self) -> Attempt[Result]:
        if self._runs.setup.bypassing():
            return self._attempt
        try:
            self._begin()
            try:
                self._attempt = self._claim()
                if self._attempt.replayed:
                    # Rolled back: PostgreSQL's lock on the key must not outlast this block.
                    self._nested.rollback()
                else:
                    self._marker = Savepoint(self._link)
                    self._marker.open()
                    self._attempt.__enter__()
                return self._attempt  # noqa: TRY300 - inside: an interruption of this line, too, is met
            except BaseException as error:  # noqa: BLE001 - passed on, or translated
                self._attempt.__exit__()
                self._restore_quietly()
                self._undo()
                table = self._records.waits_for_table
                db_errors.raise_claim_error(error, waits_for_table=table)
        except IdempotencyError as error:
            raise_about(error, self._call.identity)

    def _begin(self) -> None:
        """Open the savepoint that undoes the whole block."""
        runs = self._runs
        notice_fork()
        self._owners = runs.owners
        runs.check_usable(self._call)
        self._began = monotonic()
        self._link = link_to(self._connection, asynchronous=False)
        self._records = records_of(runs.store, self._link.dialect, self._table)
        try:
            self._nested = self._link.begin()
        except BaseException as error:  # noqa: BLE001 - passed on, or translated
            db_errors.raise_claim_error(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        attempt = self._attempt
        attempt.__exit__()  # First: an interruption from now on leaves no attempt that runs.
        if attempt.replayed or not attempt.protected:
            return
        if self._is_inherited(error):
            return
        if error is not None:
            self._undo()
            if self._call.must_retry(error):
                raise about(db_errors.retry_error(), self._call.identity) from error
            return
        try:
            # The marker is the witness: it went with the transaction that it was set in.
            self._marker.commit()
            self._complete(attempt)
        except BaseException as failure:  # noqa: BLE001 - passed on, or translated
            self._undo()
            rolled_back = db_errors.is_ended(failure) and self._was_rolled_back(attempt)
            try:
                db_errors.raise_end_error(failure, rolled_back=rolled_back)
            except IdempotencyError as rejected:
                raise_about(rejected, self._call.identity)
        try:
            # A session writes what the application left in it only now: those errors are its own.
            self._nested.commit()
        except BaseException as failure:
            self._undo()
            if self._call.must_retry(failure):
                raise about(db_errors.retry_error(), self._call.identity) from failure
            raise

    def _is_inherited(self, error: BaseException | None) -> bool:
        """Whether this process was forked inside the block: transaction and connection are not its.

        Raises `LeaseLost`, unless the block itself has raised an `error`.
        """
        notice_fork()
        if self._owners is self._runs.owners:
            return False
        if error is None:
            lost = LeaseLost(
                "the process was forked inside this block: its parent ends the attempt"
            )
            raise about(lost, self._call.identity)
        return True

    def _claim(self) -> Attempt[Result]:  # noqa: RET503 - every case returns or raises
        """Claim the record, or read its state; waits for the commit of another transaction."""
        runs, call = self._runs, self._call
        counted = call.counted
        owner = runs.owners.next() if counted is None else counted.owner
        # On the store's own connection: a read here would begin the snapshot of the transaction.
        digests = runs.digests(call) if runs.setup.rotates else runs.setup.digests(call)
        answer: Claim = Mismatch()
        for digest in digests:
            answer = self._judged(claim_request(call, owner, digest))
            if type(answer) is not Mismatch:
                break
        step = decide(answer, call.rules)
        match step:
            case Claimed():
                return TransactionAttempt(
                    call.identity,
                    number=step.number,
                    fence=step.fence,
                    owner=owner,
                    store=runs.store,
                    holder=ref(self),
                )
            case Finished():
                return runs.answered(call, step, waited=False, asked=True)
            case Reject(error=error, number=number):
                runs.reject(call, error, number)
            case Wait(retry_after=retry_after):
                # It runs elsewhere under a lease: no lock of ours would end with it.
                runs.reject(call, ConcurrentRequest(retry_after=retry_after))
            case _:
                assert_never(step)

    def _judged(self, request: ClaimRequest) -> Claim:
        """Ask for the record once, with one fingerprint."""
        answer = None if self._call.counted is not None else self._look_outside(request)
        if answer is None:
            answer = self._ask(request)
            self._drive(self._records.restore())
        return answer

    def _look_outside(self, request: ClaimRequest) -> Claim | None:
        """Judge what has been committed, where that needs another connection than the caller's."""
        store = self._records.outside
        if store is None:
            return None
        answer: Claim | None = None
        sent = monotonic()
        try:
            answer = store.read_committed(partial(transactions.look, self._records, request))
        except IdempotencyError:
            # Nothing is lost: the claim, on the caller's connection, decides.
            logger.debug("a record could not be read outside its transaction", exc_info=True)
        self._add_store_time(sent)
        return answer

    def _ask(self, request: ClaimRequest) -> Claim:
        """Ask for the record; wait for the transaction that has it, if one more call may wait."""
        runs, call, records = self._runs, self._call, self._records
        waits, most = call.rules.waits, runs.waiting.in_transaction
        if not waits or most is None or not records.by_key:
            self._prepare(wait=waits)
            return self._asked(request, wait=waits)
        # First without a wait: only a call that has to wait is counted.
        self._prepare(wait=False)
        try:
            if not records.rolls_back:  # known since it was prepared
                answer = self._asked(request, wait=False)
                if answer is not LOCKED:
                    return answer
                if not runs.waiting.join(call, most):
                    runs.too_many(call, 0.0)
            self._prepare(wait=True)
            return self._asked(request, wait=True)
        finally:
            runs.waiting.leave(call)

    def _prepare(self, *, wait: bool) -> None:
        """Bound how long the session waits for locks."""
        spent = monotonic() - self._began
        self._drive(transactions.prepare(self._records, self._call.rules, wait=wait, spent=spent))

    def _asked(self, request: ClaimRequest, *, wait: bool) -> Claim:
        """Ask once; without a wait, an open transaction that has the record is an error."""
        try:
            start = self._call.counted
            counted = None if start is None else Claimed(start.number, start.fence)
            return self._drive(
                transactions.claim(self._records, request, wait=wait, counted=counted)
            )
        except Exception as error:
            if self._records.waits_for_table or not db_errors.would_wait(error):
                raise
            if self._records.rolls_back:
                raise db_errors.retry_error() from error
            if wait:
                raise
            return LOCKED

    def _complete(self, attempt: Attempt) -> None:
        runs, call = self._runs, self._call
        kept = runs.result_to_store(call, attempt, attempt.result)
        if kept.interruption is not None:
            raise kept.interruption
        request = CompleteRequest(call.identity, attempt.owner, kept.encoded, call.rules.ttl)
        if not self._drive(transactions.complete(self._records, request, call.rules)):
            raise LeaseLost("the record was removed or replaced inside its own transaction")
        attempt.result = kept.value
        runs.announce(
            events.RanInTransaction(
                identity=call.identity,
                number=attempt.number,
                seconds=monotonic() - self._began,
                size=len(kept.encoded.data),
                store_seconds=runs.store_seconds(call),
            )
        )

    def _was_rolled_back(self, attempt: Attempt) -> bool:
        """Look whether the claim of a transaction that has ended was committed with it, or is gone.

        False = it was, or that is unknown; or what the block did afterwards may have been.
        """
        store = self._records.outside
        if store is None or self._records.commits_each:
            return False
        try:
            read = partial(self._records.read, self._call.identity)
            record = store.read_committed(read)
        except IdempotencyError:
            logger.debug("a record could not be read outside its transaction", exc_info=True)
            return False
        # A start that was counted before has the same owner; only a claim of the block is held.
        return record is None or record.owner != attempt.owner or not record.hold

    def _drive(self, verb: Verb[V]) -> V:
        """Run the statements of a verb to its end."""
        sent = monotonic()
        try:
            statement = next(verb)
            while True:
                statement = verb.send(self._link.execute(statement))
        except StopIteration as end:
            answer: V = end.value
            return answer
        finally:
            verb.close()
            self._add_store_time(sent)

    def _add_store_time(self, sent: float) -> None:
        if self._runs.timed:
            self._call.store_seconds += monotonic() - sent

    def _undo(self) -> None:
        """Roll back to the savepoint; where that fails the transaction is gone, and all with it."""
        try:
            self._nested.rollback()
        except Exception:  # noqa: BLE001 - what led here reaches the caller
            logger.debug("a savepoint could not be undone", exc_info=True)

    def _restore_quietly(self) -> None:
        """Restore the session's bound; PostgreSQL may reject that, and undoing does it."""
        try:
            self._drive(self._records.restore())
        except Exception:  # noqa: BLE001 - what led here reaches the caller
            logger.debug("a bound for locks could not be restored", exc_info=True)


def run_in_transaction(
    runs: Runs,
    begin: Callable[[], AbstractContextManager[S]],
    call: Call,
    fn: Callable[[S], T],
    retries: int = RETRIES,
    *,
    name: str = "begin",
) -> Attempt[T]:
    """Run `fn` in a transaction of `begin()`, and the whole again where the database asks.

    `name` is what the caller calls `begin`, for errors.
    """
    call.around = sys.exception()
    waits = pauses(call.rules)
    for left in range(retries, -1, -1):
        try:
            given = transactions.enterable(begin(), AbstractContextManager, name)
            with given as connection:
                if not runs.setup.bypassing():
                    transactions.check_begun(connection, name, call.identity)
                attempt = _run_inside(runs, call, connection, fn)
        except Exception as error:
            if not call.must_retry(error):
                raise
            if left == 0:
                raise about(db_errors.retry_error(), call.identity) from error
        else:
            return attempt
        sleep(next(waits))
    raise about(ConfigError(f"retries must be 0 or more, not {retries}"), call.identity)


def _run_inside(runs: Runs, call: Call, connection: S, fn: Callable[[S], T]) -> Attempt[T]:
    context: TransactionContext[T] = TransactionContext(runs, call, connection, None)
    with context as attempt:
        if attempt.replayed:
            return attempt
        attempt.result = finished(fn(connection), call.identity)
    return attempt


class TransactionsContext:
    """Several attempts in the caller's transaction; made by `transactions()`."""

    def __init__(self, contexts: Mapping[str, TransactionContext[Any]]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> dict[str, Attempt]:
        try:
            return {
                key: self._stack.enter_context(context) for key, context in self._contexts.items()
            }
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
