"""The verbs on MySQL and MariaDB: those of all servers, listings, and many members at once.

Every statement commits by itself (autocommit). `claim` and `put` insert first: reading first and
then inserting deadlocks two callers of a new key; a plain duplicate error locks as well. Insert and
read share a round trip because it halves a replay over a network. Measured on loopback, where a
round trip is nearly free, the pair in one message takes 0.75 to 0.9 of the time of two messages.

A batch is one statement, one commit and a judgment of each row. Its answers come by identity. A
member that is not among them was left open: it is asked for by the verb for one member, which knows
every case. The members must be different identities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from semel.core import judge
from semel.core.records import (
    AUDIT_SCOPE,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Identity,
    Record,
    RenewRequest,
    State,
)
from semel.errors import StoreError
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.batching import MOST_MEMBERS, weight_of_claim, weight_of_complete
from semel.stores.sql.batch import all_differ, in_order, portions
from semel.stores.sql.mysql.errors import is_locked
from semel.stores.sql.mysql.statements import (
    ALL_NEW,
    NOW,
    READ_COLUMNS,
    READ_NOW,
    SOME_MET,
    UNABLE,
    BatchStatements,
    MySQLTable,
    unpacked,
)
from semel.stores.sql.rows import (
    COLUMNS,
    ENTRIES_PURGED,
    Row,
    behind,
    listed,
    page_of,
    stamp,
)
from semel.stores.sql.verbs import (
    Operation,
    Reply,
    Statement,
    SwapVerbs,
    Verb,
    operation,
    record_of,
)
from semel.stores.urls import position, whole_number

R = TypeVar("R", CompleteRequest, RenewRequest)

Claims: TypeAlias = dict[Identity, Claim | StoreError]

PURGED_AT_ONCE: Final = 100
"""Rows that one DELETE removes and commits: no claim waits for more than this."""

_EARLIER: Final = f"{NOW} - INTERVAL %s MICROSECOND"
_DUE: Final = "FORCE INDEX (due)"
"""Left to itself, MariaDB takes the prefix of this index alone, and reads every record that ended
before it comes to the first lease."""
_IDENTITY: Final = "FORCE INDEX (`identity`)"
"""Left to itself, MariaDB takes the other index, and sorts all that is left for each page."""

_OWNER, _NUMBER, _FENCE = map(COLUMNS.index, ("owner", "number", "fence"))


class MySQLVerbs(SwapVerbs):
    """The verbs of the store SPI, on one table."""

    _table: MySQLTable

    def __init__(self, table: MySQLTable, *, in_bulk: bool = False) -> None:
        """`in_bulk`: whether the driver may know how to send a `Bulk`."""
        super().__init__(table)
        self._in_bulk = in_bulk
        self._batches = BatchStatements(table)
        self._all_new = True
        """Whether the last batch of claims met nothing."""

    def _fence_of_new(self, reply: Reply) -> int | None:
        """Return the fence of the row that an insert made."""
        return _fence_of(reply) if _made_all(reply) else None

    def _rows(self, reply: Reply) -> list[Row]:
        """Return the rows that a statement about one record read."""
        return [self._table.unpacked(row) for row in reply.rows]

    # --- listings and the purge: each query follows an index and ends after `limit` rows --------

    @operation
    def scan(self, ask: ScanRequest) -> Verb[Page]:
        """List records in the order of the unique index, so that no page sorts or skips."""
        whole_number("limit", ask.limit)
        where = ["prefix = %s", f"(expire_at IS NULL OR expire_at > {NOW})"]
        values: list[object] = [self._table.prefix]
        for condition, value in (
            ("idem_key >= %s", ask.prefix),
            ("idem_key < %s", behind(ask.prefix)),
            ("biz_type = %s", ask.scope),
            ("biz_type <> %s", AUDIT_SCOPE if ask.scope is None else None),
            ("status = %s", None if ask.state is None else int(ask.state)),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        if ask.cursor is not None:
            # Written out: neither server uses an index for (a, b) > (x, y).
            key, last_scope = position(ask.cursor)
            where.append("idem_key >= %s AND (idem_key > %s OR biz_type > %s)")
            values.extend((key, key, last_scope))
        # MariaDB sorts by a column that has one value only, rather than read the index in order.
        order = "idem_key, biz_type" if ask.scope is None else "idem_key"
        reply = yield self._select(
            f"{_IDENTITY} WHERE {' AND '.join(where)} ORDER BY {order} LIMIT %s",
            *values,
            ask.limit + 1,
        )
        return page_of(reply.rows, ask.limit)

    @operation
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Read the leases from the old end of their index; a record that has ended has none."""
        reply = yield self._select(
            f"{_DUE} WHERE prefix = %s AND lease_until <= {_EARLIER} ORDER BY lease_until LIMIT %s",
            self._table.prefix,
            stamp(ask.older_than),
            ask.limit,
        )
        return listed(reply.rows)

    @operation
    def purge(self, ask: PurgeRequest) -> Verb[int]:
        """Remove what may go, a few rows at a time, each of them looked at again as it goes."""
        expired = f"lease_until IS NULL AND expire_at <= {NOW} AND biz_type"
        removed = yield from self._remove(
            f"{expired} <> %s", "expire_at", (AUDIT_SCOPE,), ask.limit
        )
        if ask.abandoned_after is not None and removed < ask.limit:
            removed += yield from self._remove(
                f"lease_until <= {_EARLIER} AND hold = 0",
                "lease_until",
                (stamp(ask.abandoned_after),),
                ask.limit - removed,
            )
        if removed < ask.limit:
            # Last: now the index of what has expired has these entries and no others.
            yield from self._remove(f"{expired} = %s", "expire_at", (AUDIT_SCOPE,), ENTRIES_PURGED)
        return removed

    @operation
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count what has not expired."""
        reply = yield Statement(
            f"SELECT COUNT(CASE WHEN lease_until > {NOW} THEN 1 END), "  # noqa: S608 - checked
            f"COUNT(CASE WHEN lease_until <= {NOW} THEN 1 END), "
            "COUNT(CASE WHEN status = 1 THEN 1 END), COUNT(CASE WHEN status = 2 THEN 1 END) "
            f"FROM {self._table.quoted} WHERE prefix = %s "
            f"AND (expire_at IS NULL OR expire_at > {NOW}) AND biz_type <> %s",
            (self._table.prefix, AUDIT_SCOPE),
            writes=False,
        )
        return Counts(*reply.rows[0])

    @operation
    def diagnose(self) -> Verb[list[str]]:
        """Return which settings of the server let it lose what it committed."""
        reply = yield Statement(
            "SELECT @@innodb_flush_log_at_trx_commit, LOWER(@@innodb_flush_method)",
            (),
            writes=False,
        )
        ((flushed, method),) = reply.rows
        risks = []
        if flushed != 1:
            risks.append(
                f"innodb_flush_log_at_trx_commit is {flushed}: a crash loses the last commits, and "
                "their operations run again; set it to 1"
            )
        if method == "nosync":
            risks.append(
                "innodb_flush_method is nosync: a crash of the machine may damage the whole "
                "database; leave it at its default"
            )
        return risks

    def _remove(self, may_go: str, by: str, values: tuple[object, ...], limit: int) -> Verb[int]:
        name = self._table.quoted
        found = yield Statement(
            f"SELECT digest FROM {name} {_DUE} "  # noqa: S608 - a checked name
            f"WHERE prefix = %s AND {may_go} ORDER BY {by} LIMIT %s",
            (self._table.prefix, *values, limit),
            writes=False,
        )
        digests = sorted(row[0] for row in found.rows)
        removed = 0
        for start in range(0, len(digests), PURGED_AT_ONCE):
            some = digests[start : start + PURGED_AT_ONCE]
            marks = ", ".join(["%s"] * len(some))
            reply = yield Statement(
                f"DELETE FROM {name} WHERE digest IN ({marks}) AND {may_go}",  # noqa: S608 - checked
                (*some, *values),
                writes=True,
            )
            removed += reply.changed
        return removed

    def _select(self, rest: str, *values: object) -> Statement:
        sql = f"SELECT {READ_COLUMNS}, {READ_NOW} FROM {self._table.quoted} {rest}"  # noqa: S608 - a checked name
        return Statement(sql, values, writes=False)

    # --- many members at once -----------------------------------------------------------

    def batches_of(self, asks: Sequence[Any]) -> list[list[Any]]:
        """List the batches that are sent for these requests; one in none is asked for alone."""
        if not asks or not all_differ(asks):
            return []
        weight = _WEIGHTS[type(asks[0])]
        if len(asks) <= MOST_MEMBERS and sum(map(weight, asks)) <= HEAVY:
            return [list(asks)]  # as those are that the batcher sends
        light = (ask for ask in asks if weight(ask) <= HEAVY)
        return list(portions(light, weight, most_members=MOST_MEMBERS, most_bytes=MOST_BYTES))

    def batch(self, asks: Sequence[Any]) -> Operation[Any]:
        """Carry out a batch of one kind."""
        match asks[0]:
            case ClaimRequest():
                return self.claim_in_bulk(asks) if self._in_bulk else self.claim_batch(asks)
            case CompleteRequest():
                return self.complete_batch(asks)
            case _:
                return self.renew_batch(asks)

    def second_look(self, asks: Sequence[Any], outcome: object) -> Operation[Claims] | None:
        """Judge the rows of claims that met a lock."""
        if isinstance(asks[0], ClaimRequest) and is_locked(outcome):
            return self.read_batch(asks)
        return None

    @operation
    def claim_batch(self, asks: Sequence[ClaimRequest]) -> Verb[Claims]:
        """Insert the new claims, and judge the rows that exist."""
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
        return self.claim_batch(asks)

    @operation
    def _claim_in_bulk(self, asks: Sequence[ClaimRequest]) -> Verb[Claims]:
        ordered = in_order(asks, self._table.digest)
        reply = yield self._batches.claim_in_bulk(ordered)
        if reply is UNABLE:
            return (yield from self.claim_batch(asks).start())
        self._all_new = _made_all(reply)
        if self._all_new:
            return _claimed(asks, reply)
        return _judged(ordered, (yield self._batches.read_after(ordered, reply.last_id)))

    @operation
    def read_batch(self, asks: Sequence[ClaimRequest]) -> Verb[Claims]:
        """Judge the rows without waiting for a lock: an open transaction has one of the keys."""
        ordered = in_order(asks, self._table.digest)
        return _judged(ordered, (yield self._batches.read(ordered)))

    @operation
    def complete_batch(self, asks: Sequence[CompleteRequest]) -> Verb[dict[Identity, bool]]:
        """Store the success of attempts that run."""
        ordered = in_order(asks, self._table.digest)
        reply = yield self._batches.complete(ordered)
        if reply.changed == len(ordered):
            return dict.fromkeys((ask.identity for ask in asks), True)
        reply = yield self._batches.owners(ordered, State.SUCCEEDED)
        return {ask.identity: True for ask in _owned(ordered, reply)}

    @operation
    def renew_batch(self, asks: Sequence[RenewRequest]) -> Verb[dict[Identity, bool]]:
        """Extend leases. A running owner's that was missed is tried again, then asked for alone."""
        ordered = in_order(asks, self._table.digest)
        answers: dict[Identity, bool] = {}
        for _ in range(2):
            reply = yield self._batches.renew(ordered)
            if reply.changed == len(ordered):
                return answers | dict.fromkeys((ask.identity for ask in ordered.values()), True)
            reply = yield self._batches.owners(ordered, State.PROCESSING)
            running = _owned(ordered, reply)
            answers |= {ask.identity: False for ask in ordered.values() if ask not in running}
            if not running:
                break
            ordered = in_order(running, self._table.digest)
        return answers


