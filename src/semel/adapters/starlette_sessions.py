"""Record and rows in one transaction: how a request with `@idempotent(session=...)` runs.

The endpoint runs inside a transaction of its session, in which its key was claimed. An answer that
is stored is committed with the endpoint's rows, or neither is; an exception, or an answer that is
not stored, rolls back both. The response is sent after the commit.

That holds behind other integrations, too. They have a record of their own, in a transaction of its
own, which could not keep this promise.

`def` endpoints have a `Session`, and do every step in a thread; `async def` endpoints have an
`AsyncSession`, in the request's task. The decorator opens it, from a sessionmaker, or a dependency
does, for a parameter that is named.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.requests import Request
from starlette.responses import Response

from semel.adapters.check_decorators import claimed_outside, owners_around
from semel.adapters.integration import Flow
from semel.adapters.starlette import (
    Body,
    Endpoint,
    Invocation,
    Protection,
    is_of_kind,
    plain_annotation,
    read,
    response_of_answer,
    shield,
)
from semel.core.attempts import Attempt
from semel.core.optional import Needed
from semel.engine._sync.transactions import TransactionContext
from semel.engine.setup import Call
from semel.engine.transactions import AsyncTransactionContext
from semel.errors import (
    ConfigError,
    IdempotencyError,
    OutcomeUnknown,
    RetryTransaction,
    StoreError,
    about,
)
from semel.http.problems import log_failure
from semel.http.requests import HeaderLine
from semel.http.rules import Rejected, RouteRules
from semel.http.storing import Answer, is_event_stream
from semel.sync import Idempotency
from semel.transactions import db_errors

with Needed("semel[sqlalchemy]", by="@idempotent(session=...)"):
    from sqlalchemy import Engine, TextClause, event
    from sqlalchemy.exc import UnboundExecutionError
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import ORMExecuteState, Session, SessionTransaction, scoped_session


class _Limits(NamedTuple):
    """What bounds the threads of one event loop."""

    requests: CapacityLimiter
    """How many requests with a sync session run at the same time: as many as plain endpoints."""
    steps: CapacityLimiter
    """Every step of those requests has a thread at once.

    In the framework's own pool, the commit of one request would wait for threads of others, which
    wait for the connection that it would give back.
    """


_limits: Final[RunVar[_Limits]] = RunVar("semel_session_limits")


def limits_here() -> _Limits:
    """Return the limits of the running event loop."""
    try:
        return _limits.get()
    except LookupError:
        at_once = to_thread.current_default_thread_limiter().total_tokens
        made = _Limits(CapacityLimiter(at_once), CapacityLimiter(math.inf))
        _limits.set(made)
        return made


async def in_step(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one step of a request with a sync session in a thread."""
    return await to_thread.run_sync(partial(function, *args, **kwargs), limiter=limits_here().steps)


