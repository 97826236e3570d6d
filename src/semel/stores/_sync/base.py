# Generated from stores/base.py by `make generate`: change that file instead.
"""The store protocol: a store answers requests.

    answers = store.send(requests)    # one answer for each request, in their order
    answer = store.ask(request)       # one answer; its error is raised

Requests are values (`semel.core.records`). A store of your own derives from the class below, and
implements `send` and `close`. What every store promises, as `semel.testing.StoreContract` proves:

- Each request is one atomic step, and safe to send twice: the same owner gets the same answer.
- A claim is judged in the order written in `semel.core.judge`.
- The current owner is the owner id in the record. A passed lease alone rejects nothing; only
  another claim (or an operator's `forget`) makes an owner's writes answer False.
- Time is the store's, read once per request. Where a server has the records, it is the server's.
- `send` answers in the order of the requests, and to no requests with no answers (engines never ask
  that). The error of one request stands in place of its answer, as a value, and keeps no other
  request from its answer. A `send` of which nothing is known may raise instead.
- All answers count from the moment when `send` returns, and what it raises counts for every
  request. So a store that carries requests out one by one returns the errors of single ones: if it
  raised the first, an engine would take all leases of that `send` for not renewed.
- Requests of one `send` that are about the same identity are carried out one after another, in an
  order that the store chooses: as if several callers had sent them at the same moment.
- A store that cannot answer has `StoreUnavailable` (or `StoreFull`) for an error, never a driver's.

Requests about all records (`semel.core.records.LISTINGS`) come by `ask`, so never together with
others. A store may leave them out, and `AdoptRequest` too: it names them in `unsupported`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from semel.core.records import (
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Counts,
    Encoded,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    Page,
    PurgeRequest,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    ScanRequest,
    State,
    StuckRequest,
    TouchRequest,
)
from semel.errors import ConfigError, StoreError

T = TypeVar("T")


class Store(ABC):
    """A store for threads: implement `send` and `close`; the other methods use them.

    An `identity` is a scope and a key. An `owner` is the random id of one attempt. `lease` and
    `ttl` are seconds from now: how long a claim lasts without a renewal, and how long a finished
    record is kept. `result` and `error` are bytes that a store doesn't decode. Methods for many
    take requests (`asks`) or `identities`.
    """

    unsupported: frozenset[type[Request[Any]]] = frozenset()
    """The requests that this store doesn't support: of `LISTINGS`, and `AdoptRequest`."""

    path: str | None = None
    """The absolute path of the file that has the records, or None."""

    @abstractmethod
    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Return the answers to `requests`, in order; the answer to a failed one is its error.

        A store sends them in one round trip and one commit if it can.
        """

    @abstractmethod
    def close(self) -> None:
        """Close what this store opened."""

    def migrate(self) -> int | None:
        """Create or upgrade the tables and return their version; you can repeat it.

        Return None if this store needs no tables.
        """
        return None

    def ask(self, request: Request[T]) -> T:
        """Return the answer to one `request`, as any awaitable, or raise its error."""
        return self._ask(request)

    def _ask(self, request: Request[T]) -> T:
        if type(request) in self.unsupported:
            kind = type(request).__name__
            raise ConfigError(f"{type(self).__name__} does not support {kind}")
        return _answer_or_raise(self.send((request,))[0])

    # --- about one record ----------------------------------------------------------------

    def claim(self, ask: ClaimRequest) -> Claim:
        """Claim the operation; the answer to `ask` says who may run it, and what is known."""
        return self.ask(ask)

    def renew(
        self, identity: Identity, owner: bytes, lease: float, run_info: bytes | None = None
    ) -> bool:
        """Extend the lease from now; 0 parks the attempt, which is abandoned from now on.

        A lease below 0 parks it as abandoned that long ago: a resolver that returned `Unknown`
        releases the attempt with its age. `run_info` replaces that of the claim; None keeps it.
        """
        return self.ask(RenewRequest(identity, owner, lease, run_info))

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the success of this owner's attempt; return False if another one replaced it."""
        return self.ask(CompleteRequest(identity, owner, result, ttl))

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
        """Store the failure of this owner's attempt; return False if another one replaced it.

        A `retryable` one may be claimed again, and with `keep_fingerprint` only by its payload.
        With ran=False the function was never called: the record's number goes down by one, so the
        next claim has the number that this one had. The fence stays.
        """
        return self.ask(FailRequest(identity, owner, error, retryable, keep_fingerprint, ttl, ran))

    def get(self, identity: Identity) -> Record | None:
        """Return the record, or None if there is none or it has expired."""
        return self.ask(GetRequest(identity))

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        return self.ask(PutRequest(identity, owner, result, ttl))

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; return False if there is none.

        With 0, it is absent at once. That removes a finished record, and never a running one.
        """
        return self.ask(TouchRequest(identity, ttl))

    def forget(self, identity: Identity) -> bool:
        """Remove the record in any state; return False if there was none."""
        return self.ask(ForgetRequest(identity))

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not; None if there is none."""
        return self.ask(AdoptRequest(identity, owner, lease))

    # --- about many ----------------------------------------------------------------------

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """Return what `get` returns for each; raise the first error."""
        answers = self.send([GetRequest(each) for each in identities])
        return [_answer_or_raise(answer) for answer in answers]

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """Return what `forget` returns for each; raise the first error."""
        answers = self.send([ForgetRequest(each) for each in identities])
        return [_answer_or_raise(answer) for answer in answers]

    # --- about all -----------------------------------------------------------------------

    def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page; a page may be short.

        `scope`, `state`, and `prefix` (the beginning of the key) select records, `limit` is the
        most records of a page, and `cursor` is that of the page before.
        """
        return self.ask(ScanRequest(scope, prefix, state, limit, cursor))

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """List abandoned records whose lease ended `older_than` seconds ago or before.

        The oldest come first, `limit` of them at most.
        """
        return self.ask(StuckRequest(older_than, limit))

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove at most `limit` expired records, and return how many.

        With `abandoned_after`, also abandoned records that are not held and whose lease ended
        that many seconds ago.
        """
        return self.ask(PurgeRequest(limit, abandoned_after))

    def counts(self) -> Counts:
        """Count the records by state."""
        return self.ask(CountRequest())

    # --- what a store may offer beside answers ------------------------------------------

    def watch(self, identity: Identity) -> AbstractContextManager[Watch] | None:
        """Listen for the end of an identity's running attempt while the `with` block lasts.

        Return None if this store sends no wake-ups, so that waiting calls poll. A store that does
        notes in the record that a claim was answered Busy, and sends a wake-up when that record
        ends or is parked. So a waiting call watches, then claims again, then waits. Entering sends
        at most one request, and leaving neither waits nor fails.
        """
        del identity
        return None

    def server_of(self, identity: Identity) -> Hashable:
        """Return the server that has the record of an `identity`, or None if there is only one.

        It sends nothing. One of several servers may hang while the others respond, so semel renews
        leases on different servers independently.
        """
        del identity
        return None

    def diagnose(self) -> list[str]:
        """Return sentences about server settings that endanger the records."""
        return []


class Watch(Protocol):
    """Listens for the end of one record; never raises, and without a listener only sleeps."""

    def pause(self, planned: float) -> float:
        """How long to wait at most before the store is asked again, where polling would `planned`.

        Longer where a wake-up is to be expected: asking again is only a safety net then.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Sleep for these seconds, or until the record may have changed; the caller then asks.

        Returns True if a message ended it: anyone may have sent that, so the caller limits how
        often it asks. It also ends when the watch begins to listen, because what happened before
        that was not received.
        """
        ...


def _answer_or_raise(answer: T | StoreError) -> T:
    if isinstance(answer, StoreError):
        raise answer
    return answer
