"""The store SPI: few verbs, each one atomic.

What every store promises (proved by `semel.testing.StoreContract`):

- Each verb is one atomic step, and safe to send twice: the same owner gets the same answer.
- `claim` judges in the order written in `semel.core.judge`.
- The current owner is the owner id in the record. A passed lease alone refuses nothing; only
  another claim (or an operator's `forget`) makes an owner's writes answer False.
- Time is the store's, read once per verb; a client's clock never matters.
- A store that cannot answer raises `StoreUnavailable` (or `StoreFull`), never a driver's error.

Optional capabilities are small Protocols of their own; the engines use what a store offers.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar, cast, runtime_checkable

from msgspec import Struct

from semel.core.records import (
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Ended,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    State,
)
from semel.errors import StoreError

T = TypeVar("T")


class Store(Protocol):
    """A store for threads.

    An `identity` is a scope and a key. An `owner` is the random id of one attempt. `lease` and
    `ttl` are seconds from now: how long an attempt runs unless renewed, and how long what has ended
    is kept. `result` and `error` are bytes that a store does not look into.
    """

    def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation; the answer to `ask` says who may, and what is known."""
        ...

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the lease from now; 0 parks the attempt (abandoned from now on).

        A lease below 0 parks it too, as abandoned that long ago: a resolver that found nothing out
        gives the attempt back with its age.
        """
        ...

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the success of this owner's attempt; False when it was replaced."""
        ...

    def fail(
        self,
        identity: Identity,
        owner: bytes,
        error: Encoded,
        *,
        retryable: bool,
        keep_fingerprint: bool,
        ttl: float,
        ran: bool = True,
    ) -> bool:
        """Store the failure of this owner's attempt; False when it was replaced.

        A `retryable` one may be claimed again, and with `keep_fingerprint` only by its payload.
        With ran=False the function was never called: the record's number is lowered by one, so that
        the next claim has the number that this one had. The fence stays.
        """
        ...

    def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        ...

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        ...

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; False when there is none.

        Kept for 0, it is absent at once: so it is removed where what runs must stay.
        """
        ...

    def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state; False when there was none."""
        ...

    def close(self) -> None:
        """Release what this store opened itself."""
        ...


class AsyncStore(Protocol):
    """A store for asyncio: the same verbs, awaited.

    The two of every call may also be plain functions that give something to await: a coroutine, or
    a future (which `asyncio.create_task` does not take).
    """

    def claim(self, ask: ClaimRequest) -> Awaitable[Claim]: ...
    async def renew(self, identity: Identity, owner: bytes, lease: float) -> bool: ...
    def complete(
        self, identity: Identity, owner: bytes, result: Encoded, ttl: float
    ) -> Awaitable[bool]: ...
    async def fail(
        self,
        identity: Identity,
        owner: bytes,
        error: Encoded,
        *,
        retryable: bool,
        keep_fingerprint: bool,
        ttl: float,
        ran: bool = True,
    ) -> bool: ...
    async def get(self, identity: Identity) -> Record | None: ...
    async def put(
        self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes
    ) -> bool: ...
    async def touch(self, identity: Identity, ttl: float) -> bool: ...
    async def forget(self, identity: Identity) -> bool: ...
    async def close(self) -> None: ...


# --- optional capabilities ---------------------------------------------------------------


@runtime_checkable
class Batching(Protocol):
    """Many `identities`, or `asks`, in one round trip and one commit. Each has its own answer."""

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]: ...
    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]: ...
    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]: ...
    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]: ...
    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]: ...
    def forget_many(self, identities: Sequence[Identity]) -> list[bool]: ...


@runtime_checkable
class AsyncBatching(Protocol):
    """`Batching`, awaited."""

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]: ...
    async def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]: ...
    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]: ...
    async def get_many(self, identities: Sequence[Identity]) -> list[Record | None]: ...
    async def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]: ...
    async def forget_many(self, identities: Sequence[Identity]) -> list[bool]: ...


class Page(Struct, frozen=True):
    """A part of a listing; pass `cursor` on to get the next one, None = that was all."""

    records: tuple[Record, ...]
    cursor: str | None


class Counts(Struct, frozen=True):
    """How many records there are, by what is known of them."""

    processing: int
    """Running, with a live lease."""
    abandoned: int
    succeeded: int
    failed: int


class ScanRequest(Request[Page], frozen=True, gc=False):
    """List records page by page."""

    scope: str | None = None
    prefix: str = ""
    state: State | None = None
    limit: int = 100
    cursor: str | None = None


class StuckRequest(Request[list[Record]], frozen=True, gc=False):
    """List abandoned records whose lease ended `older_than` seconds ago or earlier."""

    older_than: float = 0.0
    limit: int = 100


