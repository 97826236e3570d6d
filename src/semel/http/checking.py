"""Checks of single options: what is wrong is a ConfigError, which names the option.

The doors of HTTP and of gRPC share them. Each gives back the value that it was given.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from semel.core.keys import KeyRules
from semel.core.policy import Policy
from semel.errors import ConfigError, InvalidKey

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def known_options(options: Mapping[str, Any], known: Iterable[str]) -> Mapping[str, Any]:
    """Refuse options that do not exist."""
    unknown = options.keys() - set(known)
    if unknown:
        raise ConfigError(f"there is no option {min(unknown)!r}; known: {', '.join(known)}")
    return options


def check_scope(value: object) -> str:
    """Refuse a scope that no store would take."""
    try:
        KeyRules().check_scope(value)
    except InvalidKey as error:
        raise ConfigError(str(error)) from error
    return cast("str", value)


def check_text(name: str, value: object) -> str | None:
    """Refuse what is neither a text nor None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name} must be a text or None; got {value!r}")
    return value


def check_texts(name: str, value: Sequence[str]) -> Sequence[str]:
    """Refuse one text in the place of several."""
    if isinstance(value, str):
        raise ConfigError(f"{name} must be a sequence of texts, such as [{value!r}]")
    return value


def check_flag(name: str, value: object) -> bool:
    """Refuse what is neither True nor False: a text such as "no" would be true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False; got {value!r}")
    return value


def check_header_name(option: str, value: object) -> str:
    """Refuse what cannot be the name of a header."""
    if not isinstance(value, str) or _TOKEN.fullmatch(value) is None:
        raise ConfigError(f"{option} must be the name of a header; got {value!r}")
    return value


def check_function(name: str, value: Any) -> Any:
    """Refuse what cannot be called, and coroutines where nobody would await them."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function; got {type(value).__name__}")
    if name != "tenant" and any(
        map(inspect.iscoroutinefunction, (value, getattr(value, "__call__", None)))  # noqa: B004 - it is asked what it is
    ):
        raise ConfigError(f"{name} must be a plain function: only tenant may be async")
    return value


def check_secret(value: object) -> bytes | None:
    """Refuse a secret that would protect nothing."""
    if value is not None and (not isinstance(value, bytes) or not value):
        raise ConfigError("secret must be bytes, and not empty")
    return value


def check_policy(value: object) -> Policy | None:
    """Refuse what is no policy, such as the name of one."""
    if value is not None and not isinstance(value, Policy):
        raise ConfigError(f"policy must be a Policy, not {type(value).__name__}")
    return value


def check_size(name: str, value: object) -> int:
    """Refuse what is no number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a number of bytes; got {value!r}")
    return value
