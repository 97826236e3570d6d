"""The statements of PostgreSQL: one for each verb, so that a verb is one round trip.

This module writes SQL. It runs none. The law is `semel.core.judge`; a statement decides only
whether a write may happen, on the row as it is at that moment, and `verbs` judges the rest.

Values have names here (`:owner`) and become `$1`, `$2`... once, when the store is made. Each has
its type beside it where PostgreSQL could not tell it from a NULL. Times leave as microseconds,
which is what `rows` reads: no time zone and no last year of Python's calendar comes in between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from semel.core.records import SUPERSEDED_LIMIT, State
from semel.stores.sql.rows import COLUMNS, FORMAT
from semel.stores.sql.verbs import Statement

NOW: Final = "statement_timestamp()"

TIMES: Final = frozenset({"expire_at", "created_at", "updated_at", "lease_until"})

OURS: Final = frozenset({*COLUMNS, "digest", "prefix", "takeover"})
"""Every column of the table that semel itself writes."""

_PLACEHOLDER = re.compile(r"(?<!:):([a-z_]+)")


class Query:
    """A statement with named values."""

    def __init__(self, sql: str, *, writes: bool) -> None:
        self._names = tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))
        numbers = {name: f"${number}" for number, name in enumerate(self._names, 1)}
        self._sql = " ".join(_PLACEHOLDER.sub(lambda found: numbers[found[1]], sql).split())
        self._writes = writes

    def __call__(self, **values: Any) -> Statement:
        """Give each name its value; those that the statement does not know are left out."""
        return Statement(self._sql, tuple(values[name] for name in self._names), self._writes)


def _micros(moment: str) -> str:
    return f"(extract(epoch FROM {moment}) * 1000000)::bigint"


def _after(seconds: str) -> str:
    return f"{NOW} + :{seconds}::float8 * interval '1 second'"


_ROW = ", ".join(_micros(f"r.{name}") if name in TIMES else f"r.{name}" for name in COLUMNS)
_SEEN = f"{_ROW}, {_micros(NOW)}"
"""A row as `verbs` reads it: the columns of `rows`, then the time of the statement."""

_THIS = "r.digest = :digest AND r.idem_key = :key AND r.biz_type = :scope"
_GONE = f"(r.expire_at IS NOT NULL AND r.expire_at <= {NOW})"
_OWN = f"(r.status = {State.PROCESSING:d} AND r.owner = :owner)"
_ENDED_FOR_GOOD = (
    f"(r.status = {State.SUCCEEDED:d} OR (r.status = {State.FAILED:d} AND NOT r.retryable))"
)
_LIVE = f"(r.status = {State.PROCESSING:d} AND r.lease_until > {NOW})"
_DIFFER = "coalesce(r.payload_hash <> :fingerprint::bytea, false)"
_NEXT_FENCE = "greatest(r.fence + 1, excluded.fence)"

_CLAIMABLE = f"""
    r.idem_key = :key AND r.biz_type = :scope AND (
        {_GONE}
        OR {_OWN}
        OR (r.owner <> :owner
            AND (NOT {_DIFFER} OR :replace::boolean)
            AND NOT (:replace AND coalesce(:fingerprint = ANY (r.superseded), false))
            AND (NOT {_ENDED_FOR_GOOD} OR {_DIFFER})
            AND NOT {_LIVE}
            AND NOT (r.status = {State.PROCESSING:d} AND (r.hold OR :hold::boolean))
            AND (:max_attempts::integer IS NULL OR r.number < :max_attempts)))
"""

_PUTTABLE = f"""
    r.idem_key = :key AND r.biz_type = :scope AND (
        {_GONE}
        OR NOT ({_ENDED_FOR_GOOD} OR {_LIVE} OR (r.status = {State.PROCESSING:d} AND r.hold)))
