"""Reads what Redis replies: what a script answers, the packed record, settings of the server.

This module turns bytes into values. It decides nothing and touches no server.

The header of a record is written by the scripts (lua/record.lua has the same table); only the
outcome is packed here, and the scripts never look inside it.

    bytes  field        meaning
    1      version      1
    1      flags        bits 0-1 state, 4 hold, 8 retryable, 16 fingerprint present,
                        32 a call waits
    1      superseded   how many replaced fingerprints follow, 0 to 8
    4      number
    7      fence        microseconds or previous + 1
    6      created_at   milliseconds
    6      updated_at   milliseconds
    12     owner
    16     fingerprint  only if its flag is set
    16 n   superseded   oldest first
    7      lease_until  microseconds, while PROCESSING
    6      keep         milliseconds the key outlives its lease, while PROCESSING
    1      length       of run_info, while PROCESSING; a claim without one ends the record here
    ...    run_info     while PROCESSING
    ...    unknown      while PROCESSING: what a newer release keeps of the attempt
    ...    filling      when ended, before a large outcome: 254, its whole length (1 byte), zeros
    1      codec        when ended: an entry of CODECS, or 255 and then length and name
    ...    data         when ended: to the end

Numbers are big-endian. `expires_at` is the key's own time to live. Why so tight: a finished record
with a result of 100 bytes and its fingerprint has 155 bytes, which is the most that fits Redis's
allocation class of 160; one byte more per field would cost 32 bytes per record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

from msgspec import Struct

from semel.core.records import (
    FINGERPRINT_BYTES,
    OWNER_BYTES,
    PROCESSING,
    SUPERSEDED_LIMIT,
    Abandoned,
    Busy,
    Claim,
    Claimed,
    Encoded,
    Exhausted,
    Finished,
    Identity,
    Mismatch,
    Record,
    State,
    checked_run_info,
)
from semel.errors import RecordUnreadable

DEFAULT_LIMIT: Final = 512 << 20
"""How many bytes a server takes at once, unless its settings say otherwise."""


@final
class Large(Struct, frozen=True):
    """A record that a script has judged, but that is better read by a plain GET: it is long."""

    header: bytes
    """How it begins; what begins in another way is not the record that was judged."""
    read: Callable[[bytes], Any]


def read_large(judged: Large, reply: bytes | None) -> Any:
    """Read what GET answers; `judged` again if it is about another record, or another attempt."""
    if reply is None or not reply.startswith(judged.header):
        return judged
    return judged.read(reply)


def read_claim(reply: list[Any]) -> Claim | Large:
    """Read what claim.lua answers."""
    word = reply[0]
    if word == b"finished":
        _, raw, pttl = reply
        return unpack_finished(raw, max(0, pttl) / 1e3)
    if word == b"claimed":
        _, number, fence, takeover = reply
        return Claimed(number, fence, takeover == 1)
    return _OTHER_ANSWERS[word](*reply[1:])


_OTHER_ANSWERS: dict[bytes, Callable[..., Claim | Large]] = {
    b"large": lambda header, pttl: Large(
        header, partial(unpack_finished, remaining=max(0, pttl) / 1e3)
    ),
    b"busy": lambda remaining, owner: Busy(remaining / 1e6, owner),
    b"mismatch": lambda superseded: Mismatch(superseded == 1),
    b"abandoned": Abandoned,
    b"exhausted": Exhausted,
}
"""What claim.lua may answer besides, by its first word."""


def read_upload(reply: int) -> bool | None:
    """Read what end_large.lua answers; None: the outcome has to be sent to end.lua."""
    return None if reply < 0 else reply == 1


def read_record(identity: Identity, reply: Any) -> Record | None:
    """Read what get.lua and check.lua answer."""
    if reply is None:
        return None
    raw, expires_ms, now_us = reply
    return unpack_record(identity, raw, expires_ms, now_us)


def read_adopted(identity: Identity, reply: Any) -> Record | None:
    """Read what adopt.lua answers."""
    return read_record(identity, None if reply is None else reply[1:])


def granted(reply: Any) -> bool:
    """Whether the script wrote what it was asked to write."""
    return reply == 1 or (isinstance(reply, list) and reply[0] in {b"claimed", b"adopted"})


def read_scan(reply: Any) -> tuple[int, list[bytes]]:
    """Read where SCAN goes on, and the keys found."""
    if isinstance(reply, Exception):
        raise reply
    following, keys = reply
    return int(following), list(keys)


def read_limit(reply: Any) -> int:
    """Read what CONFIG GET answers about one setting."""
    # A mapping in RESP3, else a list of names and values.
    found = dict(zip(reply[::2], reply[1::2], strict=True)) if isinstance(reply, list) else reply
    return next((int(value) for value in found.values()), DEFAULT_LIMIT)


def diagnose(info: bytes) -> list[str]:
    """Read from INFO what endangers records, in sentences."""
    said = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    found = []
    policy = said.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"maxmemory-policy is {policy}: a full server forgets records and their operations "
            "run again; set it to noeviction"
        )
    if said.get("aof_enabled") == "0":
        found.append(
            "appendonly is off: a restart loses what was written since the last snapshot, and its "
            "operations run again; set appendonly yes, or put SQL behind"
        )
    found += [
        f"{name} is {said[name]}: the server cannot write to its disk"
        for name in ("rdb_last_bgsave_status", "aof_last_write_status")
        if said.get(name, "ok") != "ok"
    ]
    return found


# --- the packed record -----------------------------------------------------------------------

VERSION: Final = 1
_HOLD, _RETRYABLE, _FINGERPRINT = 4, 8, 16
_STATE = 3
_STATES = tuple(State)
_HEADER = struct.Struct(f">BBBI7s6s6s{OWNER_BYTES}s")
_REPLAYED = struct.Struct(">BBBIQ")
"""Of the header, what a replay needs; the last number is the fence and a byte of what follows."""
_HEADER_BYTES: Final = _HEADER.size
_RUNNING_TAIL = 13

LONGEST_HEADER: Final = _HEADER.size + FINGERPRINT_BYTES * 9
"""With a fingerprint, and eight that were replaced."""

CODECS: Final[dict[str, int]] = {
    "json/1": 1,
    "msgpack/1": 2,
    "omitted": 3,
    "failure": 4,
    "http/1": 5,
    "grpc/1": 6,
}
"""Names that take one byte. Entries are never changed or reused: they are in people's stores."""

