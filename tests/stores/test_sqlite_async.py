"""SQLite for asyncio: one writer thread, shared commits, cancellation, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines.facade import PATIENCE, until
from semel.core.records import Claimed, Finished
from semel.errors import StoreUnavailable
from semel.stores.sql import sqlite_writer
from semel.stores.sql.sqlite import AsyncSQLiteStore
from semel.stores.sql.sqlite_writer import _Awaited, _LoopQueue
from stores.sqlite_helpers import (
    RESULT,
    Statements,
    ask,
    identity,
    in_a_fork,
    write_lock,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture(autouse=True)
def others():
    """Threads of stores that other tests of this process have left."""
    _others[:] = threading.enumerate()


_others: list[threading.Thread] = []


def writers():
    started = (thread for thread in threading.enumerate() if thread not in _others)
    return [thread for thread in started if thread.name == "semel-sqlite"]


async def test_tasks_share_commits_through_one_thread(path):
    statements = Statements()
    store = AsyncSQLiteStore(path, trace=statements)
    assert writers() == []

    async def work(number):
        assert isinstance(await store.claim(ask(number)), Claimed)
        assert await store.complete(identity(number), ask(number).owner, RESULT, 60.0)

    await asyncio.gather(*(work(number) for number in range(200)))
    assert len(writers()) == 1
    assert (await store.counts()).succeeded == 200
    assert statements.seen["COMMIT"] < 400 / 4
    await store.close()
    assert writers() == []


async def test_a_transaction_takes_a_bounded_number_of_callers(path, monkeypatch):
    monkeypatch.setattr(sqlite_writer, "MOST_JOBS", 10)
    statements = Statements()
    store = AsyncSQLiteStore(path, trace=statements)
    await asyncio.gather(*(store.claim(ask(number)) for number in range(100)))
    assert 10 <= statements.seen["COMMIT"] <= 20
    await store.close()


async def test_closing_a_store_that_could_not_open_does_not_try_again(path):
    path.write_bytes(b"this is not a database " * 100)
    store = AsyncSQLiteStore(path)
    with pytest.raises(StoreUnavailable, match="is not an SQLite database"):
        await store.claim(ask(1))
    await store.close()
    assert writers() == []


async def test_a_cancelled_caller_is_freed_and_its_claim_is_carried_out(path):
    store = AsyncSQLiteStore(path)
    await store.counts()
    with write_lock(path) as holder:
        cancelled = asyncio.create_task(store.claim(ask(1)))
        other = asyncio.create_task(store.claim(ask(2)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        holder.execute("ROLLBACK")
        assert isinstance(await other, Claimed)
    assert await store.get(identity(1)) is not None
    await store.close()


SHORT = 1.0
"""The timeout of a store that has to lose patience; a call that nothing stops takes far less."""


async def patient(path, *steps) -> None:
    """Take the first steps, which make the file, with a store that does not lose patience."""
    store = AsyncSQLiteStore(path)
    await store.counts()
    for step in steps:
        await step(store)
    await store.close()


async def test_a_locked_file_is_reported_in_time_and_replays_are_still_served(path):
    await patient(
        path,
        lambda store: store.claim(ask(1)),
        lambda store: store.complete(identity(1), ask(1).owner, RESULT, 60.0),
    )
    store = AsyncSQLiteStore(path, timeout=SHORT)
    await store.counts()
    with write_lock(path):
        with pytest.raises(StoreUnavailable, match="is locked by another process"):
            await store.claim(ask(2))
        assert isinstance(await store.claim(ask(1, b"other")), Finished)
    await store.close()


async def test_a_caller_does_not_wait_for_ever_for_a_writer_that_hangs(path):
    await patient(path)
    store = AsyncSQLiteStore(path, timeout=SHORT)
    await store.counts()
    session = store._executor._session
    with session._lock, pytest.raises(StoreUnavailable, match="within 2 s; nothing was done"):
        await store.claim(ask(1))
    assert await store.get(identity(1)) is None
    await store.close()


async def test_a_caller_out_of_patience_during_the_commit_is_told_that_it_may_count(path):
    claiming, committing, go_on = threading.Event(), threading.Event(), threading.Event()

    def trace(sql):
        if sql == "COMMIT" and claiming.is_set():
            committing.set()
            go_on.wait(20.0)

    await patient(path)
    store = AsyncSQLiteStore(path, timeout=SHORT, trace=trace)
    await store.counts()
    claiming.set()
    with pytest.raises(StoreUnavailable, match="may still be committed"):
        await store.claim(ask(1))
    assert committing.is_set()
    go_on.set()
    assert await store.get(identity(1)) is not None
    await store.close()


async def test_a_wait_that_ends_with_the_answer_changes_nothing(path):
    store = AsyncSQLiteStore(path)
    answered = _Awaited(())
    answered.answered.set_result(None)
    asked = store._executor._loops[answered.loop] = _LoopQueue()
    asked.waiting.append(answered)
    store._executor._check_waiting(answered.loop)
    assert answered.answered.exception() is None
    await store.close()


async def test_close_finishes_what_was_asked_for(path):
    store = AsyncSQLiteStore(path)
    claims = [asyncio.create_task(store.claim(ask(number))) for number in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(store.close(), store.close())
    assert all(isinstance(claim, Claimed) for claim in await asyncio.gather(*claims))
    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.claim(ask("late"))


async def test_closing_an_unused_store_starts_nothing(path):
    store = AsyncSQLiteStore(path)
    await store.close()
    assert writers() == []
    assert not path.exists()


def test_a_loop_that_was_closed_does_not_stop_the_writer(path):
    store = AsyncSQLiteStore(path)

    async def leave_without_waiting():
        task = asyncio.create_task(store.claim(ask(1)))
        await asyncio.sleep(0.05)
        task.cancel()

    async def go_on():
        assert isinstance(await store.claim(ask(2)), Claimed)
        assert await store.get(identity(1)) is not None
        await store.close()

    asyncio.run(store.counts())
    with write_lock(path) as holder:
        asyncio.run(leave_without_waiting())
        holder.execute("ROLLBACK")
    asyncio.run(go_on())


async def test_a_forked_child_has_a_writer_of_its_own(path):
    store = AsyncSQLiteStore(path)
    await store.claim(ask("parent"))

    def child():
        with ThreadPoolExecutor(1) as threads:  # this one has the parent's loop running
            return threads.submit(asyncio.run, store.counts()).result().processing

    assert in_a_fork(child) == "1"
    assert isinstance(await store.claim(ask("again")), Claimed)
    await store.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
async def test_callers_are_told_that_there_is_no_thread_for_them(path, monkeypatch, error):
    store = AsyncSQLiteStore(path)

    def refused(_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(StoreUnavailable, match="no thread for the store"):
            await store.claim(ask("k"))
    assert isinstance(await store.claim(ask("k")), Claimed)
    await store.close()


async def test_a_writer_whose_start_was_interrupted_ends_and_another_one_serves(path, monkeypatch):
    store = AsyncSQLiteStore(path)
    start, begun = threading.Thread.start, []

    def interrupted(thread):
        start(thread)
        begun.append(thread)
        raise ValueError("a worker's time limit")

    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: problems.append(told))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        unserved = asyncio.ensure_future(store.claim(ask("k")))
        await until(lambda: begun and problems)
    assert isinstance(await store.claim(ask("another")), Claimed)
    begun[0].join(PATIENCE)
    assert not begun[0].is_alive(), "two threads would serve one session"
    unserved.cancel()
    await store.close()


# --- dropped, and not closed ------------------------------------------------------------------


def open_files(path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(str(path) in str(link.readlink()) for link in links if link.is_symlink())


async def test_a_store_that_was_dropped_unclosed_keeps_no_thread_and_no_file(path):
    store = AsyncSQLiteStore(path)
    assert isinstance(await store.claim(ask("k")), Claimed)
    thread = store._executor._thread
    assert open_files(path)
    del store
    gc.collect()
    await until(lambda: not thread.is_alive())
    assert not open_files(path)


async def test_what_was_asked_of_a_store_that_was_dropped_is_done(path):
    store = AsyncSQLiteStore(path)
    await store.claim(ask("first"))
    request = ask("last")
    answer = store.claim(request)
    asked = asyncio.ensure_future(answer)
    await asyncio.sleep(0)
    thread = store._executor._thread
    del store, answer
    assert isinstance(await asked, Claimed)
    del asked
    gc.collect()
    await until(lambda: not thread.is_alive())


def test_dropping_a_writer_ends_its_thread_only_when_nothing_is_left(path):
    """Work that comes with the wake-up is done; the thread that finds none ends."""
    store = AsyncSQLiteStore(path)

    async def at_once():
        first = asyncio.ensure_future(store.claim(ask("a")))
        await asyncio.sleep(0)
        store._executor.drop()
        second = asyncio.ensure_future(store.claim(ask("b")))
        answers = [await first, await second]
        await until(lambda: store._executor._thread is None)
        answers.append(await store.claim(ask("c")))
        await store.close()
        return answers

    assert [type(answer) for answer in asyncio.run(at_once())] == [Claimed] * 3
