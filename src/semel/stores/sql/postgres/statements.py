"""The statements of PostgreSQL: one for each verb, so that a verb is one round trip.

This module writes SQL. It runs none. The law is `semel.core.judge`; a statement decides only
whether a write may happen, on the row as it is at that moment, and `verbs` judges the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from semel.core.records import SUPERSEDED_LIMIT, State
from semel.stores.sql.postgres.words import (
    CLAIMABLE,
    DIFFER,
    GONE,
    LIVE,
    NEXT_FENCE,
    NOW,
    OWN,
    PUTTABLE,
    RUNNING,
    SEEN,
    THIS,
    WAKE,
    WAKE_WITH_OUTCOME,
    Query,
    after,
    micros,
)
from semel.stores.sql.rows import FORMAT


class Statements:
    """The statements for one table; `columns` are the application's own, filled by a claim."""

    def __init__(self, table: str, columns: Sequence[str]) -> None:
        self.claim = Query(_claim(table, columns), writes=True)
        self.put = Query(_put(table, columns), writes=True)
        self.put_plain = Query(_put(table, ()), writes=True)
        renewing = (
            f"UPDATE {table} AS r SET lease_until = {after('lease')}, updated_at = {NOW} "  # noqa: S608 - the name is checked, here and below
            f"WHERE {THIS} AND {OWN}"
        )
        self.renew = Query(renewing, writes=True)
        self.park = Query(f"{renewing} RETURNING {WAKE}", writes=True)
        self.note_waiter = Query(
            f"UPDATE {table} AS r SET waited_for = true WHERE {THIS} AND {OWN}",  # noqa: S608
            writes=True,
        )
        self.end = Query(_end(table), writes=True)
        self.get = Query(f"SELECT {SEEN} FROM {table} AS r WHERE r.digest = :digest", writes=False)  # noqa: S608
        self.touch = Query(
            f"UPDATE {table} AS r SET expire_at = {after('ttl')} "  # noqa: S608
            f"WHERE {THIS} AND r.status <> {State.PROCESSING:d} AND r.expire_at > {NOW}",
            writes=True,
        )
        self.forget = Query(
            f"DELETE FROM {table} AS r WHERE {THIS} RETURNING NOT {GONE}, {WAKE}",  # noqa: S608
            writes=True,
        )
        self.adopt = Query(_adopt(table), writes=True)
        self.page = Query(_page(table), writes=False)
        self.stuck = Query(
            f"SELECT {SEEN} FROM {table} AS r WHERE r.status = {State.PROCESSING:d} "  # noqa: S608
            f"AND r.prefix = :prefix AND r.lease_until <= {after('since')} "
            "ORDER BY r.lease_until LIMIT :limit::bigint",
            writes=False,
        )
        self.purge_expired = Query(
            _purge(table, f"r.expire_at <= {NOW}", by="expire_at"), writes=True
        )
        self.purge_abandoned = Query(
            _purge(
                table,
                f"r.status = {State.PROCESSING:d} AND NOT r.hold "
                f"AND r.lease_until <= {after('since')}",
                by="lease_until",
            ),
            writes=True,
        )
        self.counts = Query(
            f"SELECT count(*) FILTER (WHERE {LIVE}), "  # noqa: S608
            f"count(*) FILTER (WHERE r.status = {State.PROCESSING:d} AND NOT {LIVE}), "
            f"count(*) FILTER (WHERE r.status = {State.SUCCEEDED:d}), "
            f"count(*) FILTER (WHERE r.status = {State.FAILED:d}) "
            f"FROM {table} AS r WHERE r.prefix = :prefix AND NOT {GONE}",
            writes=False,
        )


