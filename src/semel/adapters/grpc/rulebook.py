"""What to ask of a call, and how to answer it: the rules of one method.

This module decides. It never waits and touches neither a store nor a call: the interceptors do, and
ask here what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from re import Pattern
from typing import Any, Final, TypeAlias

import grpc
import msgspec
from google.protobuf.message import Message

from semel.adapters.grpc.options import Choices
from semel.adapters.grpc.storing import (
    STATUS_DETAILS,
    MessageCodec,
    Stored,
    failed,
    packed,
    unpacked,
)
from semel.core.decide import Undone
from semel.core.fingerprint import fingerprint as payload_fingerprint
from semel.core.policy import Rules
from semel.core.records import Identity
from semel.engine.setup import Call
from semel.errors import (
    ConcurrentRequest,
    IdempotencyError,
    ResultUnavailable,
    SerializationError,
    WaitTimeout,
)
from semel.events import logger
from semel.http.keys import check_form, checked, key_of_lines, stored_key
from semel.http.messages import digest
from semel.http.problems import PROBLEMS, log_failure, problem_of
from semel.http.rules import Rejected, known_tenant, rules_of

Trailers: TypeAlias = tuple[tuple[str, Any], ...]

REPLAYED: Final = "idempotent-replayed"
STATUS: Final = "idempotency-status"
PUSHBACK: Final = "grpc-retry-pushback-ms"

_REFUSALS: Final[Mapping[str, grpc.StatusCode]] = {
    "key_missing": grpc.StatusCode.INVALID_ARGUMENT,
    "identity_missing": grpc.StatusCode.UNAUTHENTICATED,
    "body_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "result_omitted": grpc.StatusCode.FAILED_PRECONDITION,
}
"""Refusals by the rules alone; errors know their code themselves."""

_RETRIED: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED})
"""Codes that clients try again by themselves; the pushback tells them when, or not to."""
_NEVER_AGAIN: Final = "-1"

_SERVER_ERROR: Final = 500
_CODEC: Final = MessageCodec()
_ENVELOPE: Final = 64 * 1024
"""Room for the details of a stored error; a message has a limit of its own."""


class Received(msgspec.Struct, frozen=True):
    """A request: as it came, and as the handler gets it."""

    data: bytes
    message: Any


class Sent(bytes):
    """A response that is serialized already: stored bytes go out as they are."""

    __slots__ = ()


class Abort(msgspec.Struct, frozen=True):
    """A call that ends with a code, by its trailers only."""

    code: grpc.StatusCode
    details: str
    trailers: Trailers = ()


class MethodBook:
    """The rules of one method."""

    def __init__(
        self,
        method: str,
        choices: Choices,
        resolved: Callable[..., Rules],
        key_pattern: Pattern[str] | None = None,
    ) -> None:
        self.method, self.choices = method, choices
        self.rules = rules_of(choices, resolved, envelope=_ENVELOPE, codec=_CODEC)
        self._pattern = key_pattern

    # --- before the handler ----------------------------------------------------------------

    def passes(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Tell whether a call is none of ours, as far as its metadata can tell."""
        chosen = self.choices
        return (
            chosen.key is None
            and not chosen.required
            and all(name != chosen.metadata for name, _ in metadata)
        )

    def key(self, metadata: Iterable[tuple[str, Any]], received: Received) -> str | None:
        """Find the key of a call; None = it is not protected."""
        chosen = self.choices
        key = key_of_lines([value for name, value in metadata if name == chosen.metadata])
        if key is None and chosen.key is not None:
            given = chosen.key(received.message)
            # A text that was not set is empty in proto3.
            key = None if given is None or given == "" else checked(given)
        if key is None:
            if chosen.required:
                raise Rejected("key_missing")
            return None
        check_form(key, self._pattern)
        return key

    def call(self, key: str, tenant: object, received: Received) -> Call:
        """Prepare the call of a key; `tenant` is what the function of that name gave."""
        chosen = self.choices
        if len(received.data) > chosen.max_request:
            raise Rejected("body_too_large")
        owner = None
        if chosen.tenant is not None:
            owner = known_tenant(tenant)
        method = self.method if chosen.separate_methods else None
        identity = Identity(chosen.scope, stored_key(key, owner, method))
        return Call(identity, self._fingerprint(received), self.rules)

    def _fingerprint(self, received: Received) -> bytes:
        chosen, message = self.choices, received.message
        if chosen.payload is not None:
            said = payload_fingerprint(chosen.payload(message))
        elif isinstance(message, Message):
            # The order of a map's entries is another one on each try of some clients.
            said = message.SerializeToString(deterministic=True)
        else:
            said = received.data
        return digest((self.method.encode(), said), chosen.secret)

    # --- answers -----------------------------------------------------------------------------

    def refusal(self, error: IdempotencyError | Rejected) -> Abort:
        """Word an error or a refusal for the client; one that is the server's fault is logged."""
        if isinstance(error, Rejected):
            return self._abort(error.code, _REFUSALS[error.code], retry=False)
        if error.http_status >= _SERVER_ERROR:
            log_failure("a call with a key was not processed", error)
        name, detail = problem_of(error)
        code = (
            self.choices.busy_code
            if isinstance(error, ConcurrentRequest | WaitTimeout)
            else grpc.StatusCode[error.grpc_status]
        )
        return self._abort(name, code, detail, retry=error.retry_helps)

    def replay(self, value: object) -> Sent | Abort:
        """Make the answer that a duplicate gets, from what is stored."""
        try:
            stored = unpacked(value)
        except SerializationError as error:
            raise ResultUnavailable(str(error)) from error
        if stored.code is not grpc.StatusCode.OK:
            trailers: Trailers = ((REPLAYED, "true"),)
            if stored.status_details is not None:
                trailers += ((STATUS_DETAILS, stored.status_details),)
            return Abort(stored.code, stored.details, trailers)
        if stored.message is None:
            return self.refusal(Rejected("result_omitted"))
        return Sent(stored.message)

    def _abort(
        self, name: str, code: grpc.StatusCode, detail: str | None = None, *, retry: bool
    ) -> Abort:
        trailers: Trailers = ((STATUS, name.replace("_", "-")),)
        if code in _RETRIED:
            pause = str(max(1, round(self.choices.pushback * 1000))) if retry else _NEVER_AGAIN
            trailers += ((PUSHBACK, pause),)
        return Abort(code, PROBLEMS[name].detail if detail is None else detail, trailers)

    # --- after the handler -------------------------------------------------------------------

    def answered(
        self, response: object, serialize: Callable[[Any], bytes] | None
    ) -> bytes | Undone:
        """Say what is stored of a response, or how its key ends."""
        if not isinstance(response, Message):
            return Undone("answered with something other than a protobuf message", "forget")
        message = None
        try:
            message = response.SerializeToString() if serialize is None else serialize(response)
        except Exception:  # noqa: BLE001 - the effect is done: a duplicate must not repeat it
            logger.exception("the response of %s cannot be serialized", self.method)
        if message is not None and len(message) > self.choices.max_response:
            message = None
        return packed(Stored(grpc.StatusCode.OK, message=message))

    def failed(self, code: grpc.StatusCode, details: object, trailers: Any) -> bytes | Undone:
        """Say what is stored of a code other than OK, or how its key ends."""
        return failed(code, details, trailers or (), self.choices.stored)


def without_marker(trailers: Sequence[tuple[str, Any]] | None) -> Trailers | None:
    """Leave out a marker of a replay that a handler passed on; None = there is none."""
    if not trailers or all(name != REPLAYED for name, _ in trailers):
        return None
    return tuple((name, value) for name, value in trailers if name != REPLAYED)
