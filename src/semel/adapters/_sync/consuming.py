# Generated from adapters/consuming.py by `make generate`: change that file instead.
"""How one message is handled on a thread, whatever the broker.

`Consumer.handle` runs the handler at most once and returns the verdict on its message. An
integration makes the `Message`, and carries the verdict out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from semel.core.attempts import Lease
from semel.core.codec import returned_by
from semel.core.stop import Stop
from semel.engine._sync.starts import MOST_LOSSES, Start
from semel.engine._sync.transactions import run_in_transaction
from semel.engine.colours.threads import finished
from semel.engine.setup import Call
from semel.errors import (
    ConfigError,
    IdempotencyError,
    LeaseLost,
    RetryTransaction,
    StoreUnavailable,
    about,
)
from semel.events import logger
from semel.messages import (
    SOONEST,
    STORE_PAUSE,
    Ack,
    Later,
    Message,
    MessageRules,
    Reject,
    Verdict,
    described,
    later,
)
from semel.sync import Idempotency
from semel.transactions import db_errors


class Consumer:
    """An engine, a handler, and the rules of the messages that come to it.

    `framework_retries` says that the framework delivers a message again whose handler raised; else
    that is done here. `keeps_value` says that a duplicate gets the value that the handler returned.
    """

    def __init__(
        self,
        engine: Idempotency,
        handler: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        default_consumer: str | None = None,
        framework_retries: bool = False,
        keeps_value: bool = False,
        not_done: tuple[type[BaseException], ...] = (),
        transaction: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(engine, Idempotency):
            raise ConfigError(
                'an Idempotency is needed, such as Idempotency("redis://..."), '
                f"not {type(engine).__name__}"
            )
        if not callable(handler):
            raise ConfigError(
                f"a function that takes the message is needed, not {type(handler).__name__}"
            )
        setup = engine.internals.setup
        setup.check_function(handler)
        self.engine = engine
        self.rules = MessageRules(
            options,
            default_consumer=default_consumer,
            framework_retries=framework_retries,
            not_done=not_done,
            levels=setup.policies_of,
            resolved=setup.rules,
        )
        if transaction is not None:
            _check_transaction(transaction, engine.internals.store)
        self._handler = handler
        self._keeps_value = keeps_value
        self._returns = returned_by(handler) if keeps_value else None
        self._transaction = transaction
        self._stopping = Stop()

    def wait_no_longer(self) -> None:
        """End the waits for a store that is down in which a start is counted no longer.

        For a consumer that stops. Messages that come later wait again.
        """
        stopping, self._stopping = self._stopping, Stop()
        stopping.set()

    def handle(self, message: Message, *args: Any) -> Verdict:
        """Call the handler with `args`, unless the message is done, and return the verdict on it.

        Raises what ends the consumer, its message unacknowledged: an error of the program, a
        cancellation or an interruption.
        """
        try:
            call = self._prepared(message)
        except IdempotencyError as error:
            return self.rules.verdict_without_run(error)
        if self._transaction is not None:
            return self._handled_in_transaction(self._transaction, call, args)
        runs = self.engine.internals
        try:
            attempt = runs.run(call, self._handler, *args)
        except Exception as error:  # noqa: BLE001 - the verdict says what becomes of it
            return self._verdict(call, error)
        lease = attempt.lease
        if lease is not None and not lease.stored:
            try:
                self._until_stored(call, lease)
            except StoreUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - a worker's time limit, of any class
                return later(SOONEST, f"interrupted before it was stored: {type(error).__name__}")
            if not lease.stored:
                return later(SOONEST, "another attempt replaced this one before it was stored")
        return Ack(attempt.result, attempt.replayed)

    def _prepared(self, message: Message) -> Call:
        rules = self.rules
        return self.engine.internals.setup.call(
            rules.key_of(message),
            rules.consumer,
            rules.payload_of(message),
            rules.policy,
            returns=self._returns,
            keeps_value=self._keeps_value,
        )

    def _verdict(self, call: Call, error: Exception) -> Verdict:
        """Say what becomes of a message after this error, of the engine or of the handler."""
        lease = call.lease
        if lease is None or not lease.entered:
            # Without protection the handler may have run, and an error of another call is its own.
            if _is_about(error, call):
                return self.rules.verdict_without_run(error)
            return self._verdict_of_failure(call, error, 1, None)
        if lease.stored:
            # A signal handler raised after the end: the next delivery gets the stored result.
            return later(SOONEST, f"interrupted after it was done: {type(error).__name__}")
        if isinstance(error, LeaseLost) and _is_about(error, call):
            return self.rules.verdict_without_run(error)
        return self._verdict_of_failure(call, error, lease.number, lease.failure)

    def _verdict_of_failure(
        self, call: Call, error: Exception, number: int, recorded: str | None
    ) -> Verdict:
        """Say what becomes of a message whose handler raised; a framework logs that itself."""
        verdict = self.rules.verdict_of_failure(error, number, recorded)
        if isinstance(verdict, Reject):
            verdict = Reject(verdict.reason, verdict.error, call.identity.key_digest)
        if not self.rules.framework_retries:
            logger.error(
                "message handler raised (attempt %d); %s [scope=%s key_digest=%s]",
                number,
                _next_of(verdict),
                call.identity.scope,
                call.identity.key_digest,
                exc_info=error,
            )
        return verdict

    def _until_stored(self, call: Call, lease: Lease) -> None:
        """Wait for the store: a message that is done is acknowledged when its record says so."""
        logger.warning(
            "message handled, but the store is unreachable; it will be acknowledged when its "
            "record is stored [scope=%s key_digest=%s]",
            call.identity.scope,
            call.identity.key_digest,
        )
        if self.engine.internals.stored(lease) is None:
            closed = StoreUnavailable(
                "the engine was closed before the store had the result: the message is not "
                "acknowledged, and may be handled again"
            )
            raise about(closed, call.identity)

    # --- in a transaction --------------------------------------------------------------------

    def _handled_in_transaction(
        self, begin: Callable[[], Any], call: Call, args: tuple[Any, ...]
    ) -> Verdict:
        """Handle a message in one transaction with its record: both are committed, or neither."""
        runs = self.engine.internals
        counts = call.rules.max_attempts is not None
        start = Start(runs, call, self._stopping)
        ended: list[Exception | None] = []  # how the handler ended, if it was called

        def begin_anew() -> Any:
            ended.clear()  # the handler of a transaction that is repeated counts no more
            start.leave()
            return begin()

        def handler(session: Any) -> Any:
            start.enter()
            try:
                value = finished(self._handler(session, *args), call.identity)
            except Exception as error:
                ended.append(error)
                raise
            ended.append(None)
            return value

        try:
            done = start.begin() if counts else None
            attempt = (
                run_in_transaction(runs, begin_anew, call, handler, name="transaction=")
                if done is None
                else done
            )
        except Exception as error:  # noqa: BLE001 - the verdict says what becomes of it
            if not ended:
                start.interrupted(error)
                return self._verdict_without_commit(call, error, ran=False)
            return self._verdict_of_rollback(call, start, error, ended[0])
        except BaseException as error:
            start.interrupted(error)
            raise
        start.end()
        return Ack(attempt.result, attempt.replayed)

    def _verdict_without_commit(self, call: Call, error: Exception, *, ran: bool) -> Verdict:
        """Say what becomes of a message whose transaction was not begun, or not committed."""
        if isinstance(error, IdempotencyError):
            verdict = self.rules.verdict_without_run(error)
            if not ran:  # the duplicate of another attempt, as a rule
                return verdict
        else:
            reason = f"the transaction failed: {described(error)}"
            unavailable = StoreUnavailable(reason)
            unavailable.__cause__ = error
            verdict = later(STORE_PAUSE, reason, unavailable)
        logger.warning(
            "message transaction not %s; %s [scope=%s key_digest=%s]",
            "committed" if ran else "begun",
            _next_of(verdict),
            call.identity.scope,
            call.identity.key_digest,
            exc_info=error,
        )
        return verdict

    def _verdict_of_rollback(
        self,
        call: Call,
        start: Start,
        error: Exception,
        raised: Exception | None,
    ) -> Verdict:
        """Say what becomes of a message whose transaction was rolled back after its handler.

        The class of the error decides, not its place: a session writes its rows with the commit, so
        that errors of the handler come there, and the handler meets those of the connection.
        """
        again = isinstance(error, RetryTransaction)
        # What the handler raises of the latter may be about any other connection of its own.
        lost = call.is_lost(error) or (isinstance(error, db_errors.DROPPED) and error is not raised)
        if again or lost:
            if start.take_back(lost=lost):
                return self._verdict_without_commit(call, error, ran=True)
            logger.error(
                "message lost its transaction's connection %d times in a row; counting a handler "
                "failure [scope=%s key_digest=%s]",
                MOST_LOSSES + 1,
                call.identity.scope,
                call.identity.key_digest,
            )
        lease = None
        with suppress(Exception):  # one of the store, which is in the log, or a worker's time limit
            if not start.counted:
                start.begin()
                start.enter()  # its handler was called, in the transaction that is gone
            lease = start.fail(error)
        if lease is not None:
            return self._verdict_of_failure(call, error, lease.number, lease.failure)
        if raised is not None:
            return self._verdict_of_failure(call, error, 1, None)
        # The database is away, or the transaction was committed after all: the next delivery asks.
        return self._verdict_without_commit(call, error, ran=True)


def _check_transaction(transaction: object, store: object) -> None:
    if not callable(transaction):
        raise ConfigError(
            "transaction must be a function that opens a transaction, such as Session.begin"
        )
    if getattr(getattr(store, "behind", store), "dialect", None) is None:
        raise ConfigError(
            "transaction= needs an engine whose records are in SQL, in the database that the "
            f"transaction is of; {type(store).__name__} keeps them elsewhere"
        )


def _next_of(verdict: Verdict) -> str:
    """Say for the log what happens to a message next."""
    if isinstance(verdict, Later):
        return f"it will be redelivered in {verdict.seconds:.0f} s"
    return "it will be rejected"


def _is_about(error: Exception, call: Call) -> TypeGuard[IdempotencyError]:
    """Return whether an error is one of this call, and not of another one that its handler made."""
    if not isinstance(error, IdempotencyError):
        return False
    own = (call.identity.scope, call.identity.key_digest)
    return error.key_digest is None or (error.scope, error.key_digest) == own
