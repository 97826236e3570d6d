"""What SQLite does in fewer statements than a look and a write: the verbs of a first execution.

Inside a transaction nobody else writes, so a claim may insert first and a complete may update
first. What is not as simple as that is read and judged, as every other verb is.

Many of them share a statement: SQLite works on it without Python's lock, so that the event loop
goes on meanwhile. With a statement for each, the lock is fought for at every one of them.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from semel.core import judge
from semel.core.records import Abandoned, Busy, Claim, ClaimRequest, CompleteRequest, Record
from semel.stores.batching import ALONE, Alone
from semel.stores.sql.sqlite_table import SQLiteTable
from semel.stores.sql.verbs import Joint, Operation, Verb, Verbs

log = logging.getLogger(__name__)

UPDATES_MANY: Final = (3, 33)
"""The version of SQLite that learned to update from a list of values."""

LARGE: Final = 16_384
"""Bytes of a result that has a statement of its own: a list is copied before it is worked on."""


class SQLiteLaw(Verbs):
    """The verbs on one table of SQLite, whose clock is the machine's and may be set back."""

    def __init__(self, table: SQLiteTable) -> None:
        super().__init__(table)
        self._sqlite = table

    def claim(self, ask: ClaimRequest) -> Operation[Claim]:
        """Ask to run the operation."""
        # A replay, the frequent case of a duplicate, needs no write lock.
        return Operation(partial(self.claiming, ask), peek=True)

    def claiming(self, ask: ClaimRequest) -> Verb[Claim]:
        """Read, judge and write a claim; note that the clock is behind a running record."""
        stored, now, to_note = yield from self._sqlite.look(ask.identity)
        answer, record = judge.claim(stored, ask, now)
        if record is not None:
            yield from self._sqlite.save(record)
        elif isinstance(answer, Busy) and to_note:
            yield from self._sqlite.note(ask.identity, now)
            log.warning(
                "the clock of this machine was set back: a running record was written in the "
                "future; its lease ends in %.1f s, counted from now, unless it is renewed",
                answer.retry_after,
            )
        elif isinstance(answer, Abandoned) and stored is not None and stored.updated_at > now:
            # Written as it is seen: a resolver looks for leases that have ended.
            yield from self._sqlite.save(replace(stored, updated_at=now))
        return answer


class SQLiteVerbs(SQLiteLaw):
    """The verbs of the store SPI, in few statements."""

    def __init__(self, table: SQLiteTable) -> None:
        super().__init__(table)
        self._many = sqlite3.sqlite_version_info >= UPDATES_MANY
        self._claim_together, self._complete_together = self._insert_all, self._update_all

    def claim(self, ask: ClaimRequest) -> Operation[Claim]:
        """Ask to run the operation."""
        return Operation(
            partial(self._insert_first, ask),
            peek=True,
            # Without a transaction it is only looked for: a replay needs no more.
            look=partial(self.claiming, ask),
            joint=Joint(ask.identity, ask, self._claim_together) if self._many else None,
        )

    def complete(self, ask: CompleteRequest) -> Operation[bool]:
        """Store the owner's success."""
        shares = self._many and len(ask.result.data) < LARGE
        return Operation(
            partial(self._update_first, ask),
            peek=False,
            joint=Joint(ask.identity, ask, self._complete_together) if shares else None,
        )

    def _insert_first(self, ask: ClaimRequest) -> Verb[Claim]:
        answer, record = judge.first_claim(ask, self._sqlite.now())
        reply = yield self._sqlite.insert([record])
        if reply.changed:
            return answer
        return (yield from self.claiming(ask))

    def _update_first(self, ask: CompleteRequest) -> Verb[bool]:
        reply = yield self._sqlite.complete(ask)
        return reply.changed > 0 or (yield from self.completing(ask))

    def _insert_all(self, asks: Sequence[ClaimRequest]) -> Verb[list[Claim | Alone]]:
        now = self._sqlite.now()
        answers, records = zip(*(judge.first_claim(ask, now) for ask in asks), strict=True)
        reply = yield self._sqlite.insert(records)
        if reply.changed == len(asks):
            return list(answers)
        reply = yield self._sqlite.whose(records)
        inserted = set(reply.rows)
        return [
            answer if _owned(record) in inserted else ALONE
            for answer, record in zip(answers, records, strict=True)
        ]

    def _update_all(self, asks: Sequence[CompleteRequest]) -> Verb[list[bool | Alone]]:
        reply = yield self._sqlite.complete_many(asks)
        # Who has been updated is told so again, alone.
        return [True if reply.changed == len(asks) else ALONE] * len(asks)


def _owned(record: Record) -> tuple[str, str, bytes, int]:
    return record.identity.scope, record.identity.key, record.owner, record.fence