def _claim(table: str, columns: Sequence[str]) -> str:
    """Write the claim; the last columns of its answer say whether it was given, and more of it.

    The row is looked at first: a duplicate that gets nothing then locks nothing and writes
    nothing, so that replays of one key do not stand in line. Whether a row that changed meanwhile
    may still be claimed is asked again where it is written, on its newest version.
    """
    names = "".join(f', "{name}"' for name in columns)
    values = "".join(f", :own_{name}" for name in columns)
    kept = "".join(
        f', "{name}" = CASE WHEN {OWN} THEN r."{name}" ELSE excluded."{name}" END'
        for name in columns
    )
    oldest = f"CASE WHEN cardinality(r.superseded) < {SUPERSEDED_LIMIT} THEN 1 ELSE 2 END"
    return f"""
        WITH found AS (
            SELECT r.* FROM {table} AS r WHERE r.digest = :digest
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, payload_hash, status, created_at, updated_at,
                retryable, owner, number, fence, hold, lease_until, superseded, takeover,
                waited_for, format
                {names}
            )
            SELECT
                :digest::uuid, :prefix::text, :key::text, :scope::text, :fingerprint::bytea,
                {State.PROCESSING:d}, {NOW}, {NOW}, false, :owner::bytea, 1, {micros(NOW)},
                :hold::boolean, {after("lease")}, '{{}}'::bytea[], false, false, {FORMAT}
                {values}
            WHERE NOT EXISTS (SELECT FROM found AS r WHERE NOT ({CLAIMABLE}))
            ON CONFLICT (digest) DO UPDATE SET
                payload_hash = CASE
                    WHEN {OWN} THEN r.payload_hash
                    WHEN {GONE} THEN excluded.payload_hash
                    ELSE coalesce(excluded.payload_hash, r.payload_hash) END,
                superseded = CASE
                    WHEN {OWN} THEN r.superseded
                    WHEN {GONE} THEN excluded.superseded
                    WHEN {DIFFER} THEN r.superseded[{oldest}:] || r.payload_hash
                    ELSE r.superseded END,
                takeover = NOT {OWN} AND r.status = {State.PROCESSING:d},
                waited_for = r.waited_for AND r.status = {State.PROCESSING:d},
                number = CASE
                    WHEN {OWN} THEN r.number WHEN {GONE} OR {DIFFER} THEN 1 ELSE r.number + 1 END,
                fence = CASE WHEN {OWN} THEN r.fence ELSE {NEXT_FENCE} END,
                hold = CASE WHEN {OWN} THEN r.hold ELSE excluded.hold END,
                created_at = CASE WHEN {GONE} THEN excluded.created_at ELSE r.created_at END,
                status = excluded.status, result_payload = NULL, codec = NULL, retryable = false,
                expire_at = NULL, updated_at = excluded.updated_at, owner = excluded.owner,
                lease_until = excluded.lease_until, format = excluded.format
                {kept}
            WHERE {CLAIMABLE}
            RETURNING {SEEN}, r.takeover, r.waited_for, true
        )
        SELECT * FROM written
        UNION ALL
        SELECT {SEEN}, r.takeover, r.waited_for, false FROM found AS r
        WHERE NOT EXISTS (SELECT FROM written)
    """  # noqa: S608 - the names are checked


def _put(table: str, columns: Sequence[str]) -> str:
    """Write a mark; no row comes back when it is refused, `true` when it is there."""
    names = "".join(f', "{name}"' for name in columns)
    values = "".join(f", :own_{name}" for name in columns)
    replaced = "".join(f', "{name}" = excluded."{name}"' for name in columns)
    mine = f"(r.owner = :owner AND r.status = {State.SUCCEEDED:d} AND NOT {GONE})"
    return f"""
        WITH found AS (
            SELECT {mine} AS mine FROM {table} AS r
            WHERE r.digest = :digest AND NOT ({PUTTABLE})
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, status, result_payload, expire_at, created_at,
                updated_at, codec, retryable, owner, number, fence, hold, superseded, takeover,
                waited_for, format
                {names}
            )
            SELECT
                :digest::uuid, :prefix::text, :key::text, :scope::text, {State.SUCCEEDED:d},
                :data::bytea, {after("ttl")}, {NOW}, {NOW}, :codec::text, false, :owner::bytea, 1,
                {micros(NOW)}, false, '{{}}'::bytea[], false, false, {FORMAT}
                {values}
            WHERE NOT EXISTS (SELECT FROM found)
            ON CONFLICT (digest) DO UPDATE SET
                payload_hash = NULL,
                superseded = CASE WHEN {GONE} THEN excluded.superseded ELSE r.superseded END,
                takeover = false,
                waited_for = false,
                number = CASE WHEN {GONE} THEN 1 ELSE r.number + 1 END,
                fence = {NEXT_FENCE},
                hold = false,
                created_at = CASE WHEN {GONE} THEN excluded.created_at ELSE r.created_at END,
                status = excluded.status, result_payload = excluded.result_payload,
                codec = excluded.codec, retryable = false, expire_at = excluded.expire_at,
                updated_at = excluded.updated_at, owner = excluded.owner, lease_until = NULL,
                format = excluded.format
                {replaced}
            WHERE {PUTTABLE}
            RETURNING true
        )
        SELECT * FROM written UNION ALL SELECT found.mine FROM found
    """  # noqa: S608 - the name is checked