class SessionChoice:
    """What `session=` says: who opens an endpoint's session, and the parameter that it goes to."""

    parameter: str
    is_async: bool
    in_thread = staticmethod(in_step)
    """Runs a plain function that has such a session."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.depends = isinstance(given, str)
        """A dependency opens the session, for the parameter that is named."""
        if self.depends:
            self.parameter = given
            _watch_changes()
        else:
            self._check_factory(given)

    @staticmethod
    def _check_factory(given: Any) -> None:
        maker = "session= takes a sessionmaker or an async_sessionmaker"
        if isinstance(given, scoped_session | async_scoped_session):
            raise ConfigError(f"{maker}, not a scoped session: each request has a session anyway")
        if isinstance(given, Session | AsyncSession):
            raise ConfigError(f"{maker}, not a session: all requests would share that one")
        if isinstance(given, Engine | AsyncEngine):
            raise ConfigError(f"{maker}: pass sessionmaker(engine) instead of the engine")
        if not callable(given):
            raise ConfigError(
                f"{maker}, or the name of the parameter whose session a dependency opens; got "
                f"{type(given).__name__}"
            )
        kinds = (
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
            inspect.iscoroutinefunction,
        )
        if any(is_of_kind(given, kind) for kind in kinds):
            name = getattr(given, "__name__", "this")
            raise ConfigError(
                f"{maker}, and {name} is a dependency. Pass the sessionmaker that it uses; or "
                f"declare Depends({name}) on a parameter, and name that: session='session'"
            )

    def bind(self, endpoint: Endpoint, name: str) -> None:
        """Find the endpoint's parameter for the session, and check that all is of one kind."""
        self.is_async = endpoint.is_coroutine
        wanted, other = (AsyncSession, Session) if self.is_async else (Session, AsyncSession)
        kind = "async def" if self.is_async else "def"
        made = getattr(self.given, "class_", None)
        if isinstance(made, type) and not issubclass(made, wanted):
            maker = "an async_sessionmaker" if self.is_async else "a plain sessionmaker"
            raise ConfigError(
                f"{name} is {kind}, so its session is {_named(wanted)}: pass session= {maker}, or "
                f"make the endpoint {'def' if self.is_async else 'async def'}"
            )
        parameters = endpoint.parameters
        if self.depends:
            found = [each for each in parameters if each == self.parameter]
        else:
            found = [each for each in parameters if _is_for(parameters[each], wanted, other)]
            found = found or [each for each in parameters if each == "session"]
        if len(found) != 1:
            such = f"{self.given if self.depends else 'session'}: {wanted.__name__}"
            raise ConfigError(
                f"{name} has {'more than one' if found else 'no'} parameter for its session: it "
                f"needs one such as `{such}`"
            )
        (self.parameter,) = found
        if self.depends and self.parameter not in endpoint.injected:
            raise ConfigError(
                f"no dependency opens the session of {name}: declare Depends(...) on its parameter "
                f"{self.parameter!r}, or pass the sessionmaker as session="
            )
        if not self.depends and self.parameter in endpoint.injected:
            raise ConfigError(
                f"a dependency opens the session of {name}: name its parameter, "
                f"session={self.parameter!r}, in place of a sessionmaker"
            )
        annotation = plain_annotation(parameters[self.parameter])
        if isinstance(annotation, type) and issubclass(annotation, other):
            raise ConfigError(
                f"{name} is {kind}, so its session is {_named(wanted)}, not {_named(other)}"
            )

    def check_given(self, session: Any) -> None:
        """Reject what a factory or a dependency has given, if it is no session of this kind."""
        wanted = AsyncSession if self.is_async else Session
        if not isinstance(session, wanted):
            whose = f"the parameter {self.parameter!r} has" if self.depends else "session= gave"
            raise ConfigError(f"{whose} {_named(type(session))}, not {_named(wanted)}")
        plain = _plain(session)
        if plain.new or plain.dirty or plain.deleted or plain in _changed:
            raise ConfigError(
                "the session has changes that were made before the endpoint ran, for example by a "
                "dependency: they would be rolled back for every duplicate. Make them in the "
                "endpoint, or in a session of their own"
            )


def _is_for(parameter: inspect.Parameter, *kinds: type) -> bool:
    annotation = plain_annotation(parameter)
    return isinstance(annotation, type) and issubclass(annotation, kinds)


def _named(kind: type) -> str:
    """Name a class in a sentence."""
    return f"{'an' if kind.__name__[:1] in 'AEIOaeio' else 'a'} {kind.__name__}"


# --- the transaction -----------------------------------------------------------------------------


class _RollBack(Exception):
    """Rolls back what was done for an answer that is not stored; it never leaves this module."""


