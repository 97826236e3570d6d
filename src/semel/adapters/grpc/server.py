"""The interceptors for `grpc.server`, whose handlers run in threads, and for `grpc.aio.server`.

A handler whose client has gone runs on, and its save counts. On asyncio a client that cancels, or
whose deadline passes, cancels the call: there a handler that runs under a key is a task of its own,
so that neither it nor its save is canceled with it. A plain handler on asyncio runs in a thread,
as without this interceptor, but in one of the loop's default threads.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, Unpack

import grpc
from grpc import StatusCode

from semel.adapters.grpc.rules import (
    REPLAYED,
    STATUS,
    Abort,
    CheckingServer,
    InterceptorOptions,
    MethodRules,
    MethodTable,
    Received,
    Sent,
)
from semel.adapters.grpc.storing import code_of, failed
from semel.adapters.integration import Background
from semel.aio import AsyncIdempotency
from semel.core.attempts import Attempt
from semel.core.decide import UnstoredResponse
from semel.engine.colours.tasks import in_thread
from semel.engine.setup import Call
from semel.errors import ConfigError, IdempotencyError
from semel.http.rules import Rejected
from semel.sync import Idempotency


class IdempotencyInterceptor(grpc.ServerInterceptor):
    """Protects the unary calls that have a key, on a server for threads.

    `idempotency` is an `Idempotency` or a URL. `close()` closes the engine if the interceptor
    opened it from a URL.
    """

    def __init__(
        self, idempotency: Idempotency | str, **options: Unpack[InterceptorOptions]
    ) -> None:
        self._opened_here = isinstance(idempotency, str)
        engine = Idempotency(idempotency) if isinstance(idempotency, str) else idempotency
        if not isinstance(engine, Idempotency):
            raise ConfigError(f"an Idempotency or a URL is needed, not {type(engine).__name__}")
        self._engine = engine
        self._methods = MethodTable(engine.internals.setup, **options)
        if any(inspect.iscoroutinefunction(choices.tenant) for choices in self._methods.choices):
            raise ConfigError("an async tenant needs the interceptor for asyncio")

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        """Return the handler of a call with its protection."""
        handler = continuation(handler_call_details)
        rules = self._methods.of_call(handler_call_details, handler)
        if rules is None:
            return handler
        call = _ProtectedCall(self._engine, rules, handler, handler_call_details)
        return _with_behaviour(handler, call)

    def checking(self, server: Any) -> Any:
        """Return a server to register services on: a stream that needs a key raises then."""
        return CheckingServer(server, self._methods)

    def close(self) -> None:
        """Close the engine if the interceptor opened it."""
        if self._opened_here:
            self._engine.close()


class AsyncIdempotencyInterceptor(grpc.aio.ServerInterceptor):
    """Protects the unary calls that have a key, on a server for asyncio.

    `idempotency` is an `AsyncIdempotency` or a URL. `await close()` waits for running handlers, and
    closes the engine if the interceptor opened it.
    """

    def __init__(
        self, idempotency: AsyncIdempotency | str, **options: Unpack[InterceptorOptions]
    ) -> None:
        self._opened_here = isinstance(idempotency, str)
        engine = AsyncIdempotency(idempotency) if isinstance(idempotency, str) else idempotency
        if not isinstance(engine, AsyncIdempotency):
            raise ConfigError(
                f"an AsyncIdempotency or a URL is needed, not {type(engine).__name__}"
            )
        self._engine = engine
        self._methods = MethodTable(engine.internals.setup, **options)
        self._background = Background()

    async def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        """Return the handler of a call with its protection."""
        handler = await continuation(handler_call_details)
        rules = self._methods.of_call(handler_call_details, handler)
        if rules is None:
            return handler
        call = _AsyncProtectedCall(
            self._engine, self._background, rules, handler, handler_call_details
        )
        return _with_behaviour(handler, call.run)

    def checking(self, server: Any) -> Any:
        """Return a server to register services on: a stream that needs a key raises then."""
        return CheckingServer(server, self._methods)

    async def close(self) -> None:
        """Wait for running handlers, and close the engine if the interceptor opened it."""
        await self._background.drain()
        if self._opened_here:
            await self._engine.close()


def _with_behaviour(handler: Any, behaviour: Callable[..., Any]) -> Any:
    """Put a behaviour in a handler's place: it gets requests with their bytes, may give bytes."""
    deserialize, serialize = handler.request_deserializer, handler.response_serializer

    def received(data: bytes) -> Received:
        return Received(data, data if deserialize is None else deserialize(data))

    def sent(response: Any) -> Any:
        if isinstance(response, Sent):
            return bytes(response)  # gRPC takes no subclass
        return response if serialize is None else serialize(response)

    return grpc.unary_unary_rpc_method_handler(behaviour, received, sent)


