"""What each verb does on a SQL table, in every dialect: the rules are those of `semel.core.judge`.

The verbs are generators: they yield statements and receive replies, so that one text serves
threads and asyncio. They do no I/O. Each writes with one statement, its last, so that a verb that
fails leaves nothing behind in a transaction it shares with others. (What many insert together is
looked at once more; a caller that asks again learns that the record is its own.)

`SwapVerbs`, for servers that many programs write to, needs no transaction and holds no lock while
it judges, at any isolation level. SQL knows three things of a record:

- insert if absent: `claim` and `put` insert first, and read in the same round trip. Reading first
  and inserting then would race two callers of a new key.
- compare and swap: what `judge` wants to change is written against the row that was judged. Time
  only moves on meanwhile: what was abandoned or expired when it was read still is. A row that has
  changed is judged again.
- owned and running: `renew`, `complete` and `fail` name their owner and need no look first. One
  that changes nothing is looked at, to tell a command that was sent twice from one that is refused.

Sent twice because its answer was lost, each statement does no more than it did once. A first
execution and a replay cost one round trip to claim, and a first execution one to complete.

SQLite has one writer at a time: its own verbs read, judge and write in a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial, wraps
from operator import itemgetter
from typing import (
    Any,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)

from msgspec import Struct

from semel.core import judge
from semel.core.records import (
    VERBS,
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
    TouchRequest,
)
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.rows import COLUMNS, Row, seconds, to_record

T = TypeVar("T")
R = TypeVar("R", RenewRequest, CompleteRequest, FailRequest)
P = ParamSpec("P")


class Statement(NamedTuple):
    """One SQL statement with its parameters."""

    sql: str
    parameters: tuple[Any, ...]
    writes: bool
    then: Statement | None = None
    """Goes out in the same round trip, where the driver can. The reply joins both: what the first
    one changed, and the rows of the second."""


class Reply(NamedTuple):
    """What the database answered to a statement."""

    rows: list[Row]
    changed: int
    """How many rows a writing statement touched."""
    last_id: int = 0
    """What an insert left in LAST_INSERT_ID(), where there is such a thing."""


Verb: TypeAlias = Generator[Statement, Reply, T]


class Operation(Struct, Generic[T], frozen=True, gc=False):
    """A verb with its arguments, ready to be started (again, if its transaction is lost)."""

    start: Callable[[], Verb[T]]


def operation(verb: Callable[P, Verb[T]]) -> Callable[P, Operation[T]]:
    """Turn a generator function into one that returns the `Operation`."""

    @wraps(verb)
    def prepare(*args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        return Operation(partial(verb, *args, **kwargs))

    return prepare


OwnColumns: TypeAlias = Mapping[str, Callable[[ClaimRequest], Any]]
"""The application's own columns, each with the function that fills it."""


def own_values(columns: OwnColumns, ask: ClaimRequest) -> dict[str, Any]:
    """Fill the application's own columns; a function that raises is no outage of the store."""
    values: dict[str, Any] = {}
    for name, fill in columns.items():
        try:
            values[name] = fill(ask)
        except Exception as error:
            # Its text stays untold: it may quote the key.
            raise ConfigError(
                f"the function that fills the column {name} raised {type(error).__name__}; nothing "
                "was written"
            ) from error
    return values


def own_values_of_mark(columns: OwnColumns, mark: PutRequest) -> dict[str, Any]:
    """Fill the same columns for a mark, by a claim that has its names; none, if one cannot be.

    A column that may be empty, or has a default, then stays as it is.
    """
    try:
        return own_values(columns, ClaimRequest(mark.identity, mark.owner, None, 0.0, mark.ttl))
    except ConfigError:
        return {}


