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
    RUNNING,
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


_BOUNDED = "(SELECT set_config('lock_timeout', :patience::text, true)) AS bounded"
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
    """Insert what is new; give back what is there, as it is."""
    nothing = ", ".join("NULL" for _ in COLUMNS)
    return f"""
        WITH asked AS MATERIALIZED (
            SELECT {_NEW_DIGEST}, asked.* FROM {_BOUNDED}, unnest(
                :digests::bytea[], :keys::text[], :scopes::text[], :locks::bigint[],
                :fingerprints::bytea[], :owners::bytea[], :leases::float8[], :holds::boolean[]
            ) AS asked (ask_digest, ask_key, ask_scope, ask_lock, fingerprint, owner, lease, hold)
        ), found AS MATERIALIZED (
            SELECT r.* FROM {table} AS r
            WHERE r.digest = ANY (ARRAY(SELECT new_digest FROM asked))
        ), tried AS MATERIALIZED (
            SELECT asked.*, {_FREE} AS free FROM asked
            WHERE new_digest NOT IN (SELECT digest FROM found)
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, payload_hash, status, created_at, updated_at,
                retryable, owner, number, fence, hold, lease_until, superseded, takeover,
                waited_for, format
            )
            SELECT
                new_digest, :prefix::text, ask_key, ask_scope, fingerprint,
                {State.PROCESSING:d}, {NOW}, {NOW}, false, owner, 1, {micros(NOW)}, hold,
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
        RETURNING uuid_send(r.digest), {WAKE_WITH_OUTCOME}
    """  # noqa: S608 - the name is checked


def _renew(table: str) -> str:
    """Extend leases; gives the digests of those it extended (true) or could not look at (false)."""
    return f"""
        WITH {_LOCKING}, written AS (
            UPDATE {table} AS r SET
                lease_until = {NOW} + {_own("leases::float8[]")} * interval '1 second',
                updated_at = {NOW}
            WHERE {_THESE_RUNNING}
            RETURNING r.digest
        )
        SELECT uuid_send(digest), true FROM written
        UNION ALL
        SELECT ask_digest, false FROM asked WHERE NOT free
    """  # noqa: S608 - the name is checked
