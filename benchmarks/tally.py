"""What a tally adds to a call: the memory store through the decorator, with the hook and without.

That is all of it: the clock is read for `store_seconds`, an event is made, and the tally counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from benchmarks.figures import OURS, Check, Race, Section, at_most
from benchmarks.measuring import (
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
from benchmarks.overhead import ASYNC_SEMEL, KEY, SCOPE, SEMEL, URL, acreate, create
from benchmarks.racing import async_race, race
from semel import AsyncIdempotency, Idempotency
from semel.observe import Tally

LIMIT = 2.5
"""Microseconds a call."""
ROUNDS = 31
WITHOUT = "without a hook"


@contextmanager
def _counted(place: Place) -> Iterator[Go]:
    with Idempotency(place.url, hooks=[Tally()]) as idem:
        yield calling(idem.once(key=KEY, scope=SCOPE)(create))


@asynccontextmanager
async def _async_counted(place: Place) -> AsyncIterator[AsyncGo]:
    async with AsyncIdempotency(place.url, hooks=[Tally()]) as idem:
        yield awaiting(idem.once(key=KEY, scope=SCOPE)(acreate))


COUNTED: ThreadContender = Contender(OURS, "ours", _counted, works=False)
BARE: ThreadContender = Contender(WITHOUT, "floor", SEMEL.open, works=False)
ASYNC_COUNTED: TaskContender = Contender(OURS, "ours", _async_counted, works=False)
ASYNC_BARE: TaskContender = Contender(WITHOUT, "floor", ASYNC_SEMEL.open, works=False)


def run(effort: Effort) -> list[Section]:
    """Race beside the same engine without a hook, sync and async."""
    place, rounds = Place(URL, Work()), effort.rounds(ROUNDS)
    for_threads = race((COUNTED, BARE), place, callers=1, rounds=rounds, effort=effort)
    for_tasks = asyncio.run(
        async_race((ASYNC_COUNTED, ASYNC_BARE), place, callers=1, rounds=rounds, effort=effort)
    )
    races = [
        *(Race(f"sync {one.what}", one.unit, one.lanes) for one in for_threads),
        *(Race(f"async {one.what}", one.unit, one.lanes) for one in for_tasks),
    ]
    checks = [_check(one) for one in races]
    return [Section("A tally, memory store through the decorator", "", races, checks)]


def _check(one: Race) -> Check:
    return at_most(
        0, f"the Tally hook adds, {one.what}", one.microseconds_more(OURS, WITHOUT), LIMIT, "us"
    )
