"""The interceptor for `grpc.server`, whose handlers run in threads.

A handler whose client has gone runs on, and its save counts. `context.abort` raises a bare
Exception and `context.set_code` nothing at all: the context's code shows how a handler ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, Unpack

import grpc

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
    without_marker,
)
from semel.adapters.grpc.storing import code_of
from semel.core.attempts import Attempt
from semel.core.decide import Undone
from semel.engine.setup import Call
from semel.errors import ConfigError, IdempotencyError
from semel.http.rules import Rejected
from semel.sync import Idempotency


class IdempotencyInterceptor(grpc.ServerInterceptor):
    """Protects the unary calls that have a key, on a server for threads.

    `idempotency` is an Idempotency, or a URL. `close()` closes the engine, if it was opened here by
    its URL.
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
        """Put the protection around the handler of a call."""
        handler = continuation(handler_call_details)
        rules = self._methods.of_call(handler_call_details, handler)
        if rules is None:
            return handler
        call = _ProtectedCall(self._engine, rules, handler, handler_call_details)
        return with_behaviour(handler, call)

    def checking(self, server: Any) -> Any:
        """Return a server to register services on: a stream that needs a key is an error then."""
        return CheckingServer(server, self._methods)

    def close(self) -> None:
        """Close the engine, if it was opened here."""
        if self._opened_here:
            self._engine.close()


def with_behaviour(handler: Any, behaviour: Callable[..., Any]) -> Any:
    """Put a behaviour in a handler's place: it gets requests with their bytes, may give bytes."""
    deserialize, serialize = handler.request_deserializer, handler.response_serializer

    def received(data: bytes) -> Received:
        return Received(data, data if deserialize is None else deserialize(data))

    def sent(response: Any) -> Any:
        if isinstance(response, Sent):
            return bytes(response)  # gRPC takes no subclass
        return response if serialize is None else serialize(response)

    return grpc.unary_unary_rpc_method_handler(behaviour, received, sent)


class _ProtectedCall:
    """The handler of one call, behind its key."""

    def __init__(self, engine: Idempotency, rules: MethodRules, handler: Any, details: Any) -> None:
        self._runs, self._rules = engine.internals, rules
        self._metadata = details.invocation_metadata
        self._behaviour, self._serialize = handler.unary_unary, handler.response_serializer
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
            self._record_error(call, attempt, error, context)
            raise
        return self._record_response(call, attempt, response, context)

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
                return rules.replay(attempt.result)
        except (IdempotencyError, Rejected) as error:
            return rules.rejection(error)
        return call, attempt

    def _record_response(self, call: Call, attempt: Attempt, response: Any, context: Any) -> Any:
        trailers = without_marker(context.trailing_metadata())
        if trailers is not None:
            context.set_trailing_metadata(trailers)
        code = code_of(context.code(), numbers=False)
        if code is not grpc.StatusCode.OK:
            self._record_code(call, attempt, code, context)
            return response
        ended = self._rules.stored_response(response, self._serialize)
        if isinstance(ended, Undone):
            self._runs.failed(call, attempt, ended)
            context.set_trailing_metadata(
                (*(context.trailing_metadata() or ()), (STATUS, "not-stored"))
            )
            return response
        try:
            self._runs.succeeded(call, attempt, ended)
        except IdempotencyError as error:  # another attempt took over: its answer counts
            _abort(context, self._rules.rejection(error))
        return response

    def _record_error(
        self, call: Call, attempt: Attempt, error: BaseException, context: Any
    ) -> None:
        code = code_of(context.code(), numbers=False)
        # What `abort` raises says nothing; any other error is the policy's to judge.
        if type(error) is Exception and not error.args and code is not grpc.StatusCode.OK:
            self._record_code(call, attempt, code, context)
        else:
            self._runs.failed(call, attempt, error)

    def _record_code(
        self, call: Call, attempt: Attempt, code: grpc.StatusCode, context: Any
    ) -> None:
        """Record a code other than OK."""
        ended = self._rules.stored_failure(code, context.details(), context.trailing_metadata())
        if isinstance(ended, Undone):
            self._runs.failed(call, attempt, ended)
        else:
            with suppress(IdempotencyError):  # the client gets this end, stored or not
                self._runs.succeeded(call, attempt, ended)


def _abort(context: grpc.ServicerContext, abort: Abort) -> NoReturn:
    context.set_trailing_metadata(abort.trailers)
    context.abort(abort.code, abort.details)