def _made_all(reply: Reply) -> bool:
    return ALL_NEW <= reply.last_id < SOME_MET


def _fence_of(reply: Reply) -> int:
    return reply.last_id - ALL_NEW


def _claimed(asks: Sequence[ClaimRequest], reply: Reply) -> Claims:
    claimed = Claimed(1, _fence_of(reply))
    return dict.fromkeys((ask.identity for ask in asks), claimed)


def _judged(asks: Mapping[bytes, ClaimRequest], reply: Reply) -> Claims:
    answers: Claims = {}
    for digest, *packed in reply.rows:
        ask = asks[digest]
        if (answer := _answer(ask, packed)) is not None:
            answers[ask.identity] = answer
    return answers


def _answer(ask: ClaimRequest, packed: Sequence[Any]) -> Claim | StoreError | None:
    try:
        row = unpacked(packed)
        if row[-1] and row[_OWNER] == ask.owner:
            return Claimed(row[_NUMBER], row[_FENCE])
        stored = record_of(row, ask.identity)
    except StoreError as damage:
        return damage
    answer, record = judge.claim(stored, ask, stored.now)
    return answer if record is None else None  # it has to be written over, by compare-and-swap


def _owned(asks: Mapping[bytes, R], reply: Reply) -> list[R]:
    return [asks[digest] for digest, owner in reply.rows if asks[digest].owner == owner]


# --- how many share a statement -----------------------------------------------------------

MOST_BYTES: Final = 1 << 18
"""A batch ends with the member that fills it."""

HEAVY: Final = 1 << 17
"""A larger member goes alone. Quoting may double what is sent, and with these two limits it still
fits into a megabyte, the least `max_allowed_packet` in use: a server hangs up on larger packets,
and all members would lose their connection."""


def _weight_of_renewal(ask: RenewRequest) -> int:
    return 100 + len(ask.owner) + len(ask.run_info or b"")


_WEIGHTS: Final[dict[type, Callable[[Any], int]]] = {
    ClaimRequest: weight_of_claim,
    CompleteRequest: weight_of_complete,
    RenewRequest: _weight_of_renewal,
}