class _Instead(Exception):
    """An answer that is sent in the place of the endpoint's; it never leaves this package."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


@contextmanager
def _transaction(session: Session) -> Iterator[None]:
    """Commit in the end, or roll back; a dependency may have begun the transaction by reading."""
    if not session.in_transaction():
        session.begin()
    try:
        yield
        session.commit()
    except BaseException:
        session.rollback()
        raise


@asynccontextmanager
async def _async_transaction(session: AsyncSession) -> AsyncIterator[None]:
    if not session.in_transaction():
        await session.begin()
    try:
        yield
        await session.commit()
    except BaseException:
        await session.rollback()
        raise


def _plain(session: Any) -> Session:
    """Return a session itself, or the one that an `AsyncSession` works with."""
    plain: Session = getattr(session, "sync_session", session)
    return plain


def _reject_use(session: Session, _: object) -> None:
    """Reject a transaction that nothing would end."""
    session.close()  # else this transaction would be there, and the next use would not be rejected
    raise ConfigError(
        "a response used the session of its endpoint after the commit: the rest of a response that "
        "is larger than max_response, and every event stream, are made after it. Read what is "
        "needed in the endpoint, or open another session in the stream"
    )


# A dependency may have changed rows before the endpoint: what it has not flushed is in the session.
# What it has sent to the database is seen only while it is sent.

_CHANGES: Final = ("insert", "update", "delete", "replace", "merge")
_changed: Final[WeakSet[Session]] = WeakSet()
"""Sessions that have sent a change in the transaction that is open."""


def _watch_changes() -> None:
    """Note from now on which sessions send changes to their databases."""
    if not event.contains(Session, "after_flush", _note_flush):
        event.listen(Session, "after_flush", _note_flush)
        event.listen(Session, "do_orm_execute", _note_execute)
        event.listen(Session, "after_transaction_end", _note_end)


def _note_flush(session: Session, _: object) -> None:
    _changed.add(session)


def _note_execute(execution: ORMExecuteState) -> None:
    statement = execution.statement
    if getattr(statement, "is_dml", False) or (
        isinstance(statement, TextClause) and statement.text.lstrip().lower().startswith(_CHANGES)
    ):
        _changed.add(execution.session)


def _note_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        _changed.discard(session)


class _CommitGuard:
    """Rejects a commit by the endpoint: it would be one without the record."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._root, self._savepoint = session.get_transaction(), session.get_nested_transaction()

    def __enter__(self) -> None:
        event.listen(self._session, "before_commit", self._reject)

    def __exit__(self, *_: object) -> None:
        event.remove(self._session, "before_commit", self._reject)

    def _reject(self, session: Session) -> None:
        # Savepoints of the endpoint's own are committed as ever.
        if session.get_nested_transaction() is self._savepoint:
            raise ConfigError(
                "an endpoint with session= must not commit: its rows are committed with its "
                "record, after it has returned. Use flush() to send them to the database earlier"
            )

    def check(self) -> None:
        """Raise a ConfigError in another transaction than the one in which the key was claimed."""
        if self._session.get_transaction() is not self._root:
            raise ConfigError(
                "the endpoint ended the transaction of its session (rollback() or close()) and "
                "returned a response to store; nothing was committed. Use "
                "begin_nested() for what may fail, or return an error response after a rollback"
            )
        if self._savepoint is not None and not self._savepoint.is_active:
            raise ConfigError(
                "the endpoint caught an error of its session, which had undone all that was done "
                "before, and returned a response to store; nothing was committed. Use "
                "begin_nested() for what may fail, or return an error response"
            )


@contextmanager
def _unbound() -> Iterator[None]:
    """Say what is missing, where a session does not know its database."""
    try:
        yield
    except UnboundExecutionError as error:
        raise ConfigError(
            "session= needs a session that is bound to one database: sessionmaker(engine)"
        ) from error


# --- the request ---------------------------------------------------------------------------------


class CommittingFlow(Flow, kw_only=True):
    """An answer too large to be kept is sent while it is read: its rows are committed before."""

    commit: Callable[[Response, bytes | None], Awaitable[None]]

    async def _open(self, begun: Callable[[AsyncIterator[bytes]], Any]) -> None:
        await self.commit(begun(self._sent(asyncio.Queue())), None)
        if not (self._left or self._ready.done()):  # the client may have gone meanwhile
            await super()._open(begun)


_ready: Final[WeakSet[Any]] = WeakSet()
"""Engines whose table of records is there."""