"""


class Statements:
    """The statements for one table; `columns` are the application's own, filled by a claim."""

    def __init__(self, table: str, columns: Sequence[str]) -> None:
        self.claim = Query(_claim(table, columns), writes=True)
        self.put = Query(_put(table), writes=True)
        self.renew = Query(
            f"UPDATE {table} AS r SET lease_until = {_after('lease')}, updated_at = {NOW} "  # noqa: S608 - the name is checked, here and below
            f"WHERE {_THIS} AND {_OWN}",
            writes=True,
        )
        self.end = Query(_end(table), writes=True)
        self.get = Query(f"SELECT {_SEEN} FROM {table} AS r WHERE r.digest = :digest", writes=False)  # noqa: S608
        self.touch = Query(
            f"UPDATE {table} AS r SET expire_at = {_after('ttl')} "  # noqa: S608
            f"WHERE {_THIS} AND r.status <> {State.PROCESSING:d} AND r.expire_at > {NOW}",
            writes=True,
        )
        self.forget = Query(
            f"DELETE FROM {table} AS r WHERE {_THIS} RETURNING NOT {_GONE}",  # noqa: S608
            writes=True,
        )
        self.adopt = Query(_adopt(table), writes=True)
        self.page = Query(_page(table), writes=False)
        self.stuck = Query(
            f"SELECT {_SEEN} FROM {table} AS r WHERE r.status = {State.PROCESSING:d} "  # noqa: S608
            f"AND r.prefix = :prefix AND r.lease_until <= {_after('since')} "
            "ORDER BY r.lease_until LIMIT :limit::bigint",
            writes=False,
        )
        self.purge_expired = Query(_purge(table, f"r.expire_at <= {NOW}"), writes=True)
        self.purge_abandoned = Query(
            _purge(
                table,
                f"r.status = {State.PROCESSING:d} AND NOT r.hold "
                f"AND r.lease_until <= {_after('since')}",
            ),
            writes=True,
        )
        self.counts = Query(
            f"SELECT count(*) FILTER (WHERE {_LIVE}), "  # noqa: S608
            f"count(*) FILTER (WHERE r.status = {State.PROCESSING:d} AND NOT {_LIVE}), "
            f"count(*) FILTER (WHERE r.status = {State.SUCCEEDED:d}), "
            f"count(*) FILTER (WHERE r.status = {State.FAILED:d}) "
            f"FROM {table} AS r WHERE r.prefix = :prefix AND NOT {_GONE}",
            writes=False,
        )


def _claim(table: str, columns: Sequence[str]) -> str:
    """Write the claim; the last column of its answer says whether it was given.

    The row is looked at first: a duplicate that gets nothing then locks nothing and writes
    nothing, so that replays of one key do not stand in line. Whether a row that changed meanwhile
    may still be claimed is asked again where it is written, on its newest version.
    """
    names = "".join(f', "{name}"' for name in columns)
    values = "".join(f", :own_{name}" for name in columns)
    kept = "".join(
        f', "{name}" = CASE WHEN {_OWN} THEN r."{name}" ELSE excluded."{name}" END'
        for name in columns
    )
    oldest = f"CASE WHEN cardinality(r.superseded) < {SUPERSEDED_LIMIT} THEN 1 ELSE 2 END"
    return f"""
        WITH found AS (
            SELECT r.* FROM {table} AS r WHERE r.digest = :digest
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, payload_hash, status, created_at, updated_at,
                retryable, owner, number, fence, hold, lease_until, superseded, takeover, format
                {names}
            )
            SELECT
                :digest::uuid, :prefix::text, :key::text, :scope::text, :fingerprint::bytea,
                {State.PROCESSING:d}, {NOW}, {NOW}, false, :owner::bytea, 1, {_micros(NOW)},
                :hold::boolean, {_after("lease")}, '{{}}'::bytea[], false, {FORMAT}
                {values}
            WHERE NOT EXISTS (SELECT FROM found AS r WHERE NOT ({_CLAIMABLE}))
            ON CONFLICT (digest) DO UPDATE SET
                payload_hash = CASE
                    WHEN {_OWN} THEN r.payload_hash
                    WHEN {_GONE} THEN excluded.payload_hash
                    ELSE coalesce(excluded.payload_hash, r.payload_hash) END,
                superseded = CASE
                    WHEN {_OWN} THEN r.superseded
                    WHEN {_GONE} THEN excluded.superseded
                    WHEN {_DIFFER} THEN r.superseded[{oldest}:] || r.payload_hash
                    ELSE r.superseded END,
                takeover = NOT {_OWN} AND r.status = {State.PROCESSING:d},
                number = CASE
                    WHEN {_OWN} THEN r.number WHEN {_GONE} THEN 1 ELSE r.number + 1 END,
                fence = CASE WHEN {_OWN} THEN r.fence ELSE {_NEXT_FENCE} END,
                hold = CASE WHEN {_OWN} THEN r.hold ELSE excluded.hold END,
                created_at = CASE WHEN {_GONE} THEN excluded.created_at ELSE r.created_at END,
                status = excluded.status, result_payload = NULL, codec = NULL, retryable = false,
                expire_at = NULL, updated_at = excluded.updated_at, owner = excluded.owner,
                lease_until = excluded.lease_until, format = excluded.format
                {kept}
            WHERE {_CLAIMABLE}
            RETURNING {_SEEN}, r.takeover, true
        )
        SELECT * FROM written
        UNION ALL
        SELECT {_SEEN}, r.takeover, false FROM found AS r WHERE NOT EXISTS (SELECT FROM written)
    """  # noqa: S608 - the names are checked


