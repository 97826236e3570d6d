"""The verbs on PostgreSQL: its statements about one record, and the verbs that are its own.

The rules are those of `semel.core.judge`; a statement knows of a record only whether it is there,
whether it is still the one that was judged, and whether its owner runs. Every statement commits by
itself. It reads as of its beginning, though: when the row was made while it ran, it neither wrote
nor shows why; then it is sent again. `batch` has the statements for many records.

Values have names here (`:owner`) and become `$1`, `$2`... once, when the store is made. Each has
its type beside it where PostgreSQL could not tell it from a NULL. Times leave as microseconds,
which is what `rows` reads: no time zone and no last year of Python's calendar comes in between.
`r` is the row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final
from uuid import UUID

from semel.core.records import (
    AUDIT_SCOPE,
    Busy,
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    State,
    TouchRequest,
    checked_run_info,
)
from semel.errors import ValueRejected
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.sql.rows import (
    COLUMNS,
    ENTRIES_PURGED,
    FORMAT,
    Row,
    behind,
    listed,
    page_of,
    to_row,
)
from semel.stores.sql.verbs import (
    COMPARED,
    OwnColumns,
    Statement,
    SwapVerbs,
    Verb,
    compared_of,
    operation,
    own_values,
    own_values_of_mark,
)
from semel.stores.urls import position, whole_number

# --- fragments: values, times, conditions -----------------------------------------------------


NOW: Final = "statement_timestamp()"

TIMES: Final = frozenset({"expire_at", "created_at", "updated_at", "lease_until"})

_PLACEHOLDER = re.compile(r"(?<!:):([a-z_][a-z0-9_]*)")


class Query:
    """A statement with named values."""

    def __init__(self, sql: str, *, writes: bool) -> None:
        names = tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))
        numbers = {name: f"${number}" for number, name in enumerate(names, 1)}
        self._sql = " ".join(_PLACEHOLDER.sub(lambda found: numbers[found[1]], sql).split())
        self._writes = writes
        # Twice the first: of one name alone, it would give the value and no tuple.
        self._pick = itemgetter(names[0], *names)

    def __call__(self, **values: Any) -> Statement:
        """Return the value of each name; those that the statement does not know are left out."""
        return self.fill(values)

    def fill(self, values: Mapping[str, Any]) -> Statement:
        """Do the same with a mapping, which is quicker."""
        return Statement(self._sql, self._pick(values)[1:], self._writes)


def micros(moment: str) -> str:
    """Turn a time into microseconds."""
    return f"(extract(epoch FROM {moment}) * 1000000)::bigint"


def after(seconds: str) -> str:
    """Name the moment that is so many seconds from now."""
    return f"{NOW} + :{seconds}::float8 * interval '1 second'"


def moment(name: str) -> str:
    """Turn microseconds into a time."""
    return f"'epoch'::timestamptz + :{name}::bigint * interval '1 microsecond'"


_ROW = ", ".join(micros(f"r.{name}") if name in TIMES else f"r.{name}" for name in COLUMNS)
SEEN = f"{_ROW}, {micros(NOW)}"
"""A row as `verbs` reads it: the columns of `rows`, then the time of the statement."""

CHANNEL: Final = "semel_wakeup"
"""Where wake-ups go. One channel for all keys: a listener needs no statement for each of them."""

WAKE = f"CASE WHEN r.waited_for THEN pg_notify('{CHANNEL}', r.digest::text) END"
"""Lets those who wait ask again. Every role of the database can read the message, and send it."""

THIS = "r.digest = :digest AND r.idem_key = :key AND r.biz_type = :scope"
GONE = f"(r.expire_at IS NOT NULL AND r.expire_at <= {NOW})"
RUNNING = f"r.status::integer = {State.PROCESSING:d}"
"""For statements about one record, or some: the cast keeps them from the index of all running ones.
While few run, the planner prefers it to the primary key; and a prepared plan is kept."""
OWN = f"({RUNNING} AND r.owner = :owner)"
NO_ENTRY = f"(r.biz_type <> '{AUDIT_SCOPE}')"
"""Is no entry of the audit trail."""
LIVE = f"(r.status = {State.PROCESSING:d} AND r.lease_until > {NOW})"


MOST_BYTES: Final = (1 << 30) - (1 << 16)
"""Of one result. PostgreSQL takes no message of a gigabyte: it hangs up without a word."""

DIGESTS_KEPT: Final = 256
"""A claim is soon followed by a complete of the same identity."""

_FIRST_CLAIM: Final = {"state": int(State.PROCESSING), "codec": None, "ttl": None}
_MARK: Final = {"state": int(State.SUCCEEDED), "fingerprint": None, "hold": False, "lease": None}
_SUCCESS: Final = {
    "state": int(State.SUCCEEDED),
    "retryable": False,
    "keep_fingerprint": True,
    "ran": True,
}
_WAS: Final = tuple(f"was_{name}" for name in COMPARED)


class PostgresTable:
    """One table of records, seen by the store of one prefix."""

    def __init__(self, name: str, prefix: str, columns: OwnColumns) -> None:
        """`columns` are the application's own, filled by a claim."""
        self.name = name
        self.prefix = prefix
        self.columns = columns
        self.digest = lru_cache(maxsize=DIGESTS_KEPT)(self._digest)
        self._salt = f"{len(prefix)}:{prefix}:".encode()
        self.statements = Statements(name, tuple(columns))

    def read(self, identity: Identity) -> Statement:
        """Read the row."""
        return self.statements.get.fill(self.named(identity))

    def claim(self, ask: ClaimRequest) -> Statement:
        """Insert the first claim unless there is a row; either way, read the row."""
        values = self.named(ask.identity)
        values.update(_FIRST_CLAIM)
        values["owner"] = ask.owner
        values["fingerprint"] = ask.fingerprint
        values["lease"] = ask.lease
        values["hold"] = ask.hold
        values["data"] = checked_run_info(ask.run_info)
        for name, value in own_values(self.columns, ask).items():
            values[f"own_{name}"] = value
        return self.statements.insert.fill(values)

    def put(self, ask: PutRequest) -> Statement:
        """Insert the mark unless there is a row; either way, read the row."""
        check_size(len(ask.result.data))
        own = self.filled_by_mark(ask)
        values = self.named(ask.identity) | _MARK
        values["owner"] = ask.owner
        values["data"] = ask.result.data
        values["codec"] = ask.result.codec
        values["ttl"] = ask.ttl
        values |= {f"own_{name}": value for name, value in own.items()}
        return (self.statements.insert if own else self.statements.insert_plain).fill(values)

    def swap(self, row: Row, record: Record, own: Mapping[str, Any]) -> Statement:
        """Write `record` over the row, if it is still the one that was read."""
        values = self.named(record.identity) | dict(zip(COLUMNS, to_row(record), strict=True))
        values["superseded"] = list(record.superseded)  # an array here
        values |= zip(_WAS, compared_of(row), strict=True)
        values |= {f"own_{name}": value for name, value in own.items()}
        return (self.statements.swap if own else self.statements.swap_plain).fill(values)

    def filled(self, ask: ClaimRequest) -> dict[str, Any]:
        """Return the application's own columns, as this claim fills them."""
        return own_values(self.columns, ask)

    def filled_by_mark(self, ask: PutRequest) -> dict[str, Any]:
        """Return the same columns for a mark; none, if their functions cannot."""
        return own_values_of_mark(self.columns, ask)

    def renew(self, ask: RenewRequest) -> Statement:
        """Extend the lease of a running owner, or end it and wake those who wait."""
        write = self.statements.renew if ask.lease > 0 else self.statements.park
        named = self.named(ask.identity)
        return write(**named, owner=ask.owner, lease=ask.lease, run_info=ask.run_info)

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner."""
        values = self._ending(ask.identity, ask.owner, ask.result, ask.ttl)
        values.update(_SUCCESS)
        return self.statements.end.fill(values)

    def fail(self, ask: FailRequest) -> Statement:
        """Store the failure of a running owner."""
        values = self._ending(ask.identity, ask.owner, ask.error, ask.ttl)
        values["state"] = int(State.FAILED)
        values["retryable"] = ask.retryable
        values["keep_fingerprint"] = ask.keep_fingerprint
        values["ran"] = ask.ran
        return self.statements.end.fill(values)

    def _ending(
        self, identity: Identity, owner: bytes, outcome: Encoded, ttl: float
    ) -> dict[str, Any]:
        check_size(len(outcome.data))
        values = self.named(identity)
        values["owner"] = owner
        values["data"] = outcome.data
        values["codec"] = outcome.codec
        values["ttl"] = ttl
        return values

    def note_waiter(self, identity: Identity, owner: bytes | None) -> Statement:
        """Note in the row of a running owner that a caller waits for its end."""
        return self.statements.note_waiter(**self.named(identity), owner=owner)

    def touch(self, ask: TouchRequest) -> Statement:
        """Keep a finished record for `ttl` from now."""
        return self.statements.touch(**self.named(ask.identity), ttl=ask.ttl)

    def delete(self, identity: Identity, *, expired: bool) -> Statement:
        """Remove the record, if it has expired, or if it has not."""
        delete = self.statements.forget_expired if expired else self.statements.forget
        return delete(**self.named(identity))

    def named(self, identity: Identity) -> dict[str, Any]:
        """Return the values that every statement about one record has."""
        return {
            "digest": self.digest(identity),
            "prefix": self.prefix,
            "key": identity.key,
            "scope": identity.scope,
        }

    def _digest(self, identity: Identity) -> UUID:
        """Return the primary key of a record."""
        return UUID(bytes=self.short_digest(identity))

    def short_digest(self, identity: Identity) -> bytes:
        """Return the primary key as bytes."""
        return hashlib.sha256(self._salt + identity.encoded).digest()[:16]


def check_size(size: int) -> None:
    """Refuse to send what the server can never take."""
    if size > MOST_BYTES:
        raise ValueRejected(f"PostgreSQL takes at most {MOST_BYTES} bytes at once, not {size}")


class Statements:
    """The statements for one table; `columns` are the application's own, filled by a claim."""

    def __init__(self, table: str, columns: Sequence[str]) -> None:
        self.insert = Query(_insert(table, columns), writes=True)
        self.insert_plain = Query(_insert(table, ()), writes=True)
        self.swap = Query(_swap(table, columns), writes=True)
        self.swap_plain = Query(_swap(table, ()), writes=True)
        renewing = (
            f"UPDATE {table} AS r SET lease_until = {after('lease')}, updated_at = {NOW}, "  # noqa: S608 - the name is checked, here and below
            "result_payload = coalesce(:run_info::bytea, r.result_payload) "
            f"WHERE {THIS} AND {OWN}"
        )
        self.renew = Query(renewing, writes=True)
        self.park = Query(f"{renewing} RETURNING {WAKE}", writes=True)
        self.note_waiter = Query(
            f"UPDATE {table} AS r SET waited_for = true WHERE {THIS} AND {OWN}",  # noqa: S608
            writes=True,
        )
        self.end = Query(_end(table), writes=True)
        self.get = Query(
            f"SELECT {SEEN}, r.waited_for, false FROM {table} AS r WHERE r.digest = :digest",  # noqa: S608
            writes=False,
        )
        self.touch = Query(
            f"UPDATE {table} AS r SET expire_at = {after('ttl')} "  # noqa: S608
            f"WHERE {THIS} AND r.expire_at > {NOW}",
            writes=True,
        )
        self.forget = Query(
            f"DELETE FROM {table} AS r WHERE {THIS} AND NOT {GONE} RETURNING {WAKE}",  # noqa: S608
            writes=True,
        )
        self.forget_expired = Query(
            f"DELETE FROM {table} AS r WHERE {THIS} AND {GONE}",  # noqa: S608
            writes=True,
        )
        self.page = Query(_page(table), writes=False)
        self.stuck = Query(
            f"SELECT {SEEN} FROM {table} AS r WHERE r.status = {State.PROCESSING:d} "  # noqa: S608
            f"AND r.prefix = :prefix AND r.lease_until <= {after('since')} "
            "ORDER BY r.lease_until LIMIT :limit::bigint",
            writes=False,
        )
        self.purge_expired = Query(
            _purge(table, f"r.expire_at <= {NOW} AND {NO_ENTRY}", by="expire_at"), writes=True
        )
        self.purge_audit = Query(
            _purge(table, f"r.expire_at <= {NOW} AND NOT {NO_ENTRY}", by="expire_at"), writes=True
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
            f"FROM {table} AS r WHERE r.prefix = :prefix AND NOT {GONE} AND {NO_ENTRY}",
            writes=False,
        )


