"""What each verb does on a SQL table: read the row, let `judge` decide, write the row.

The verbs are generators: they yield statements and receive replies, so that one text serves
threads and asyncio, and every dialect. They do no I/O. Each writes with one statement, its last,
so that a verb that fails leaves nothing behind in a transaction it shares with others. (What many
insert together is looked at once more; whoever asks again is told that it is his own.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Any,
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
    AdoptRequest,
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
from semel.errors import ConfigError, RecordUnreadable
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.sql.rows import Row

if TYPE_CHECKING:  # transactions need the verbs, and `import semel` need not wait for batches
    from semel.stores.batching import Alone

T = TypeVar("T")
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


class Joint(Struct, Generic[T], frozen=True, gc=False):
    """One of many operations that a single statement can carry out."""

    identity: Identity
    """Two of the same never share a statement."""
    ask: Any
    together: Callable[[Sequence[Any]], Verb[list[T | Alone]]]
    """The same for everybody who may share it; it gets what each of them asks."""


class Operation(Struct, Generic[T], frozen=True, gc=False):
    """A verb with its arguments, ready to be started (again, if its transaction is lost)."""

    start: Callable[[], Verb[T]]
    peek: bool
    """Worth a try without a transaction: it often, or always, ends without writing."""
    look: Callable[[], Verb[T]] | None = None
    """What to try without a transaction, where `start` would begin with a write."""
    joint: Joint[T] | None = None
    """How it is carried out together with others, where the database gains by that."""


def operation(*, peek: bool) -> Callable[[Callable[P, Verb[T]]], Callable[P, Operation[T]]]:
    """Turn a generator function into one that returns the `Operation`."""

    def decorate(verb: Callable[P, Verb[T]]) -> Callable[P, Operation[T]]:
        @wraps(verb)
        def prepare(*args: P.args, **kwargs: P.kwargs) -> Operation[T]:
            return Operation(partial(verb, *args, **kwargs), peek)

        return prepare

    return decorate


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


class Table(Protocol):
    """The statements of one dialect, for verbs that judge in Python."""

    def read(self, identity: Identity) -> Verb[tuple[Record | None, float]]:
        """Read the record as stored, and the store's time."""
        ...

    def save(self, record: Record) -> Verb[None]:
        """Insert or overwrite the record."""
        ...

    def delete(self, identity: Identity) -> Verb[None]:
        """Remove the record."""
        ...

    def page(
        self, scope: str | None, prefix: str, state: State | None, limit: int, cursor: str | None
    ) -> Verb[Page]:
        """List records by key, then scope."""
        ...

    def stuck(self, older_than: float, limit: int) -> Verb[list[Record]]:
        """List abandoned records, oldest first."""
        ...

    def purge(self, limit: int, abandoned_after: float | None) -> Verb[int]:
        """Remove what may go, at most `limit`."""
        ...

    def counts(self) -> Verb[Counts]:
        """Count the records by state."""
        ...


class Verbs:
    """The verbs of the store SPI on one table, judged in Python inside a transaction.

    All but `claim`.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    @operation(peek=False)
    def renew(self, ask: RenewRequest) -> Verb[bool]:
        """Extend the owner's lease from now."""
        stored, now = yield from self._table.read(ask.identity)
        return (yield from self._keep(stored, judge.renew(stored, ask, now)))

    def complete(self, ask: CompleteRequest) -> Operation[bool]:
        """Store the owner's success."""
        return Operation(partial(self.completing, ask), peek=False)

    def completing(self, ask: CompleteRequest) -> Verb[bool]:
        """Read, judge and write a success."""
        stored, now = yield from self._table.read(ask.identity)
        return (yield from self._keep(stored, judge.complete(stored, ask, now)))

    @operation(peek=False)
    def fail(self, ask: FailRequest) -> Verb[bool]:
        """Store the owner's failure."""
        stored, now = yield from self._table.read(ask.identity)
        failed = judge.fail(
            stored,
            ask.owner,
            ask.error,
            retryable=ask.retryable,
            keep_fingerprint=ask.keep_fingerprint,
            ttl=ask.ttl,
            ran=ask.ran,
            now=now,
        )
        return (yield from self._keep(stored, failed))

    @operation(peek=True)
    def get(self, ask: GetRequest) -> Verb[Record | None]:
        """Read the record; expired is absent."""
        stored, now = yield from self._table.read(ask.identity)
        return judge.present(stored, now)

    @operation(peek=True)  # a mark that exists is the frequent case here too
    def put(self, ask: PutRequest) -> Verb[bool]:
        """Mark as done without running."""
        stored, now = yield from self._table.read(ask.identity)
        return (yield from self._keep(stored, judge.put(stored, ask, now)))

    @operation(peek=False)
    def touch(self, ask: TouchRequest) -> Verb[bool]:
        """Keep a finished record for `ttl` from now."""
        stored, now = yield from self._table.read(ask.identity)
        return (yield from self._keep(stored, judge.touch(stored, ask.ttl, now)))

    @operation(peek=False)
    def forget(self, ask: ForgetRequest) -> Verb[bool]:
        """Remove the record, whatever its state."""
        exists = known = True
        with suppress(RecordUnreadable):  # a damaged record exists, and this is the way out of it
            stored, now = yield from self._table.read(ask.identity)
            exists, known = stored is not None, judge.present(stored, now) is not None
        if exists:
            yield from self._table.delete(ask.identity)
        return known

    @operation(peek=False)
    def adopt(self, ask: AdoptRequest) -> Verb[Record | None]:
        """Give an abandoned attempt to a resolver."""
        stored, now = yield from self._table.read(ask.identity)
        adopted = judge.adopt(stored, ask, now)
        yield from self._keep(stored, adopted)
        return adopted

    @operation(peek=True)
    def page(self, ask: ScanRequest) -> Verb[Page]:
        """List records by key, then scope."""
        return (
            yield from self._table.page(ask.scope, ask.prefix, ask.state, ask.limit, ask.cursor)
        )

    @operation(peek=True)
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Abandoned records, oldest first."""
        return (yield from self._table.stuck(ask.older_than, ask.limit))

    @operation(peek=False)
    def purge(self, ask: PurgeRequest) -> Verb[int]:
        """Remove expired records and, if asked, those abandoned long ago that nobody holds."""
        return (yield from self._table.purge(ask.limit, ask.abandoned_after))

    @operation(peek=True)
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count the records by state."""
        return (yield from self._table.counts())

    def _keep(self, stored: Record | None, record: Record | None) -> Verb[bool]:
        """Write what the judge says; the very record that was read means it is there already."""
        if record is not None and record is not stored:
            yield from self._table.save(record)
        return record is not None