# --- the handler of one call, behind its key -----------------------------------------------


class _Handler:
    """A handler, and what both kinds of servers do with the end of it."""

    def __init__(self, rules: MethodRules, handler: Any, details: Any) -> None:
        self._rules = rules
        self._metadata = details.invocation_metadata
        self._behaviour, self._serialize = handler.unary_unary, handler.response_serializer

    def _ended(self, response: Any, code: StatusCode, context: Any) -> bytes | UnstoredResponse:
        """Say what is stored of the end, or how its key ends, of which trailers tell the client."""
        trailers = context.trailing_metadata() or ()
        if code is not StatusCode.OK:
            return failed(code, context.details(), trailers, self._rules.choices.stored)
        ended = self._rules.stored_response(response, self._serialize)
        if isinstance(ended, UnstoredResponse):
            context.set_trailing_metadata((*trailers, (STATUS, "not-stored")))
        return ended


def _drop_marker(context: Any) -> None:
    """Leave out a marker of a replay that a handler passed on from a call of its own."""
    trailers = context.trailing_metadata() or ()
    if any(name == REPLAYED for name, _ in trailers):
        own = tuple((name, value) for name, value in trailers if name != REPLAYED)
        context.set_trailing_metadata(own)


class _ProtectedCall(_Handler):
    """On threads: `context.abort` raises a bare Exception and `context.set_code` nothing at all.

    The context's code shows how a handler ended.
    """

    def __init__(self, engine: Idempotency, rules: MethodRules, handler: Any, details: Any) -> None:
        super().__init__(rules, handler, details)
        self._runs = engine.internals
        # A handler may bring threads of its own; the server asks the one that stands in its place.
        self.experimental_thread_pool = getattr(self._behaviour, "experimental_thread_pool", None)

    def __call__(self, received: Received, context: Any) -> Any:
        begun = self._begin(received, context)
        if begun is None:
            return self._behaviour(received.message, context)
        if isinstance(begun, Sent):
            context.set_trailing_metadata(((REPLAYED, "true"),))
            return begun
        if isinstance(begun, Abort):
            _abort(context, begun)
        call, attempt = begun
        try:
            with attempt:
                response = self._behaviour(received.message, context)
        except BaseException as error:
            # What `abort` raises says nothing; any other error is the policy's to judge.
            if type(error) is Exception and not error.args and _code(context) is not StatusCode.OK:
                self._record(call, attempt, None, context)
            else:
                self._runs.failed(call, attempt, error)
            raise
        _drop_marker(context)
        instead = self._record(call, attempt, response, context)
        if instead is not None:
            _abort(context, instead)
        return response

    def _begin(
        self, received: Received, context: Any
    ) -> tuple[Call, Attempt] | Sent | Abort | None:
        """Claim the key: run it, answer it with this, or (None) let it pass."""
        rules = self._rules
        try:
            key = rules.key(self._metadata, received)
            if key is None:
                return None
            tenant = rules.tenant(self._metadata, context)
            call = rules.call(key, tenant, received)
            attempt = self._runs.begin(call)
            if attempt.replayed:
                return rules.replay(attempt.result, call.identity)
        except (IdempotencyError, Rejected) as error:
            return rules.rejection(error)
        return call, attempt

    def _record(self, call: Call, attempt: Attempt, response: Any, context: Any) -> Abort | None:
        """Record how the handler ended; returns what the client gets instead, if anything."""
        code = _code(context)
        ended = self._ended(response, code, context)
        if isinstance(ended, UnstoredResponse):
            self._runs.failed(call, attempt, ended)
            return None
        try:
            self._runs.succeeded(call, attempt, ended)
        except IdempotencyError as error:
            if code is StatusCode.OK:  # another attempt took over: its answer counts
                return self._rules.rejection(error)
        return None


