"""What a fork does, step by step, and what a child does whose fork Python does not see.

`test_process.py` runs these in a process of their own. Some pretend that this process is a child,
and CPython itself may hang after an unseen fork of a process whose threads are busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import threading
from typing import ClassVar

import aiosqlite
import pytest

from semel import AsyncIdempotency, Idempotency, LeaseLost, Policy, StoreUnavailable
from semel.core import process
from semel.core.process import ForkAware
from semel.core.records import Claimed
from semel.observe import Tally
from semel.repair import Reconciler, Unknown
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.testing import AsyncFaultyStore, FaultyStore
from stores.sqlite_helpers import ask, finish, in_a_fork
from unseen import in_an_unseen_fork, unseen_fork


class Member(ForkAware):
    def __init__(self, start=lambda: None):
        self.started = 0
        self.start = start
        process.follow_forks(self)

    def after_fork_in_child(self):
        self.started += 1
        self.start()


def test_every_store_starts_afresh_in_the_child(tmp_path):
    memory, sqlite = MemoryStore(), SQLiteStore(tmp_path / "semel.db")
    for_tasks = AsyncSQLiteStore(tmp_path / "semel.db")
    finish(sqlite, 1)
    process._before()
    assert memory._lock.locked()
    assert sqlite._executor._session._connection is None
    process._after_in_child()
    assert isinstance(memory.claim(ask(1)), Claimed)
    finish(sqlite, 2)
    assert asyncio.run(for_tasks.counts()).succeeded == 2
    sqlite.close()
    asyncio.run(for_tasks.close())


def test_two_forks_at_once_take_turns():
    store = MemoryStore()
    process._before()
    other = threading.Thread(target=lambda: (process._before(), process._after()))
    other.start()
    assert other.is_alive()
    process._after()
    other.join()
    assert isinstance(store.claim(ask(1)), Claimed)


def test_a_store_that_is_gone_hears_of_no_fork():
    before = len(process._members)
    MemoryStore()
    assert len(process._members) <= before


def test_what_a_hook_raises_holds_up_neither_the_others_nor_the_next_fork():
    class Struck(Member):
        strikes: ClassVar = ["before_fork", "after_fork"]

        def before_fork(self):
            self._strike("before_fork")

        def after_fork(self):
            self._strike("after_fork")

        def _strike(self, where):
            if where in self.strikes:
                self.strikes.remove(where)
                raise KeyboardInterrupt

    stores = [MemoryStore(), process.ForkSafeLock(), Struck(), MemoryStore(), MemoryStore()]
    with pytest.raises(KeyboardInterrupt):
        process._before()
    with pytest.raises(KeyboardInterrupt):
        process._after()
    process._before()
    process._after()
    for store in stores:
        if isinstance(store, MemoryStore):
            finish(store, 1)


def test_what_the_last_hook_raises_does_not_hold_up_the_next_fork(monkeypatch):
    class Struck(Member):
        def after_fork(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "_members", {Struck()})
    for _ in range(2):
        process._before()
        with pytest.raises(KeyboardInterrupt):
            process._after()
        assert not process._one_fork_at_a_time.locked()


def test_stores_may_be_made_while_the_process_forks(monkeypatch):
    class Growing:
        calls = 0

        def __iter__(self):
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("Set changed size during iteration")
            return iter(())

    monkeypatch.setattr(process, "_members", Growing())
    process._before()
    process._after()


# --- a fork that Python does not see ---------------------------------------------------------


def pretend_fork():
    """Make this process look like a child that nothing has noticed yet."""
    process._known[0] = 0


def test_an_unseen_fork_is_noticed_once():
    member = Member()
    process.notice_fork()
    assert member.started == 0
    pretend_fork()
    process.notice_fork()
    process.notice_fork()
    assert member.started == 1


def test_threads_of_a_child_wait_until_one_of_them_has_started_all_afresh():
    begun, go_on = threading.Event(), threading.Event()
    member = Member(lambda: (begun.set(), go_on.wait(30)))
    noticed = []
    pretend_fork()

    def call():
        process.notice_fork()
        noticed.append(go_on.is_set())

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    assert noticed == []
    go_on.set()
    for thread in threads:
        thread.join()
    assert (noticed, member.started) == ([True] * 3, 1)


def test_an_interrupted_start_is_repeated():
    strikes = [KeyboardInterrupt]

    def strike():
        if strikes:
            raise strikes.pop()

    member = Member(strike)
    pretend_fork()
    with pytest.raises(KeyboardInterrupt):
        process.notice_fork()
    process.notice_fork()
    assert member.started == 2


def test_a_signal_handler_may_call_while_all_starts_afresh():
    member = Member(lambda: member.started == 1 and process.notice_fork())
    pretend_fork()
    process.notice_fork()
    process.notice_fork()
    assert member.started == 2


def test_a_fork_of_the_parents_that_was_under_way_holds_nothing_up():
    process._before()
    pretend_fork()
    process.notice_fork()
    process._before()
    process._after()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lock_that_was_held_at_the_fork_is_replaced(reentrant):
    safe = process.ForkSafeLock(reentrant=reentrant)
    held = threading.Thread(target=safe.lock.acquire)
    held.start()
    held.join()
    pretend_fork()
    process.notice_fork()
    with safe.lock:
        pass


def test_a_memory_store_that_was_being_changed_begins_empty():
    whole, torn = MemoryStore(), MemoryStore()
    for store in (whole, torn):
        finish(store, 1)
    torn._lock.acquire()
    pretend_fork()
    assert whole.counts().succeeded == 1
    assert torn.counts().succeeded == 0


def test_where_the_kernel_wipes_no_page_process_ids_are_compared(monkeypatch):
    def refused(*_, **__):
        raise OSError("no such advice")

    monkeypatch.setattr(process.mmap, "mmap", refused)
    known = process._wiped_page()
    known[0] = 1
    assert known[0]
    assert in_a_fork(lambda: known[0]) == "0"
    monkeypatch.setattr(process, "_known", known)
    member = Member()
    process.notice_fork()
    assert member.started == 0


# --- SQLite, which remembers in memory which files its process has locked ----------------------


def test_commits_of_a_child_survive_the_parents_last_connection(tmp_path):
    path = tmp_path / "semel.db"
    store, other = SQLiteStore(path), SQLiteStore(path)
    finish(store, 1)
    read, write = os.pipe()
    answers, answer = os.pipe()
    child = unseen_fork()
    if child == 0:
        try:
            finish(store, 2)
            os.write(answer, b"!")
            os.read(read, 1)  # meanwhile the parent closes, and removes a log that nobody uses
            finish(store, 3)
        finally:
            os._exit(0)  # without closing
    os.read(answers, 1)
    store.close()
    os.write(write, b"!")
    os.waitpid(child, 0)
    for descriptor in (read, write, answers, answer):
        os.close(descriptor)
    assert other.counts().succeeded == 3
    other.close()


def test_a_child_forked_during_a_transaction_refuses_the_file_in_every_store(tmp_path):
    path = tmp_path / "semel.db"
    store = SQLiteStore(path)
    finish(store, 1)

    def ask_again():
        with pytest.raises(StoreUnavailable, match="forked during a transaction"):
            store.counts()
        with pytest.raises(StoreUnavailable, match="forked during a transaction"):
            SQLiteStore(path).counts()
        return "refused"

    with store._executor._session._lock:
        assert in_an_unseen_fork(ask_again) == "refused"
    finish(store, 2)
    store.close()


def test_a_given_connection_is_refused_after_an_unseen_fork(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "semel.db")) as connection:
        store = SQLiteStore(connection=connection)
        finish(store, 1)
        said = in_an_unseen_fork(store.counts)
        assert "cannot be used after a fork" in said
        assert store.counts().succeeded == 1


# --- what is not asked for by a call -----------------------------------------------------------


def test_a_child_closes_what_it_inherited_without_waiting_for_its_parents_threads(tmp_path):
    idem = Idempotency(f"sqlite:///{tmp_path / 'semel.db'}", policy=Policy(lease=60))
    idem.execute("k", lambda: "done")
    assert in_an_unseen_fork(idem.close) == "None"
    assert idem.execute("k", lambda: "again") == "done"
    idem.close()


def test_a_child_shows_only_what_it_has_counted_itself():
    tally = Tally()
    with Idempotency("memory://", hooks=[tally]) as idem:
        idem.execute("k", lambda: "done", scope="shop")
        assert in_an_unseen_fork(lambda: tally.totals().events) == "{}"
        assert tally.totals().events["shop"]["Ran"] == 1


def test_a_reconciler_can_be_started_in_a_child(tmp_path):
    with Idempotency(f"sqlite:///{tmp_path / 'semel.db'}") as idem:
        reconciler = Reconciler(idem, {"pay": lambda record: Unknown()})
        reconciler.start()

        def start():
            reconciler.start()
            running = reconciler._background.running
            reconciler.stop()
            return running is not None and not running.is_alive()

        assert in_an_unseen_fork(start) == "True"
        reconciler.stop()


# --- inside a call -----------------------------------------------------------------------------


def overdue(engine):
    """Begin a call of an engine, and let its lease be due; its timer waits for longer than that."""
    (lease,) = engine._internals.leases.running()
    lease.due = 0.0
    return engine._internals.renewer


def test_the_timer_of_an_inherited_call_renews_nothing():
    store = FaultyStore(MemoryStore())
    with Idempotency(store) as idem:
        block = idem.attempt("k")
        block.__enter__()
        renewer = overdue(idem)
        pretend_fork()
        assert renewer.tick() == math.inf
        with pytest.raises(LeaseLost):
            block.__exit__(None, None, None)
    assert not {"renew", "renew_many", "complete"} & {call.verb for call in store.calls}


async def test_so_it_is_where_a_task_is_inherited_with_its_loop():
    store = AsyncFaultyStore(AsyncMemoryStore())
    async with AsyncIdempotency(store) as idem:
        block = idem.attempt("k")
        await block.__aenter__()
        renewer = overdue(idem)
        pretend_fork()
        assert await renewer.tick() == math.inf
        with pytest.raises(LeaseLost):
            await block.__aexit__(None, None, None)
    assert not {"renew", "renew_many", "complete"} & {call.verb for call in store.calls}


# --- inside a block ----------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(None, None, None), (ValueError, ValueError("no"), None)])
def test_a_child_forked_inside_a_transaction_leaves_its_end_to_the_parent(tmp_path, ends):
    path = tmp_path / "semel.db"
    with (
        Idempotency(f"sqlite:///{path}") as idem,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection,
    ):
        idem.marks.check("k")  # makes the table
        connection.execute("BEGIN")
        block = idem.transaction(connection, "k")
        attempt = block.__enter__()
        said = in_an_unseen_fork(lambda: block.__exit__(*ends))
        if ends[0] is None:
            assert said.startswith("LeaseLost('the process was forked inside this block")
        else:
            assert said == "None", "its own exception reaches the caller"
        attempt.result = "the parent's"
        block.__exit__(None, None, None)
        connection.execute("COMMIT")
        assert idem.execute("k", lambda: "again") == "the parent's"


@pytest.mark.parametrize("error", [None, ValueError("of the block")])
def test_the_end_of_an_inherited_block_writes_nothing(tmp_path, error):
    path = tmp_path / "semel.db"
    with (
        Idempotency(f"sqlite:///{path}") as idem,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection,
    ):
        idem.marks.check("k")  # makes the table
        connection.execute("BEGIN")
        block = idem.transaction(connection, "k")
        block.__enter__()
        pretend_fork()
        if error is None:
            with pytest.raises(LeaseLost, match="forked inside this block"):
                block.__exit__(None, None, None)
        else:
            block.__exit__(ValueError, error, None)
        connection.execute("ROLLBACK")
        assert idem.peek("k") is None


async def test_the_end_of_an_inherited_block_of_a_task_writes_nothing(tmp_path):
    path = tmp_path / "semel.db"
    async with (
        AsyncIdempotency(f"sqlite:///{path}") as idem,
        aiosqlite.connect(path, isolation_level=None) as connection,
    ):
        await idem.marks.check("k")
        for error in (None, ValueError("of the block")):
            await connection.execute("BEGIN")
            block = idem.transaction(connection, "k")
            await block.__aenter__()
            pretend_fork()
            if error is None:
                with pytest.raises(LeaseLost, match="forked inside this block"):
                    await block.__aexit__(None, None, None)
            else:
                await block.__aexit__(ValueError, error, None)
            await connection.execute("ROLLBACK")


def test_what_never_came_to_rest_is_not_undone():
    process._after()
    process.ForkSafeLock().after_fork()
    MemoryStore().after_fork()
