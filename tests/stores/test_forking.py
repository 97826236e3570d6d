"""What a fork does to stores, step by step; the tests with real children are beside their stores."""

from __future__ import annotations

import asyncio
import threading

from semel.core.records import Claimed
from semel.stores import forking
from semel.stores.memory import MemoryStore
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from stores.sqlite_helpers import ask, finish


def test_every_store_starts_afresh_in_the_child(tmp_path):
    memory, sqlite = MemoryStore(), SQLiteStore(tmp_path / "semel.db")
    for_tasks = AsyncSQLiteStore(tmp_path / "semel.db")
    finish(sqlite, 1)
    forking._before()
    assert memory._lock.locked()
    assert sqlite._executor._session._connection is None
    forking._in_child()
    assert isinstance(memory.claim(ask(1)), Claimed)
    finish(sqlite, 2)
    assert asyncio.run(for_tasks.counts()).succeeded == 2
    sqlite.close()
    asyncio.run(for_tasks.close())


def test_two_forks_at_once_take_turns():
    store = MemoryStore()
    forking._before()
    other = threading.Thread(target=lambda: (forking._before(), forking._in_parent()))
    other.start()
    assert other.is_alive()
    forking._in_parent()
    other.join()
    assert isinstance(store.claim(ask(1)), Claimed)


def test_a_store_that_is_gone_hears_of_no_fork():
    before = len(forking._members)
    MemoryStore()
    assert len(forking._members) <= before
