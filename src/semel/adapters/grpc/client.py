"""The interceptors of clients: a key for each unary call, the same on every retry.

    channel = grpc.intercept_channel(channel, IdempotencyClientInterceptor())
    channel = grpc.aio.insecure_channel(target, interceptors=[AsyncIdempotencyClientInterceptor()])

One logical call has one key and one deadline, whatever the number of its tries. A key that the
caller gave is never replaced. The pause that the server asks for (`grpc-retry-pushback-ms`, gRPC
A6) goes before our own pauses.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import Any, Final, NamedTuple, TypedDict, Unpack

import grpc
from grpc import StatusCode

from semel.adapters.grpc.rules import PUSHBACK, metadata_name
from semel.core.attempts import current_attempt
from semel.core.policy import Duration, seconds
from semel.errors import ConfigError
from semel.http.client import ClientRules
from semel.http.options import known_options

RETRIED: Final = (StatusCode.UNAVAILABLE, StatusCode.ABORTED)
"""A connection that broke, a call that still runs, an attempt that was replaced."""


class ClientOptions(TypedDict, total=False):
    """The options of a client, by name; what is left out has its default (see `Retrying`)."""

    metadata: str
    codes: Iterable[grpc.StatusCode]
    retries: int
    backoff: Duration
    backoff_max: Duration
    pushback_max: Duration
    retry_for: Duration
    app: str | None


class Retrying:
    """The options of a client, complete and checked.

    metadata      where the key goes
    codes         after which a call is tried again
    retries       tries after the first one
    backoff       the first wait; each further one is twice as long, up to `backoff_max`
    pushback_max  a server that asks for a longer wait is not asked again
    retry_for     no try begins later than this after the first one
    app           stands in front of new keys
    """

    def __init__(
        self,
        *,
        metadata: str = "idempotency-key",
        codes: Iterable[grpc.StatusCode] = RETRIED,
        pushback_max: Duration = 30.0,
        **options: Any,
    ) -> None:
        self._metadata = metadata_name(metadata)
        self.codes = frozenset(codes)
        if not all(isinstance(code, StatusCode) for code in self.codes):
            raise ConfigError("codes must be grpc.StatusCode members")
        known_options(options, ClientOptions.__annotations__)
        longest = seconds("pushback_max", pushback_max, zero=True)
        self.rules = ClientRules(retry_after_max=longest, **options)  # as clients of HTTP

    def begin(self, method: str | bytes, metadata: Any, timeout: float | None) -> LogicalCall:
        """Begin a call of a `method`: its key is the caller's, or derived from the attempt, or new.

        `metadata` and `timeout` are those of the call.
        """
        given: tuple[tuple[str, Any], ...] = () if metadata is None else tuple(metadata)
        if all(name != self._metadata for name, _ in given):
            around = current_attempt()
            name = method.decode() if isinstance(method, bytes) else method
            key = self.rules.new_key() if around is None else around.derive_next(name)
            given = (*given, (self._metadata, key))
        return LogicalCall(self, given, timeout)


class LogicalCall:
    """One call of the application, with all its tries."""

    def __init__(self, retrying: Retrying, metadata: Any, timeout: float | None) -> None:
        self._retrying = retrying
        self.metadata = metadata
        began = monotonic()
        self._deadline = math.inf if timeout is None else began + timeout
        self._last_start = min(self._deadline, began + retrying.rules.retry_for)
        self._made = 0

    @property
    def timeout(self) -> float | None:
        """Seconds that are left of the caller's deadline; None = it has set none."""
        return None if self._deadline == math.inf else max(0.0, self._deadline - monotonic())

    def pause(self, code: object, trailers: Iterable[tuple[str, Any]] | None) -> float | None:
        """Seconds until the next try, after one that ended so; None = it was the last."""
        rules = self._retrying.rules
        if code not in self._retrying.codes or self._made == rules.retries:
            return None
        asked = _pushback(trailers or ())
        if asked is None:
            pause = rules.backoff_after(self._made)
        elif asked > rules.retry_after_max:
            return None
        else:
            # Never sooner than asked, and clients that failed together come back apart.
            pause = asked * random.uniform(1.0, 1.1)  # noqa: S311 - jitter, not a secret
        if monotonic() + pause > self._last_start:
            return None
        self._made += 1
        return pause


def _pushback(trailers: Iterable[tuple[str, Any]]) -> float | None:
    """Seconds that the server asks for; infinite = never again, None = it says nothing.

    A value that is negative or no number means "never again" (gRPC A6).
    """
    said: str | None = next((value for name, value in trailers if name == PUSHBACK), None)
    if said is None:
        return None
    return float(said) / 1000 if said.isascii() and said.isdecimal() else math.inf


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class IdempotencyClientInterceptor(grpc.UnaryUnaryClientInterceptor):
    """Sends each unary call with a key, and repeats it under that key; `sleep` waits in between.

    It waits in the caller's thread, so `stub.Method.future(...)` returns its future after the call
    has ended.
    """

    def __init__(
        self, *, sleep: Callable[[float], None] = time.sleep, **options: Unpack[ClientOptions]
    ) -> None:
        self._retrying = Retrying(**options)
        self._sleep = sleep

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Send one call, and repeat it as the options allow."""
        given = client_call_details
        logical = self._retrying.begin(given.method, given.metadata, given.timeout)
        while True:
            details = _Details(
                given.method,
                logical.timeout,
                logical.metadata,
                given.credentials,
                getattr(given, "wait_for_ready", None),
                getattr(given, "compression", None),
            )
            call = continuation(details, request)
            pause = logical.pause(call.code(), call.trailing_metadata())
            if pause is None:
                return call
            self._sleep(pause)


class AsyncIdempotencyClientInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends each unary call with a key, and repeats it under that key; `sleep` waits in between."""

    def __init__(
        self,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._retrying = Retrying(**options)
        self._sleep = sleep

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Send one call, and repeat it as the options allow."""
        given = client_call_details
        logical = self._retrying.begin(given.method, given.metadata, given.timeout)
        while True:
            details = grpc.aio.ClientCallDetails(
                given.method,
                logical.timeout,
                grpc.aio.Metadata(*logical.metadata),
                given.credentials,
                given.wait_for_ready,
            )
            call = await continuation(details, request)
            try:
                pause = logical.pause(await call.code(), await call.trailing_metadata())
            except asyncio.CancelledError:
                # gRPC cancels only this task: the server must be notified as well.
                call.cancel()
                raise
            if pause is None:
                return call
            await self._sleep(pause)
