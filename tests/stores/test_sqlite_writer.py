"""The thread that writes for an event loop, at moments that only a race would bring about."""

from __future__ import annotations

import asyncio
import threading

from semel.core.records import Claimed
from semel.stores.sql import writing
from semel.stores.sql.sqlite import AsyncSQLiteStore
from stores.sqlite_helpers import ask

PATIENCE = 20.0


class HeldCommits:
    """Holds the writer at its commits until they are released; what comes meanwhile queues up."""

    def __init__(self) -> None:
        self.count = 0
        self._reached, self._released = threading.Event(), threading.Event()

    def trace(self, sql: str) -> None:
        if sql == "COMMIT":
            self.count += 1
            self._reached.set()
            self._released.wait(PATIENCE)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE)

    def release(self) -> None:
        self._released.set()


async def test_what_is_asked_for_together_with_the_closing_is_done(tmp_path):
    commits = HeldCommits()
    store = AsyncSQLiteStore(tmp_path / "semel.db", trace=commits.trace)
    first = asyncio.create_task(store.claim(ask(1)))
    await commits.reached()
    second = asyncio.create_task(store.claim(ask(2)))
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)  # both have queued up now: the writer will find them together
    assert store._executor._queue.qsize() == 2
    commits.release()
    await closing
    assert isinstance(await first, Claimed)
    assert isinstance(await second, Claimed)


async def test_more_than_fits_into_one_transaction_goes_into_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "BATCH", 2)
    commits = HeldCommits()
    store = AsyncSQLiteStore(tmp_path / "semel.db", trace=commits.trace)
    claims = [asyncio.create_task(store.claim(ask(0)))]
    await commits.reached()
    claims += [asyncio.create_task(store.claim(ask(number))) for number in range(1, 4)]
    await asyncio.sleep(0)
    assert store._executor._queue.qsize() == 3
    commits.release()
    assert all(isinstance(answer, Claimed) for answer in await asyncio.gather(*claims))
    assert commits.count == 3
    await store.close()
