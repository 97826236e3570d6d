"""What each verb does on MySQL and MariaDB: insert first, judge what was there, swap.

The verbs are generators: they yield statements and receive replies. Every statement commits by
itself (autocommit), so no verb holds a lock while it thinks, at any isolation level:

- `claim` and `put` insert first and read in the same round trip. Reading first and then inserting
  deadlocks two callers of a new key; a plain duplicate error locks as well.
- What the law in `judge` wants to change is written by compare-and-swap against the row that was
  judged. Time only moves on meanwhile: what was abandoned or expired when it was read still is.
  A row that has changed is judged again.
- The writes of an owner name it and need no look first. One that changes nothing is looked at, to
  tell a command that was sent twice from one that was refused.

Sent twice because its answer was lost, each statement does no more than it did once. Insert and
read share a round trip because it halves a replay over a network: first execution and replay cost
one round trip to claim, and one to complete. Measured on loopback, where a round trip is nearly
free, the pair in one message takes 0.75 to 0.9 of the time of two messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from semel.core import judge
from semel.core.records import (
    AdoptRequest,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
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
from semel.errors import StoreError, StoreUnavailable
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.batching import MOST_MEMBERS, Request
from semel.stores.sql.members import all_differ, in_order, portions
from semel.stores.sql.mysql.errors import concerns_every_member
from semel.stores.sql.mysql.statements import (
    ALL_NEW,
    SOME_MET,
    UNABLE,
    BatchStatements,
    Listing,
    MySQLTable,
)
from semel.stores.sql.rows import COLUMNS, Row, seconds, to_record
from semel.stores.sql.verbs import Operation, Reply, Statement, Verb, operation

ROUNDS: Final = 20
"""How often a row may change between a look at it and the write, before a verb gives up."""


class _Look(NamedTuple):
    """A row as it was found."""

    stored: Record | None
    now: float
    inserted: bool
    """Whether the insert before this look made the row."""


class MySQLVerbs:
    """The verbs of the store SPI, on one table."""

    def __init__(self, table: MySQLTable) -> None:
        self._table = table
        self._listing = Listing(table)

    @operation(peek=False)
    def claim(self, ask: ClaimRequest) -> Verb[Claim]:
        """Ask to run the operation."""
        for _ in range(ROUNDS):
            found = yield from self._look(self._table.claim(ask), ask.identity)
            if found.stored is None:
                continue  # removed between insert and read
            if found.inserted and found.stored.owner == ask.owner:
                return Claimed(found.stored.number, found.stored.fence)
            answer, record = judge.claim(found.stored, ask, found.now)
            own = self._table.filled(ask)
            if record is None or (yield from self._swapped(found.stored, record, own)):
                return answer
        raise self._restless(ask.identity)

    @operation(peek=False)
    def put(self, ask: PutRequest) -> Verb[bool]:
        """Mark as done without running."""
        for _ in range(ROUNDS):
            found = yield from self._look(self._table.put(ask), ask.identity)
            if found.stored is None:
                continue  # removed between insert and read
            if found.inserted and found.stored.owner == ask.owner:
                return True
            record = judge.put(found.stored, ask, found.now)
            if record is None or record is found.stored:
                return record is not None
            own = self._table.filled_by_mark(ask)
            if (yield from self._swapped(found.stored, record, own)):
                return True
        raise self._restless(ask.identity)

    @operation(peek=False)
    def adopt(self, ask: AdoptRequest) -> Verb[Record | None]:
        """Give an abandoned attempt to a resolver."""
        for _ in range(ROUNDS):
            found = yield from self._look(self._table.read(ask.identity), ask.identity)
            record = judge.adopt(found.stored, ask, found.now)
            if record is None or found.stored is None:
                return None
            if (yield from self._swapped(found.stored, record)):
                return record
        raise self._restless(ask.identity)

    @operation(peek=False)
    def renew(self, ask: RenewRequest) -> Verb[bool]:
        """Extend the owner's lease from now."""
        reply = yield self._table.renew(ask)
        return reply.changed > 0

    @operation(peek=False)
    def complete(self, ask: CompleteRequest) -> Verb[bool]:
        """Store the owner's success."""
        reply = yield self._table.complete(ask)
        return reply.changed > 0 or (
            yield from self._ended_as(State.SUCCEEDED, ask.identity, ask.owner)
        )

    @operation(peek=False)
    def fail(self, ask: FailRequest) -> Verb[bool]:
        """Store the owner's failure."""
        reply = yield self._table.fail(
            ask.identity,
            ask.owner,
            ask.error,
            retryable=ask.retryable,
            keep_fingerprint=ask.keep_fingerprint,
            ttl=ask.ttl,
            ran=ask.ran,
        )
        return reply.changed > 0 or (
            yield from self._ended_as(State.FAILED, ask.identity, ask.owner)
        )

    @operation(peek=False)
    def get(self, ask: GetRequest) -> Verb[Record | None]:
        """Read the record; expired is absent."""
        found = yield from self._look(self._table.read(ask.identity), ask.identity)
        return judge.present(found.stored, found.now)

    @operation(peek=False)
    def touch(self, ask: TouchRequest) -> Verb[bool]:
        """Keep a finished record for `ttl` from now."""
        reply = yield self._table.touch(ask.identity, ask.ttl)
        return reply.changed > 0

    @operation(peek=False)
    def forget(self, ask: ForgetRequest) -> Verb[bool]:
        """Remove the record, whatever its state."""
        reply = yield self._table.delete(ask.identity)
        return reply.changed > 0

    @operation(peek=False)
    def page(self, ask: ScanRequest) -> Verb[Page]:
        """List records by key, then scope."""
        return (
            yield from self._listing.page(ask.scope, ask.prefix, ask.state, ask.limit, ask.cursor)
        )

    @operation(peek=False)
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Abandoned records, oldest first."""
        return (yield from self._listing.stuck(ask.older_than, ask.limit))

    @operation(peek=False)
    def purge(self, ask: PurgeRequest) -> Verb[int]:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        return (yield from self._listing.purge(ask.limit, ask.abandoned_after))

    @operation(peek=False)
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count the records by state."""
        return (yield from self._listing.counts())

    @operation(peek=False)
    def diagnose(self) -> Verb[list[str]]:
        """Tell which settings of the server let it lose what it committed."""
        reply = yield Statement(
            "SELECT @@innodb_flush_log_at_trx_commit, LOWER(@@innodb_flush_method)",
            (),
            writes=False,
        )
        ((flushed, method),) = reply.rows
        dangers = []
        if flushed != 1:
            dangers.append(
                f"innodb_flush_log_at_trx_commit is {flushed}: a crash loses the last commits, and "
                "their operations run again; set it to 1"
            )
        if method == "nosync":
            dangers.append(
                "innodb_flush_method is nosync: a crash of the machine may damage the whole "
                "database; leave it at its default"
            )
        return dangers

    def _ended_as(self, state: State, identity: Identity, owner: bytes) -> Verb[bool]:
        """Tell whether the owner's attempt has ended this way before."""
        found = yield from self._look(self._table.read(identity), identity)
        record = judge.present(found.stored, found.now)
        return record is not None and record.state is state and record.owner == owner

    def _look(self, statement: Statement, identity: Identity) -> Verb[_Look]:
        reply = yield statement
        if not reply.rows:
            return _Look(None, 0.0, inserted=False)
        *row, now, inserted = reply.rows[0]
        record = record_of(tuple(row), seconds(now), identity)
        return _Look(record, record.now, inserted=bool(inserted))

    def _swapped(
        self, stored: Record, record: Record, own: Mapping[str, Any] | None = None
    ) -> Verb[bool]:
        reply = yield self._table.swap(stored, record, own or {})
        return reply.changed > 0

    def _restless(self, identity: Identity) -> StoreUnavailable:
        return StoreUnavailable(
            f"the record of {identity.scope!r} / {identity.key!r} in {self._table.name} changed "
            f"{ROUNDS} times while it was being judged (or its key is in a row that is not semel's)"
        )


