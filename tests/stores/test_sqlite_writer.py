"""The thread that writes for an event loop, at moments that only a race would bring about."""

from __future__ import annotations

import asyncio
import threading
from queue import Empty, SimpleQueue

import pytest

from semel.core.records import Claimed
from semel.errors import StoreUnavailable
from semel.stores.sql import sqlite_writer
from semel.stores.sql.sqlite import AsyncSQLiteStore
from stores.sqlite_helpers import RESULT, Statements, ask, identity, wait_until

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
    monkeypatch.setattr(sqlite_writer, "MOST_JOBS", 2)
    commits = HeldCommits()
    store = AsyncSQLiteStore(tmp_path / "semel.db", trace=commits.trace)
    claims = [asyncio.create_task(store.claim(ask(0)))]
    await commits.reached()
    claims += [asyncio.create_task(store.claim(ask(number))) for number in range(1, 4)]
    await asyncio.sleep(0)  # they have asked
    await asyncio.sleep(0)  # and are handed over, as many at a time as one transaction takes
    assert store._executor._queue.qsize() == 2
    commits.release()
    assert all(isinstance(answer, Claimed) for answer in await asyncio.gather(*claims))
    assert commits.count == 3
    await store.close()


async def test_what_was_asked_for_while_another_loop_closes_the_store_is_refused(tmp_path):
    store = AsyncSQLiteStore(tmp_path / "semel.db")
    late = asyncio.create_task(store.claim(ask(1)))
    cancelled = asyncio.create_task(store.claim(ask(2)))
    await asyncio.sleep(0)  # they have asked, and are not handed over yet
    cancelled.cancel()
    closing = threading.Thread(target=lambda: asyncio.run(store.close()))
    closing.start()
    closing.join()
    with pytest.raises(StoreUnavailable, match="is closed"):
        await late
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_those_who_ask_in_one_turn_of_the_loop_share_a_transaction(tmp_path):
    statements = Statements()
    store = AsyncSQLiteStore(tmp_path / "semel.db", trace=statements)
    await store.counts()
    assert all(
        isinstance(answer, Claimed)
        for answer in await asyncio.gather(*(store.claim(ask(number)) for number in range(100)))
    )
    assert statements.seen["COMMIT"] == 1
    await store.close()


# --- a store that nobody uses any more -----------------------------------------------------------


async def test_a_thread_without_work_ends_and_the_next_call_starts_another(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_writer, "QUIET", 0.01)
    store = AsyncSQLiteStore(tmp_path / "semel.db")
    assert isinstance(await store.claim(ask(1)), Claimed)
    await asyncio.to_thread(wait_until, lambda: store._executor._thread is None)
    await asyncio.to_thread(wait_until, lambda: store._executor._session._connection is None)
    monkeypatch.setattr(sqlite_writer, "QUIET", PATIENCE)
    assert await store.complete(identity(1), ask(1).owner, RESULT, 60.0)
    assert store._executor._thread.is_alive()
    await store.close()


class LateQueue(SimpleQueue):
    """Has what it did not have in time."""

    late = True

    def get(self, block=True, timeout=None):
        taken = super().get(block, timeout)
        if timeout is not None and self.late:
            self.late = False
            self.put(taken)
            raise Empty
        return taken


async def test_what_comes_while_a_thread_is_about_to_end_is_done(tmp_path):
    store = AsyncSQLiteStore(tmp_path / "semel.db")
    store._executor._queue = queue = LateQueue()
    assert isinstance(await store.claim(ask(1)), Claimed)
    assert not queue.late
    await store.close()


def test_a_store_whose_loop_is_gone_leaves_no_thread_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_writer, "QUIET", 0.01)
    stores = [AsyncSQLiteStore(tmp_path / "semel.db") for _ in range(3)]
    for number, store in enumerate(stores):
        asyncio.run(store.counts())
        assert isinstance(asyncio.run(claimed(store, number)), Claimed)
    wait_until(lambda: all(store._executor._thread is None for store in stores))


async def claimed(store, number):
    return await store.claim(ask(number))


def test_a_store_forgets_the_loops_that_were_closed(tmp_path):
    store = AsyncSQLiteStore(tmp_path / "semel.db")
    for number in range(3):
        asyncio.run(claimed(store, number))
    assert len(store._executor._loops) == 1
    asyncio.run(store.close())


def test_a_store_keeps_in_mind_the_loops_that_are_open(tmp_path):
    store = AsyncSQLiteStore(tmp_path / "semel.db")
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(claimed(store, 1))
        second.run(claimed(store, 2))
        assert len(store._executor._loops) == 2
        first.run(store.close())
