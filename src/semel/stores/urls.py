"""Opens a store by its URL, and reads what a store is given as text.

A store's module, and so its driver, is imported only when its URL is asked for. What is wrong in a
URL, an option or a cursor is named before anything is connected.
"""

from __future__ import annotations

import importlib
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from semel.core.optional import Needed
from semel.core.records import Identity
from semel.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from semel.stores.base import AsyncStore, Store

DEFAULT_PREFIX = "idem:"
DEFAULT_TIMEOUT = 5.0

SEARCH_SHARE = 0.5
"""For which part of its `timeout` a call looks for a server that it cannot reach, in every store.
Enough for a restart; and a request does not pay all of it while the server stays away."""


class Backend(NamedTuple):
    """Where the stores of a URL scheme live: a module with `open_store` and `open_async_store`."""

    module: str
    install: str | None
    """What pip installs to have the driver; None when nothing is needed."""


BACKENDS = {
    "memory": Backend("semel.stores.memory", None),
    "sqlite": Backend("semel.stores.sql.sqlite", None),
    "redis": Backend("semel.stores.redis", "semel[redis]"),
    "rediss": Backend("semel.stores.redis", "semel[redis]"),
    "redis+unix": Backend("semel.stores.redis", "semel[redis]"),
    "redis+cluster": Backend("semel.stores.redis", "semel[redis]"),
    "rediss+cluster": Backend("semel.stores.redis", "semel[redis]"),
    "redis+sentinel": Backend("semel.stores.redis", "semel[redis]"),
    "rediss+sentinel": Backend("semel.stores.redis", "semel[redis]"),
    "mysql": Backend("semel.stores.sql.mysql", "semel[mysql]"),
    "mariadb": Backend("semel.stores.sql.mysql", "semel[mysql]"),
    "postgresql": Backend("semel.stores.sql.postgres", "semel[postgres]"),
    "postgres": Backend("semel.stores.sql.postgres", "semel[postgres]"),
    "semel+http": Backend("semel.stores.remote", "semel[remote]"),
    "semel+https": Backend("semel.stores.remote", "semel[remote]"),
}
"""Our own schemes. Others come from the entry point group `semel.stores` (name = scheme)."""

RELATED = {
    "valkey": "redis",
    "valkeys": "rediss",
    "aioredis": "redis",
    "unix": "redis+unix",
    "sqlite3": "sqlite",
    "pgsql": "postgresql",
    "psql": "postgresql",
}
"""Schemes that other libraries use, and the scheme of semel for the same server."""

TIERS = Backend("semel.stores.tiered", "semel[redis]")
"""Redis in front, another store behind: asked for by `behind`, not by a scheme."""

TIER_OPTIONS = frozenset({"front_ttl", "front_timeout"})
"""Options that mean nothing without a store behind."""

OPEN_OPTIONS = TIER_OPTIONS | {"behind", "prefix", "timeout"}
"""Options of `open_store` itself, whichever store is opened."""

ENTRY_POINT_GROUP = "semel.stores"


