"""The Redis server in front: what it keeps of a key, when it is asked, and which store may be one.

This module turns values into bytes and back, builds commands and reads replies, and checks what a
tiered store is given. It reads no clock and touches no server. The fixed part of an entry is
written by the scripts (lua/front.lua has the table); this is the body:

    4      number       of the attempt; 0 in a hint
    1      length       of the fingerprint, 0 = none
    2      length       of the codec's name
    ...    fingerprint
    ...    codec
    ...    data         to the end
"""

from __future__ import annotations

import enum
import random
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Struct

from semel.core.observers import Log
from semel.core.process import ForkSafeLock
from semel.core.records import Encoded, Identity
from semel.errors import ConfigError, RecordUnreadable, StoreError, StoreFull, did_you_mean
from semel.stores.base import AsyncStore, Store
from semel.stores.redis import AsyncRedisStore, RedisStore
from semel.stores.redis.commands import Command, KeyLayout, load, microseconds, milliseconds
from semel.stores.urls import BACKENDS, TIER_OPTIONS

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


# --- when it is asked: not again and again while it is down ---------------------------------

log = Log(__name__)

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0

_OF_ONE_KEY: Final = (StoreFull, RecordUnreadable)
"""Errors that say nothing about other keys: a full server still answers for those it has."""


class Breaker:
    """The breaker of one front, shared by all callers of a store.

    The first error opens it. While it is open no call is made; when its pause is over one call is
    let through to try. An error then makes the next pause longer, an answer closes the breaker. A
    call that is let through delays the next one, so one that never comes back blocks no other.

    `longest_call` is how long a call may take: while the first may still answer, no second one
    tries.
    """

    def __init__(self, where: str, longest_call: float) -> None:
        self._where = where
        self._longest_call = longest_call
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
            self._tried, self._next = now, now + max(self._pause, self._longest_call)
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
            log.info("front at %s in use again", self._where)
        elif not was_open:
            log.warning("front unreachable; SQL decides alone: %s", outage)


# --- the two stores, by URL or as objects of the application; nothing is connected here ------

RedisKind = TypeVar("RedisKind", RedisStore, AsyncRedisStore)

FRONT_TTL: Final = 600.0
"""How long the front answers with a copy. It bounds how long a lost mark can matter."""

FRONT_TIMEOUT: Final = 0.25
"""How long a call of the front may take: once, and then the breaker is open."""


def check_front_url(url: str) -> None:
    """Reject a URL that is not of the Redis family."""
    backend = BACKENDS.get(url.partition("://")[0])
    if backend is None or backend != BACKENDS["redis"]:
        raise ConfigError(
            "a store behind goes with Redis in front, as in redis://localhost with "
            "behind=sqlite:///semel.db; leave behind out for another store"
        )


def check_behind_url(url: str) -> None:
    """Reject a store behind that forgets with its process: Redis would outlast what decides.

    A store object in memory is accepted: it is for a test, and shared among the engines of a
    process.
    """
    if url.partition("://")[0] == "memory":
        raise ConfigError(
            "the store behind decides, so it must outlast the process, and memory:// does not; "
            "give an SQL store, as in behind=sqlite:///semel.db (a test may give a MemoryStore)"
        )


def checked_front(front: object, kind: type[RedisKind], options: Mapping[str, Any]) -> RedisKind:
    """Return a Redis store of the application, if it is one; options are for URLs."""
    if not isinstance(front, kind):
        found = type(front).__name__
        raise ConfigError(f"the front must be a Redis URL or {kind.__name__}, not {found}")
    if options:
        name = min(options)
        raise ConfigError(
            f"the option {name!r} goes with a front that is given by URL"
            + did_you_mean(name, TIER_OPTIONS)
        )
    return front


def checked_behind(behind: Any, *, asynchronous: bool) -> Any:
    """Return a store that decides: of the right kind, and not Redis again."""
    if isinstance(behind, (RedisStore, AsyncRedisStore)):
        raise ConfigError("the store behind decides, so it must not be Redis; give an SQL store")
    found = type(behind).__name__
    if not isinstance(behind, AsyncStore if asynchronous else Store):
        wanted = "asyncio" if asynchronous else "threads"
        raise ConfigError(f"the store behind must be one for {wanted}, not {found}")
    return behind