class SwapTable(Protocol):
    """The statements of one dialect that `SwapVerbs` sends.

    Those that read answer with the columns of `rows`, the server's time, what the dialect adds,
    and last whether this very statement made the row; or with what `SwapVerbs._rows` turns into it.
    """

    name: str

    def read(self, identity: Identity) -> Statement:
        """Read the row."""
        ...

    def claim(self, ask: ClaimRequest) -> Statement:
        """Insert the first claim unless there is a row; read the row in the same round trip.

        A new row of which the reply tells `SwapVerbs._fence_of_new` need not be read.
        """
        ...

    def put(self, ask: PutRequest) -> Statement:
        """Insert the mark unless there is a row; either way, read the row."""
        ...

    def swap(self, row: Row, record: Record, own: Mapping[str, Any]) -> Statement:
        """Write `record` over the row, if it is still the one that was read.

        A claim has a fence of its own, and what changes during it (renewed, ended, touched) shows
        in the others of `COMPARED`.
        """
        ...

    def filled(self, ask: ClaimRequest) -> dict[str, Any]:
        """Return the application's own columns, as this claim fills them."""
        ...

    def filled_by_mark(self, ask: PutRequest) -> dict[str, Any]:
        """Return the same columns for a mark; none, if their functions cannot."""
        ...

    def renew(self, ask: RenewRequest) -> Statement:
        """Extend the lease of a running owner."""
        ...

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner."""
        ...

    def fail(self, ask: FailRequest) -> Statement:
        """Store the failure of a running owner."""
        ...

    def touch(self, ask: TouchRequest) -> Statement:
        """Keep a finished record for `ttl` from now."""
        ...

    def delete(self, identity: Identity, *, expired: bool) -> Statement:
        """Remove the record, if it has expired, or if it has not."""
        ...


ROUNDS: Final = 20
"""How often a row may change between a look at it and the write, before a verb gives up."""


_OWNER, _NUMBER, _FENCE = map(COLUMNS.index, ("owner", "number", "fence"))

COMPARED: Final = ("fence", "status", "lease_until", "expire_at")
"""The columns that tell whether a row is still the one that was read: as they were read, because a
time that became a float and back may be another one (after the year 2242)."""

compared_of: Final = itemgetter(*map(COLUMNS.index, COMPARED))


class SwapVerbs:
    """The verbs on one record: insert first, judge what was there, swap."""

    def __init__(self, table: SwapTable) -> None:
        self._table = table

    @operation
    def claim(self, ask: ClaimRequest) -> Verb[Claim]:
        """Ask to run the operation."""
        insert = self._table.claim(ask)
        for _ in range(ROUNDS):
            reply = yield insert
            if (fence := self._fence_of_new(reply)) is not None:
                return Claimed(1, fence)
            for row in self._rows(reply):  # none: another one was made, or removed, meanwhile
                if row[-1] and row[_OWNER] == ask.owner:
                    return Claimed(row[_NUMBER], row[_FENCE])
                stored = record_of(row, ask.identity)
                answer, record = judge.claim(stored, ask, stored.now)
                if record is not None:
                    own = {} if stored.owner == ask.owner else self._table.filled(ask)
                    write: Statement | None = self._table.swap(row, record, own)
                else:
                    write = self._note_of_waiter(ask, answer, row)
                if write is None or (yield write).changed:
                    return answer
        raise self._changed_too_often()

    def _note_of_waiter(
        self,
        ask: ClaimRequest,  # noqa: ARG002 - for dialects that note it, as the next ones
        answer: Claim,  # noqa: ARG002
        row: Row,  # noqa: ARG002
    ) -> Statement | None:
        """Note in a running record that a caller waits for its end; None = nothing to write."""
        return None

    @operation
    def put(self, ask: PutRequest) -> Verb[bool]:
        """Mark as done without running."""
        insert = self._table.put(ask)
        for _ in range(ROUNDS):
            reply = yield insert
            if self._fence_of_new(reply) is not None:
                return True
            for row in self._rows(reply):  # none: another one was made, or removed, meanwhile
                if row[-1] and row[_OWNER] == ask.owner:
                    return True
                stored = record_of(row, ask.identity)
                record = judge.put(stored, ask, stored.now)
                if record is None or record is stored:
                    return record is not None
                own = self._table.filled_by_mark(ask)
                if (yield self._table.swap(row, record, own)).changed:
                    return True
        raise self._changed_too_often()

    @operation
    def adopt(self, ask: AdoptRequest) -> Verb[Record | None]:
        """Assign an abandoned attempt to a resolver."""
        for _ in range(ROUNDS):
            rows = self._rows((yield self._table.read(ask.identity)))
            if not rows:
                return None
            stored = record_of(rows[0], ask.identity)
            record = judge.adopt(stored, ask, stored.now)
            if record is None or (yield self._table.swap(rows[0], record, {})).changed:
                return record
        raise self._changed_too_often()

    @operation
    def renew(self, ask: RenewRequest) -> Verb[bool]:
        """Extend the owner's lease from now."""
        return (yield from self._as_owner(ask, self._table.renew(ask), judge.renew))

    @operation
    def complete(self, ask: CompleteRequest) -> Verb[bool]:
        """Store the owner's success."""
        return (yield from self._as_owner(ask, self._table.complete(ask), judge.complete))

    @operation
    def fail(self, ask: FailRequest) -> Verb[bool]:
        """Store the owner's failure."""
        return (yield from self._as_owner(ask, self._table.fail(ask), judge.fail))

    def _as_owner(
        self, ask: R, write: Statement, rule: Callable[[Record, R, float], Record | None]
    ) -> Verb[bool]:
        """Write to the record of a running owner; what was written before stays.

        A write that misses the record proves nothing: the node of a cluster that got it may not
        have applied the claim yet. The record decides, and a running owner's is written again.
        """
        for _ in range(ROUNDS):
            if (yield write).changed:
                return True
            stored = yield from self._read(ask.identity)
            record = None if stored is None else rule(stored, ask, stored.now)
            if record is None or record is stored:
                return record is not None
        raise StoreUnavailable(
            f"the record is in {self._table.name}, and none of {ROUNDS} writes reached it (a "
            "cluster's node that lags?); try again"
        )

    @operation
    def get(self, ask: GetRequest) -> Verb[Record | None]:
        """Read the record; expired is absent."""
        stored = yield from self._read(ask.identity)
        return None if stored is None else judge.present(stored, stored.now)

    @operation
    def touch(self, ask: TouchRequest) -> Verb[bool]:
        """Keep a finished record for `ttl` from now."""
        reply = yield self._table.touch(ask)
        return reply.changed > 0

    @operation
    def forget(self, ask: ForgetRequest) -> Verb[bool]:
        """Remove the record, whatever its state, and even if it cannot be read."""
        if (yield self._table.delete(ask.identity, expired=False)).changed:
            return True
        yield self._table.delete(ask.identity, expired=True)  # absent already, for the caller
        return False

    def _read(self, identity: Identity) -> Verb[Record | None]:
        rows = self._rows((yield self._table.read(identity)))
        return record_of(rows[0], identity) if rows else None

    def _fence_of_new(self, reply: Reply) -> int | None:  # noqa: ARG002 - for dialects that know
        """Return the fence of the row that an insert made, if its reply tells without the row."""
        return None

    def _rows(self, reply: Reply) -> list[Row]:
        """Return the rows that a statement about one record read."""
        return reply.rows

    def _changed_too_often(self) -> StoreUnavailable:
        # Without the operation, which the engine adds by its digest: a key may be a secret.
        return StoreUnavailable(
            f"the record in {self._table.name} was changed by others each of the {ROUNDS} times "
            "that it was judged (or its key is in a row that is not semel's); try again"
        )


