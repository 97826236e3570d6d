"""What the front keeps of one key, as bytes, and the commands that read and write it.

This module turns values into bytes and back, builds commands and reads replies. It decides nothing,
reads no clock and touches no server. The fixed part of an entry is written by the scripts
(lua/front.lua has the table); this is the body:

    4      number       of the attempt; 0 in a hint
    1      length       of the fingerprint, 0 = none
    2      length       of the codec's name
    ...    fingerprint
    ...    codec
    ...    data         to the end
"""

from __future__ import annotations

import enum
import logging
import random
import struct
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from semel.core.records import Encoded, Identity
from semel.errors import RecordUnreadable, StoreError, StoreFull
from semel.stores.forking import ForkSafeLock
from semel.stores.redis.commands import Command, KeyLayout, load, microseconds, milliseconds

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


# --- the scripts of the front -------------------------------------------------------------


WINDOW: Final = 5.0
"""Seconds after SQL was asked within which its word may still be written to the front."""

MARK_LIFE: Final = WINDOW + 1.0
"""A mark outlives every write that was on its way when SQL changed."""

ABOVE_ALL: Final = 2**53 - 1
"""A fence that no attempt reaches; the largest number that Lua knows exactly."""

_PREFIX_OF_ENTRIES: Final = "~front:"
"""Follows the prefix, so that a plain Redis store on the same server never meets an entry."""

_GENERATION: Final = b"~generation"
"""Follows the bucket; an entry goes on with a digit there."""

_DRIFT: Final = 0.001
"""Two clocks differ by less than this part of the time that passes; taken off, to be safe."""


_load = partial(load, "semel.stores.tiered", "front")

GET = _load("get")
PUT = _load("put")
MARK = _load("mark")


class Found(Struct, frozen=True):
    """What the front answered: the entry if there is one, its time in microseconds, and more."""

    entry: Entry | None
    now: int
    generation: bytes
    """Changes with every forgetting in the bucket of the key."""


class Look(Struct, frozen=True):
    """What was found, and when on this process's clock that was known."""

    found: Found
    seen_at: float

    def front_time(self, moment: float) -> int:
        """What the front's clock showed at a moment since then, or a little less."""
        return self.found.now + int((moment - self.seen_at) * (1 - _DRIFT) * 1e6)


class Calls:
    """Builds the calls of one front."""

    def __init__(self, prefix: str, front_ttl: float) -> None:
        self._keys = KeyLayout(prefix + _PREFIX_OF_ENTRIES)
        self._longest = milliseconds(front_ttl)

    def get(self, identity: Identity) -> Command[Found]:
        """Ask for the entry of a key."""
        return Command(GET, self._of(identity), (), _read_found)

    def put(
        self,
        identity: Identity,
        kind: Kind,
        fence: int,
        body: bytes,
        *,
        look: Look,
        sent: float,
        valid: float,
    ) -> Command[bool]:
        """Write what SQL said when it was asked at `sent`, after this look; `valid` from then."""
        arguments = (
            int(kind),
            fence,
            look.front_time(sent),
            microseconds(valid),
            microseconds(WINDOW),
            self._longest,
            body,
            look.found.generation,
        )
        return Command(PUT, self._of(identity), arguments, bool)

    def mark(self, identity: Identity, fence: int) -> Command[bool]:
        """Remove what is older than the fence, and keep it out."""
        arguments = (fence, milliseconds(MARK_LIFE))
        return Command(MARK, self._of(identity), arguments, bool)

    def _of(self, identity: Identity) -> tuple[bytes, bytes]:
        """The entry of a key, and the generation of its bucket, which shares its slot."""
        entry = self._keys.record(identity)
        return entry, entry[: entry.index(b"}") + 1] + _GENERATION


def _read_found(reply: tuple[bytes | None, int, bytes]) -> Found:
    raw, now, generation = reply
    return Found(None if raw is None else unpack(raw), now, generation)


def looks(
    questions: Sequence[Command[Found] | None],
    answers: Sequence[Found | StoreError],
    seen_at: float,
) -> list[Look | None]:
    """Put each answer to its question; None where nothing was asked or nothing came back."""
    left = iter(answers)
    found = [None if question is None else next(left, None) for question in questions]
    return [Look(each, seen_at) if isinstance(each, Found) else None for each in found]


# --- Decides whether the front is asked: not again and again while it is down -------------
#
# This module decides; time is an argument. The first error opens the breaker. While it is open no
# call is made; when its pause is over one call is let through to try. An error then makes the next
# pause longer, an answer closes the breaker. A call that is let through moves the time of the next
# one on, so a call that never comes back blocks nobody.


log = logging.getLogger(__name__)

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0

_OF_ONE_KEY: Final = (StoreFull, RecordUnreadable)
"""Errors that say nothing about other keys: a full server still answers for those it has."""


class Breaker:
    """The breaker of one front, shared by all callers of a store.

    `patience` is how long a call may take: no second one tries while the first may still answer.
    """

    def __init__(self, where: str, patience: float) -> None:
        self._where = where
        self._patience = patience
        self._lock = ForkSafeLock()
        self._pause = FIRST_PAUSE
        self._tried = 0.0
        """When the breaker opened, or the last call was let through to try."""
        self._next: float | None = None
        """When one call may try again; None while the front is in use."""

    def allows(self, now: float) -> bool:
        """Whether a call may begin now."""
        with self._lock.lock:
            if self._next is None:
                return True
            if now < self._next:
                return False
            self._tried, self._next = now, now + max(self._pause, self._patience)
            return True

    def learn(self, answers: Sequence[object], began: float, now: float) -> None:
        """Take the answers of a call into account that began at `began`."""
        errors = [each for each in answers if isinstance(each, StoreError)]
        outage = next((each for each in errors if not isinstance(each, _OF_ONE_KEY)), None)
        if outage is None and self._next is None:
            return
        with self._lock.lock:
            was_open = self._next is not None
            if was_open and began < self._tried:
                return  # it began before the outage was known, and tells nothing new
            if outage is None:
                self._next, self._pause = None, FIRST_PAUSE
            else:
                self._pause = min(self._pause * 2, LONGEST_PAUSE) if was_open else FIRST_PAUSE
                # Jitter: the callers of many processes must not come back all at once.
                pause = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                self._tried, self._next = now, now + pause
        if outage is None:
            log.info("the front at %s is in use again", self._where)
        elif not was_open:
            log.warning("the front is out of use, SQL answers alone: %s", outage)
