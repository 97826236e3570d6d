"""What can be known of a codec before it has a result to encode.

Noticed only then, it would be too late: the effect is done, and its result is lost to duplicates.
"""

from __future__ import annotations

import inspect
from typing import Final

from semel.core.codec.wire import BY_STORED_NAME
from semel.core.records import FAILURE, OMITTED
from semel.errors import ConfigError

LONGEST_NAME: Final = 255
"""Bytes of a codec's name that every store can hold."""

RESERVED: Final = frozenset({OMITTED, FAILURE, "http/1", "grpc/1"})
"""Names under which semel itself stores what is no result, and the answers of its doors."""

METHODS: Final = {"encode": "value", "decode": "data"}
"""What a codec must do, with the name of the first argument."""


def check_codec(codec: object, where: str) -> None:
    """Refuse what cannot be a codec; `where` it was given begins the error."""
    if isinstance(codec, type):
        name = codec.__name__
        raise ConfigError(f"{where} must be an object, {name}(...), not the class {name} itself")
    kind = type(codec).__name__
    if not all(hasattr(codec, needed) for needed in ("name", *METHODS)):
        expected = "a codec's name or an object with name, encode and decode"
        raise ConfigError(f"{where} must be {expected}; got {kind}")
    for method, first in METHODS.items():
        if not _takes_three(getattr(codec, method)):
            expected = f"a plain method that takes ({first}, context, hint=None)"
            raise ConfigError(f"{where} must be a codec whose {method} is {expected}; got {kind}")
    name = getattr(codec, "name")  # noqa: B009 - its type is not known to have one
    if not isinstance(name, str) or not name.isprintable() or not _fits(name):
        expected = f"a printable text of 1 to {LONGEST_NAME} bytes, such as 'zip/1'"
        raise ConfigError(
            f"{where} must be a codec whose name is {expected}; {kind} has {repr(name)[:80]}"
        )
    taken = BY_STORED_NAME.get(name)
    # By type: a subclass may write something else, and what is stored by now would be read with it.
    if name in RESERVED or (taken is not None and type(codec) is not type(taken)):
        raise ConfigError(
            f"{where} must be a codec with a name of its own; {kind} has {name!r}, under which "
            "semel itself stores something else"
        )


def _fits(name: str) -> bool:
    return 0 < len(name.encode()) <= LONGEST_NAME


def _takes_three(method: object) -> bool:
    """Whether it can be called as the engine calls it, and answers at once."""
    if not callable(method) or inspect.iscoroutinefunction(method):
        return False
    try:
        inspect.signature(method).bind(b"", b"", None)
    except TypeError:
        return False
    except ValueError:  # a function of an extension may not tell
        return True
    return True