def record_of(row: Row, identity: Identity) -> Record:
    """Read the row that was found under the digest of an identity, with the time that follows."""
    record = to_record(row[: len(COLUMNS)], seconds(row[len(COLUMNS)]))
    if record.identity != identity:
        raise StoreError("the digest of this key is taken by another key")
    return record


class Dialect(Protocol):
    """The verbs on one table. Transactional mode needs three; a store has one for each request."""

    def claim(self, ask: ClaimRequest) -> Operation[Claim]:
        """Ask to run the operation."""
        ...

    def renew(self, ask: RenewRequest) -> Operation[bool]:
        """Extend the owner's lease from now."""
        ...

    def complete(self, ask: CompleteRequest) -> Operation[bool]:
        """Store the owner's success."""
        ...


class BatchVerbs(Dialect, Protocol):
    """The verbs of a server, for one request and for many of one kind."""

    def batches_of(self, asks: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """List the batches that are sent for these requests; one in none is asked for alone."""
        ...

    def batch(self, asks: Sequence[Any]) -> Operation[dict[Identity, Any]]:
        """Carry out a batch; its answers come by identity. One that has none is asked for alone."""
        ...

    def second_look(
        self, asks: Sequence[Any], outcome: object
    ) -> Operation[dict[Identity, Any]] | None:
        """Return an operation that reads a failed batch's records without waiting for locks.

        None if there is none.
        """
        ...


def operations_of(verbs: Dialect) -> dict[type, Callable[[Any], Operation[Any]]]:
    """Map each request to the verb that answers it."""
    return {request: getattr(verbs, verb) for request, verb in VERBS.items()}
