"""Options and rules of methods: which call is protected, and what its client gets.

The options of an interceptor hold for every unary method; a `MethodRule` changes some of them for
one method, or for all methods of a service. A bad option raises ConfigError when the interceptor is
made.

This module decides. It never waits and touches neither a store nor a call: the interceptors do.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack

import grpc
import msgspec
from google.protobuf.message import Message

from semel.adapters.grpc.storing import (
    CODES,
    STATUS_DETAILS,
    StoredCodes,
    check_stored,
    no_other_code,
)
from semel.core.decide import UnstoredResponse
from semel.core.fingerprint import fingerprint as payload_fingerprint
from semel.core.policy import Duration, Policy, seconds
from semel.core.records import Identity
from semel.core.stored_answers import MessageCodec, StoredMessage, pack_message, unpack_message
from semel.engine.setup import Call, Setup
from semel.errors import (
    ConcurrentRequest,
    ConfigError,
    IdempotencyError,
    ResultUnavailable,
    SerializationError,
    WaitTimeout,
    about,
)
from semel.events import logger
from semel.http import options as checking
from semel.http.options import MIB
from semel.http.problems import PROBLEMS, instance_of, log_failure, problem_of
from semel.http.requests import check_form, check_key, digest, key_of_lines, stored_key
from semel.http.rules import Rejected, TenantCheck, known_tenant, rules_of
from semel.http.storing import check_function

_METADATA_NAME: Final = re.compile(r"[0-9a-z_.\-]+")
_METHOD: Final = re.compile(r"/[^/*]+/(?:[^/*]+|\*)")
_BUSY_CODES: Final = {
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "ABORTED": grpc.StatusCode.ABORTED,
}


class CallView(msgspec.Struct, frozen=True):
    """A call as a `tenant` function gets it."""

    method: str
    metadata: grpc.aio.Metadata
    """`metadata.get("x-tenant")`, `metadata.get_all(...)`; names are in lower case."""
    context: Any
    """The servicer context: `context.auth_context()`, `context.peer_identities()`."""


KeyFunction: TypeAlias = Callable[[Any], str | None]
PayloadFunction: TypeAlias = Callable[[Any], object]
Tenant: TypeAlias = Callable[[CallView], str | bytes | Awaitable[str | None] | None]
"""bytes: only so is `metadata.get("x-tenant")` of gRPC's type. semel rejects a tenant in bytes."""
BusyCode: TypeAlias = Literal["UNAVAILABLE", "ABORTED"]


class MethodOptions(TypedDict, total=False):
    """Every option that may differ from method to method."""

    metadata: str | None
    key: KeyFunction | None
    required: bool
    scope: str
    tenant: Tenant | None
    separate_methods: bool
    payload: PayloadFunction | None
    secret: bytes | None
    policy: Policy | None
    wait: Duration
    stored: StoredCodes
    max_request: int
    max_response: int
    pushback: Duration
    busy_code: BusyCode


class InterceptorOptions(MethodOptions, total=False):
    """Every option of an interceptor."""

    methods: Mapping[str, MethodRule]


class Choices:
    """The options of one method, complete and checked."""

    def __init__(
        self,
        *,
        metadata: str | None = "idempotency-key",
        key: KeyFunction | None = None,
        required: bool = False,
        scope: str = "grpc",
        tenant: Tenant | msgspec.UnsetType | None = msgspec.UNSET,
        separate_methods: bool = False,
        payload: PayloadFunction | None = None,
        secret: bytes | None = None,
        policy: Policy | None = None,
        wait: Duration = 0,
        stored: StoredCodes = no_other_code,
        max_request: int = 4 * MIB,
        max_response: int = MIB,
        pushback: Duration = 1.0,
        busy_code: BusyCode = "UNAVAILABLE",
    ) -> None:
        self.metadata = None if metadata is None else metadata_name(metadata)
        self.key = check_function("key", key)
        self.required, self.separate_methods = required, separate_methods
        self.scope = checking.check_scope(scope)
        self.tenant_is_unset = tenant is msgspec.UNSET
        self.tenant = check_function("tenant", None if tenant is msgspec.UNSET else tenant)
        self.payload = check_function("payload", payload)
        self.secret = checking.check_secret(secret)
        self.policy = checking.check_policy(policy)
        self.wait = seconds("wait", wait, zero=True)
        self.stored = check_stored(check_function("stored", stored) or no_other_code)
        self.max_request = checking.check_size("max_request", max_request)
        self.max_response = checking.check_size("max_response", max_response)
        self.pushback = seconds("pushback", pushback)
        if busy_code not in _BUSY_CODES:
            raise ConfigError(f"busy_code is UNAVAILABLE or ABORTED; got {busy_code!r}")
        self.busy_code = _BUSY_CODES[busy_code]
        if self.metadata is None and self.key is None:
            raise ConfigError("a key comes from metadata or from the function key: both are None")


