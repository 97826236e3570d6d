"""semel, by its public API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

from benchmarks.figures import OURS
from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Place,
    TaskContender,
    ThreadContender,
    awaiting,
    calling,
)
from semel import AsyncIdempotency, Idempotency


@contextmanager
def _threads(place: Place) -> Iterator[Go]:
    with closing(Idempotency(place.url)) as idem:
        yield calling(lambda key: idem.execute(key, place.work.run))


@asynccontextmanager
async def _tasks(place: Place) -> AsyncIterator[AsyncGo]:
    async with AsyncIdempotency(place.url) as idem:
        yield awaiting(lambda key: idem.execute(key, place.work.arun))


SEMEL: ThreadContender = Contender(OURS, "ours", _threads)
ASYNC_SEMEL: TaskContender = Contender(OURS, "ours", _tasks)