def protected(
    by: Protection, choice: SessionChoice, engine: Callable[[], Any]
) -> Callable[..., Awaitable[Any]]:
    """Make the function that the framework calls in the place of an endpoint with a session.

    `engine` returns the engine of the sessions' kind. Without a key a request runs in a transaction
    all the same.
    """
    rules, kind = by.rules, Work if choice.is_async else ThreadWork

    async def answered(*args: Any, **values: Any) -> Any:
        invocation, call = by.invoked(args, values), None
        # Behind another integration, too: that one saves in a transaction of its own.
        if rules.concerns(invocation.request.method, by.name):
            body = Body(invocation.request, rules.max_body)
            try:
                call = await by.integration.prepare(rules, body.request, body.read)
            except (IdempotencyError, Rejected) as error:
                return response_of_answer(rules.rejection(error))
        given = values[choice.parameter] if choice.depends else None
        work = kind(rules, choice, given, engine, call)
        return await work.flow.answer(by.background, work.run(invocation))

    return answered


class Work:
    """One request whose endpoint runs in a transaction: that of an `AsyncSession`."""

    _session: Any
    _guard: _CommitGuard
    _stack: Any
    """The session and its transaction, to be closed with the request."""

    def __init__(
        self,
        rules: RouteRules,
        choice: SessionChoice,
        given: Any,
        engine: Callable[[], Any],
        call: Call | None,
    ) -> None:
        self._rules, self._choice, self._given = rules, choice, given
        self._engine, self._call = engine, call
        self.flow = CommittingFlow(rules.max_response, shield, commit=self._commit)
        self._attempt: Attempt | None = None
        self._ended = False
        self._place = AsyncExitStack()
        """Among the requests that run at the same time, until the transaction has ended."""

    async def run(self, invocation: Invocation) -> Response:
        """Answer the request: by the endpoint, or by what is known of its key."""
        async with self._place:
            await self._place.enter_async_context(self._bound())
            try:
                self._attempt = attempt = await self._begun()
            except IdempotencyError as error:
                return response_of_answer(self._rules.rejection(await self._explained(error)))
            if attempt is not None and attempt.replayed:
                return await self._replayed(attempt)
            choice = self._choice
            handed = {} if choice.depends else {choice.parameter: self._session}
            try:
                with self._guard:
                    value = await invocation.call(**handed)
                return await self._recorded(await invocation.respond(value), invocation.request)
            except _Instead as instead:
                return response_of_answer(instead.answer)
            except BaseException as error:
                if self._ended:
                    raise
                try:
                    await self._end(error)
                except RetryTransaction as again:  # the database asks for one
                    return response_of_answer(self._rules.rejection(again))
                raise

    async def _begun(self) -> Attempt | None:
        engine, call = self._engine(), self._call
        if self._choice.depends:  # first: the engine would wait for rows that it has locked
            self._choice.check_given(self._given)
        if call is not None and engine not in _ready and not engine.internals.setup.bypassing():
            await self._known(engine, call)  # by the engine's own connection: the table is made
            _ready.add(engine)
        return await self._begin(engine, call)

    async def _replayed(self, attempt: Attempt) -> Response:
        await self._end(_RollBack())
        try:
            return response_of_answer(self._rules.replay(attempt.result, attempt.identity))
        except IdempotencyError as error:
            return response_of_answer(self._rules.rejection(error))

    async def _recorded(self, response: Response, request: Request) -> Response:
        """Commit what the endpoint did, and its answer with it, or roll back."""
        lines = response.raw_headers
        lines[:] = self._rules.first(lines)
        if self._rules.decide(response.status_code, lines) != "store":
            if self._call is not None:
                self._rules.log_redirect(response.status_code, request, rolled_back=True)
            await self._end(_RollBack())
            return response
        self._guard.check()
        if is_event_stream(lines) or (
            self._call is None and not hasattr(response, "body_iterator")
        ):
            # Its rows are committed, so it must not run again; it is only not kept.
            await self._commit(response, None)
            return response
        response, body = await read(response, request, self.flow)
        if not self._ended:
            await self._commit(response, body)
        return response

    async def _commit(self, response: Response, body: bytes | None) -> None:
        """Write the record and commit; an error of semel is sent instead of the answer."""
        if self._attempt is not None:
            lines: list[HeaderLine] = response.raw_headers
            self._attempt.result = self._rules.stored(response.status_code, lines, body)
        try:
            await self._end(None)
        except Exception as error:
            call = self._call
            if call is not None and isinstance(error, IdempotencyError):
                if isinstance(error, OutcomeUnknown):  # no answer of 5xx, which would be logged
                    log_failure("an endpoint ended the transaction of its record", error)
                raise _Instead(self._rules.rejection(error)) from error
            if call is not None and call.must_retry(error):
                again = about(db_errors.retry_error(), call.identity)
                raise _Instead(self._rules.rejection(again)) from error
            raise

    async def _end(self, error: BaseException | None) -> None:
        """Commit, or roll back because of an error; close what was opened."""
        self._ended = True
        try:
            await self._close(
                (None, None, None) if error is None else (type(error), error, error.__traceback__)
            )
        finally:
            if not self._choice.depends:
                event.listen(_plain(self._session), "after_transaction_create", _reject_use)
            await self._place.aclose()  # how fast a client reads what is left is its own affair

    async def _explained(self, error: IdempotencyError) -> IdempotencyError:
        """Say that it is an integration around this one that has the record which rejects it."""
        call = self._call
        owners = set() if call is None else owners_around(call.identity)
        if call is not None and owners:
            with suppress(StoreError):
                record = await self._known(self._engine(), call)
                if record is not None and record.owner in owners:
                    return claimed_outside("session", call.identity)
        return error

    def _opened(self) -> Any:
        if self._choice.depends:
            return self._given
        session = self._choice.given()
        self._choice.check_given(session)
        return session

    # --- the steps that wait for the database ------------------------------------------------

    def _bound(self) -> Any:
        """Return what bounds the requests that run at the same time."""
        return nullcontext()

    async def _begin(self, engine: Any, call: Call | None) -> Attempt | None:
        """Open the session and a transaction, and claim the key in it."""
        async with AsyncExitStack() as stack:
            with _unbound():
                self._session = session = self._opened()
                if not self._choice.depends:
                    await stack.enter_async_context(session)
                await stack.enter_async_context(_async_transaction(session))
                attempt = None
                if call is not None:
                    attempt = await stack.enter_async_context(
                        AsyncTransactionContext(engine.internals, call, session, None)
                    )
                self._guard = _CommitGuard(session.sync_session)
                self._stack = stack.pop_all()
        return attempt

    async def _close(self, raised: tuple[Any, Any, Any]) -> None:
        await self._stack.__aexit__(*raised)

    async def _known(self, engine: Any, call: Call) -> Any:
        """Look up the record of a call."""
        return await engine.internals.store.get(call.identity)