def _put(table: str) -> str:
    """Write a mark; no row comes back when it is refused, `true` when it is there."""
    mine = f"(r.owner = :owner AND r.status = {State.SUCCEEDED:d} AND NOT {_GONE})"
    return f"""
        WITH found AS (
            SELECT {mine} AS mine FROM {table} AS r
            WHERE r.digest = :digest AND NOT ({_PUTTABLE})
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, status, result_payload, expire_at, created_at,
                updated_at, codec, retryable, owner, number, fence, hold, superseded, takeover,
                format
            )
            SELECT
                :digest::uuid, :prefix::text, :key::text, :scope::text, {State.SUCCEEDED:d},
                :data::bytea, {_after("ttl")}, {NOW}, {NOW}, :codec::text, false, :owner::bytea, 1,
                {_micros(NOW)}, false, '{{}}'::bytea[], false, {FORMAT}
            WHERE NOT EXISTS (SELECT FROM found)
            ON CONFLICT (digest) DO UPDATE SET
                payload_hash = NULL,
                superseded = CASE WHEN {_GONE} THEN excluded.superseded ELSE r.superseded END,
                takeover = false,
                number = CASE WHEN {_GONE} THEN 1 ELSE r.number + 1 END,
                fence = {_NEXT_FENCE},
                hold = false,
                created_at = CASE WHEN {_GONE} THEN excluded.created_at ELSE r.created_at END,
                status = excluded.status, result_payload = excluded.result_payload,
                codec = excluded.codec, retryable = false, expire_at = excluded.expire_at,
                updated_at = excluded.updated_at, owner = excluded.owner, lease_until = NULL,
                format = excluded.format
            WHERE {_PUTTABLE}
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
        "expire_at": _after("ttl"),
        "updated_at": NOW,
    }
    running = f"r.status = {State.PROCESSING:d}"
    changes = ", ".join(
        f"{name} = CASE WHEN {running} THEN {value} ELSE r.{name} END"
        for name, value in new.items()
    )
    return f"""
        UPDATE {table} AS r SET status = :state::smallint, lease_until = NULL, {changes}
        WHERE {_THIS} AND r.owner = :owner
            AND ({running} OR (r.status = :state::smallint AND NOT {_GONE}))
    """  # noqa: S608 - the name is checked


def _adopt(table: str) -> str:
    return f"""
        UPDATE {table} AS r SET
            fence = CASE
                WHEN {_OWN} THEN r.fence ELSE greatest(r.fence + 1, {_micros(NOW)}) END,
            owner = :owner::bytea, lease_until = {_after("lease")}, updated_at = {NOW}
        WHERE {_THIS} AND r.status = {State.PROCESSING:d} AND ({_OWN} OR NOT {_LIVE})
        RETURNING {_SEEN}
    """  # noqa: S608 - the name is checked


def _page(table: str) -> str:
    """List in the order of the index on the key, from `:start` on: no page sorts or skips."""
    return f"""
        SELECT {_SEEN} FROM {table} AS r
        WHERE r.prefix = :prefix AND NOT {_GONE} AND r.idem_key >= :start
            AND (:behind::text IS NULL OR r.idem_key < :behind)
            AND (:scope::text IS NULL OR r.biz_type = :scope)
            AND (:state::smallint IS NULL OR r.status = :state)
            AND (:after_key::text IS NULL
                OR (r.idem_key, r.biz_type) > (:after_key, :after_scope::text))
        ORDER BY r.idem_key, r.biz_type LIMIT :limit::bigint
    """  # noqa: S608 - the name is checked


def _purge(table: str, condition: str) -> str:
    """Delete a small batch along an index; what somebody has locked is left for the next one."""
    return f"""
        DELETE FROM {table} WHERE digest = ANY (ARRAY(
            SELECT r.digest FROM {table} AS r WHERE r.prefix = :prefix AND {condition}
            LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
        ))
    """  # noqa: S608 - the name is checked
