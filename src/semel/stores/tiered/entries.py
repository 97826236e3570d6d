"""What the front keeps of one key, as bytes.

This module turns values into bytes and back. It decides nothing and touches no server. The fixed
part of an entry is written by the scripts (lua/front.lua has the table); this is the body:

    4      number       of the attempt; 0 in a hint
    1      length       of the fingerprint, 0 = none
    2      length       of the codec's name
    ...    fingerprint
    ...    codec
    ...    data         to the end
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from msgspec import Struct

from semel.core.records import Encoded
from semel.errors import RecordUnreadable

VERSION: Final = 1
_FIXED = struct.Struct(">BB7s7s")
_BODY = struct.Struct(">IBH")
_NO_OUTCOME = Encoded("", b"")


class Kind(enum.IntEnum):
    """What an entry says; of one attempt, a higher kind is newer."""

    HINT = 0
    """An attempt is running."""
    CLOSED = 1
    """Nothing; but it keeps older entries out."""
    SUCCEEDED = 2
    FAILED = 3
    """For good: other failures are never kept."""


class Entry(Struct, frozen=True):
    """One entry of the front."""

    kind: Kind
    fence: int
    expires: int
    """Microseconds on the front's clock."""
    number: int = 0
    fingerprint: bytes | None = None
    outcome: Encoded = _NO_OUTCOME

    @property
    def rank(self) -> tuple[int, Kind]:
        """Entries go forward only; this is the order."""
        return self.fence, self.kind


def pack_body(number: int, fingerprint: bytes | None, outcome: Encoded = _NO_OUTCOME) -> bytes:
    """Pack what follows the fixed part."""
    compared = b"" if fingerprint is None else fingerprint
    codec = outcome.codec.encode()
    return _BODY.pack(number, len(compared), len(codec)) + compared + codec + outcome.data


def unpack(raw: bytes) -> Entry:
    """Read an entry."""
    if not raw or raw[0] != VERSION:
        raise RecordUnreadable("the front holds an entry of another version")
    try:
        return _unpack(raw)
    except (struct.error, ValueError) as broken:
        raise RecordUnreadable(f"an entry of the front is damaged ({broken})") from broken


def _unpack(raw: bytes) -> Entry:
    _, kind, fence, expires = _FIXED.unpack_from(raw)
    fixed = Kind(kind), int.from_bytes(fence), int.from_bytes(expires)
    if kind == Kind.CLOSED:
        return Entry(*fixed)
    number, compared, named = _BODY.unpack_from(raw, _FIXED.size)
    start = _FIXED.size + _BODY.size
    codec = start + compared
    data = codec + named
    fingerprint = raw[start:codec] if compared > 0 else None
    return Entry(*fixed, number, fingerprint, Encoded(raw[codec:data].decode(), raw[data:]))
