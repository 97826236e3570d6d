"""What an application may choose, checked when a door is made: a bad option is a ConfigError then.

The options of a door hold for every request; a `Route` changes some of them for the paths it names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast

from semel.core.keys import KeyRules
from semel.core.policy import Duration, Policy, seconds
from semel.errors import ConfigError, InvalidKey
from semel.http.messages import Request
from semel.http.problems import Wording, checked_wordings
from semel.http.storing import StoredStatuses, is_success

PathPattern: TypeAlias = str | re.Pattern[str]
KeySource: TypeAlias = Literal["header", "query", "field", "function"]
Tenant: TypeAlias = Callable[[Request], Awaitable[str | None] | str | None]
KeyFunction: TypeAlias = Callable[[Request, bytes], str | None]
Payload: TypeAlias = Sequence[str] | Callable[[Request, bytes], object]

MIB: Final = 1024 * 1024
SOURCES: Final[tuple[KeySource, ...]] = ("header", "query", "field", "function")
_NEVER_INTERCEPTED: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class DoorOptions(TypedDict, total=False):
    """Every option, by name; what is left out has its default (see `Choices`)."""

    header: str | None
    query: str | None
    field: str | None
    key: KeyFunction | None
    order: Sequence[KeySource]
    strict: bool
    required: bool
    methods: Sequence[str]
    scope: str
    tenant: Tenant | None
    separate_routes: bool
    payload: Payload | None
    secret: bytes | None
    policy: Policy | None
    wait: Duration
    stored: StoredStatuses
    never_stored: Sequence[str]
    replayed_header: str
    max_body: int
    max_response: int
    retry_after: Duration
    problems: Mapping[str, Wording]


class Choices:
    """The options of one route, complete and checked."""

    def __init__(
        self,
        *,
        header: str | None = "Idempotency-Key",
        query: str | None = None,
        field: str | None = None,
        key: KeyFunction | None = None,
        order: Sequence[KeySource] = SOURCES,
        strict: bool = False,
        required: bool = False,
        methods: Sequence[str] = ("POST", "PATCH"),
        scope: str = "http",
        tenant: Tenant | None = None,
        separate_routes: bool = False,
        payload: Payload | None = None,
        secret: bytes | None = None,
        policy: Policy | None = None,
        wait: Duration = 0,
        stored: StoredStatuses = is_success,
        never_stored: Sequence[str] = (),
        replayed_header: str = "Idempotent-Replayed",
        max_body: int = MIB,
        max_response: int = MIB,
        retry_after: Duration = 1.0,
        problems: Mapping[str, Wording] | None = None,
    ) -> None:
        self.header = None if header is None else _header_name("header", header)
        self.query = _text("query", query)
        self.field = _text("field", field)
        self.key = _function("key", key)
        self.order = _order(order)
        self.strict, self.required, self.separate_routes = strict, required, separate_routes
        self.methods = _methods(methods)
        self.scope = _scope(scope)
        self.tenant = _function("tenant", tenant)
        self.payload = _payload(payload)
        self.secret = _secret(secret)
        self.policy = _policy(policy)
        self.wait = seconds("wait", wait, zero=True)
        self.stored = _function("stored", stored) or is_success
        self.never_stored = frozenset(
            _header_name("never_stored", name).lower().encode() for name in _texts(never_stored)
        )
        self.replayed_header = _header_name("replayed_header", replayed_header)
        self.max_body, self.max_response = (
            _size("max_body", max_body),
            _size("max_response", max_response),
        )
        self.retry_after = seconds("retry_after", retry_after)
        self.problems = checked_wordings(problems or {})
        if not any((self.header, self.query, self.field, self.key)):
            raise ConfigError("a key comes from header, query, field or key: all of them are None")


def chosen(options: Mapping[str, Any]) -> Choices:
    """Check options that are given by name."""
    unknown = options.keys() - DoorOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(DoorOptions.__annotations__)
        raise ConfigError(f"there is no option {min(unknown)!r}; known: {known}")
    return Choices(**options)


class Route:
    """Other options for the paths that match: `Route("/coupons/*", policy=..., required=True)`.

    A pattern is a path, in which `*` stands for anything, or a compiled regular expression.
    """

    def __init__(self, pattern: PathPattern, **options: Any) -> None:
        self.matches = path_matcher(pattern)
        self.options = options


def path_matcher(pattern: PathPattern) -> Callable[[str], object]:
    """Compile a pattern over whole paths."""
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch
    if not isinstance(pattern, str) or not pattern.startswith(("/", "*")):
        raise ConfigError(
            f"a path pattern begins with / or *, or is a compiled one; got {pattern!r}"
        )
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch


def _scope(scope: object) -> str:
    try:
        KeyRules().check_scope(scope)
    except InvalidKey as error:
        raise ConfigError(str(error)) from error
    return cast("str", scope)


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name} must be a text or None; got {value!r}")
    return value


def _texts(value: Sequence[str]) -> Sequence[str]:
    if isinstance(value, str):
        raise ConfigError(f"a sequence of texts is needed, not the text {value!r}")
    return value


def _header_name(option: str, value: object) -> str:
    if not isinstance(value, str) or _TOKEN.fullmatch(value) is None:
        raise ConfigError(f"{option} must be the name of a header; got {value!r}")
    return value


def _function(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function; got {type(value).__name__}")
    if name != "tenant" and inspect.iscoroutinefunction(value):
        raise ConfigError(f"{name} must be a plain function: only tenant may be async")
    return value


def _order(order: Sequence[KeySource]) -> tuple[KeySource, ...]:
    given = tuple(_texts(order))
    if sorted(given) != sorted(SOURCES):
        raise ConfigError(f"order must have each of {', '.join(SOURCES)} once; got {given!r}")
    return given  # type: ignore[return-value]


def _methods(methods: Sequence[str]) -> frozenset[str]:
    names = frozenset(name.upper() for name in _texts(methods))
    if names & _NEVER_INTERCEPTED:
        wrong = ", ".join(sorted(names & _NEVER_INTERCEPTED))
        raise ConfigError(f"methods: {wrong} changes nothing, so it is never intercepted")
    return names


def _payload(payload: Any) -> Any:
    if payload is None or callable(payload):
        return _function("payload", payload)
    fields = tuple(_texts(payload))
    if not fields or not all(isinstance(field, str) and field for field in fields):
        raise ConfigError("payload must be fields of the body, such as ['amount'], or a function")
    return fields


def _secret(secret: object) -> bytes | None:
    if secret is not None and (not isinstance(secret, bytes) or not secret):
        raise ConfigError("secret must be bytes, and not empty")
    return secret


def _policy(policy: object) -> Policy | None:
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy must be a Policy, not {type(policy).__name__}")
    return policy


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a number of bytes; got {value!r}")
    return value
