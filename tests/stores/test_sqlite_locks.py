"""Another program has the file: who waits for it, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading

import pytest

from semel.core.records import Claimed
from semel.errors import StoreUnavailable
from semel.stores.sql import sqlite_session
from semel.stores.urls import open_async_store, open_store
from stores.sqlite_helpers import ask, finish, identity

PATIENCE = 20.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@contextlib.contextmanager
def writing(path):
    with contextlib.closing(
        sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def broken_reads(monkeypatch, code):
    """The first look at the file fails; tells how many were tried."""
    looks = []

    def drive(connection, operation, *, may_write):
        looks.append(may_write)
        if len(looks) == 1:
            error = sqlite3.OperationalError("the file is not to be read now")
            error.sqlite_errorcode = code
            raise error
        return original(connection, operation, may_write=may_write)

    original = sqlite_session.drive
    monkeypatch.setattr(sqlite_session, "drive", drive)
    return looks


def test_who_may_not_read_while_another_process_repairs_the_file_waits_in_a_transaction(
    path, monkeypatch
):
    with contextlib.closing(open_store(f"sqlite:///{path}")) as store:
        finish(store, "k")
        looks = broken_reads(monkeypatch, sqlite3.SQLITE_BUSY_RECOVERY)
        assert store.get(identity("k")) is not None
        assert looks == [False, True]


def test_a_file_that_cannot_be_read_for_another_reason_is_no_matter_of_waiting(path, monkeypatch):
    with contextlib.closing(open_store(f"sqlite:///{path}")) as store:
        finish(store, "k")
        looks = broken_reads(monkeypatch, sqlite3.SQLITE_IOERR)
        with pytest.raises(StoreUnavailable):
            store.get(identity("k"))
        assert looks == [False]


def test_a_writer_gets_the_lock_as_soon_as_another_process_gives_it_back(path):
    with contextlib.closing(open_store(f"sqlite:///{path}", timeout=PATIENCE)) as store:
        finish(store, "before")
        answers = []
        with writing(path):
            writer = threading.Thread(target=lambda: answers.append(store.claim(ask("k"))))
            writer.start()
            writer.join(0.1)
            assert not answers
        writer.join(PATIENCE)
        assert isinstance(answers[0], Claimed)


async def test_tasks_run_out_of_patience_one_after_the_other(path):
    store = open_async_store(f"sqlite:///{path}", timeout=0.3)
    await store.get(identity("k"))
    with writing(path):
        early = asyncio.create_task(store.claim(ask("early")))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(store.claim(ask("late")))
        for waiting in (early, late):
            with pytest.raises(StoreUnavailable):
                await waiting
    assert isinstance(await store.claim(ask("next")), Claimed)
    await store.close()


async def test_results_that_were_given_are_not_kept(path):
    store = open_async_store(f"sqlite:///{path}")
    for number in range(50):
        await store.get(identity(number))
    [queue] = store._executor._loops.values()
    assert len(queue.waiting) == 1
    await store.close()
