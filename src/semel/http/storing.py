"""What of an answer is stored, and what a replay is made of.

2xx is stored by default, everything else runs again. Never stored, whatever a function says:
answers about the client rather than the operation (`NEVER`), and header lines that are secret,
that belong to one connection, or that the layers around us write anew (`_FORBIDDEN`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import msgspec

from semel.core.codec import unbound
from semel.errors import SerializationError
from semel.events import logger
from semel.http.messages import Answer, HeaderLine

Keeping: TypeAlias = Literal["store", "forget", "unknown", "failure"]
"""What becomes of the key: stored, free again, parked, or what the policy says of failures."""

StoredStatuses: TypeAlias = Callable[[int], bool | Literal["unknown"]]
"""Says of a status whether its answer is stored; "unknown" parks the key."""

NEVER: Final = frozenset({401, 403, 408, 425, 429})
"""Statuses that tell of the client's rights or of the moment, not of the operation."""

_FORBIDDEN: Final = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"set-cookie",
        b"set-cookie2",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"www-authenticate",
    }
)
_FORBIDDEN_BEGINNINGS: Final = (b"proxy-", b"access-control-")
_FORBIDDEN_PARTS: Final = (b"token", b"csrf", b"authentication-info")

_EVENT_STREAM: Final = b"text/event-stream"
UNPROTECTED: Final[HeaderLine] = (b"idempotent-unprotected", b"stream")
"""Marks a live stream: a retry of it runs again."""

SUCCESSES: Final = range(200, 300)
_FIRST_SERVER_ERROR: Final = 500


def is_success(status: int) -> bool:
    """The default: 2xx is stored."""
    return status in SUCCESSES


def keeping(status: int, stored: StoredStatuses = is_success) -> Keeping:
    """Say what becomes of the key after an answer with this status.

    >>> keeping(201), keeping(404), keeping(500)
    ('store', 'forget', 'failure')
    """
    if status in NEVER:
        return "forget"
    try:
        choice = stored(status)
    except Exception:  # noqa: BLE001 - the effect is done, and its answer must go out
        logger.exception("the function that says which statuses are stored raised for %d", status)
        choice = is_success(status)
    if choice == "unknown":
        return "unknown"
    if choice:
        return "store"
    return "forget" if status < _FIRST_SERVER_ERROR else "failure"


def is_event_stream(lines: Iterable[HeaderLine]) -> bool:
    """Tell whether an answer is a stream of events, which has no end that could be waited for."""
    for name, value in lines:
        if name.lower() == b"content-type" and value.lower().startswith(_EVENT_STREAM):
            return True
    return False


def kept_lines(
    lines: Iterable[HeaderLine], also_forbidden: frozenset[bytes]
) -> tuple[HeaderLine, ...]:
    """Leave out the header lines that may not be stored."""
    kept: list[HeaderLine] = []
    of_connection: set[bytes] = set()
    for line in lines:
        name = line[0].lower()
        if name == b"connection":  # it names others, which belong to the connection as well
            of_connection |= {each.strip().lower() for each in line[1].split(b",")}
        elif name not in also_forbidden and not _is_forbidden(name):
            kept.append(line)
    if of_connection:
        kept = [line for line in kept if line[0].lower() not in of_connection]
    return tuple(kept)


@lru_cache(maxsize=1024)
def _is_forbidden(name: bytes) -> bool:
    name = name.replace(b"_", b"-")  # some applications write them so
    return (
        name in _FORBIDDEN
        or name.startswith(_FORBIDDEN_BEGINNINGS)
        or any(part in name for part in _FORBIDDEN_PARTS)
    )


class Stored(
    msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1, forbid_unknown_fields=True
):
    """An answer as it is stored; a body of None was too large. The tag is the format's version."""

    status: int
    headers: tuple[HeaderLine, ...]
    body: bytes | None


packed = msgspec.msgpack.Encoder().encode
"""Give the bytes that are stored: version, status, header lines, body."""
_unpack = msgspec.msgpack.Decoder(Stored).decode


def unpacked(data: object) -> Stored:
    """Read stored bytes; anything else in their place is a typed error, and runs nothing."""
    try:
        return _unpack(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise SerializationError(f"the stored answer cannot be read: {error}") from error


@unbound
class AnswerCodec:
    """Stores the packed bytes as they are: any other codec would only wrap them."""

    name = "http/1"

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:  # noqa: ARG002
        """Give the bytes as they are."""
        if not isinstance(value, bytes):
            raise SerializationError(f"an answer is stored as bytes, not {type(value).__name__}")
        return value

    def decode(self, data: bytes, context: bytes, hint: object = None) -> object:  # noqa: ARG002
        """Give the bytes as they are."""
        return data


def replay(stored: Stored, marker: bytes) -> Answer:
    """Make the answer that a duplicate gets."""
    body = b"" if stored.body is None else stored.body
    mark = (marker, b"true")
    if not has_body(stored.status):
        return Answer(stored.status, (*stored.headers, mark), body)
    length = (b"content-length", b"%d" % len(body))
    return Answer(stored.status, (*stored.headers, length, mark), body)


def has_body(status: int) -> bool:
    """Tell whether an answer with this status may have a body."""
    return status not in {204, 304} and status >= SUCCESSES.start
