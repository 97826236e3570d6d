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
import msgspec
from grpc import StatusCode

from semel.core.codec import unbound
from semel.core.decide import UnstoredResponse
from semel.errors import ConfigError, SerializationError
from semel.events import logger
from semel.http.storing import AnswerCodec

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

_VERSION: Final = 1
_CODES: Final[dict[int, StatusCode]] = {code.value[0]: code for code in StatusCode}

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[int, int, str, bytes | None, bytes | None]).decode


class Stored(msgspec.Struct, frozen=True):
    """An answer as it is stored; OK without a message: it could not be kept."""

    code: StatusCode
    details: str = ""
    message: bytes | None = None
    status_details: bytes | None = None


@unbound
class MessageCodec(AnswerCodec):
    """Stores the packed bytes as they are."""

    name = "grpc/1"


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


def packed(stored: Stored) -> bytes:
    """Return the bytes that are stored."""
    number = stored.code.value[0]
    return _pack((_VERSION, number, stored.details, stored.message, stored.status_details))


def unpacked(data: Any) -> Stored:
    """Read stored bytes; anything else in their place is a typed error, and runs nothing."""
    try:
        version, number, details, message, status_details = _unpack(data)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise SerializationError("the stored answer cannot be read") from error
    if version != _VERSION or number not in _CODES:
        raise SerializationError(f"the stored answer has the format {version}, code {number}")
    return Stored(_CODES[number], details, message, status_details)


def failed(
    code: StatusCode, details: object, trailers: Iterable[tuple[str, Any]], stored: StoredCodes
) -> bytes | UnstoredResponse:
    """Say what becomes of the key after a code other than OK: what is stored, or how it ends."""
    try:
        choice = stored(code)
        if not _is_choice(choice):
            raise TypeError(_WRONG_WORD.format(choice))  # noqa: TRY301 - logged like its own errors
    except Exception:  # noqa: BLE001 - the client's answer does not depend on it
        logger.exception("the function that says which codes are stored raised for %s", code.name)
        choice = False
    reason = f"answered with {code.name}"
    if choice == "unknown":
        return UnstoredResponse(reason, "unknown")
    if choice and code not in NEVER:
        status_details = next(
            (value for name, value in trailers if name == STATUS_DETAILS and type(value) is bytes),
            None,
        )
        return packed(Stored(code, text(details), status_details=status_details))
    return UnstoredResponse(reason, "forget" if code in _REJECTIONS else None)


def code_of(code: object, *, numbers: bool = True) -> StatusCode:
    """Read the code that a handler left, if any; what is no code at all travels as UNKNOWN.

    A number is a code for the server on asyncio, and none for the one on threads.
    """
    if code is None:
        return StatusCode.OK
    if numbers and isinstance(code, int):
        return _CODES.get(code, StatusCode.UNKNOWN)
    return code if isinstance(code, StatusCode) else StatusCode.UNKNOWN


def text(details: object) -> str:
    """Read the details of a status, which a server for threads keeps as bytes.

    Invalid Unicode is replaced: an end that could not be packed would leave its key held.
    """
    if isinstance(details, str):
        details = details.encode(errors="replace")
    return details.decode(errors="replace") if isinstance(details, bytes) else ""