class PurgeRequest(Request[int], frozen=True, gc=False):
    """Remove what has expired and, if asked, what was abandoned long ago."""

    limit: int = 1000
    abandoned_after: float | None = None


class CountRequest(Request[Counts], frozen=True, gc=False):
    """Count the records by state."""


@runtime_checkable
class Partitioned(Protocol):
    """A store on several servers, each of which may hang while the others answer."""

    def server_of(self, identity: Identity) -> Hashable:
        """Name the server that has the record of an `identity`; None = there is only one.

        It asks nobody. Renewals of different servers are sent by different threads or tasks.
        """
        ...


@runtime_checkable
class OnFile(Protocol):
    """A store whose records may be in a file of this machine."""

    @property
    def path(self) -> str | None:
        """The absolute path of that file; None = there is none."""
        ...


@runtime_checkable
class Scannable(Protocol):
    """What the command line, the reconciler and the dashboard read."""

    def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page; `prefix` is the beginning of the key. A page may be short.

        `scope` and `state` leave out all others, `limit` is the most records of a page, and
        `cursor` that of the page before. A record that cannot be read is left out, and a warning
        names it; it hides no other.
        """
        ...

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """List abandoned records whose lease ended `older_than` seconds ago or before.

        The oldest come first, `limit` of them at most.
        """
        ...

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove at most `limit` expired records; returns how many went.

        With `abandoned_after`, also abandoned records that nobody holds and whose lease ended
        that many seconds ago. Live and held PROCESSING records are never removed.
        """
        ...

    def counts(self) -> Counts:
        """Count the records by state."""
        ...


@runtime_checkable
class AsyncScannable(Protocol):
    """`Scannable`, awaited."""

    async def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page: ...
    async def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]: ...
    async def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int: ...
    async def counts(self) -> Counts: ...


@runtime_checkable
class Repairing(Protocol):
    """A store whose abandoned records can be given to a resolver."""

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not; None = nothing to do.

        `identity`, `owner` and `lease` are as for `claim`.
        """
        ...


@runtime_checkable
class AsyncRepairing(Protocol):
    """`Repairing`, awaited."""

    async def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None: ...


@runtime_checkable
class Migrating(Protocol):
    """A store whose tables are made by migrations, for threads alone: a command runs them."""

    def migrate(self) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat."""
        ...

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        ...


@runtime_checkable
class Creating(Protocol):
    """A store whose first call creates its table, for threads alone: a command asks it not to."""

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table or change it."""
        ...


@runtime_checkable
class Diagnosing(Protocol):
    """A store that can tell what its server's settings put at risk."""

    def diagnose(self) -> list[str]:
        """Say what endangers the records, in sentences; none = all is well."""
        ...


class Watch(Protocol):
    """Hears of one record's end. It never raises: what cannot be heard is waited for asleep."""

    def pause(self, planned: float) -> float:
        """How long to wait at most before the store is asked again, where polling would `planned`.

        Longer where a wake-up is to be expected: asking again is only a safety net then.
        """
        ...

    def wait(self, seconds: float) -> Ended | None:
        """Sleep so long, or until the record may have changed; what it became, if that was told.

        It also ends when the watch begins to hear, because what happened before that was not heard.
        """
        ...


class AsyncWatch(Protocol):
    """`Watch`, awaited."""

    def pause(self, planned: float) -> float: ...
    async def wait(self, seconds: float) -> Ended | None: ...


@runtime_checkable
class Notifying(Protocol):
    """A store that wakes those who wait for a running attempt, instead of letting them poll.

    A claim that is answered Busy notes in the record that somebody waits; what ends or parks a
    record with that note sends a wake-up. So a waiter watches, then claims again, then waits.
    """

    def watch(self, identity: Identity) -> AbstractContextManager[Watch]:
        """Listen for the end of an identity's running attempt while the `with` block lasts.

        `identity` names the record. Entering sends a request at most, and leaving neither waits nor
        fails.
        """
        ...


@runtime_checkable
class AsyncNotifying(Protocol):
    """`Notifying`, awaited."""

    def watch(self, identity: Identity) -> AbstractContextManager[AsyncWatch]: ...


class Transactional(Protocol):
    """A store whose record can be written on the caller's own connection (one commit for both)."""

    def on_connection(self, connection: object) -> Store:
        """The same store, speaking through the open transaction of the caller's `connection`."""
        ...


def is_for_asyncio(store: object) -> bool:
    """Tell the two kinds of stores apart."""
    # Not by `claim` alone: a plain function may give something to await, too, with less ado.
    verbs = (getattr(store, name, None) for name in ("claim", "get", "close"))
    return any(inspect.iscoroutinefunction(verb) for verb in verbs)


def all_or_error(answers: list[T | StoreError]) -> list[T]:
    """Return the answers of a batch; the first error among them is raised."""
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return cast("list[T]", answers)
