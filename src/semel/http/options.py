"""What an application may choose, checked when an integration is made: errors are ConfigErrors.

The options of an integration hold for every request; a `Route` changes some of them for the paths
that it names.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import eq
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast, get_args

from msgspec import UNSET, UnsetType

from semel.core.keys import KeyRules
from semel.core.policy import Duration, Policy, seconds
from semel.errors import ConfigError, InvalidKey, did_you_mean
from semel.http.problems import Wording, checked_wordings
from semel.http.requests import HEADER_NAME, BodyFormat, Request
from semel.http.storing import StoredRule, StoredStatuses, check_function

PathPattern: TypeAlias = str | re.Pattern[str]
KeySource: TypeAlias = Literal["header", "query", "field", "function"]
Tenant: TypeAlias = Callable[[Request], Awaitable[str | None] | str | None]
KeyFunction: TypeAlias = Callable[[Request, bytes], str | None]
Payload: TypeAlias = Sequence[str] | Callable[[Request, bytes], object]

MIB: Final = 1024 * 1024
SOURCES: Final[tuple[KeySource, ...]] = ("header", "query", "field", "function")
CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FORMATS: Final = get_args(BodyFormat)
_NEVER_INTERCEPTED: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})


class IntegrationOptions(TypedDict, total=False):
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
    format: BodyFormat
    secret: bytes | None
    policy: Policy | None
    wait: Duration
    stored: StoredStatuses | None
    never_stored: Sequence[str]
    replayed_header: str
    max_body: int
    max_response: int
    retry_after: Duration
    problems: Mapping[str, Wording]


class PathOptions(TypedDict, total=False):
    """The paths that a middleware protects, and other options for some of them."""

    include: Sequence[PathPattern] | None
    exclude: Sequence[PathPattern]
    routes: Sequence[Route]


class MiddlewareOptions(IntegrationOptions, PathOptions, total=False):
    """Options of every integration, and which paths it takes."""


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
        tenant: Tenant | UnsetType | None = UNSET,
        separate_routes: bool = False,
        payload: Payload | None = None,
        format: BodyFormat = "json",  # noqa: A002 - the option's name
        secret: bytes | None = None,
        policy: Policy | None = None,
        wait: Duration = 0,
        stored: StoredStatuses | None = None,
        never_stored: Sequence[str] = (),
        replayed_header: str = "Idempotent-Replayed",
        max_body: int = MIB,
        max_response: int = MIB,
        retry_after: Duration = 1.0,
        problems: Mapping[str, Wording] | None = None,
    ) -> None:
        self.header = None if header is None else check_header_name("header", header)
        self.query = check_text("query", query)
        self.field = check_text("field", field)
        self.key = check_function("key", key)
        self.order = _order(order)
        self.strict = check_flag("strict", strict)
        self.required = check_flag("required", required)
        self.separate_routes = check_flag("separate_routes", separate_routes)
        self.methods = _methods(methods)
        self.scope = check_scope(scope)
        self.tenant_is_unset = tenant is UNSET
        self.tenant = check_function("tenant", None if tenant is UNSET else tenant)
        self.payload = _payload(payload)
        self.format: BodyFormat = _format(format)
        self.secret = check_secret(secret)
        self.policy = check_policy(policy)
        self.wait = seconds("wait", wait, zero=True)
        self.stored = StoredRule.of(stored)
        self.never_stored = frozenset(
            check_header_name("never_stored", name).lower().encode()
            for name in check_texts("never_stored", never_stored)
        )
        self.replayed_header = check_header_name("replayed_header", replayed_header)
        self.max_body = check_size("max_body", max_body)
        self.max_response = check_size("max_response", max_response)
        self.retry_after = seconds("retry_after", retry_after)
        self.problems = checked_wordings(problems or {})
        if not any((self.header, self.query, self.field, self.key)):
            raise ConfigError("a key comes from header, query, field or key: all of them are None")

    @property
    def reads_fields(self) -> bool:
        """Whether fields are looked for in the body, which then has one format."""
        return self.field is not None or isinstance(self.payload, tuple)


def chosen(options: Mapping[str, Any]) -> Choices:
    """Check options that are given by name."""
    return Choices(**known_options(options, IntegrationOptions.__annotations__))


class Route:
    """Other options for the paths that match: `Route("/coupons/*", policy=..., required=True)`.

    A pattern is a path in which `*` matches anything, or a compiled regular expression.
    """

    def __init__(self, pattern: PathPattern, **options: Any) -> None:
        path_matcher(pattern)  # raises ConfigError if the pattern is invalid
        self.pattern = pattern
        self.options = known_options(options, IntegrationOptions.__annotations__)


def path_matcher(pattern: PathPattern) -> Callable[[str], object]:
    """Compile a pattern over whole paths."""
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch
    if not isinstance(pattern, str) or not pattern.startswith(("/", "*")):
        raise ConfigError(
            f"a path pattern begins with / or *, or is a compiled one; got {pattern!r}"
        )
    first, *rest = pattern.split("*")
    return partial(_matches, first, rest) if rest else partial(eq, pattern)


def _matches(first: str, rest: Sequence[str], path: str) -> bool:
    """Match texts with anything between them, each at its first place: no search is repeated."""
    *middle, last = rest
    start, end = len(first), len(path) - len(last)
    if start > end or not path.startswith(first) or not path.endswith(last):
        return False
    for text in middle:
        found = path.find(text, start, end)
        if found < 0:
            return False
        start = found + len(text)
    return True


def _order(order: Sequence[KeySource]) -> tuple[KeySource, ...]:
    given = tuple(check_texts("order", order))
    if sorted(given) != sorted(SOURCES):
        raise ConfigError(f"order must have each of {', '.join(SOURCES)} once; got {given!r}")
    return given  # type: ignore[return-value]


def _methods(methods: Sequence[str]) -> frozenset[str]:
    names = frozenset(name.upper() for name in check_texts("methods", methods))
    if names & _NEVER_INTERCEPTED:
        wrong = ", ".join(sorted(names & _NEVER_INTERCEPTED))
        raise ConfigError(f"methods: {wrong} changes nothing, so it is never intercepted")
    return names


def _payload(payload: Any) -> Any:
    if payload is None or callable(payload):
        return check_function("payload", payload)
    fields = tuple(check_texts("payload", payload))
    if not fields or not all(isinstance(field, str) and field for field in fields):
        raise ConfigError("payload must be fields of the body, such as ['amount'], or a function")
    return fields


def _format(given: Any) -> BodyFormat:
    if given not in _FORMATS:
        raise ConfigError(f"format must be one of {', '.join(_FORMATS)}; got {given!r}")
    return cast("BodyFormat", given)


# --- checks of single options --------------------------------------------------------------------
#
# HTTP and gRPC share them. Each returns the value that it was given; a wrong one is a ConfigError
# that names the option.


def known_options(options: Mapping[str, Any], known: Iterable[str]) -> Mapping[str, Any]:
    """Reject options that do not exist."""
    unknown = options.keys() - set(known)
    if unknown:
        name = min(unknown)
        raise ConfigError(
            f"there is no option {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}"
        )
    return options


def check_scope(value: object) -> str:
    """Reject a scope that no store would take."""
    try:
        KeyRules().check_scope(value)
    except InvalidKey as error:
        raise ConfigError(str(error)) from error
    return cast("str", value)


def check_text(name: str, value: object) -> str | None:
    """Accept only a string or None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name} must be a string or None; got {value!r}")
    return value


def check_texts(name: str, value: Sequence[str]) -> Sequence[str]:
    """Reject one text in the place of several."""
    if isinstance(value, str):
        raise ConfigError(f"{name} must be a sequence of strings, such as [{value!r}]")
    return value


def check_flag(name: str, value: object) -> bool:
    """Accept only True or False: a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False; got {value!r}")
    return value


def check_header_name(option: str, value: object) -> str:
    """Reject what cannot be the name of a header."""
    if not isinstance(value, str) or HEADER_NAME.fullmatch(value) is None:
        raise ConfigError(f"{option} must be the name of a header; got {value!r}")
    return value


def check_secret(value: object) -> bytes | None:
    """Reject a secret that would protect nothing."""
    if value is not None and (not isinstance(value, bytes) or not value):
        raise ConfigError("secret must be bytes, and not empty")
    return value


def check_policy(value: object) -> Policy | None:
    """Accept only a policy, not the name of one."""
    if value is not None and not isinstance(value, Policy):
        raise ConfigError(f"policy must be a Policy, not {type(value).__name__}")
    return value


def check_size(name: str, value: object) -> int:
    """Accept only a number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a number of bytes; got {value!r}")
    return value
