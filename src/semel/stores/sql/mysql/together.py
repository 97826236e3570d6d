"""What the verbs do for many members at once: one statement, one commit, a judgement of each row.

They are generators, as in `verbs`, and give the answers by identity. A member that is not among
them was left open: it is asked for by the verb for one member, which knows every case. The members
must be different identities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from semel.core import judge
from semel.core.records import (
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Identity,
    RenewRequest,
    State,
)
from semel.errors import StoreError
from semel.stores.sql.members import in_order
from semel.stores.sql.mysql.statements import ALL_NEW, SOME_MET, UNABLE, BatchStatements, MySQLTable
from semel.stores.sql.mysql.verbs import MySQLVerbs, record_of
from semel.stores.sql.rows import COLUMNS, Row, seconds
from semel.stores.sql.verbs import Operation, Reply, Verb, operation

R = TypeVar("R", CompleteRequest, RenewRequest)

Claims: TypeAlias = dict[Identity, Claim | StoreError]

_OWNER, _NUMBER, _FENCE = map(COLUMNS.index, ("owner", "number", "fence"))


class MySQLBatchVerbs(MySQLVerbs):
    """The verbs for one member and for many, on one table."""

    def __init__(self, table: MySQLTable) -> None:
        super().__init__(table)
        self._batches = BatchStatements(table)
        self._all_new = True
        """Whether the last batch of claims met nothing."""

    @operation(peek=False)
    def claim_together(self, asks: Sequence[ClaimRequest]) -> Verb[Claims]:
        """Claim what is new, and judge what is there."""
        ordered = in_order(asks, self._table.digest)
        reply = yield self._batches.claim(ordered)
        self._all_new = _made_all(reply)
        return _claimed(asks, reply) if self._all_new else _judged(ordered, reply)

    def claim_in_bulk(self, asks: Sequence[ClaimRequest]) -> Operation[Claims]:
        """Do the same, for drivers that may send a `Bulk`, if nothing will have to be read.

        For what was there before, it takes a second round trip; so duplicates, who seldom come
        alone, are claimed by the text, which reads them in one.
        """
        if self._all_new and not self._table.own_names:
            return self._claim_in_bulk(asks)
        return self.claim_together(asks)

    @operation(peek=False)
    def _claim_in_bulk(self, asks: Sequence[ClaimRequest]) -> Verb[Claims]:
        ordered = in_order(asks, self._table.digest)
        reply = yield self._batches.claim_in_bulk(ordered)
        if reply is UNABLE:
            return (yield from self.claim_together(asks).start())
        self._all_new = _made_all(reply)
        if self._all_new:
            return _claimed(asks, reply)
        return _judged(ordered, (yield self._batches.read_after(ordered, reply.last_id)))

    @operation(peek=False)
    def look_together(self, asks: Sequence[ClaimRequest]) -> Verb[Claims]:
        """Judge what is there, and wait for nobody: an open transaction has one of the keys."""
        ordered = in_order(asks, self._table.digest)
        return _judged(ordered, (yield self._batches.read(ordered)))

    @operation(peek=False)
    def complete_together(self, asks: Sequence[CompleteRequest]) -> Verb[dict[Identity, bool]]:
        """Store the success of attempts that run."""
        ordered = in_order(asks, self._table.digest)
        reply = yield self._batches.complete(ordered)
        if reply.changed == len(ordered):
            return dict.fromkeys((ask.identity for ask in asks), True)
        reply = yield self._batches.owners(ordered, State.SUCCEEDED)
        return {ask.identity: True for ask in _owned(ordered, reply)}

    @operation(peek=False)
    def renew_together(self, asks: Sequence[RenewRequest]) -> Verb[dict[Identity, bool]]:
        """Extend leases."""
        ordered = in_order(asks, self._table.digest)
        reply = yield self._batches.renew(ordered)
        if reply.changed == len(ordered):
            return dict.fromkeys((ask.identity for ask in asks), True)
        reply = yield self._batches.owners(ordered, State.PROCESSING)
        refused = dict.fromkeys((ask.identity for ask in asks), False)
        return refused | {ask.identity: True for ask in _owned(ordered, reply)}


def _made_all(reply: Reply) -> bool:
    return ALL_NEW <= reply.last_id < SOME_MET


def _claimed(asks: Sequence[ClaimRequest], reply: Reply) -> Claims:
    claimed = Claimed(1, reply.last_id - ALL_NEW)
    return dict.fromkeys((ask.identity for ask in asks), claimed)


def _judged(asks: Mapping[bytes, ClaimRequest], reply: Reply) -> Claims:
    answers: Claims = {}
    for digest, *row, now, made_here in reply.rows:
        ask = asks[digest]
        if made_here and row[_OWNER] == ask.owner:
            answers[ask.identity] = Claimed(row[_NUMBER], row[_FENCE])
        elif (answer := _answer(ask, tuple(row), seconds(now))) is not None:
            answers[ask.identity] = answer
    return answers


def _answer(ask: ClaimRequest, row: Row, now: float) -> Claim | StoreError | None:
    try:
        answer, record = judge.claim(record_of(row, now, ask.identity), ask, now)
    except StoreError as damage:
        return damage
    return answer if record is None else None  # it has to be written over, by compare-and-swap


def _owned(asks: Mapping[bytes, R], reply: Reply) -> list[R]:
    return [asks[digest] for digest, owner in reply.rows if asks[digest].owner == owner]