_NAMED_CODEC: Final = 255
_FILLING: Final = 254
_LONGEST_NAME: Final = 255
_CODEC_BYTES = {name: bytes((number,)) for name, number in CODECS.items()}
_CODEC_NAMES = {number: name for name, number in CODECS.items()}


def pack_outcome(outcome: Encoded) -> bytes:
    """Put the codec in front of the data."""
    known = _CODEC_BYTES.get(outcome.codec)
    if known is not None:
        return known + outcome.data
    name = outcome.codec.encode()
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"the codec name {outcome.codec!r} is longer than {_LONGEST_NAME} bytes")
    return bytes((_NAMED_CODEC, len(name))) + name + outcome.data


def unpack_outcome(packed: bytes, at: int = 0) -> Encoded:
    """Read what `pack_outcome` wrote, from this place on."""
    first = packed[at]
    if first == _FILLING:
        at += packed[at + 1]
        first = packed[at]
    name = _CODEC_NAMES.get(first)
    if name is not None:
        return Encoded(name, packed[at + 1 :])
    if first != _NAMED_CODEC:
        raise RecordUnreadable(f"it names an unknown codec ({first})")
    begin = at + 2
    end = begin + packed[at + 1]
    return Encoded(packed[begin:end].decode(), packed[end:])


def pack_run_info(run_info: bytes) -> bytes:
    """Put its length in front, in one byte."""
    return bytes((len(checked_run_info(run_info)),)) + run_info


def _unpack_run_info(packed: bytes) -> bytes:
    """Read what `pack_run_info` wrote; what a newer release put behind it is left out."""
    return packed[1 : 1 + packed[0]] if packed else b""


def unpack_record(identity: Identity, raw: bytes, expires_ms: int, now_us: int) -> Record:
    """Read a packed record as it was at `now_us`; its key expires at `expires_ms`."""
    _check_version(raw)
    try:
        return _unpack(identity, raw, expires_ms / 1e3, now_us / 1e6)
    except (struct.error, ValueError, IndexError) as broken:
        raise RecordUnreadable(f"its bytes are damaged ({broken})") from broken


def unpack_finished(raw: bytes, remaining: float) -> Finished:
    """Read of a record that has ended only what a replay needs."""
    # Every replay comes here: the version and the usual codecs are looked up without a function.
    try:
        version, flags, replaced, number, fence = _REPLAYED.unpack_from(raw)
        if version != VERSION:
            _check_version(raw)
        prints = replaced + 1 if flags & _FINGERPRINT else replaced
        at = _HEADER_BYTES + FINGERPRINT_BYTES * prints
        codec = _CODEC_NAMES.get(raw[at])
        outcome = unpack_outcome(raw, at) if codec is None else Encoded(codec, raw[at + 1 :])
        state = _STATES[flags & _STATE]
    except (struct.error, ValueError, IndexError) as broken:
        _check_version(raw)
        raise RecordUnreadable(f"its bytes are damaged ({broken})") from broken
    return Finished(state, outcome, number, fence >> 8, remaining)


def _check_version(raw: bytes) -> None:
    if not raw or raw[0] != VERSION:
        found = f"version {raw[0]}" if raw else "empty"
        raise RecordUnreadable(
            f"it is {found}, this release reads version {VERSION}; was it written by a newer one?"
        )


def _unpack(identity: Identity, raw: bytes, expires_at: float, now: float) -> Record:
    _, flags, replaced, number, fence, created, updated, owner = _HEADER.unpack_from(raw)
    state = State(flags & _STATE)
    if replaced > SUPERSEDED_LIMIT:
        raise ValueError("too many replaced fingerprints")
    at = _HEADER.size
    fingerprint = None
    if flags & _FINGERPRINT:
        fingerprint = raw[at : at + FINGERPRINT_BYTES]
        at += FINGERPRINT_BYTES
    ends = range(at + FINGERPRINT_BYTES, at + FINGERPRINT_BYTES * (replaced + 1), FINGERPRINT_BYTES)
    superseded = tuple(raw[end - FINGERPRINT_BYTES : end] for end in ends)
    at += FINGERPRINT_BYTES * replaced
    running = state is PROCESSING
    if running and len(raw) - at < _RUNNING_TAIL:
        raise ValueError("cut short")
    return Record(
        identity=identity,
        state=state,
        owner=owner,
        number=number,
        fence=int.from_bytes(fence),
        hold=bool(flags & _HOLD),
        created_at=int.from_bytes(created) / 1e3,
        updated_at=int.from_bytes(updated) / 1e3,
        now=now,
        fingerprint=fingerprint,
        superseded=superseded,
        lease_until=int.from_bytes(raw[at : at + 7]) / 1e6 if running else None,
        expires_at=None if running else expires_at,
        outcome=None if running else unpack_outcome(raw, at),
        retryable=bool(flags & _RETRYABLE),
        run_info=_unpack_run_info(raw[at + _RUNNING_TAIL :]) if running else b"",
    )
