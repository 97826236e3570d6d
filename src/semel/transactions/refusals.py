"""What is refused before a connection is touched: arguments that cannot be meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from semel.errors import ConfigError
from semel.transactions.families import is_connection

T = TypeVar("T")

_BEGIN = "begin must be a function that gives a context manager, such as Session.begin"


def check_keys(keys: object) -> None:
    """Refuse what is no collection of keys; a text would be read by letters."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise ConfigError(
            f"several keys are needed, such as a list of them, not {type(keys).__name__}; "
            "for one key there is idem.transaction()"
        )


def check_begin(begin: object) -> None:
    """Refuse what begins no unit of work; some connections can be called, with another meaning."""
    if not callable(begin) or is_connection(begin):
        raise ConfigError(f"{_BEGIN}, not {type(begin).__name__}")


def enterable(given: T, kind: type) -> T:
    """Give what `begin` has given, if it can be entered."""
    if not isinstance(given, kind):
        raise ConfigError(f"{_BEGIN}; it gave {type(given).__name__}")
    return given