def _code(context: Any) -> StatusCode:
    return code_of(context.code(), numbers=False)


def _abort(context: grpc.ServicerContext, abort: Abort) -> NoReturn:
    context.set_trailing_metadata(abort.trailers)
    context.abort(abort.code, abort.details)


class _AsyncProtectedCall(_Handler):
    """On asyncio: the handler is a coroutine, or runs in a thread."""

    def __init__(
        self,
        engine: AsyncIdempotency,
        background: Background,
        rules: MethodRules,
        handler: Any,
        details: Any,
    ) -> None:
        super().__init__(rules, handler, details)
        self._runs, self._background = engine.internals, background
        self._plain = not inspect.iscoroutinefunction(handler.unary_unary)

    async def run(self, received: Received, context: Any) -> Any:
        """Answer the call."""
        begun = await self._begin(received, context)
        if isinstance(begun, Sent):
            context.set_trailing_metadata(((REPLAYED, "true"),))
            return begun
        if begun is None and not self._plain:
            return await self._behaviour(received.message, context)
        outcome = (
            begun
            if isinstance(begun, Abort)
            else await self._run_shielded(begun, received, context)
        )
        if isinstance(outcome, Abort):
            await context.abort(outcome.code, outcome.details, outcome.trailers)
        return outcome

    async def _begin(
        self, received: Received, context: Any
    ) -> tuple[Call, Attempt] | Sent | Abort | None:
        """Claim the key: run it, answer it with this, or (None) let it pass."""
        rules = self._rules
        try:
            key = rules.key(self._metadata, received)
            if key is None:
                return None
            tenant = rules.tenant(self._metadata, context)
            tenant = await tenant if inspect.isawaitable(tenant) else tenant
            call = rules.call(key, tenant, received)
            attempt = await self._runs.begin(call)
            if attempt.replayed:
                return rules.replay(attempt.result, call.identity)
        except (IdempotencyError, Rejected) as error:
            return rules.rejection(error)
        return call, attempt

    async def _run_shielded(
        self, begun: tuple[Call, Attempt] | None, received: Received, context: Any
    ) -> Any:
        """Run the handler so that it cannot be canceled, as it could not be in a thread."""
        seen = HandlerContext(context)
        task = self._background.begin(
            self._run_unprotected(received.message, seen)
            if begun is None
            else self._run_protected(*begun, received.message, seen)
        )
        task.add_done_callback(self._background.end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            seen.detach()
            self._background.leave(task)
            raise

    async def _run_unprotected(self, message: Any, seen: HandlerContext) -> Any:
        try:
            return await self._call(message, seen)
        except grpc.aio.AbortError:
            return seen.aborted

    async def _run_protected(
        self, call: Call, attempt: Attempt, message: Any, seen: HandlerContext
    ) -> Any:
        """Run the handler and record how it ended; returns its response, or what to abort with."""
        response = None
        try:
            with attempt:
                response = await self._call(message, seen)
        except BaseException as error:
            if seen.aborted is None or not isinstance(error, grpc.aio.AbortError):
                await self._runs.failed(call, attempt, error)
                raise
        if seen.aborted is None:
            _drop_marker(seen)
        instead = await self._record(call, attempt, response, seen)
        return response if instead is None else instead

    async def _record(
        self, call: Call, attempt: Attempt, response: Any, seen: HandlerContext
    ) -> Abort | None:
        """Record how the handler ended; returns what the client gets instead, if anything."""
        code = code_of(seen.code())
        ended = self._ended(response, code, seen)
        if isinstance(ended, UnstoredResponse):
            await self._runs.failed(call, attempt, ended)
            return seen.aborted
        try:
            await self._runs.succeeded(call, attempt, ended)
        except IdempotencyError as error:
            if code is StatusCode.OK:  # another attempt took over: its answer counts
                return self._rules.rejection(error)
        return seen.aborted

    def _call(self, message: Any, seen: HandlerContext) -> Coroutine[Any, Any, Any]:
        called: Coroutine[Any, Any, Any] = (
            self._in_thread(message, seen) if self._plain else self._behaviour(message, seen)
        )
        return called

    async def _in_thread(self, message: Any, seen: HandlerContext) -> Any:
        plain = PlainHandlerContext(seen)
        response = await in_thread(self._behaviour, message, plain)
        for callback in plain.callbacks:
            callback()
        return response


# --- what a handler on asyncio sees of its call ---------------------------------------------

_ASKED_OF_THE_CALL: Final = ("peer", "peer_identities", "peer_identity_key", "auth_context")


class HandlerContext:
    """What an async handler sees of its call, in place of gRPC's own context.

    A handler whose client has gone runs on, but its call is over: to send on it is an error, and
    gRPC may free it under the handler. So the context is detached from its call in time. And
    `abort` is held back until the end of the handler is recorded: when the client is notified, its
    key is free.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        # Asked now: when the call is over, by a deadline say, some of it is gone at once.
        self._remembered: dict[str, Callable[..., Any]] = {
            name: _constant(getattr(context, name)()) for name in _ASKED_OF_THE_CALL
        }
        self.aborted: Abort | None = None

    def __getattr__(self, name: str) -> Any:
        remembered = self._remembered.get(name)
        return getattr(self._context, name) if remembered is None else remembered

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call; what it ends with is sent when the end is recorded."""
        self.note(code, details, trailing_metadata)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status."""
        self.note(status.code, status.details, status.trailing_metadata)

    def note(self, code: Any, details: str | None, trailers: Any) -> NoReturn:
        """Note what the call ends with, and leave the handler."""
        ended = code_of(code)
        if ended is StatusCode.OK:  # a mistake, which a server for threads reports like this
            ended = StatusCode.UNKNOWN
        self.aborted = aborted = Abort(
            ended,
            details or self._context.details(),
            tuple(trailers or self._context.trailing_metadata()),
        )
        self._remembered |= {
            "code": _constant(aborted.code),
            "details": _constant(aborted.details),
            "trailing_metadata": _constant(aborted.trailers),
        }
        raise grpc.aio.AbortError("Locally aborted.")

    def detach(self) -> None:
        """Send nothing any more: the call is about to go."""
        self._remembered["send_initial_metadata"] = _unsent


class PlainHandlerContext:
    """The context of a plain handler, which runs in a thread beside the loop."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.callbacks: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call; what it ends with is sent when the end is recorded."""
        self._context.note(code, details, trailing_metadata)

    def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status."""
        self._context.note(status.code, status.details, status.trailing_metadata)

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Send metadata before the response."""
        sending = self._context.send_initial_metadata(initial_metadata)
        asyncio.run_coroutine_threadsafe(sending, self._loop).result()

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Call this when the handler is done."""
        self.callbacks.append(callback)
        return True


def _constant(value: object) -> Callable[[], Any]:
    return lambda: value


async def _unsent(_: object) -> None:
    """Send nothing: the client is gone."""
