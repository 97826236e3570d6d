"""What a store remembers of the claims it has sent, until they end.

This module remembers. A claim is noted before it is sent: an owner whose answer was lost asks
again, and must then be told by SQL, not by a hint that another caller left in the front.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from semel.core.records import Claimed, ClaimRequest, Identity
from semel.stores.tiered.calls import Look
from semel.stores.tiered.locks import ForkSafeLock

LIMIT: Final = 100_000
"""The oldest note goes first; its attempt then ends without a copy in the front, no more."""

Key: TypeAlias = tuple[Identity, bytes]


class Note(Struct, frozen=True):
    """A claim that was given."""

    fence: int
    number: int
    fingerprint: bytes | None
    lease: float
    look: Look | None
    """What the front said before; None when its outcome must not be copied there."""


class Notes:
    """The notes of one store, by identity and owner."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = ForkSafeLock()
        self._notes: dict[Key, Note | None] = {}
        """None: sent, and not answered yet."""

    def __contains__(self, key: Key) -> bool:
        return key in self._notes

    def sent(self, ask: ClaimRequest) -> None:
        """A claim is about to be sent."""
        with self._lock.lock:
            self._notes.setdefault((ask.identity, ask.owner), None)
            if len(self._notes) > self._limit:
                del self._notes[next(iter(self._notes))]

    def given(self, ask: ClaimRequest, claimed: Claimed, look: Look | None) -> bool:
        """The claim was given; tells whether this owner had it before."""
        known = self.find(ask.identity, ask.owner)
        had_it = known is not None and known.fence == claimed.fence
        if known is not None and had_it:
            # Only its lease is new: the record keeps what its first claim said.
            note = replace(known, lease=ask.lease)
        else:
            # Without a payload the record may have kept the one of an earlier attempt.
            exact = claimed.number == 1 or ask.fingerprint is not None
            copied = look if exact else None
            note = Note(claimed.fence, claimed.number, ask.fingerprint, ask.lease, copied)
        with self._lock.lock:
            self._notes[ask.identity, ask.owner] = note
        return had_it

    def find(self, identity: Identity, owner: bytes) -> Note | None:
        """Give the note of a claim that was given."""
        return self._notes.get((identity, owner))

    def take(self, identity: Identity, owner: bytes) -> Note | None:
        """Give the note of a claim that was given, and remove it."""
        with self._lock.lock:
            return self._notes.pop((identity, owner), None)