def _insert(table: str, columns: Sequence[str]) -> str:
    """Write a new record unless there is one; either way, the row comes back.

    The row is looked at first: a duplicate then locks nothing and writes nothing, so that replays
    of one key do not stand in line. No row comes back when another one was made meanwhile.
    """
    names = "".join(f', "{name}"' for name in columns)
    values = "".join(f", :own_{name}" for name in columns)
    return f"""
        WITH found AS (
            SELECT r.* FROM {table} AS r WHERE r.digest = :digest
        ), written AS (
            INSERT INTO {table} AS r (
                digest, prefix, idem_key, biz_type, payload_hash, status, result_payload,
                expire_at, created_at, updated_at, codec, retryable, owner, number, fence, hold,
                lease_until, superseded, takeover, waited_for, format
                {names}
            )
            SELECT
                :digest::uuid, :prefix::text, :key::text, :scope::text, :fingerprint::bytea,
                :state::smallint, :data::bytea, {after("ttl")}, {NOW}, {NOW}, :codec::text, false,
                :owner::bytea, 1, {micros(NOW)}, :hold::boolean, {after("lease")},
                '{{}}'::bytea[], false, false, {FORMAT}
                {values}
            WHERE NOT EXISTS (SELECT FROM found)
            ON CONFLICT (digest) DO NOTHING
            RETURNING {SEEN}, r.waited_for, true
        )
        SELECT * FROM written
        UNION ALL
        SELECT {SEEN}, r.waited_for, false FROM found AS r
    """  # noqa: S608 - the names are checked


