"""How a failure, and a success without its value, are stored. Writing them never fails."""

from __future__ import annotations

from typing import Final

import msgspec

from semel.core.records import FAILURE, OMITTED, Encoded
from semel.errors import SerializationError

MESSAGE_LIMIT: Final = 1000
"""Characters of a failure's message that are kept."""

_failure_decoder = msgspec.json.Decoder(tuple[str, str])


def encode_failure(error: BaseException) -> Encoded:
    """Keep the type name and the message of an exception."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure itself
        message = "(its message could not be read)"
    pair = (_clean(type(error).__name__), _clean(message))
    return Encoded(FAILURE, msgspec.json.encode(pair))


def decode_failure(stored: Encoded) -> tuple[str, str]:
    """Read the type name and the message of a stored failure."""
    try:
        return _failure_decoder.decode(stored.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError("the stored failure cannot be read") from error


def omitted(reason: str) -> Encoded:
    """Stand for a success whose value is not kept, and say why."""
    return Encoded(OMITTED, _clean(reason).encode())


def omission_reason(stored: Encoded) -> str:
    """Read why the value of a success was not kept."""
    return stored.data.decode(errors="replace")


def _clean(text: str) -> str:
    """Cut a text, and make it one that UTF-8 can hold."""
    return str.encode(text, "utf-8", "replace").decode()[:MESSAGE_LIMIT]
