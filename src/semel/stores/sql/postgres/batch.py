"""Batches on PostgreSQL: the statements for many claims, completes or renewals in one commit.

This module writes SQL and judges rows. It runs nothing. A member is one request of a batch: arrays
go in, one row comes out for each. Each statement does what is done most
often, for all members it can do that for: insert a new record, end a running attempt, extend a
lease. A member that it leaves open is `ALONE`: it is asked for by the verb for one member, which
knows every case. The members must be different identities.

No member waits for an open transaction that holds its record (the advisory lock of
`semel.transactions`): the lock is only tried. It is shared, so that batches do not keep each other
out. Locks of others, which we know nothing of, are waited for a moment (`:lock_wait`).

A digest travels as bytes: drivers are several times quicker with those than with UUIDs.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from semel.core import judge
from semel.core.records import (
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Identity,
    RenewRequest,
    State,
    checked_run_info,
)
from semel.errors import StoreError, StoreUnavailable
from semel.stores.batching import ALONE, Alone, Request
from semel.stores.sql.batch import all_differ, in_order
from semel.stores.sql.errors import ASK_AGAIN_AFTER
from semel.stores.sql.postgres.verbs import (
    NOW,
    RUNNING,
    SEEN,
    WAKE,
    PostgresVerbs,
    Query,
    check_size,
    micros,
)
from semel.stores.sql.rows import COLUMNS, FORMAT, Row
from semel.stores.sql.verbs import Operation, OwnColumns, Verb, operation, record_of


class Seen(enum.IntEnum):
    """What a batch of claims says of a member; it says nothing of one that changed meanwhile."""

    FOUND = 0
    WRITTEN = 1
    LOCKED = 2


class BatchStatements:
    """The statements for one table."""

    def __init__(self, table: str) -> None:
        self.claim = Query(_claim(table), writes=True)
        self.complete = Query(_complete(table), writes=True)
        self.renew = Query(_renew(table), writes=True)


_BOUNDED = "(SELECT set_config('lock_timeout', :lock_wait::text, true)) AS bounded"
_NEW_DIGEST = "encode(ask_digest, 'hex')::uuid AS new_digest"
_FREE = "pg_try_advisory_xact_lock_shared(ask_lock)"
_LOCKING = f"""
    asked AS MATERIALIZED (
        SELECT {_NEW_DIGEST}, ask_digest, {_FREE} AS free
        FROM {_BOUNDED}, unnest(:digests::bytea[], :locks::bigint[]) AS asked (ask_digest, ask_lock)
    )
"""  # noqa: S608 - words of our own, here and below


def _own(array: str) -> str:
    """Take what belongs to the row out of an array.

    Not by a join: the planner takes one that compares each member with each, since it expects
    few; or one that reads the table once for each, since it is small yet. Prepared plans are kept.
    """
    return f"(:{array})[array_position(:digests::bytea[], uuid_send(r.digest))]"


_THESE_RUNNING = f"""
    r.digest = ANY (ARRAY(SELECT new_digest FROM asked WHERE free))
    AND r.idem_key = {_own("keys::text[]")} AND r.biz_type = {_own("scopes::text[]")}
    AND r.owner = {_own("owners::bytea[]")} AND {RUNNING}