class MethodRule:
    """Other options for one method; `off=True` leaves it unprotected."""

    def __init__(self, *, off: bool = False, **options: Unpack[MethodOptions]) -> None:
        self.off = off
        self.options = options


def chosen(options: Mapping[str, Any]) -> Choices:
    """Check options that are given by name."""
    return Choices(**checking.known_options(options, MethodOptions.__annotations__))


def checked_rules(rules: Mapping[str, MethodRule]) -> dict[str, MethodRule]:
    """Check the names and kinds of the rules of methods."""
    if not isinstance(rules, Mapping):
        raise ConfigError(
            'methods must be a mapping, such as {"/package.Service/Method": MethodRule(...)}; '
            f"got {type(rules).__name__}"
        )
    for name, rule in rules.items():
        if _METHOD.fullmatch(name) is None:
            raise ConfigError(f"a method is named /package.Service/Method or .../*; got {name!r}")
        if not isinstance(rule, MethodRule):
            raise ConfigError(f"methods[{name!r}] must be a MethodRule, not {type(rule).__name__}")
    return dict(rules)


def metadata_name(value: object) -> str:
    """Return the name of a metadatum as it travels; a ConfigError if it cannot carry a key."""
    name = value.lower() if isinstance(value, str) else ""
    if _METADATA_NAME.fullmatch(name) is None or name.startswith("grpc-") or name.endswith("-bin"):
        raise ConfigError(
            f"metadata must be the name of a text entry that is not gRPC's own; got {value!r}"
        )
    return name


# --- the rules of one method ---------------------------------------------------------------------

Trailers: TypeAlias = tuple[tuple[str, Any], ...]

REPLAYED: Final = "idempotent-replayed"
STATUS: Final = "idempotency-status"
INSTANCE: Final = "idempotency-instance"
"""Names the record, as `instance` does in the problems of HTTP: `semel find` takes it."""
PUSHBACK: Final = "grpc-retry-pushback-ms"

_REJECTIONS: Final[Mapping[str, grpc.StatusCode]] = {
    "key_missing": grpc.StatusCode.INVALID_ARGUMENT,
    "identity_missing": grpc.StatusCode.UNAUTHENTICATED,
    "body_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "result_omitted": grpc.StatusCode.FAILED_PRECONDITION,
}
"""Rejections by the rules alone; errors know their code themselves."""

_RETRIED: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED})
"""Codes that clients try again by themselves; the pushback says when, or never."""
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


