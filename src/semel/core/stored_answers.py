"""Stored answers of HTTP and gRPC as bytes: the formats `http/1` and `grpc/1`.

The integrations write and read them, and an operator's tools do so without any framework. A format
begins with its version. Bytes that are none of it are a `SerializationError`, and run nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

from semel.core.codec import unbound
from semel.errors import SerializationError

HTTP: Final = "http/1"
GRPC: Final = "grpc/1"


@unbound
class AnswerCodec:
    """Stores packed bytes as they are: any other codec would only wrap them."""

    name = HTTP

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:  # noqa: ARG002
        """Return the bytes as they are."""
        if not isinstance(value, bytes):
            raise SerializationError(f"a response is stored as bytes, not {type(value).__name__}")
        return value

    def decode(self, data: bytes, context: bytes, hint: object = None) -> object:  # noqa: ARG002
        """Return the bytes as they are."""
        return data


@unbound
class MessageCodec(AnswerCodec):
    """The same for the answers of gRPC."""

    name = GRPC


# --- HTTP ----------------------------------------------------------------------------------------


class StoredAnswer(
    msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1, forbid_unknown_fields=True
):
    """An answer of HTTP as it is stored; a body of None was too large. The tag is the version."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    """Names and values as they travel, in order."""
    body: bytes | None


pack_answer = msgspec.msgpack.Encoder().encode
"""Return the bytes that are stored: version, status, header lines, body."""
_unpack_answer = msgspec.msgpack.Decoder(StoredAnswer).decode


def unpack_answer(data: object) -> StoredAnswer:
    """Read the stored bytes of an answer."""
    try:
        return _unpack_answer(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise SerializationError(f"the stored response cannot be read: {error}") from error


# --- gRPC ----------------------------------------------------------------------------------------

STATUS_CODES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""The codes of gRPC by their numbers; they are part of its protocol, and stored as numbers."""

_VERSION: Final = 1
_pack = msgspec.msgpack.Encoder().encode
_unpack_message = msgspec.msgpack.Decoder(tuple[int, int, str, bytes | None, bytes | None]).decode


class StoredMessage(msgspec.Struct, frozen=True):
    """An answer of gRPC as it is stored; OK without a message: it could not be kept."""

    number: int
    """Of the status code."""
    details: str = ""
    message: bytes | None = None
    status_details: bytes | None = None
    """The status of the richer error model."""


def pack_message(stored: StoredMessage) -> bytes:
    """Return the bytes that are stored."""
    return _pack((_VERSION, stored.number, stored.details, stored.message, stored.status_details))


def unpack_message(data: object) -> StoredMessage:
    """Read the stored bytes of an answer."""
    try:
        version, number, details, message, status_details = _unpack_message(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise SerializationError("the stored response cannot be read") from error
    if version != _VERSION or not 0 <= number < len(STATUS_CODES):
        raise SerializationError(f"the stored response has the format {version}, code {number}")
    return StoredMessage(number, details, message, status_details)
