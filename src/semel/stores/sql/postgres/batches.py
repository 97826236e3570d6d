"""The statements of PostgreSQL for many members: arrays in, one row out for each, one commit.

This module writes SQL. It runs none. Each statement does what is done most often, for all members
it can do that for: insert a new record, end a running attempt, extend a lease. Everything else is
the business of the statement for one member.

No member waits for an open transaction that holds its record (the advisory lock of
`semel.transactions`): the lock is only tried. It is shared, so that batches do not keep each other
out. Locks of others, which we know nothing of, are waited for a moment (`:patience`).

A digest travels as bytes: drivers are several times quicker with those than with UUIDs.
"""

from __future__ import annotations

import enum

from semel.core.records import State
from semel.stores.sql.postgres.words import (
    NOW,
    SEEN,
    WAKE_WITH_OUTCOME,
    Query,
    micros,
)
from semel.stores.sql.rows import COLUMNS, FORMAT


class Seen(enum.IntEnum):
    """What `claim_many` tells of a member; of one that was changed meanwhile, it tells nothing."""

    FOUND = 0
    WRITTEN = 1
    LOCKED = 2


class BatchStatements:
    """The statements for one table."""

    def __init__(self, table: str) -> None:
        self.claim = Query(_claim(table), writes=True)
        self.complete = Query(_complete(table), writes=True)
        self.renew = Query(_renew(table), writes=True)


def _asked(*columns: str) -> str:
    """Turn the arrays into rows, and the wait for other locks into a short one.

    The arrays are in the order of the digest, and so are the writes: two batches never deadlock.
    """
    common = ("digests::bytea[]", "keys::text[]", "scopes::text[]", "locks::bigint[]")
    arrays = ", ".join(f":{column}" for column in (*common, *columns))
    names = ", ".join(column.partition("::")[0] for column in columns)
    return f"""
        (SELECT set_config('lock_timeout', :patience::text, true)) AS bounded,
        unnest({arrays}) AS asked (ask_digest, ask_key, ask_scope, ask_lock, {names})
    """


_DIGEST = "encode(ask_digest, 'hex')::uuid"
_FREE = "pg_try_advisory_xact_lock_shared(ask_lock)"
_THIS = "r.digest = a.digest AND r.idem_key = a.ask_key AND r.biz_type = a.ask_scope"
_RUNNING = f"r.owner = a.owners AND r.status = {State.PROCESSING:d}"


def _claim(table: str) -> str:
    """Insert what is new; give back what is there, as it is.

    LATERAL and LIMIT: each member is looked up by the index, whatever the planner thinks of the
    table, which may have been empty when it thought.
    """
    nothing = ", ".join("NULL" for _ in COLUMNS)
    return f"""
        WITH looked AS MATERIALIZED (
            SELECT {_DIGEST} AS new_digest, asked.*, r.* FROM
            {
        _asked("fingerprints::bytea[]", "owners::bytea[]", "leases::float8[]", "holds::boolean[]")
    }
            LEFT JOIN LATERAL (
                SELECT r.* FROM {table} AS r WHERE r.digest = {_DIGEST} LIMIT 1
            ) AS r ON true
        ), tried AS MATERIALIZED (
            SELECT *, {_FREE} AS free FROM looked WHERE digest IS NULL
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, payload_hash, status, created_at, updated_at,
                retryable, owner, number, fence, hold, lease_until, superseded, takeover,
                waited_for, format
            )
            SELECT
                new_digest, :prefix::text, ask_key, ask_scope, fingerprints,
                {State.PROCESSING:d}, {NOW}, {NOW}, false, owners, 1, {micros(NOW)}, holds,
                {NOW} + leases * interval '1 second', '{{}}'::bytea[], false, false, {FORMAT}
            FROM tried WHERE free
            ON CONFLICT (digest) DO NOTHING
            RETURNING r.digest, r.fence
        )
        SELECT {Seen.FOUND:d}, uuid_send(r.digest), r.waited_for, {SEEN}
        FROM looked AS r WHERE r.digest IS NOT NULL
        UNION ALL
        SELECT {Seen.WRITTEN:d}, uuid_send(digest), NULL, {nothing}, fence FROM written
        UNION ALL
        SELECT {Seen.LOCKED:d}, ask_digest, NULL, {nothing}, NULL FROM tried WHERE NOT free
    """  # noqa: S608 - the name is checked


def _complete(table: str) -> str:
    """End running attempts; gives the digests of those that it ended."""
    return f"""
        UPDATE {table} AS r SET
            status = {State.SUCCEEDED:d}, lease_until = NULL, result_payload = a.datas,
            codec = a.codecs, retryable = false, updated_at = {NOW},
            expire_at = {NOW} + a.ttls * interval '1 second'
        FROM (
            SELECT {_DIGEST} AS digest, asked.* FROM
            {_asked("owners::bytea[]", "datas::bytea[]", "codecs::text[]", "ttls::float8[]")}
            WHERE {_FREE} OFFSET 0
        ) AS a
        WHERE {_THIS} AND {_RUNNING}
        RETURNING uuid_send(r.digest), {WAKE_WITH_OUTCOME}
    """  # noqa: S608 - the name is checked


def _renew(table: str) -> str:
    """Extend leases; gives the digests of those it extended (true) or could not look at (false)."""
    return f"""
        WITH a AS MATERIALIZED (
            SELECT {_DIGEST} AS digest, asked.*, {_FREE} AS free FROM
            {_asked("owners::bytea[]", "leases::float8[]")}
        ), written AS (
            UPDATE {table} AS r SET
                lease_until = {NOW} + a.leases * interval '1 second', updated_at = {NOW}
            FROM a WHERE a.free AND {_THIS} AND {_RUNNING}
            RETURNING r.digest
        )
        SELECT uuid_send(digest), true FROM written
        UNION ALL
        SELECT ask_digest, false FROM a WHERE NOT free
    """  # noqa: S608 - the name is checked
