"""Reads what a store is given as text: options of its URL, numbers, cursors of its listings.

What is wrong is named, before anything is connected.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec

from semel.core.records import Identity
from semel.errors import ConfigError

_BESIDE_EVERY_URL: Final = {
    "prefix": "an option of open_store, and a setting",
    "behind": "an option of open_store, and a setting",
    "front_ttl": "an option of open_store",
    "front_timeout": "an option of open_store",
}


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


def check_login(url: str) -> None:
    """Refuse an @ behind the address: what stands before it is probably half of a password.

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
    """Part `scheme://address?name=value` into the decoded address and its options."""
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise ConfigError(f"{scheme}:// has the option {name} twice")
        options[name] = value
    return unquote(address), options


def refuse_in_url(in_url: Iterable[str], **by_name: str) -> None:
    """Refuse the options that a URL cannot carry; `by_name` are those of this store, and why."""
    reasons = _BESIDE_EVERY_URL | by_name
    for name in in_url:
        if name in reasons:
            raise ConfigError(f"{name} is {reasons[name]}: give it by name, not in the URL")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Name the options that a mistyped one may have meant, for the end of a message."""
    from difflib import get_close_matches  # noqa: PLC0415 - few mistype, and all would load it

    near = get_close_matches(name, sorted(known))
    return f"; did you mean {' or '.join(near)}?" if near else ""


def merge_options(
    scheme: str, in_url: Mapping[str, str], by_name: Mapping[str, Any], known: frozenset[str]
) -> dict[str, Any]:
    """Join the options of the URL with those given by name; unknown ones are an error."""
    unknown = sorted((set(in_url) | set(by_name)) - known)
    if unknown:
        raise ConfigError(
            f"{scheme}:// does not know the option {unknown[0]}; known: {', '.join(sorted(known))}"
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


_SWITCH = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def switch(name: str, value: object) -> bool:
    """Read on or off, from a URL or as it is."""
    read = value if isinstance(value, bool) else _SWITCH.get(str(value).lower())
    if read is None:
        raise ConfigError(f"{name} is on or off, not {value!r}")
    return read


# --- cursors of listings: records are listed by key, then by scope ------------------------


def cursor_after(identity: Identity) -> str:
    """Name the place where a page that ends with `identity` goes on."""
    return msgspec.json.encode((identity.key, identity.scope)).decode()


def position(cursor: str) -> tuple[str, str]:
    """Read the (key, scope) that a cursor stands for."""
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{cursor!r} is not the cursor of a page") from error