def open_store(
    url: str,
    *,
    behind: str | Store | None = None,
    prefix: str = DEFAULT_PREFIX,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> Store:
    """Open the store at `url` for threads; it connects at the first use.

    `prefix` stands in front of all names in the store. `timeout` bounds each store call in seconds;
    further options go to the store itself. With `behind`, a URL or a store, Redis only stands in
    front: `open_store("redis://localhost", behind="sqlite:///semel.db")`.

    Examples:
        >>> store = open_store("memory://", timeout=2.0)
        >>> idem = Idempotency(store)
    """
    if behind is not None:
        options["behind"] = behind
    opener: Callable[..., Store] = _opener(url, "open_store", options)
    return opener(url, prefix=prefix, timeout=timeout, **options)


def open_async_store(
    url: str,
    *,
    behind: str | AsyncStore | None = None,
    prefix: str = DEFAULT_PREFIX,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> AsyncStore:
    """Open the store at `url` for asyncio; it connects at the first use.

    `behind`, `prefix`, `timeout` and further options are those of `open_store`.

    Examples:
        >>> store = open_async_store("memory://")
        >>> idem = AsyncIdempotency(store)
    """
    if behind is not None:
        options["behind"] = behind
    opener: Callable[..., AsyncStore] = _opener(url, "open_async_store", options)
    return opener(url, prefix=prefix, timeout=timeout, **options)


def _opener(url: object, name: str, options: Mapping[str, Any]) -> Any:
    if not isinstance(url, str) or "://" not in url:
        # Not the text itself: whatever it is, it may hold a password.
        shown = "a text without ://" if isinstance(url, str) else f"a {type(url).__name__}"
        raise ConfigError(
            f"a store URL looks like sqlite:///semel.db or redis://localhost:6379/0; got {shown}"
        )
    scheme = url.partition("://")[0]
    backend = TIERS if "behind" in options else BACKENDS.get(scheme)
    of_tiers = TIER_OPTIONS & set(options)
    if of_tiers and backend is not TIERS:
        raise ConfigError(
            f"{min(of_tiers)} goes with a store behind: "
            'open_store("redis://localhost", behind="postgresql://...")'
        )
    if backend is None:
        module = _third_party(scheme)
        if not hasattr(module, name):
            raise ConfigError(
                f"the store of {scheme}:// cannot be opened here: its entry point in "
                f"{ENTRY_POINT_GROUP} has no {name}"
            )
        return getattr(module, name)
    with Needed(backend.install, by=f"{scheme}://", error=ConfigError):
        # The second step too: it may import the driver of this kind of store.
        return getattr(importlib.import_module(backend.module), name)


def _third_party(scheme: str) -> Any:
    # Imported here: it costs more than all of semel, and few ask for another's store.
    from importlib.metadata import entry_points  # noqa: PLC0415

    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == scheme:
            return entry.load()
    known = ", ".join(f"{name}://" for name in BACKENDS)
    raise ConfigError(f"no store knows the scheme {scheme}://; {_hint(scheme)}known: {known}")


def _hint(scheme: str) -> str:
    """Name the scheme that was probably meant: others' URLs also name a driver."""
    database, _, driver = scheme.lower().partition("+")
    ours = RELATED.get(database, database)
    if scheme.lower() in BACKENDS:
        return f"write it in small letters, {scheme.lower()}://; "
    if ours not in BACKENDS:
        return ""
    why = " (Idempotency and AsyncIdempotency choose the driver by themselves)" if driver else ""
    return f"write {ours}://{why}; "


# --- what a URL and the options beside it say ------------------------------------------------

_BESIDE_EVERY_URL: Final = {
    "prefix": "an option of open_store, and a setting",
    "behind": "an option of open_store, and a setting",
    "front_ttl": "an option of open_store",
    "front_timeout": "an option of open_store",
}


def check_login(url: str) -> None:
    """Reject an @ behind the address: what stands before it is probably half of a password.

    Whatever is made of such a URL, a part of the password would be taken for a host, a database or
    an option, and be shown in a message.
    """
    scheme, _, rest = url.partition("://")
    address = re.split("[/?]", rest, maxsplit=1)[0]
    if "@" in rest.removeprefix(address):
        raise ConfigError(
            f"@, /, ? and # in the password or the options of {scheme}:// are written "
            "%40, %2F, %3F and %23"
        )


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """Split `scheme://address?name=value` into the decoded address and its options."""
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise ConfigError(f"{scheme}:// has the option {name} twice")
        options[name] = value
    return unquote(address), options


def reject_in_url(in_url: Iterable[str], **by_name: str) -> None:
    """Reject the options that a URL cannot carry; `by_name` are those of this store, and why."""
    reasons = _BESIDE_EVERY_URL | by_name
    for name in in_url:
        if name in reasons:
            raise ConfigError(f"{name} is {reasons[name]}: give it by name, not in the URL")


def merge_options(
    scheme: str, in_url: Mapping[str, str], by_name: Mapping[str, Any], known: frozenset[str]
) -> dict[str, Any]:
    """Join the options of the URL with those given by name; unknown ones are an error."""
    unknown = sorted((set(in_url) | set(by_name)) - known)
    if unknown:
        raise ConfigError(
            f"{scheme}:// does not know the option {unknown[0]}; known: {', '.join(sorted(known))}"
            f"{did_you_mean(unknown[0], known)}"
        )
    twice = sorted(set(in_url) & set(by_name))
    if twice:
        raise ConfigError(f"{scheme}:// got the option {twice[0]} in its URL and by name")
    return {**in_url, **by_name}


def whole_number(name: str, value: object) -> int:
    """Read a positive whole number, from a URL or as it is."""
    try:
        number = int(value) if isinstance(value, (str, int)) else 0
    except ValueError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number above 0, not {value!r}")
    return number


def positive_seconds(name: str, value: object) -> float:
    """Read a number of seconds, from a URL or as it is."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}")
    return number


_BOOLEANS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def boolean(name: str, value: object) -> bool:
    """Read on or off, from a URL or as it is."""
    read = value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())
    if read is None:
        raise ConfigError(f"{name} is on or off, not {value!r}")
    return read


# --- cursors of listings: records are listed by key, then by scope ------------------------


def cursor_after(identity: Identity) -> str:
    """Return the cursor of the page after the one that ends with `identity`."""
    return msgspec.json.encode((identity.key, identity.scope)).decode()


def position(cursor: str) -> tuple[str, str]:
    """Read the (key, scope) that a cursor stands for."""
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{cursor!r} is not the cursor of a page") from error


# --- why no connection will come about -------------------------------------------------------


def tls_error(error: BaseException | None, *, connecting: bool) -> ssl.SSLError | None:
    """Find, in an error and what it was made of, the reason why TLS will never come about here.

    Only errors that are known to stay count; the others may be gone with the next connection.
    `connecting` = they came before the connection was open.
    """
    while error is not None:
        if isinstance(error, ssl.SSLError) and _stays(error, connecting=connecting):
            return error
        # Drivers raise their own error while they handle this one, mostly without naming it as the
        # cause. An error of the system has a reason of its own, whatever was handled meanwhile.
        hidden = error.__suppress_context__ or isinstance(error, OSError)
        error = error.__cause__ or (None if hidden else error.__context__)
    return None


def _stays(error: ssl.SSLError, *, connecting: bool) -> bool:
    reason = getattr(error, "reason", None) or ""
    return (
        isinstance(error, ssl.SSLCertVerificationError)
        or reason.endswith(_LASTING)
        or (connecting and reason in NO_TLS)
        or getattr(error, "library", None) in _OF_FILES
        or any(words in str(error) for words in _UNREADABLE)
    )


NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""What OpenSSL says of a server that answers without TLS; on an open connection, of any garbage."""
_LASTING: Final = (
    "UNSUPPORTED_PROTOCOL",
    "NO_PROTOCOLS_AVAILABLE",
    "NO_CERTIFICATE_ASSIGNED",
    # What the other side found wrong: its names begin with that of a version of TLS.
    "ALERT_PROTOCOL_VERSION",
    "ALERT_HANDSHAKE_FAILURE",
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_CERTIFICATE_REVOKED",
    "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_CERTIFICATE_REQUIRED",
)
_OF_FILES: Final = frozenset({"X509", "PEM"})
"""The parts of OpenSSL that read files of certificates and keys."""
_UNREADABLE: Final = ("PEM lib", "no start line")