class ThreadWork(Work):
    """The same with a `Session`, whose steps are done in threads."""

    @asynccontextmanager
    async def _bound(self) -> AsyncIterator[None]:
        """Bound them as the framework bounds plain endpoints."""
        limiter = limits_here().requests
        # Not of the task: a response may be read, and so committed, by tasks of its own.
        await limiter.acquire_on_behalf_of(self)
        try:
            yield
        finally:
            limiter.release_on_behalf_of(self)

    async def _begin(self, engine: Idempotency, call: Call | None) -> Attempt | None:
        attempt: Attempt | None = await in_step(self._begin_in_thread, engine, call)
        if attempt is not None and attempt.protected and not attempt.replayed:
            attempt.__enter__()  # of the task, too: each thread gets a copy of its context
        return attempt

    def _begin_in_thread(self, engine: Idempotency, call: Call | None) -> Attempt | None:
        with ExitStack() as stack, _unbound():
            self._session = session = self._opened()
            if not self._choice.depends:
                stack.enter_context(session)
            stack.enter_context(_transaction(session))
            attempt = None
            if call is not None:
                attempt = stack.enter_context(
                    TransactionContext(engine.internals, call, session, None)
                )
            self._guard = _CommitGuard(session)
            self._stack = stack.pop_all()
        return attempt

    async def _close(self, raised: tuple[Any, Any, Any]) -> None:
        await in_step(self._stack.__exit__, *raised)

    async def _known(self, engine: Idempotency, call: Call) -> Any:
        return await in_step(engine.internals.store.get, call.identity)
