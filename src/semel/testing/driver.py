"""Drives a store of either kind by plain calls, so that one test text proves both.

A store for threads is called as it is. The verbs of a store for asyncio run to their end on one
event loop that belongs to the driver: such a store is bound to the loop that first used it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, cast

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
from semel.stores.base import (
    AsyncStore,
    Batching,
    Counts,
    Page,
    Repairing,
    Scannable,
    Store,
    is_for_asyncio,
)

Answer = TypeVar("Answer")


class _Everything(Store, Batching, Scannable, Repairing, Protocol):
    """What a store may offer; a verb that it does not offer is simply not called."""


class StoreDriver:
    """A `Store` (with whatever its store offers beyond) in front of a store of either kind."""

    def __init__(self, store: Store | AsyncStore) -> None:
        # An async store answers the same verbs with awaitables, which `_finish` resolves.
        self._store = cast("_Everything", store)
        self._runner = asyncio.Runner()
        self._is_async = is_for_asyncio(store)

    def offers(self, capability: type) -> bool:
        """Whether the store has a capability: `Batching`, `Scannable`, `Repairing`."""
        return isinstance(self._store, capability)

    def claim(self, ask: ClaimRequest) -> Claim:
        """Drive `claim`."""
        return self._finish(self._store.claim(ask))

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """Drive `renew`."""
        return self._finish(self._store.renew(identity, owner, lease))

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Drive `complete`."""
        return self._finish(self._store.complete(identity, owner, result, ttl))

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
        """Drive `fail`."""
        return self._finish(
            self._store.fail(
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
        """Drive `get`."""
        return self._finish(self._store.get(identity))

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """Drive `put`."""
        return self._finish(self._store.put(identity, result, ttl, owner=owner))

    def touch(self, identity: Identity, ttl: float) -> bool:
        """Drive `touch`."""
        return self._finish(self._store.touch(identity, ttl))

    def forget(self, identity: Identity) -> bool:
        """Drive `forget`."""
        return self._finish(self._store.forget(identity))

    def close(self) -> None:
        """Close the store, and the loop it ran on."""
        try:
            closing: object = self._store.close()  # type: ignore[func-returns-value]
            self._finish(closing)
        finally:
            self._runner.close()

    # --- Batching ------------------------------------------------------------------------

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """Drive `claim_many`."""
        return self._finish(self._store.claim_many(asks))

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """Drive `complete_many`."""
        return self._finish(self._store.complete_many(asks))

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """Drive `renew_many`."""
        return self._finish(self._store.renew_many(asks))

    def get_many(self, identities: Sequence[Identity]) -> list[Record | None]:
        """Drive `get_many`."""
        return self._finish(self._store.get_many(identities))

    def put_many(self, asks: Sequence[PutRequest]) -> list[bool | StoreError]:
        """Drive `put_many`."""
        return self._finish(self._store.put_many(asks))

    def forget_many(self, identities: Sequence[Identity]) -> list[bool]:
        """Drive `forget_many`."""
        return self._finish(self._store.forget_many(identities))

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
        """Drive `scan`."""
        return self._finish(
            self._store.scan(scope=scope, prefix=prefix, state=state, limit=limit, cursor=cursor)
        )

    def stuck(self, *, older_than: float = 0.0, limit: int = 100) -> list[Record]:
        """Drive `stuck`."""
        return self._finish(self._store.stuck(older_than=older_than, limit=limit))

    def purge(self, *, limit: int = 1000, abandoned_after: float | None = None) -> int:
        """Drive `purge`."""
        return self._finish(self._store.purge(limit=limit, abandoned_after=abandoned_after))

    def counts(self) -> Counts:
        """Drive `counts`."""
        return self._finish(self._store.counts())

    # --- Repairing -----------------------------------------------------------------------

    def adopt(self, identity: Identity, owner: bytes, lease: float) -> Record | None:
        """Drive `adopt`."""
        return self._finish(self._store.adopt(identity, owner, lease))

    # --- many callers at once ------------------------------------------------------------

    def race(self, asks: Sequence[ClaimRequest]) -> list[Claim]:
        """Send all claims, `asks`, at the same moment, each from a thread or task of its own."""
        return self.race_verbs([("claim", ask) for ask in asks])

    def race_verbs(self, calls: Sequence[tuple[Any, ...]], *, apart: float = 0.0) -> list[Any]:
        """Send calls of any verbs beside each other: each is a verb's name and its arguments.

        Each begins `apart` seconds after the one before it.
        """
        if self._is_async:
            return self._runner.run(self._gather(calls, apart))
        ready = threading.Barrier(len(calls))

        def send(place: int) -> Any:
            ready.wait()
            time.sleep(place * apart)
            return self._begin(calls[place])

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(send, range(len(calls))))

    async def _gather(self, calls: Sequence[tuple[Any, ...]], apart: float) -> list[Any]:
        async def send(place: int) -> Any:
            await asyncio.sleep(place * apart)
            return await self._begin(calls[place])

        return await asyncio.gather(*map(send, range(len(calls))))

    def _begin(self, call: tuple[Any, ...]) -> Any:
        verb, *arguments = call
        return getattr(self._store, verb)(*arguments)

    def _finish(self, answer: Answer) -> Answer:
        if inspect.isawaitable(answer):
            return cast("Answer", self._runner.run(_awaited(answer)))
        return answer


async def _awaited(answer: Awaitable[Answer]) -> Answer:
    return await answer
