"""Stores that fail on purpose, on top of real ones; twins for threads and asyncio.

store = FaultyStore(MemoryStore())
store.inject("complete", LoseReply())       # applied, but the caller is told it was not
...
assert store.fired("complete") == 1         # the fault really happened
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from semel.core.records import Claim, ClaimRequest, Encoded, Identity, Record
from semel.errors import ConfigError
from semel.stores.base import (
    AsyncNotifying,
    AsyncStore,
    Notifying,
    Partitioned,
    Store,
    is_for_asyncio,
)
from semel.testing.faults import Delay, FaultScript, LoseReply, Refuse

P = ParamSpec("P")
Answer = TypeVar("Answer")

VERBS = ("claim", "renew", "complete", "fail", "get", "put", "touch", "forget")
"""What every store has."""

OPTIONAL_VERBS = (
    *("claim_many", "complete_many", "renew_many", "get_many", "put_many", "forget_many"),
    *("scan", "stuck", "purge", "counts"),
    "adopt",
)
"""Verbs of the capabilities. A faulty store has those that its store has, set one by one, so that
`isinstance(store, Batching)` stays as true as it was."""


class FaultyStore(FaultScript):
    """A `store` for threads whose calls fail as scripted.

    Examples:
        >>> store = FaultyStore(open_store("memory://"))
        >>> store.inject("claim", Refuse())
    """

    def __init__(self, store: Store) -> None:
        _check(store, asynchronous=False)
        offered = [verb for verb in OPTIONAL_VERBS if hasattr(store, verb)]
        super().__init__([*VERBS, *offered])
        self.store = store
        for verb in offered:
            setattr(self, verb, functools.partial(self._meet, verb, getattr(store, verb)))
        if isinstance(store, Notifying):
            self.watch = store.watch  # it never fails, so it is no verb that could
        if isinstance(store, Partitioned):
            self.server_of = store.server_of

    def claim(self, ask: ClaimRequest) -> Claim:
        """`claim`, or its fault."""
        return self._meet("claim", self.store.claim, ask)

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """`renew`, or its fault."""
        return self._meet("renew", self.store.renew, identity, owner, lease)

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """`complete`, or its fault."""
        return self._meet("complete", self.store.complete, identity, owner, result, ttl)

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
        """`fail`, or its fault."""
        return self._meet(
            "fail",
            self.store.fail,
            identity,
            owner,
            error,
            retryable=retryable,
            keep_fingerprint=keep_fingerprint,
            ttl=ttl,
            ran=ran,
        )

    def get(self, identity: Identity) -> Record | None:
        """`get`, or its fault."""
        return self._meet("get", self.store.get, identity)

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """`put`, or its fault."""
        return self._meet("put", self.store.put, identity, result, ttl, owner=owner)

    def touch(self, identity: Identity, ttl: float) -> bool:
        """`touch`, or its fault."""
        return self._meet("touch", self.store.touch, identity, ttl)

    def forget(self, identity: Identity) -> bool:
        """`forget`, or its fault."""
        return self._meet("forget", self.store.forget, identity)

    def close(self) -> None:
        """Close the store; this never fails on purpose."""
        self.store.close()

    def _meet(
        self, verb: str, apply: Callable[P, Answer], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer:
        match self._next(verb, args, kwargs):
            case Refuse(error):
                raise error
            case LoseReply(error):
                apply(*args, **kwargs)
                raise error
            case Delay(seconds):
                time.sleep(seconds)
        return apply(*args, **kwargs)


class AsyncFaultyStore(FaultScript):
    """A store for asyncio whose calls fail as scripted."""

    def __init__(self, store: AsyncStore) -> None:
        _check(store, asynchronous=True)
        offered = [verb for verb in OPTIONAL_VERBS if hasattr(store, verb)]
        super().__init__([*VERBS, *offered])
        self.store = store
        for verb in offered:
            setattr(self, verb, functools.partial(self._meet, verb, getattr(store, verb)))
        if isinstance(store, AsyncNotifying):
            self.watch = store.watch  # it never fails, so it is no verb that could
        if isinstance(store, Partitioned):
            self.server_of = store.server_of

    async def claim(self, ask: ClaimRequest) -> Claim:
        """`claim`, or its fault."""
        return await self._meet("claim", self.store.claim, ask)

    async def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        """`renew`, or its fault."""
        return await self._meet("renew", self.store.renew, identity, owner, lease)

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """`complete`, or its fault."""
        return await self._meet("complete", self.store.complete, identity, owner, result, ttl)

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
    ) -> bool:
        """`fail`, or its fault."""
        return await self._meet(
            "fail",
            self.store.fail,
            identity,
            owner,
            error,
            retryable=retryable,
            keep_fingerprint=keep_fingerprint,
            ttl=ttl,
            ran=ran,
        )

    async def get(self, identity: Identity) -> Record | None:
        """`get`, or its fault."""
        return await self._meet("get", self.store.get, identity)

    async def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        """`put`, or its fault."""
        return await self._meet("put", self.store.put, identity, result, ttl, owner=owner)

    async def touch(self, identity: Identity, ttl: float) -> bool:
        """`touch`, or its fault."""
        return await self._meet("touch", self.store.touch, identity, ttl)

    async def forget(self, identity: Identity) -> bool:
        """`forget`, or its fault."""
        return await self._meet("forget", self.store.forget, identity)

    async def close(self) -> None:
        """Close the store; this never fails on purpose."""
        await self.store.close()

    async def _meet(
        self, verb: str, apply: Callable[P, Awaitable[Answer]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer:
        match self._next(verb, args, kwargs):
            case Refuse(error):
                raise error
            case LoseReply(error):
                await apply(*args, **kwargs)
                raise error
            case Delay(seconds):
                await asyncio.sleep(seconds)
        return await apply(*args, **kwargs)


def _check(store: object, *, asynchronous: bool) -> None:
    """Refuse what is no store of this kind: on it, no fault would ever be met."""
    kind, opener = (
        ("AsyncFaultyStore", "open_async_store") if asynchronous else ("FaultyStore", "open_store")
    )
    whole = all(callable(getattr(store, verb, None)) for verb in (*VERBS, "close"))
    if isinstance(store, type) or not whole:
        raise ConfigError(
            f"{kind} stands in front of a store, such as {opener}(url) or one of your own; got "
            f"{type(store).__name__}"
        )
    if is_for_asyncio(store) is not asynchronous:
        other = "FaultyStore" if asynchronous else "AsyncFaultyStore"
        raise ConfigError(
            f"{type(store).__name__} is a store {'for threads' if asynchronous else 'for asyncio'}"
            f": use {other}"
        )
