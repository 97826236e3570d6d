"""The Redis store for threads.

This module is thin on purpose: `verbs` says what to send and how to read it, `listing` what to
ask next, `transport` how to send. `aio` is its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.core.records import (
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    State,
)
from semel.errors import StoreError
from semel.stores.base import Counts, Page
from semel.stores.redis.adopt import adopt
from semel.stores.redis.delivery import certain
from semel.stores.redis.keys import KeyLayout
from semel.stores.redis.listing import Listing, Nodes, ScanStep, Steps
from semel.stores.redis.scripts import Call
from semel.stores.redis.transport import Transport
from semel.stores.redis.verbs import SMALLEST_LIMIT, Verbs, rejections, with_rejections
from semel.stores.redis.wakeups import RedisWakeups
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.wakeups.threads import Watch

Ask = TypeVar("Ask", CompleteRequest, PutRequest)
Result = TypeVar("Result")


class RedisStore:
    """Keeps records in Redis or Valkey: one server, Sentinel or a cluster.

    `client` is a `redis.Redis` or `redis.RedisCluster` of the application, which also closes it.
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._keys = KeyLayout(prefix)
        self._verbs = Verbs(self._keys)
        self._listing = Listing(self._keys, self._verbs)
        self._transport = client if isinstance(client, Transport) else adopt(client, timeout)
        self._wakeups = RedisWakeups(self._transport, self._keys)

    def __repr__(self) -> str:
        return f"<RedisStore {self._transport.where} prefix={self._keys.prefix!r}>"

    def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation; the answer says who may, and what is known."""
        return self._transport.call(self._verbs.claim(ask))

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Extend the lease from now; 0 parks the attempt (abandoned from now on)."""
        ask = RenewRequest(identity, owner, lease)
        # Parking is a step of a call, as many of them as there are callers: it waits its turn.
        return self._transport.call(self._verbs.renew(ask), urgent=lease > 0)

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the success of this owner's attempt; False when it was replaced."""
        ask = CompleteRequest(identity, owner, result, ttl)
        if len(result.data) > SMALLEST_LIMIT:
            return self._complete_large(ask)
        return self._transport.call(self._verbs.complete(ask))

    def _complete_large(self, ask: CompleteRequest) -> bool:
        return certain((self.complete_many([ask]))[0])

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
        """Store the failure of this owner's attempt; False when it was replaced."""
        return self._transport.call(
            self._verbs.fail(
                identity,
                owner,
                error,
                retryable=retryable,
                keep_fingerprint=keep_fingerprint,
                ttl=ttl,
                ran=ran,
            )
        )

    def get(self, identity: Identity) -> Record | None:
        """Read the record; expired is absent."""
        return self._transport.call(self._verbs.get(identity))

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Mark as done without running, if nothing else is running or done."""
        ask = PutRequest(identity, owner, result, ttl)
        if len(result.data) > SMALLEST_LIMIT:
            return certain((self.put_many([ask]))[0])
        return self._transport.call(self._verbs.put(ask))

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Keep a finished record for `ttl` from now; False when there is none."""
        return self._transport.call(self._verbs.touch(identity, ttl))

    def forget(self, identity: Identity) -> bool:
        """Remove the record, whatever its state; False when there was none."""
        return self._transport.call(self._verbs.forget(identity))

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Make a resolver the owner of an abandoned attempt, held or not; None = nothing to do."""
        return self._transport.call(self._verbs.adopt(RenewRequest(identity, owner, lease)))

    def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return self._transport.call(self._verbs.diagnose())

    def close(self) -> None:
        """Release what this store opened itself."""
        self._wakeups.close()
        self._transport.close()

    def watch(self, identity: Identity) -> Watch:
        """Listen for the end of the record's running attempt."""
        return self._wakeups.watch(identity)

    def server_of(self, identity: Identity) -> str | None:
        """Name the node of a cluster that has the record, as far as is known."""
        return self._transport.server_of(self._keys.record(identity))

    # --- Batching ------------------------------------------------------------------------

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim`, many in one round trip."""
        return self._transport.call_many([self._verbs.claim(ask) for ask in asks])

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete`, many in one round trip."""
        return self._save_many(asks, self._verbs.complete)

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew`, many in one round trip."""
        calls = [self._verbs.renew(ask) for ask in asks]
        return self._transport.call_many(calls, urgent=True)

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """`get`, many in one round trip."""
        calls = [self._verbs.get(identity) for identity in identities]
        return [certain(answer) for answer in self._transport.call_many(calls)]

    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """`put`, many in one round trip."""
        return self._save_many(asks, self._verbs.put)

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """`forget`, many in one round trip."""
        calls = [self._verbs.forget(identity) for identity in identities]
        return [certain(answer) for answer in self._transport.call_many(calls)]

    def _save_many(
        self, asks: Sequence[Ask], verb: Callable[[Ask], Call[bool]]
    ) -> list[bool | StoreError]:
        """Send what its server can take; only large values cost a question."""
        questions = self._verbs.limits_of(asks)
        if not questions:
            return self._transport.call_many([verb(ask) for ask in asks])
        limits = self._transport.call_many(questions)
        rejected = rejections(asks, limits, self._transport.where)
        fitting = [ask for ask, error in zip(asks, rejected, strict=True) if error is None]
        answers = self._transport.call_many([verb(ask) for ask in fitting])
        return with_rejections(answers, rejected)

    # --- Scannable -----------------------------------------------------------------------

    def scan(
        self,
        *,
        scope: str | None = None,
        prefix: str = "",
        state: State | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List records page by page; `prefix` is the beginning of the key. A page may be short."""
        return self._run(self._listing.scan(scope, prefix, state, limit, cursor))

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Abandoned records whose lease ended at least `older_than` seconds ago, oldest first."""
        return self._run(self._listing.stuck(older_than, limit))

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Remove abandoned records that nobody holds; expired ones go by themselves."""
        return self._run(self._listing.purge(limit, abandoned_after))

    def counts(self) -> Counts:
        """Count the records by state; reads every key."""
        return self._run(self._listing.counts())

    def _run(self, steps: Steps[Result]) -> Result:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                result: Result = done.value
                return result
            match step:
                case Nodes():
                    answer = self._transport.nodes()
                case ScanStep():
                    answer = self._transport.scan(step.node, step.cursor, step.pattern, step.count)
                case calls:
                    answer = self._transport.call_many(calls)