def _swap(table: str, columns: Sequence[str]) -> str:
    """Write a record over the row, if it is still the one that was read."""
    values = {name: f":{name}::{kind}" for name, kind in _WRITTEN.items()}
    values |= {name: moment(name) for name in TIMES}
    changes = ", ".join(f"{name} = {value}" for name, value in values.items())
    own = "".join(f', "{name}" = :own_{name}' for name in columns)
    return f"""
        UPDATE {table} AS r SET {changes}{own},
            waited_for = r.waited_for AND {RUNNING} AND :status::smallint = {State.PROCESSING:d}
        WHERE {THIS} AND r.fence = :was_fence::bigint AND r.status::integer = :was_status::integer
            AND {micros("r.lease_until")} IS NOT DISTINCT FROM :was_lease_until::bigint
            AND {micros("r.expire_at")} IS NOT DISTINCT FROM :was_expire_at::bigint
    """  # noqa: S608 - the names are checked


_WRITTEN: Final = {
    "payload_hash": "bytea",
    "status": "smallint",
    "result_payload": "bytea",
    "codec": "text",
    "retryable": "boolean",
    "owner": "bytea",
    "number": "integer",
    "fence": "bigint",
    "hold": "boolean",
    "superseded": "bytea[]",
    "format": "smallint",
}
"""What a swap writes beside the times, with the types of the columns."""


