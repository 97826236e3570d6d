# Generated from stores/remote/aio.py by `make generate`: change that file instead.
"""The remote store for threads: batches on their way to a service, what is sent again, watches.

Every request is safe to send twice. So one that meets a closed connection, a service that restarts,
or a balancer whose server is gone is sent again, for half of `timeout` at most. An answer of the
service itself is final. Requests that the service refuses in a batch are asked for alone where the
others may have an answer; so are renewals always, because attempts depend on them that have nothing
to do with each other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from queue import Empty
from time import monotonic, sleep
from typing import Any, Final, Self, TypeVar

from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.records import LISTINGS, Identity, RenewRequest, Request
from semel.errors import StoreError, StoreRefused, StoreUnavailable
from semel.stores.base import Store
from semel.stores.listening import SAFETY, Backoff
from semel.stores.remote import wire
from semel.stores.remote.addresses import Unreachable, parse
from semel.stores.remote.threads import Transport
from semel.stores.thread_batching import Batcher, Slots
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


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> RemoteStore:
    """Open a store for threads; it connects on first use."""
    address = parse(url, prefix=prefix, timeout=timeout, options=options)
    return RemoteStore(Transport(address))


class RemoteStore(Store):
    """Keeps records in a semel service. Any number of threads may use it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.where = transport.address.where
        self._timeout = transport.address.timeout
        self._batcher = Batcher(self._ask_one, self._exchange)
        self._calls = Slots(MOST_CALLS)
        self.watches = Watches(self.where)

    def __repr__(self) -> str:
        return f"<RemoteStore {self.transport.address.url}>"

    def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        wire.check(request)
        return self._batcher.ask(request)

    def _ask_one(self, request: Request[T]) -> T:
        try:
            [answer] = self._exchange((request,))
        except wire.NotAnswered as refused:
            raise refused.error from None
        if isinstance(answer, StoreError):
            raise answer
        known: T = answer
        return known

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests, as many as the service takes in one round trip."""
        for request in requests:
            wire.check(request)
        answers: list[T | StoreError] = []
        for chunk in wire.chunks(requests):
            answers += self._send_chunk(chunk)
        return answers

    def _send_chunk(self, requests: Sequence[Request[Any]]) -> list[Any]:
        try:
            return self._exchange(requests)
        except wire.NotAnswered as refused:
            error = refused.error
            if not isinstance(error, StoreError):
                if not _renew(requests):
                    raise error from None
                error = StoreRefused(str(error))
            if len(requests) == 1:
                return [error]
        half = len(requests) // 2
        first = self._send_chunk(requests[:half])
        return first + self._send_chunk(requests[half:])

    def _exchange(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Send a batch; one that is refused as a whole raises `NotAnswered`."""
        notice_fork()  # the parent's threads may have all slots
        if _renew(requests):
            return self._answers(requests)
        try:
            slot = self._calls.get(timeout=self._timeout)
        except Empty:
            raise StoreUnavailable(
                f"{MOST_CALLS} calls of this process wait for {self.where}; nothing was sent"
            ) from None
        try:
            return self._answers(requests)
        finally:
            self._calls.give(slot)

    def _answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Send a batch until it is answered."""
        listing = type(requests[0]) in LISTINGS
        end = monotonic() + (max(self._timeout, LISTING) if listing else self._timeout)
        search_until = monotonic() + self._timeout * SEARCH_SHARE
        pause = FIRST_PAUSE
        while True:
            left = end - monotonic()
            body = wire.write_batch(requests, left, self.where)
            try:
                reply = self.transport.post(wire.SEND, body, left)
                if not wire.passes(reply):
                    return wire.read_answers(reply, requests, self.where)
                failed = Unreachable(f"HTTP status {reply.status}")
            except Unreachable as error:
                failed = error
            if monotonic() + pause > search_until:
                raise StoreUnavailable(f"{self.where} can't be reached: {failed}") from failed
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Close the connections; waiting calls are woken, and poll."""
        self._batcher.close()
        self.transport.close()

    def watch(self, identity: Identity) -> RemoteWatch:
        """Listen for the end of the record's running attempt."""
        notice_fork()
        return RemoteWatch(self, identity)

    def changed(self, identity: Identity, seconds: float) -> bool:
        """Wait until a record has no live attempt; False after these seconds."""
        body = wire.write_watch(identity, min(seconds, wire.MOST_SECONDS))
        try:
            reply = self.transport.post(wire.WATCH, body, seconds + self._timeout)
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
        self._open: set[RemoteWatch] = set()
        self._backoff = Backoff(self._where)

    def add(self, watch: RemoteWatch) -> None:
        """Let a watch listen, unless many do."""
        if len(self._open) < MOST_WATCHES:
            self._open.add(watch)

    def remove(self, watch: RemoteWatch) -> None:
        """Listen no longer for this watch."""
        self._open.discard(watch)

    def may_listen(self, watch: RemoteWatch) -> bool:
        """Whether this watch is told of an end; else its caller polls."""
        return watch in self._open and self._backoff.is_over(monotonic())

    def told(self, error: Exception | None) -> None:
        """Note that a watch was answered, or why not."""
        if error is None:
            self._backoff.succeeded()
        elif self._backoff.is_over(monotonic()):  # else another watch has failed just before
            self._backoff.failed(error, monotonic())


class RemoteWatch:
    """Where one thread waits."""

    def __init__(self, store: RemoteStore, identity: Identity) -> None:
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

    def wait(self, seconds: float) -> bool:
        """Sleep for this time, or until the attempt has ended; True if the service says so."""
        if not self._store.watches.may_listen(self):
            sleep(seconds)
            return False
        try:
            changed = self._store.changed(self._identity, seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller asks, and polls
            self._store.watches.told(error)
            return False
        self._store.watches.told(None)
        return changed
