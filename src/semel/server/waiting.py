"""Starts that wait for another attempt: how many may, and what wakes them.

A store that sends wake-ups does so here too (`Store.watch`). For any other, `finish` and `fail`
through this instance wake its waiters, and one batch of reads for all of them is the net: it sees
what other instances and engines did.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from semel.core.records import PROCESSING, GetRequest, Identity, Record
from semel.errors import StoreError
from semel.server.problems import Problem
from semel.server.tokens import Caller
from semel.stores.base import AsyncStore, AsyncWatch

NET: Final = 0.25
"""Seconds between two looks at all records that are waited for."""
BATCH: Final = 500
"""Records that are read at a time."""


class Place:
    """One start that waits."""

    def __init__(self, watch: AsyncWatch | None) -> None:
        self._watch = watch
        self._woken = asyncio.Event()

    def wake(self, *_: object) -> None:
        """End its pause."""
        self._woken.set()

    def pause(self, planned: float) -> float:
        """Return how long to wait at most, where polling would wait as planned."""
        return math.inf if self._watch is None else self._watch.pause(planned)

    async def wait(self, seconds: float) -> bool:
        """Wait for these seconds, or until the record may have changed.

        Returns True if a message of the store ended it, of which there may be any number.
        """
        woken = asyncio.create_task(self._woken.wait())
        waits: set[asyncio.Task[Any]] = {woken}
        if self._watch is not None:
            waits.add(asyncio.create_task(self._watch.wait(seconds)))
        try:
            done, _ = await asyncio.wait(
                waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._woken.clear()
        return any(each.result() for each in done if each is not woken)


class Waiting:
    """The starts of one service that wait."""

    def __init__(self, store: AsyncStore, most: int, most_each: int) -> None:
        self._store = store
        self.most = most
        self.most_each = most_each
        """For each token."""
        self.count = 0
        self._by_key: dict[Identity, set[Place]] = {}
        self._net: asyncio.Task[None] | None = None

    @contextmanager
    def place(self, identity: Identity, caller: Caller) -> Iterator[Place]:
        """Wait while the `with` block lasts; too many are a `too_many_waiting` problem at once."""
        if self.count >= self.most or caller.waiting >= self.most_each:
            # Without a connection that stays open: descriptors are what there is too few of.
            raise Problem("too_many_waiting", close=True)
        with ExitStack() as stack:
            self.count += 1
            caller.waiting += 1
            stack.callback(self._leave, caller)
            watch = self._store.watch(identity)
            place = Place(None if watch is None else stack.enter_context(watch))
            self._by_key.setdefault(identity, set()).add(place)
            stack.callback(self._remove, identity, place)
            if watch is None and self._net is None:
                self._net = asyncio.create_task(self._look())
            yield place

    def _leave(self, caller: Caller) -> None:
        self.count -= 1
        caller.waiting -= 1

    def _remove(self, identity: Identity, place: Place) -> None:
        places = self._by_key[identity]
        places.discard(place)
        if not places:
            del self._by_key[identity]

    def wake(self, identity: Identity) -> None:
        """Let the waiters of a key ask again."""
        for place in self._by_key.get(identity, ()):
            place.wake()

    def wake_all(self) -> None:
        """Let all waiters look again: the service stops."""
        for identity in self._by_key:
            self.wake(identity)

    async def _look(self) -> None:
        """Be the net, while anyone waits."""
        owners: dict[Identity, bytes] = {}
        try:
            while self._by_key:
                await asyncio.sleep(NET)
                identities = list(self._by_key)
                owners = {each: owners[each] for each in identities if each in owners}
                for start in range(0, len(identities), BATCH):
                    with suppress(StoreError):  # a waiter meets it when its attempt's lease ends
                        await self._look_at(identities[start : start + BATCH], owners)
        finally:
            self._net = None

    async def _look_at(self, identities: list[Identity], owners: dict[Identity, bytes]) -> None:
        answers = await self._store.send([GetRequest(each) for each in identities])
        for identity, record in zip(identities, answers, strict=True):
            if isinstance(record, StoreError):
                continue
            if not runs(record):
                self.wake(identity)
            elif record is not None and owners.setdefault(identity, record.owner) != record.owner:
                owners[identity] = record.owner  # taken over: its lease is another one
                self.wake(identity)

    async def close(self) -> None:
        """End the net."""
        if self._net is not None:
            self._net.cancel()
            with suppress(asyncio.CancelledError):
                await self._net


def runs(record: Record | None) -> bool:
    """Return whether an attempt runs under a live lease."""
    return record is not None and record.state is PROCESSING and not record.abandoned