def _end(table: str) -> str:
    """Write the outcome of an attempt that runs."""
    return f"""
        UPDATE {table} AS r SET
            status = :state::smallint, lease_until = NULL, result_payload = :data::bytea,
            codec = :codec::text, retryable = :retryable::boolean,
            payload_hash = CASE WHEN :keep_fingerprint::boolean THEN r.payload_hash END,
            number = CASE WHEN :ran::boolean THEN r.number ELSE r.number - 1 END,
            expire_at = {after("ttl")}, updated_at = {NOW}
        WHERE {THIS} AND {OWN}
        RETURNING {WAKE}
    """  # noqa: S608 - the name is checked


def _page(table: str) -> str:
    """List in the order of the index on the key, from `:start` on: no page sorts or skips."""
    return f"""
        SELECT {SEEN} FROM {table} AS r
        WHERE r.prefix = :prefix AND NOT {GONE} AND r.idem_key >= :start
            AND (:behind::text IS NULL OR r.idem_key < :behind)
            AND CASE WHEN :scope::text IS NULL THEN {NO_ENTRY} ELSE r.biz_type = :scope END
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


# --- the verbs ---------------------------------------------------------------------------------

UNSAFE_WHEN_OFF: Final = {
    "fsync": "a crash of the machine may damage the whole database; set it to on",
    "full_page_writes": "a crash of the machine may damage the whole database; set it to on",
    "synchronous_commit": "a crash of the server loses the last commits, and their operations run "
    "again; set it to on for the role that semel uses",
}
"""Settings that are dangerous when they are off, and why."""


class PostgresVerbs(SwapVerbs):
    """The verbs of the store SPI, on one table, for the store of one prefix."""

    _table: PostgresTable

    def __init__(
        self, table: str, prefix: str, columns: OwnColumns, waiting: Container[UUID] = ()
    ) -> None:
        """`waiting` has the digests of the records for whose end a caller waits."""
        super().__init__(PostgresTable(table, prefix, columns))
        self._waiting = waiting

    @property
    def table(self) -> str:
        """The name of the table, as it stands in statements."""
        return self._table.name

    def on(self, table: str) -> PostgresVerbs:
        """Return the verbs on another table, for the same prefix."""
        return PostgresVerbs(table, self._table.prefix, self._table.columns)

    def digest(self, identity: Identity) -> UUID:
        """Return the primary key of a record."""
        return self._table.digest(identity)

    def short_digest(self, identity: Identity) -> bytes:
        """Return the primary key as bytes."""
        return self._table.short_digest(identity)

    def _note_of_waiter(self, ask: ClaimRequest, answer: Claim, row: Row) -> Statement | None:
        """Only for those who wait: another duplicate that gets nothing writes nothing."""
        *_, waited_for, _inserted = row
        # Who asks for no lease is in a transaction of its own, and does not wait for a wake-up.
        if waited_for or ask.lease <= 0 or not isinstance(answer, Busy):
            return None
        if self.digest(ask.identity) not in self._waiting:
            return None
        return self._table.note_waiter(ask.identity, answer.owner)

    @operation
    def scan(self, ask: ScanRequest) -> Verb[Page]:
        """List records by key, then scope."""
        whole_number("limit", ask.limit)
        after_key, after_scope = (None, None) if ask.cursor is None else position(ask.cursor)
        reply = yield self._table.statements.page(
            prefix=self._table.prefix,
            start=max(ask.prefix, after_key or ""),
            behind=behind(ask.prefix),
            scope=ask.scope,
            state=None if ask.state is None else int(ask.state),
            after_key=after_key,
            after_scope=after_scope,
            limit=ask.limit + 1,
        )
        return page_of(reply.rows, ask.limit)

    @operation
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Abandoned records, oldest first."""
        reply = yield self._table.statements.stuck(
            prefix=self._table.prefix, since=-ask.older_than, limit=ask.limit
        )
        return listed(reply.rows)

    @operation
    def purge(self, ask: PurgeRequest) -> Verb[int]:
        """Remove expired records and, if asked, those abandoned long ago that are not held."""
        reply = yield self._table.statements.purge_expired(
            prefix=self._table.prefix, limit=ask.limit
        )
        removed = reply.changed
        if ask.abandoned_after is not None and removed < ask.limit:
            reply = yield self._table.statements.purge_abandoned(
                prefix=self._table.prefix, limit=ask.limit - removed, since=-ask.abandoned_after
            )
            removed += reply.changed
        if removed < ask.limit:
            # Last: now the index of what has expired has these entries and no others.
            yield self._table.statements.purge_audit(
                prefix=self._table.prefix, limit=ENTRIES_PURGED
            )
        return removed

    @operation
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count the records by state."""
        reply = yield self._table.statements.counts(prefix=self._table.prefix)
        return Counts(*reply.rows[0])

    @operation
    def diagnose(self) -> Verb[list[str]]:
        """Return which settings of the server or this session let it lose what it committed."""
        reply = yield Statement(
            "SELECT name::text FROM pg_catalog.pg_settings WHERE name = ANY ($1::text[]) "
            "AND setting = 'off' ORDER BY name",
            (list(UNSAFE_WHEN_OFF),),
            writes=False,
        )
        return [f"{name} is off: {UNSAFE_WHEN_OFF[name]}" for (name,) in reply.rows]