"""  # noqa: S608
"""The attempts that these owners run."""


def _claim(table: str) -> str:
    """Insert the new rows; return the existing ones unchanged."""
    nothing = ", ".join("NULL" for _ in COLUMNS)
    return f"""
        WITH asked AS MATERIALIZED (
            SELECT {_NEW_DIGEST}, asked.* FROM {_BOUNDED}, unnest(
                :digests::bytea[], :keys::text[], :scopes::text[], :locks::bigint[],
                :fingerprints::bytea[], :owners::bytea[], :leases::float8[], :holds::boolean[],
                :run_infos::bytea[]
            ) AS asked (
                ask_digest, ask_key, ask_scope, ask_lock, fingerprint, owner, lease, hold, run_info
            )
        ), found AS MATERIALIZED (
            SELECT r.* FROM {table} AS r
            WHERE r.digest = ANY (ARRAY(SELECT new_digest FROM asked))
        ), tried AS MATERIALIZED (
            SELECT asked.*, {_FREE} AS free FROM asked
            WHERE new_digest NOT IN (SELECT digest FROM found)
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, payload_hash, status, result_payload,
                created_at, updated_at, retryable, owner, number, fence, hold, lease_until,
                superseded, takeover, waited_for, format
            )
            SELECT
                new_digest, :prefix::text, ask_key, ask_scope, fingerprint,
                {State.PROCESSING:d}, run_info, {NOW}, {NOW}, false, owner, 1, {micros(NOW)}, hold,
                {NOW} + lease * interval '1 second', '{{}}'::bytea[], false, false, {FORMAT}
            FROM tried WHERE free
            ON CONFLICT (digest) DO NOTHING
            RETURNING r.digest, r.fence
        )
        SELECT {Seen.FOUND:d}, uuid_send(r.digest), r.waited_for, {SEEN} FROM found AS r
        UNION ALL
        SELECT {Seen.WRITTEN:d}, uuid_send(digest), NULL, {nothing}, fence FROM written
        UNION ALL
        SELECT {Seen.LOCKED:d}, ask_digest, NULL, {nothing}, NULL FROM tried WHERE NOT free
    """  # noqa: S608 - the name is checked


def _complete(table: str) -> str:
    """End running attempts; gives the digests of those that it ended."""
    return f"""
        WITH {_LOCKING}
        UPDATE {table} AS r SET
            status = {State.SUCCEEDED:d}, lease_until = NULL, retryable = false,
            updated_at = {NOW}, result_payload = {_own("results::bytea[]")},
            codec = {_own("codecs::text[]")},
            expire_at = {NOW} + {_own("ttls::float8[]")} * interval '1 second'
        WHERE {_THESE_RUNNING}
        RETURNING uuid_send(r.digest), {WAKE}
    """  # noqa: S608 - the name is checked


def _renew(table: str) -> str:
    """Extend leases; gives the digests of those it extended (true) or could not look at (false)."""
    return f"""
        WITH {_LOCKING}, written AS (
            UPDATE {table} AS r SET
                lease_until = {NOW} + {_own("leases::float8[]")} * interval '1 second',
                result_payload = coalesce({_own("run_infos::bytea[]")}, r.result_payload),
                updated_at = {NOW}
            WHERE {_THESE_RUNNING}
            RETURNING r.digest
        )
        SELECT uuid_send(digest), true FROM written
        UNION ALL
        SELECT ask_digest, false FROM asked WHERE NOT free
    """  # noqa: S608 - the name is checked


# --- the verbs --------------------------------------------------------------------------------


BATCH_LIMIT: Final = 512
"""Members of one statement. Each holds an advisory lock until the commit, and a server has room for
some thousands of those, for all its sessions."""

LOCKED: Final = "an open transaction has this record locked; nothing was written"


class PostgresBatchVerbs(PostgresVerbs):
    """The verbs for one member and for many, on one table."""

    def __init__(
        self,
        table: str,
        prefix: str,
        columns: OwnColumns,
        waiting: Container[UUID],
        lock_wait: float,
    ) -> None:
        """`lock_wait`: how long a batch may wait for a lock that is no transaction of ours."""
        super().__init__(table, prefix, columns, waiting)
        self._batches = BatchStatements(table)
        self._lock_wait = f"{max(1, round(lock_wait * 1000))}ms"

    def batches_of(self, asks: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """List the batches that are sent for these requests; one in none is asked for alone."""
        if not all_differ(asks) or any(self._goes_alone(ask) for ask in asks):
            return []
        return [asks[start : start + BATCH_LIMIT] for start in range(0, len(asks), BATCH_LIMIT)]

    def _goes_alone(self, ask: Any) -> bool:
        if isinstance(ask, ClaimRequest):
            # The types of own columns are the application's: no array has them.
            return bool(self._table.columns)
        return isinstance(ask, RenewRequest) and ask.lease <= 0  # it is to be parked

    def batch(self, asks: Sequence[Any]) -> Operation[dict[Identity, Any]]:
        """Carry out a batch of one kind."""
        match asks[0]:
            case ClaimRequest():
                return self.claim_batch(asks)
            case CompleteRequest():
                return self.complete_batch(asks)
            case _:
                return self.renew_batch(asks)

    def second_look(self, asks: Sequence[Any], outcome: object) -> None:
        """Nothing: the statement itself skips locked rows."""

    @operation
    def claim_batch(self, asks: Sequence[ClaimRequest]) -> Verb[dict[Identity, Any]]:
        """Insert the new claims, and judge the rows that exist."""
        ordered = in_order(asks, self.short_digest)
        reply = yield self._batches.claim(
            **self._named(ordered),
            prefix=self._table.prefix,
            fingerprints=[ask.fingerprint for ask in ordered.values()],
            owners=[ask.owner for ask in ordered.values()],
            leases=[float(ask.lease) for ask in ordered.values()],
            holds=[ask.hold for ask in ordered.values()],
            run_infos=[checked_run_info(ask.run_info) for ask in ordered.values()],
        )
        # A member that another caller inserted while the statement ran has no row.
        return {(ask := ordered[row[1]]).identity: self._answer(ask, row) for row in reply.rows}

    def _answer(self, ask: ClaimRequest, found: Row) -> Claim | StoreError | Alone:
        seen, digest, waited_for, *row = found
        if seen == Seen.WRITTEN:
            return Claimed(1, row[-1])
        if seen == Seen.LOCKED:
            return Busy(ASK_AGAIN_AFTER)
        try:
            record = record_of(tuple(row), ask.identity)
        except StoreError as damage:
            return damage
        answer, _ = judge.claim(record, ask, record.now)
        if isinstance(answer, Claimed):
            return ALONE  # it has to be written over, on its newest version
        if isinstance(answer, Busy) and not waited_for and UUID(bytes=digest) in self._waiting:
            return ALONE  # it has to be noted that a caller waits
        return answer

    @operation
    def complete_batch(self, asks: Sequence[CompleteRequest]) -> Verb[dict[Identity, bool]]:
        """Store the success of attempts that run."""
        ordered = in_order(asks, self.short_digest)
        results = [ask.result.data for ask in ordered.values()]
        check_size(sum(map(len, results)))  # too much for one batch, each is asked for alone
        reply = yield self._batches.complete(
            **self._named(ordered),
            owners=[ask.owner for ask in ordered.values()],
            results=results,
            codecs=[ask.result.codec for ask in ordered.values()],
            ttls=[float(ask.ttl) for ask in ordered.values()],
        )
        return {ordered[row[0]].identity: True for row in reply.rows}

    @operation
    def renew_batch(self, asks: Sequence[RenewRequest]) -> Verb[dict[Identity, bool | StoreError]]:
        """Extend leases. What an open transaction has is not waited for, for the others' sake."""
        ordered = in_order(asks, self.short_digest)
        reply = yield self._batches.renew(
            **self._named(ordered),
            owners=[ask.owner for ask in ordered.values()],
            leases=[float(ask.lease) for ask in ordered.values()],
            run_infos=[ask.run_info for ask in ordered.values()],
        )
        answers: dict[Identity, bool | StoreError] = dict.fromkeys(
            (ask.identity for ask in asks), False
        )
        for digest, renewed in reply.rows:
            answers[ordered[digest].identity] = renewed or StoreUnavailable(LOCKED)
        return answers

    def _named(self, ordered: Mapping[bytes, Request]) -> dict[str, Any]:
        return {
            "digests": [*ordered],
            "keys": [ask.identity.key for ask in ordered.values()],
            "scopes": [ask.identity.scope for ask in ordered.values()],
            "locks": [lock_number(digest) for digest in ordered],
            "lock_wait": self._lock_wait,
        }


def lock_number(digest: bytes) -> int:
    """Name the advisory lock of a record."""
    return int.from_bytes(digest[:8], "big", signed=True)
