"""What the engine itself costs: the memory store through the decorator, beside a dictionary.

The dictionary has a ttl for each entry, builds the same key with the same decorator's template,
and encodes and reads back with the same codec. What is left is the engine: claim, lease, owner,
duplicates, cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

from benchmarks.contenders.commands import TTL
from benchmarks.figures import OURS, Race, Section, at_most
from benchmarks.measuring import (
    RESULT,
    AsyncGo,
    Contender,
    Effort,
    Go,
    Place,
    TaskContender,
    ThreadContender,
    Work,
    awaiting,
    calling,
)
from benchmarks.racing import async_race, race
from semel import AsyncIdempotency, Idempotency
from semel.core.codec import codec_named

URL = "memory://?max_records=2000000"
ROUNDS = 21
KEY = "order:{order_id}"
SCOPE = "orders.create"
CODEC = codec_named("json")


class Entries:
    """A dictionary with a ttl."""

    def __init__(self, key_for: Callable[[str], str]) -> None:
        self._key_for = key_for
        self._entries: dict[str, tuple[float, bytes]] = {}

    def once(self, order_id: str, fn: Callable[[str], str]) -> Any:
        key = self._key_for(order_id)
        entry = self._entries.get(key)
        if entry is not None and entry[0] > monotonic():
            return CODEC.decode(entry[1], b"", str)
        data = CODEC.encode(fn(order_id), b"", str)
        self._entries[key] = (monotonic() + TTL, data)
        return CODEC.decode(data, b"", str)

    async def aonce(self, order_id: str, fn: Callable[[str], Any]) -> Any:
        key = self._key_for(order_id)
        entry = self._entries.get(key)
        if entry is not None and entry[0] > monotonic():
            return CODEC.decode(entry[1], b"", str)
        data = CODEC.encode(await fn(order_id), b"", str)
        self._entries[key] = (monotonic() + TTL, data)
        return CODEC.decode(data, b"", str)


def create(order_id: str) -> str:
    """The operation: as good as nothing."""
    del order_id
    return RESULT


async def acreate(order_id: str) -> str:
    """The operation, awaited."""
    del order_id
    return RESULT


@contextmanager
def _semel(place: Place) -> Iterator[Go]:
    with Idempotency(place.url) as idem:
        yield calling(idem.once(key=KEY, scope=SCOPE)(create))


@contextmanager
def _dictionary(place: Place) -> Iterator[Go]:
    with Idempotency(place.url) as idem:
        entries = Entries(idem.once(key=KEY, scope=SCOPE)(create).key_for)
        yield calling(lambda order_id: entries.once(order_id, create))


@asynccontextmanager
async def _async_semel(place: Place) -> AsyncIterator[AsyncGo]:
    async with AsyncIdempotency(place.url) as idem:
        yield awaiting(idem.once(key=KEY, scope=SCOPE)(acreate))


@asynccontextmanager
async def _async_dictionary(place: Place) -> AsyncIterator[AsyncGo]:
    async with AsyncIdempotency(place.url) as idem:
        entries = Entries(idem.once(key=KEY, scope=SCOPE)(acreate).key_for)
        yield awaiting(lambda order_id: entries.aonce(order_id, acreate))


SEMEL: ThreadContender = Contender(OURS, "ours", _semel, works=False)
DICTIONARY: ThreadContender = Contender("dictionary with ttl", "floor", _dictionary, works=False)
ASYNC_SEMEL: TaskContender = Contender(OURS, "ours", _async_semel, works=False)
ASYNC_DICTIONARY: TaskContender = Contender(
    "dictionary with ttl", "floor", _async_dictionary, works=False
)


def run(effort: Effort) -> list[Section]:
    """Race beside the dictionary, sync and async."""
    place, rounds = Place(URL, Work()), effort.rounds(ROUNDS)
    first, replay = race((SEMEL, DICTIONARY), place, callers=1, rounds=rounds, effort=effort)
    async_first, async_replay = asyncio.run(
        async_race((ASYNC_SEMEL, ASYNC_DICTIONARY), place, callers=1, rounds=rounds, effort=effort)
    )
    name = DICTIONARY.title
    return [
        Section(
            "Memory store through the decorator",
            "",
            [
                *(Race(f"sync {one.what}", one.unit, one.lanes) for one in (first, replay)),
                *(
                    Race(f"async {one.what}", one.unit, one.lanes)
                    for one in (async_first, async_replay)
                ),
            ],
            [
                at_most(6, "sync replay, time to the dictionary's", replay.ratio(name, OURS), 2.5),
                at_most(6, "sync first, time to the dictionary's", first.ratio(name, OURS), 5),
                at_most(
                    6, "async first, time to the dictionary's", async_first.ratio(name, OURS), 10
                ),
            ],
        )
    ]