def record_of(row: Row, now: float, identity: Identity) -> Record:
    """Read the row that was found under the digest of an identity."""
    record = to_record(row, now)
    if record.identity != identity:
        raise StoreError("the digest of this key is taken by another key")
    return record


# --- many members at once: one statement, one commit, a judgement of each row --------------
#
# The answers come by identity. A member that is not among them was left open: it is asked for by
# the verb for one member, which knows every case. The members must be different identities.

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


# --- who may share a statement, how many at once, and what its outcome is for each ----------

A = TypeVar("A", bound=Request)

MOST_BYTES: Final = 1 << 18
"""A batch ends with the member that fills it."""

HEAVY: Final = 1 << 17
"""Who weighs more goes alone. Quoting may double what is sent, and with these two limits it still
fits into a megabyte, the least `max_allowed_packet` in use: a server hangs up on larger packets,
and all members would be told of a lost connection."""


def cut(asks: Sequence[A], weight: Callable[[A], int]) -> list[list[A]]:
    """List the batches that are sent for these members; who is in none is asked for alone."""
    if not all_differ(asks):
        return []
    if len(asks) <= MOST_MEMBERS and sum(map(weight, asks)) <= HEAVY:
        return [list(asks)] if asks else []  # as those are that the batcher sends
    light = (ask for ask in asks if weight(ask) <= HEAVY)
    return list(portions(light, weight, most_members=MOST_MEMBERS, most_bytes=MOST_BYTES))


def weight_of_renewal(ask: RenewRequest) -> int:
    """Guess how much a renewal adds to a batch."""
    return 100 + len(ask.owner)


def told(outcomes: Iterable[tuple[Sequence[Request], Any]]) -> dict[Identity, Any]:
    """Turn the outcomes of batches into answers; who is not among them is asked for alone."""
    answers: dict[Identity, Any] = {}
    for asks, outcome in outcomes:
        if not isinstance(outcome, Exception):
            answers |= outcome
        elif concerns_every_member(outcome):
            answers |= {ask.identity: _copied(outcome) for ask in asks}
        # else the member that it belongs to meets it again
    return answers


def _copied(error: Exception) -> Exception:
    """Raised for many, one error would gather all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
