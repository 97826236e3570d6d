"""The remote store for asyncio: batches on their way to a service, what is sent again, watches.

Every request is safe to send twice. So one that meets a closed connection, a service that restarts,
or a balancer whose server is gone is sent again, for half of `timeout` at most. An answer of the
service itself is final. Requests that the service refuses in a batch are asked for alone where the
others may have an answer; so are renewals always, because attempts depend on them that have nothing
to do with each other.
"""

from __future__ import annotations

import random
from asyncio import sleep
from collections.abc import Awaitable, Sequence
from queue import Empty
from time import monotonic
from typing import Any, Final, Self, TypeVar

from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.records import LISTINGS, Identity, RenewRequest, Request
from semel.errors import StoreError, StoreRefused, StoreUnavailable
from semel.stores.base import AsyncStore
from semel.stores.batching import AsyncBatcher, AsyncSlots
from semel.stores.listening import SAFETY, Backoff
from semel.stores.remote import wire
from semel.stores.remote.addresses import Unreachable, parse
from semel.stores.remote.tasks import AsyncTransport
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT, SEARCH_SHARE

T = TypeVar("T")

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5
"""Between two tries to reach a service."""

MOST_CALLS: Final = 64
"""Connections for calls. Renewals and watches have further ones, so that they never queue."""

MOST_WATCHES: Final = 64
"""Watches of a store that have a connection; the callers of further ones poll."""

LISTING: Final = 60.0
"""Seconds that a listing may take: it may read every record."""


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncRemoteStore:
    """Open a store for asyncio; it connects on first use."""
    address = parse(url, prefix=prefix, timeout=timeout, options=options)
    return AsyncRemoteStore(AsyncTransport(address))


class AsyncRemoteStore(AsyncStore):
    """Keeps records in a semel service. It belongs to the first event loop that uses it."""

    def __init__(self, transport: AsyncTransport) -> None:
        self.transport = transport
        self.where = transport.address.where
        self._timeout = transport.address.timeout
        self._batcher = AsyncBatcher(self._ask_one, self._exchange)
        self._calls = AsyncSlots(MOST_CALLS)
        self.watches = Watches(self.where)

    def __repr__(self) -> str:
        return f"<AsyncRemoteStore {self.transport.address.url}>"

    def ask(self, request: Request[T]) -> Awaitable[T]:
        """Answer one request."""
        wire.check(request)
        return self._batcher.ask(request)

    async def _ask_one(self, request: Request[T]) -> T:
        try:
            [answer] = await self._exchange((request,))
        except wire.NotAnswered as refused:
            raise refused.error from None
        if isinstance(answer, StoreError):
            raise answer
        known: T = answer
        return known

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests, as many as the service takes in one round trip."""
        for request in requests:
            wire.check(request)
        answers: list[T | StoreError] = []
        for chunk in wire.chunks(requests):
            answers += await self._send_chunk(chunk)
        return answers

    async def _send_chunk(self, requests: Sequence[Request[Any]]) -> list[Any]:
        try:
            return await self._exchange(requests)
        except wire.NotAnswered as refused:
            error = refused.error
            if not isinstance(error, StoreError):
                if not _renew(requests):
                    raise error from None
                error = StoreRefused(str(error))
            if len(requests) == 1:
                return [error]
        half = len(requests) // 2
        first = await self._send_chunk(requests[:half])
        return first + await self._send_chunk(requests[half:])

    async def _exchange(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Send a batch; one that is refused as a whole raises `NotAnswered`."""
        notice_fork()  # the parent's tasks may have all slots
        if _renew(requests):
            return await self._answers(requests)
        try:
            slot = await self._calls.get(timeout=self._timeout)
        except Empty:
            raise StoreUnavailable(
                f"{MOST_CALLS} calls of this process wait for {self.where}; nothing was sent"
            ) from None
        try:
            return await self._answers(requests)
        finally:
            self._calls.give(slot)

    async def _answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Send a batch until it is answered."""
        listing = type(requests[0]) in LISTINGS
        end = monotonic() + (max(self._timeout, LISTING) if listing else self._timeout)
        search_until = monotonic() + self._timeout * SEARCH_SHARE
        pause = FIRST_PAUSE
        while True:
            left = end - monotonic()
            body = wire.write_batch(requests, left, self.where)
            try:
                reply = await self.transport.post(wire.SEND, body, left)
                if not wire.passes(reply):
                    return wire.read_answers(reply, requests, self.where)
                failed = Unreachable(f"HTTP status {reply.status}")
            except Unreachable as error:
                failed = error
            if monotonic() + pause > search_until:
                raise StoreUnavailable(f"{self.where} can't be reached: {failed}") from failed
            await sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def close(self) -> None:
        """Close the connections; waiting calls are woken, and poll."""
        await self._batcher.close()
        await self.transport.close()

    def watch(self, identity: Identity) -> AsyncRemoteWatch:
        """Listen for the end of the record's running attempt."""
        notice_fork()
        return AsyncRemoteWatch(self, identity)

    async def changed(self, identity: Identity, seconds: float) -> bool:
        """Wait until a record has no live attempt; False after these seconds."""
        body = wire.write_watch(identity, min(seconds, wire.MOST_SECONDS))
        try:
            reply = await self.transport.post(wire.WATCH, body, seconds + self._timeout)
        except Unreachable as error:
            raise StoreUnavailable(f"{self.where} can't be reached: {error}") from error
        return wire.read_changed(reply, self.where)


def _renew(requests: Sequence[Request[Any]]) -> bool:
    return all(isinstance(each, RenewRequest) for each in requests)


class Watches(ForkAware):
    """The watches of a store that may have a connection, and when one may be tried again."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.after_fork_in_child()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Begin anew: those that the parent's threads opened will never end here."""
        self._open: set[AsyncRemoteWatch] = set()
        self._backoff = Backoff(self._where)

    def add(self, watch: AsyncRemoteWatch) -> None:
        """Let a watch listen, unless many do."""
        if len(self._open) < MOST_WATCHES:
            self._open.add(watch)

    def remove(self, watch: AsyncRemoteWatch) -> None:
        """Listen no longer for this watch."""
        self._open.discard(watch)

    def may_listen(self, watch: AsyncRemoteWatch) -> bool:
        """Whether this watch is told of an end; else its caller polls."""
        return watch in self._open and self._backoff.is_over(monotonic())

    def told(self, error: Exception | None) -> None:
        """Note that a watch was answered, or why not."""
        if error is None:
            self._backoff.succeeded()
        elif self._backoff.is_over(monotonic()):  # else another watch has failed just before
            self._backoff.failed(error, monotonic())


class AsyncRemoteWatch:
    """Where one task waits."""

    def __init__(self, store: AsyncRemoteStore, identity: Identity) -> None:
        self._store = store
        self._identity = identity

    def __enter__(self) -> Self:
        self._store.watches.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.watches.remove(self)

    def pause(self, planned: float) -> float:
        """How long to wait at most before the store is asked again."""
        if self._store.watches.may_listen(self):
            return max(planned, random.uniform(SAFETY / 2, SAFETY))  # noqa: S311 - no secret
        return planned

    async def wait(self, seconds: float) -> bool:
        """Sleep for this time, or until the attempt has ended; True if the service says so."""
        if not self._store.watches.may_listen(self):
            await sleep(seconds)
            return False
        try:
            changed = await self._store.changed(self._identity, seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller asks, and polls
            self._store.watches.told(error)
            return False
        self._store.watches.told(None)
        return changed
