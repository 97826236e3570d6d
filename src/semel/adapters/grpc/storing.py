"""What of an answer is stored, and what becomes of a key whose answer is not.

OK with a protobuf message is stored: its bytes, no metadata. Other codes run again, unless a
function says that they are stored; then code and details are, and the richer error model's status.
Never stored, whatever a function says: what depends on the caller or on the moment (`NEVER`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

import grpc
from grpc import StatusCode

from semel.core.decide import UnstoredResponse
from semel.core.stored_answers import StoredMessage, pack_message
from semel.errors import ConfigError
from semel.events import logger

StoredCodes: TypeAlias = Callable[[grpc.StatusCode], bool | Literal["unknown"]]
"""Says of a code other than OK whether its answer is stored; "unknown" parks the key."""

NEVER: Final = frozenset(
    {
        StatusCode.CANCELLED,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.PERMISSION_DENIED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.UNAVAILABLE,
    }
)

_REJECTIONS: Final = frozenset(
    {
        StatusCode.ALREADY_EXISTS,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.OUT_OF_RANGE,
        StatusCode.PERMISSION_DENIED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.UNIMPLEMENTED,
    }
)
"""Codes by which a handler rejects a call: nothing was done, so the key is free again."""

STATUS_DETAILS: Final = "grpc-status-details-bin"
"""The one trailer that is part of an error rather than of a connection."""

_WRONG_WORD: Final = "stored must return True, False or 'unknown', not {!r}"

CODES: Final[dict[int, StatusCode]] = {code.value[0]: code for code in StatusCode}
"""The codes by their numbers."""


def check_stored(stored: StoredCodes) -> StoredCodes:
    """Reject a function that answers with a wrong word, which would count as true."""
    for code in StatusCode:
        choice: object = None
        with suppress(Exception):  # logged when a call ends with this code
            choice = stored(code)
        if code is not StatusCode.OK and not _is_choice(choice):
            raise ConfigError(f"{_WRONG_WORD.format(choice)}, which it returns for {code.name}")
    return stored


def _is_choice(choice: object) -> bool:
    return choice == "unknown" or not isinstance(choice, str | Awaitable)


def no_other_code(_: StatusCode) -> bool:
    """The default: OK alone is stored."""
    return False


def failed(
    code: StatusCode, details: object, trailers: Iterable[tuple[str, Any]], stored: StoredCodes
) -> bytes | UnstoredResponse:
    """Say what becomes of the key after a code other than OK: what is stored, or how it ends."""
    try:
        choice = stored(code)
        if not _is_choice(choice):
            raise TypeError(_WRONG_WORD.format(choice))  # noqa: TRY301 - logged like its own errors
    except Exception:  # noqa: BLE001 - the client's answer does not depend on it
        logger.exception("the function stored= raised for code %s", code.name)
        choice = False
    reason = f"answered with {code.name}"
    if choice == "unknown":
        return UnstoredResponse(reason, "unknown")
    if choice and code not in NEVER:
        status_details = next(
            (value for name, value in trailers if name == STATUS_DETAILS and type(value) is bytes),
            None,
        )
        return pack_message(
            StoredMessage(code.value[0], text(details), status_details=status_details)
        )
    return UnstoredResponse(reason, "forget" if code in _REJECTIONS else None)


def code_of(code: object, *, numbers: bool = True) -> StatusCode:
    """Read the code that a handler left, if any; what is no code at all travels as UNKNOWN.

    A number is a code for the server on asyncio, and none for the one on threads.
    """
    if code is None:
        return StatusCode.OK
    if numbers and isinstance(code, int):
        return CODES.get(code, StatusCode.UNKNOWN)
    return code if isinstance(code, StatusCode) else StatusCode.UNKNOWN


def text(details: object) -> str:
    """Read the details of a status, which a server for threads keeps as bytes.

    Invalid Unicode is replaced: an end that could not be packed would leave its key held.
    """
    if isinstance(details, str):
        details = details.encode(errors="replace")
    return details.decode(errors="replace") if isinstance(details, bytes) else ""
