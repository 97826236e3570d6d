"""What an application may choose; a bad option is a ConfigError when the interceptor is made.

The options of an interceptor hold for every unary method; a `MethodRule` changes some of them for
one method, or for all methods of a service.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack

import grpc
import msgspec

from semel.adapters.grpc.storing import StoredCodes, no_other_code
from semel.core.policy import Duration, Policy, seconds
from semel.errors import ConfigError
from semel.http import options as checking
from semel.http.options import MIB
from semel.http.storing import check_function

_METADATA_NAME: Final = re.compile(r"[0-9a-z_.\-]+")
_METHOD: Final = re.compile(r"/[^/*]+/(?:[^/*]+|\*)")
_BUSY_CODES: Final = {
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "ABORTED": grpc.StatusCode.ABORTED,
}


class CallView(msgspec.Struct, frozen=True):
    """What a `tenant` function sees of a call."""

    method: str
    metadata: grpc.aio.Metadata
    """`metadata.get("x-tenant")`, `metadata.get_all(...)`; names are in lower case."""
    context: Any
    """The servicer context: `context.auth_context()`, `context.peer_identities()`."""


KeyFunction: TypeAlias = Callable[[Any], str | None]
PayloadFunction: TypeAlias = Callable[[Any], object]
Tenant: TypeAlias = Callable[[CallView], str | Awaitable[str | None] | None]
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
        tenant: Tenant | None = None,
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
        self.tenant = check_function("tenant", tenant)
        self.payload = check_function("payload", payload)
        self.secret = checking.check_secret(secret)
        self.policy = checking.check_policy(policy)
        self.wait = seconds("wait", wait, zero=True)
        self.stored: StoredCodes = check_function("stored", stored) or no_other_code
        self.max_request = checking.check_size("max_request", max_request)
        self.max_response = checking.check_size("max_response", max_response)
        self.pushback = seconds("pushback", pushback)
        if busy_code not in _BUSY_CODES:
            raise ConfigError(f"busy_code is UNAVAILABLE or ABORTED; got {busy_code!r}")
        self.busy_code = _BUSY_CODES[busy_code]
        if self.metadata is None and self.key is None:
            raise ConfigError("a key comes from metadata or from the function key: both are None")


class MethodRule:
    """Other options for one method; `off=True` lets it pass whatever it brings."""

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
    """Give the name of a metadatum as it travels; a ConfigError if it cannot carry a key."""
    name = value.lower() if isinstance(value, str) else ""
    if _METADATA_NAME.fullmatch(name) is None or name.startswith("grpc-") or name.endswith("-bin"):
        raise ConfigError(
            f"metadata must be the name of a text that is not gRPC's own; got {value!r}"
        )
    return name
