"""The shelf of a memory store: records, and which of them may go when there is no room.

This module keeps and drops records. It judges no verb, reads no clock and takes no lock.
What may go, and when:

    ended           when it expires
    abandoned       its lease plus the ttl of its claim, unless it is held
    held, running   never
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from semel.core.records import PROCESSING, Identity, Record

SWEEP = 2
"""Due records dropped by each new one: memory shrinks again, and no call pays for it all."""

SLACK = 1000
"""Entries the agenda may hold beyond twice the records before it is built anew."""


class Shelf:
    """At most `room` records, in any order, with an agenda of when each may go."""

    def __init__(self, room: int, *, evicts: bool = False) -> None:
        """`evicts`: it will be asked to drop the oldest that has ended."""
        self.room = room
        self._evicts = evicts
        self._records: dict[Identity, Record] = {}
        self.find = self._records.get  # no function of ours around it: every verb begins with it
        """Look a record up as it was stored last, expired or not."""
        self._ttls: dict[Identity, float] = {}
        """What the claim of a running record asked for; it counts once the lease has ended."""
        self._finished: OrderedDict[Identity, None] = OrderedDict()
        """If it evicts, oldest first. A dict finds its first key slowly once many are gone."""
        self._due: dict[Identity, float] = {}
        """The agenda's one valid entry for each record that may go."""
        self._agenda: list[tuple[float, str, str]] = []
        """A heap of (due, key, scope). Entries that `_due` does not confirm are stale."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def has_room(self, now: float) -> bool:
        """Whether one more record fits, after a few that may go by now have gone."""
        if self._agenda and self._agenda[0][0] <= now:
            self._drop_due(now)
        return len(self._records) < self.room

    def place(self, record: Record, ttl: float | None = None) -> None:
        """Store a record; `ttl` comes with a claim."""
        identity = record.identity
        self._records[identity] = record
        running = record.state is PROCESSING
        if self._evicts:
            self._finished.pop(identity, None)
            if not running:
                self._finished[identity] = None
        if not running:
            self._ttls.pop(identity, None)
            self._schedule(identity, record.expires_at)
        else:
            if ttl is not None:
                self._ttls[identity] = ttl
            self._schedule(identity, self._first_look_at(record))

    def drop(self, identity: Identity) -> bool:
        """Remove a record, whatever its state."""
        if self._records.pop(identity, None) is None:
            return False
        self._ttls.pop(identity, None)
        self._finished.pop(identity, None)
        self._due.pop(identity, None)
        return True

    def _drop_due(self, now: float) -> None:
        dropped = 0
        while dropped < SWEEP and self._agenda and self._agenda[0][0] <= now:
            due, key, scope = heapq.heappop(self._agenda)
            identity = Identity(scope, key)
            if self._due.get(identity) != due:
                continue
            record = self._records[identity]
            at = self._may_go_at(record)
            if at is not None and at <= now:
                self.drop(identity)
                dropped += 1
            else:  # renewed, touched or held since it was put on the agenda
                del self._due[identity]
                self._schedule(identity, at)

    def drop_oldest_finished(self) -> bool:
        """Remove the record that ended first; False when none has."""
        return bool(self._finished) and self.drop(next(iter(self._finished)))

    def _may_go_at(self, record: Record) -> float | None:
        if record.state is not PROCESSING:
            return record.expires_at
        if record.hold or record.lease_until is None:
            return None
        return record.lease_until + self._ttls[record.identity]

    def _first_look_at(self, record: Record) -> float | None:
        """Tell when to see whether a running one may go: before it may.

        It will most likely end, and then go sooner than it may now: with one early look at it,
        its end needs no place of its own on the agenda.
        """
        if record.hold or record.lease_until is None:
            return None
        return min(record.lease_until, record.updated_at) + self._ttls[record.identity]

    def _schedule(self, identity: Identity, at: float | None) -> None:
        planned = self._due.get(identity)
        if at is None or (planned is not None and planned <= at):
            # Never, or not before the entry that exists: that one is set right when its time comes.
            return
        self._due[identity] = at
        heapq.heappush(self._agenda, (at, identity.key, identity.scope))
        if len(self._agenda) > 2 * len(self._records) + SLACK:
            # Mostly stale (a key forgotten and claimed in a loop): memory must stay bounded.
            self._agenda = [(due, one.key, one.scope) for one, due in self._due.items()]
            heapq.heapify(self._agenda)