def _end(table: str) -> str:
    """Write the outcome; one that this owner stored before is written again as it is."""
    new = {
        "result_payload": ":data::bytea",
        "codec": ":codec::text",
        "retryable": ":retryable::boolean",
        "payload_hash": "CASE WHEN :keep_fingerprint::boolean THEN r.payload_hash END",
        "number": "CASE WHEN :ran::boolean THEN r.number ELSE r.number - 1 END",
        "expire_at": after("ttl"),
        "updated_at": NOW,
    }
    running = f"r.status = {State.PROCESSING:d}"
    changes = ", ".join(
        f"{name} = CASE WHEN {running} THEN {value} ELSE r.{name} END"
        for name, value in new.items()
    )
    return f"""
        UPDATE {table} AS r SET status = :state::smallint, lease_until = NULL, {changes}
        WHERE {THIS} AND r.owner = :owner
            AND ({running} OR (r.status = :state::smallint AND NOT {GONE}))
        RETURNING {WAKE_WITH_OUTCOME}
    """  # noqa: S608 - the name is checked


def _adopt(table: str) -> str:
    return f"""
        UPDATE {table} AS r SET
            fence = CASE
                WHEN {OWN} THEN r.fence ELSE greatest(r.fence + 1, {micros(NOW)}) END,
            owner = :owner::bytea, lease_until = {after("lease")}, updated_at = {NOW}
        WHERE {THIS} AND {RUNNING} AND ({OWN} OR NOT {LIVE})
        RETURNING {SEEN}
    """  # noqa: S608 - the name is checked


def _page(table: str) -> str:
    """List in the order of the index on the key, from `:start` on: no page sorts or skips."""
    return f"""
        SELECT {SEEN} FROM {table} AS r
        WHERE r.prefix = :prefix AND NOT {GONE} AND r.idem_key >= :start
            AND (:behind::text IS NULL OR r.idem_key < :behind)
            AND (:scope::text IS NULL OR r.biz_type = :scope)
            AND (:state::smallint IS NULL OR r.status = :state)
            AND (:after_key::text IS NULL
                OR (r.idem_key, r.biz_type) > (:after_key, :after_scope::text))
        ORDER BY r.idem_key, r.biz_type LIMIT :limit::bigint
    """  # noqa: S608 - the name is checked


def _purge(table: str, condition: str, by: str) -> str:
    """Delete a small batch along an index; what somebody has locked is left for the next one.

    In order: else the planner may read the table from its start, over all that went before. The
    commit waits for no disk and no replica: a purge that a crash undoes is repeated by the next.
    """
    return f"""
        DELETE FROM {table}
        WHERE (SELECT set_config('synchronous_commit', 'off', true)) = 'off'
            AND digest = ANY (ARRAY(
                SELECT r.digest FROM {table} AS r WHERE r.prefix = :prefix AND {condition}
                ORDER BY r.{by} LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
            ))
    """  # noqa: S608 - the name is checked