class MethodRules:
    """The rules of one method."""

    def __init__(self, method: str, choices: Choices, setup: Setup, tenants: TenantCheck) -> None:
        self.method, self.choices = method, choices
        self._tenants = tenants
        self.policy = rules_of(choices, setup.rules, envelope=_ENVELOPE, codec=_CODEC)
        self._pattern = setup.key_rules.pattern

    # --- before the handler ----------------------------------------------------------------

    def passes(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Return whether the metadata alone shows that a call is not protected."""
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
            key = None if given is None or given == "" else check_key(given)
        if key is None:
            if chosen.required:
                raise Rejected("key_missing")
            return None
        check_form(key, self._pattern)
        return key

    def tenant(self, metadata: Iterable[tuple[str, Any]], context: Any) -> Any:
        """Ask the application's function, which may be async; None = there is none."""
        self._tenants.check(self.choices)
        function = self.choices.tenant
        if function is None:
            return None
        return function(CallView(self.method, grpc.aio.Metadata(*metadata), context))

    def call(self, key: str, tenant: object, received: Received) -> Call:
        """Prepare the call of a key; `tenant` is what the function of that name returned."""
        chosen = self.choices
        if len(received.data) > chosen.max_request:
            raise Rejected("body_too_large")
        owner = None if chosen.tenant is None else known_tenant(tenant)
        method = self.method if chosen.separate_methods else None
        identity = Identity(chosen.scope, stored_key(key, owner, method))
        return Call(identity, self._fingerprint(received), self.policy)

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

    # --- responses of our own ------------------------------------------------------------------

    def rejection(self, error: IdempotencyError | Rejected) -> Abort:
        """Word an error or a rejection for the client; one that is the server's fault is logged."""
        if isinstance(error, Rejected):
            return self._abort(error.code, _REJECTIONS[error.code], retry=False)
        if error.http_status >= _SERVER_ERROR:
            log_failure("a call with a key was not processed", error)
        name, detail = problem_of(error)
        code = (
            self.choices.busy_code
            if isinstance(error, ConcurrentRequest | WaitTimeout)
            else grpc.StatusCode[error.grpc_status]
        )
        return self._abort(name, code, detail, retry=error.retry_helps, key_digest=error.key_digest)

    def replay(self, value: object, identity: Identity) -> Sent | Abort:
        """Make the response that a duplicate gets, from what is stored for its operation."""
        try:
            stored = unpack_message(value)
        except SerializationError as error:
            raise about(ResultUnavailable(str(error)), identity) from error
        code = CODES[stored.number]
        if code is not grpc.StatusCode.OK:
            trailers: Trailers = ((REPLAYED, "true"),)
            if stored.status_details is not None:
                trailers += ((STATUS_DETAILS, stored.status_details),)
            return Abort(code, stored.details, trailers)
        if stored.message is None:
            name = "result_omitted"
            return self._abort(name, _REJECTIONS[name], retry=False, key_digest=identity.key_digest)
        return Sent(stored.message)

    def _abort(
        self,
        name: str,
        code: grpc.StatusCode,
        detail: str | None = None,
        *,
        retry: bool,
        key_digest: str | None = None,
    ) -> Abort:
        trailers: Trailers = ((STATUS, name.replace("_", "-")),)
        if key_digest is not None:
            trailers += ((INSTANCE, instance_of(key_digest)),)
        if code in _RETRIED:
            pause = str(max(1, round(self.choices.pushback * 1000))) if retry else _NEVER_AGAIN
            trailers += ((PUSHBACK, pause),)
        return Abort(code, PROBLEMS[name].detail if detail is None else detail, trailers)

    # --- after the handler -------------------------------------------------------------------

    def stored_response(
        self, response: object, serialize: Callable[[Any], bytes] | None
    ) -> bytes | UnstoredResponse:
        """Say what is stored of a response, or how its key ends."""
        if not isinstance(response, Message):
            return UnstoredResponse(
                "answered with something other than a protobuf message", "forget"
            )
        message = None
        try:
            message = response.SerializeToString() if serialize is None else serialize(response)
        except Exception:  # noqa: BLE001 - the effect is done: a duplicate must not repeat it
            logger.exception("the response of %s cannot be serialized", self.method)
        if message is not None and len(message) > self.choices.max_response:
            message = None
        return pack_message(StoredMessage(grpc.StatusCode.OK.value[0], message=message))


# --- the rules of all methods --------------------------------------------------------------------

_REMEMBERED: Final = 1024
"""Methods whose rules are remembered; a generic handler may take endlessly many."""


class MethodTable:
    """The rules of every method: those of its own, of its service, or of all."""

    def __init__(
        self,
        setup: Setup,
        *,
        methods: Mapping[str, MethodRule] | None = None,
        **options: Any,
    ) -> None:
        self._setup, self._tenants = setup, TenantCheck()
        rules = checked_rules({} if methods is None else methods)
        self._off = {name for name, rule in rules.items() if rule.off}
        self._default = chosen(options)
        self._choices = {name: chosen({**options, **rule.options}) for name, rule in rules.items()}
        self._known: dict[str, MethodRules | None] = {}
        self.choices = (self._default, *self._choices.values())
        """Every set of options that a method may have."""
        for choices in self.choices:  # what the engine cannot do is an error now
            MethodRules("", choices, setup, self._tenants)

    def of_call(self, details: Any, handler: Any) -> MethodRules | None:
        """Return the rules of a call; None = its handler is not protected."""
        rules = None if handler is None else self.check(details.method, handler)
        return None if rules is None or rules.passes(details.invocation_metadata) else rules

    def check(self, method: str, handler: Any) -> MethodRules | None:
        """Return the rules of a method, if it has any; a stream that needs a key is an error."""
        rules = self.find(method)
        if rules is None or not (handler.request_streaming or handler.response_streaming):
            return rules
        if rules.choices.required:
            raise ConfigError(
                f"{method} is a stream, which cannot be replayed, but its key is required: "
                f"write methods={{{method!r}: MethodRule(off=True)}}"
            )
        return None

    def find(self, method: str) -> MethodRules | None:
        """Return the rules of a method; None = they are switched off."""
        if method in self._known:
            return self._known[method]
        name = method if method in self._choices else f"{method.rpartition('/')[0]}/*"
        rules = None
        if name not in self._off:
            choices = self._choices.get(name, self._default)
            rules = MethodRules(method, choices, self._setup, self._tenants)
        if len(self._known) < _REMEMBERED:
            self._known[method] = rules
        return rules


class CheckingServer:
    """A server on which services are registered, each handler checked before.

    An interceptor sees a handler no earlier than its first call: services that are registered
    through `interceptor.checking(server)` are checked before the server starts.
    """

    def __init__(self, server: Any, methods: MethodTable) -> None:
        self._server, self._methods = server, methods

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Check and register the handlers of a service."""
        self._check({f"/{service_name}/{name}": one for name, one in method_handlers.items()})
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Check and register generic handlers, as far as they tell what they hold."""
        handlers = tuple(generic_rpc_handlers)
        for handler in handlers:
            # The kind that `grpc.method_handlers_generic_handler` makes; others tell nothing.
            self._check(getattr(handler, "_method_handlers", {}))
        self._server.add_generic_rpc_handlers(handlers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def _check(self, handlers: Mapping[str, Any]) -> None:
        for method, handler in handlers.items():
            self._methods.check(method, handler)
