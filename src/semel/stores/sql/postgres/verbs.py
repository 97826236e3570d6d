"""What each verb does on PostgreSQL: one statement, and a judgement of the row that comes back.

The verbs are generators, as in `semel.stores.sql.verbs`, but none needs a transaction: the
statement decides on the newest version of the row whether it may be written. A statement reads
as of its beginning, though. When the row was changed while it ran, it neither wrote nor shows
why; then it is sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from functools import lru_cache, partial
from typing import Any, Final
from uuid import UUID

from semel.core import judge
from semel.core.records import (
    AdoptRequest,
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    State,
    TouchRequest,
)
from semel.errors import StoreError, StoreUnavailable, ValueRejected
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.paging import position
from semel.stores.sql.listed import listed, page_of
from semel.stores.sql.postgres.statements import Statements
from semel.stores.sql.ranges import behind
from semel.stores.sql.rows import Row, seconds, to_record
from semel.stores.sql.verbs import (
    OwnColumns,
    Statement,
    Verb,
    operation,
    own_values,
    own_values_of_mark,
)
from semel.stores.urls import whole_number

MOST_SENDINGS: Final = 100
"""A row that changes under every one of so many statements is no accident any more."""

MOST_BYTES: Final = (1 << 30) - (1 << 16)
"""Of one result. PostgreSQL takes no message of a gigabyte: it hangs up without a word."""

DANGERS: Final = {
    "fsync": "a crash of the machine may damage the whole database; set it to on",
    "full_page_writes": "a crash of the machine may damage the whole database; set it to on",
    "synchronous_commit": "a crash of the server loses the last commits, and their operations run "
    "again; set it to on for the role that semel uses",
}
"""Settings that are dangerous when they are off, and why."""

DIGESTS_KEPT: Final = 256
"""A claim is soon followed by a complete of the same identity."""

single = partial(operation, peek=True)
"""One statement, committed by itself."""


class PostgresVerbs:
    """The verbs of the store SPI, on one table, for the store of one prefix."""

    def __init__(
        self, table: str, prefix: str, columns: OwnColumns, waiting: Container[UUID] = ()
    ) -> None:
        """`waiting` has the digests of the records whose end somebody waits to hear of."""
        self._statements = Statements(table, tuple(columns))
        self._prefix = prefix
        self._salt = f"{len(prefix)}:{prefix}:".encode()
        self._columns = columns
        self._waiting = waiting
        self.digest = lru_cache(maxsize=DIGESTS_KEPT)(self._digest)

    @single()
    def claim(self, ask: ClaimRequest) -> Verb[Claim]:
        """Ask to run the operation."""
        values = self._named(ask.identity)
        values["owner"] = ask.owner
        values["fingerprint"] = ask.fingerprint
        values["lease"] = ask.lease
        values["hold"] = ask.hold
        values["replace"] = ask.replace
        values["max_attempts"] = ask.max_attempts
        for name, value in own_values(self._columns, ask).items():
            values[f"own_{name}"] = value
        statement = self._statements.claim.fill(values)
        for _ in range(MOST_SENDINGS):
            reply = yield statement
            for *row, takeover, waited_for, written in reply.rows:
                record = record_of(row, ask.identity)
                if written:
                    return Claimed(record.number, record.fence, takeover)
                answer, _changed = judge.claim(record, ask, record.now)
                if isinstance(answer, Claimed):
                    continue
                if (yield from self._noted(ask, answer, waited_for=waited_for)):
                    return answer
        raise _restless(ask.identity)

    @single()
    def renew(self, ask: RenewRequest) -> Verb[bool]:
        """Extend the owner's lease from now."""
        write = self._statements.renew if ask.lease > 0 else self._statements.park
        reply = yield write(**self._named(ask.identity), owner=ask.owner, lease=ask.lease)
        return reply.changed > 0

    @single()
    def complete(self, ask: CompleteRequest) -> Verb[bool]:
        """Store the owner's success."""
        reply = yield self._end(
            State.SUCCEEDED, ask.identity, ask.owner, ask.result, ask.ttl, keep_fingerprint=True
        )
        return reply.changed > 0

    @single()
    def fail(self, ask: FailRequest) -> Verb[bool]:
        """Store the owner's failure."""
        reply = yield self._end(
            State.FAILED,
            ask.identity,
            ask.owner,
            ask.error,
            ask.ttl,
            retryable=ask.retryable,
            keep_fingerprint=ask.keep_fingerprint,
            ran=ask.ran,
        )
        return reply.changed > 0

    @single()
    def get(self, ask: GetRequest) -> Verb[Record | None]:
        """Read the record; expired is absent."""
        reply = yield self._statements.get(**self._named(ask.identity))
        for row in reply.rows:
            record = record_of(row, ask.identity)
            return judge.present(record, record.now)
        return None

    @single()
    def put(self, ask: PutRequest) -> Verb[bool]:
        """Mark as done without running."""
        check_size(len(ask.result.data))
        own = own_values_of_mark(self._columns, ask)
        write = self._statements.put if own else self._statements.put_plain
        statement = write(
            **self._named(ask.identity),
            owner=ask.owner,
            data=ask.result.data,
            codec=ask.result.codec,
            ttl=ask.ttl,
            **{f"own_{name}": value for name, value in own.items()},
        )
        for _ in range(MOST_SENDINGS):
            reply = yield statement
            for (there,) in reply.rows:
                return bool(there)
        raise _restless(ask.identity)

    @single()
    def touch(self, ask: TouchRequest) -> Verb[bool]:
        """Keep a finished record for `ttl` from now."""
        reply = yield self._statements.touch(**self._named(ask.identity), ttl=ask.ttl)
        return reply.changed > 0

    @single()
    def forget(self, ask: ForgetRequest) -> Verb[bool]:
        """Remove the record, whatever its state."""
        reply = yield self._statements.forget(**self._named(ask.identity))
        return any(known for known, _ in reply.rows)

    @single()
    def adopt(self, ask: AdoptRequest) -> Verb[Record | None]:
        """Give an abandoned attempt to a resolver."""
        reply = yield self._statements.adopt(
            **self._named(ask.identity), owner=ask.owner, lease=ask.lease
        )
        for row in reply.rows:
            return record_of(row, ask.identity)
        return None

    @single()
    def page(self, ask: ScanRequest) -> Verb[Page]:
        """List records by key, then scope."""
        whole_number("limit", ask.limit)
        after_key, after_scope = (None, None) if ask.cursor is None else position(ask.cursor)
        reply = yield self._statements.page(
            prefix=self._prefix,
            start=max(ask.prefix, after_key or ""),
            behind=behind(ask.prefix),
            scope=ask.scope,
            state=None if ask.state is None else int(ask.state),
            after_key=after_key,
            after_scope=after_scope,
            limit=ask.limit + 1,
        )
        return page_of(reply.rows, ask.limit)

    @single()
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Abandoned records, oldest first."""
        reply = yield self._statements.stuck(
            prefix=self._prefix, since=-ask.older_than, limit=ask.limit
        )
        return listed(reply.rows)

    @single()
    def purge(self, ask: PurgeRequest) -> Verb[int]:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        reply = yield self._statements.purge_expired(prefix=self._prefix, limit=ask.limit)
        removed = reply.changed
        if ask.abandoned_after is not None and removed < ask.limit:
            reply = yield self._statements.purge_abandoned(
                prefix=self._prefix, limit=ask.limit - removed, since=-ask.abandoned_after
            )
            removed += reply.changed
        return removed

    @single()
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count the records by state."""
        reply = yield self._statements.counts(prefix=self._prefix)
        return Counts(*reply.rows[0])

    @single()
    def diagnose(self) -> Verb[list[str]]:
        """Tell which settings of the server, or of this session, let it lose what it committed."""
        reply = yield Statement(
            "SELECT name::text FROM pg_catalog.pg_settings WHERE name = ANY ($1::text[]) "
            "AND setting = 'off' ORDER BY name",
            (list(DANGERS),),
            writes=False,
        )
        return [f"{name} is off: {DANGERS[name]}" for (name,) in reply.rows]

    def _end(
        self,
        state: State,
        identity: Identity,
        owner: bytes,
        outcome: Encoded,
        ttl: float,
        *,
        retryable: bool = False,
        keep_fingerprint: bool,
        ran: bool = True,
    ) -> Statement:
        check_size(len(outcome.data))
        values = self._named(identity)
        values["owner"] = owner
        values["state"] = int(state)
        values["data"] = outcome.data
        values["codec"] = outcome.codec
        values["ttl"] = ttl
        values["retryable"] = retryable
        values["keep_fingerprint"] = keep_fingerprint
        values["ran"] = ran
        return self._statements.end.fill(values)

    def _noted(self, ask: ClaimRequest, answer: Claim, *, waited_for: bool) -> Verb[bool]:
        """Note in the row that somebody waits here; False = it ended before that, unheard.

        Only for those who wait: another duplicate that gets nothing writes nothing.
        """
        # Who asks for no lease is in a transaction of its own, and does not wait for a wake-up.
        if waited_for or ask.lease <= 0 or not isinstance(answer, Busy):
            return True
        named = self._named(ask.identity)
        if named["digest"] not in self._waiting:
            return True
        reply = yield self._statements.note_waiter(**named, owner=answer.owner)
        return reply.changed > 0

    def _digest(self, identity: Identity) -> UUID:
        """Give the primary key of a record."""
        return UUID(bytes=self.short_digest(identity))

    def short_digest(self, identity: Identity) -> bytes:
        """Give the primary key as bytes."""
        return hashlib.sha256(self._salt + identity.encoded).digest()[:16]

    def _named(self, identity: Identity) -> dict[str, Any]:
        return {
            "digest": self.digest(identity),
            "prefix": self._prefix,
            "key": identity.key,
            "scope": identity.scope,
        }


def check_size(size: int) -> None:
    """Refuse to send what the server can never take."""
    if size > MOST_BYTES:
        raise ValueRejected(f"PostgreSQL takes at most {MOST_BYTES} bytes at once, not {size}")


def record_of(row: Row | list[Any], identity: Identity) -> Record:
    """Read a row that must be of this identity."""
    *columns, now = row
    record = to_record(tuple(columns), seconds(now))
    if record.identity != identity:
        raise StoreError("the digest of this key is taken by another key")
    return record


def _restless(identity: Identity) -> StoreUnavailable:
    return StoreUnavailable(
        f"the record of {identity!r} was changed by others each time it was asked for; try again"
    )
