"""The scripts of the front, and what a call of one looks like.

This module builds calls and reads replies. It sends nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from semel.core.records import Identity
from semel.errors import StoreError
from semel.stores.redis.commands import Command, KeyLayout, load, microseconds, milliseconds
from semel.stores.tiered.entries import Entry, Kind, unpack

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
