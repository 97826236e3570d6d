"""Many callers on one file: threads share commits, processes take turns, a killed one harms nobody."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading

import pytest

from semel.core.records import Claimed, CompleteRequest, Encoded, Finished
from semel.errors import StoreError, StoreFull, StoreUnavailable
from semel.stores.sql import sqlite_session, sqlite_writer
from semel.stores.sql.sqlite import SQLiteStore
from semel.stores.sql.sqlite_session import Job
from semel.stores.thread_batching import Turn
from stores.sqlite_helpers import (
    RESULT,
    Statements,
    ask,
    finish,
    forked,
    identity,
    in_a_fork,
    spawn,
    start_fork,
    wait_until,
    write_lock,
)

THREADS = 64
PROCESSES = 4
KEYS = 60


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


def run_threads(work, count):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_commits(path):
    statements = Statements()
    store = SQLiteStore(path, trace=statements)
    store.counts()
    barrier = threading.Barrier(THREADS)

    def work(number):
        barrier.wait()
        for turn in range(10):
            finish(store, f"{number}-{turn}")

    run_threads(work, THREADS)
    assert store.counts().succeeded == THREADS * 10
    assert statements.seen["COMMIT"] < THREADS * 10 * 2 / 4
    store.close()


def test_one_of_many_threads_gets_each_claim(path):
    store = SQLiteStore(path)
    answers = []

    def work(number):
        answers.extend(store.claim(ask(key, b"%d" % number)) for key in range(20))

    run_threads(work, 16)
    assert sum(isinstance(answer, Claimed) for answer in answers) == 20
    store.close()


def claim_everything(path, barrier, answers, number):
    store = SQLiteStore(path, timeout=30.0)
    barrier.wait()
    mine = [
        key for key in range(KEYS) if isinstance(store.claim(ask(key, b"%d" % number)), Claimed)
    ]
    for key in mine:
        assert store.complete(identity(key), b"%d" % number, RESULT, 60.0)
    answers.put(mine)
    store.close()


def test_processes_that_start_together_claim_each_key_once(path):
    barrier, answers = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [
        spawn.Process(target=claim_everything, args=(path, barrier, answers, number))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    claimed = [key for _ in processes for key in answers.get(timeout=60)]
    for process in processes:
        process.join()
    assert sorted(claimed) == list(range(KEYS))


def die_in_a_claim(path):
    def die(sql):
        if sql.startswith("INSERT"):
            os.kill(os.getpid(), signal.SIGKILL)

    SQLiteStore(path, trace=die).claim(ask("killed"))


def test_a_process_killed_in_the_middle_of_a_claim_leaves_nothing_behind(path):
    store = SQLiteStore(path)
    finish(store, "before")
    victim = spawn.Process(target=die_in_a_claim, args=(path,))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert isinstance(store.claim(ask("killed")), Claimed)
    assert isinstance(store.claim(ask("before", b"other")), Finished)
    store.close()


def test_a_bad_value_fails_alone(path):
    store = SQLiteStore(path)
    answers = store.send([ask(1), ask("\ud800"), ask(2), ask(3, lease=1e300)])
    assert [isinstance(answer, StoreError) for answer in answers] == [False, True, False, True]
    assert "cannot take this" in str(answers[1])
    assert store.counts().processing == 2
    store.close()


def test_a_bug_in_one_member_reaches_its_caller_and_nobody_else(path):
    store = SQLiteStore(path)
    with pytest.raises(AttributeError):
        store.send([None])
    with pytest.raises(AttributeError):
        store.get(None)
    finish(store, 1)
    store.close()


@pytest.mark.parametrize(("batch", "commits"), [(256, 2), (2, 3)])
def test_followers_are_answered_by_the_one_who_leads(path, monkeypatch, batch, commits):
    monkeypatch.setattr(sqlite_writer, "MOST_WAITERS", batch)
    statements = Statements()
    store = SQLiteStore(path, trace=statements, timeout=20.0)
    store.counts()
    with write_lock(path) as holder:
        leader = threading.Thread(target=store.claim, args=(ask(1),))
        leader.start()
        wait_until(store._executor._session._lock.locked)
        followers = [threading.Thread(target=store.claim, args=(ask(n),)) for n in range(2, 6)]
        for follower in followers:
            follower.start()
        wait_until(lambda: len(store._executor.waiting.members) == 4)
        holder.execute("ROLLBACK")
        for thread in (leader, *followers):
            thread.join()
    assert statements.seen["COMMIT"] == commits
    assert store.counts().processing == 5
    store.close()


def test_nobody_waits_for_ever_behind_a_lock_that_is_not_released(path):
    store = SQLiteStore(path, timeout=0.3)
    finish(store, "done")
    errors = []

    def work(number):
        with pytest.raises(StoreUnavailable) as caught:
            store.claim(ask(number))
        errors.append(str(caught.value))

    with write_lock(path):
        run_threads(work, 8)
        assert isinstance(store.claim(ask("done", b"other")), Finished)
        replay, new = store.send([ask("done", b"other"), ask("new")])
        assert isinstance(replay, Finished)
        assert isinstance(new, StoreUnavailable)
        new, replay = store.send([ask("new"), ask("done", b"other")])
        assert isinstance(new, StoreUnavailable)
        assert isinstance(replay, Finished)
    assert len(errors) == 8
    assert all(str(path) in error for error in errors)
    assert any("is locked by another process" in error for error in errors)
    assert store.counts().processing == 0
    finish(store, 1)
    store.close()


def test_who_lost_patience_in_the_queue_is_never_served(path):
    store = SQLiteStore(path, timeout=0.2)
    store.counts()
    store._executor._session._lock.acquire()
    leader = threading.Thread(target=store.claim, args=(ask(1),))
    leader.start()
    wait_until(lambda: store._executor.leaders and not store._executor.waiting.members)
    with pytest.raises(StoreUnavailable, match=r"did not answer within 0.2 s; nothing was done"):
        store.claim(ask(2))
    store._executor._session._lock.release()
    leader.join()
    assert store.get(identity(1)) is not None
    assert store.get(identity(2)) is None
    store.close()


def test_who_loses_patience_during_the_commit_is_told_that_it_may_count(path):
    commits, go_on, errors = [], threading.Event(), []

    def hang_in_the_second_commit(sql):
        if sql == "COMMIT":
            commits.append(sql)
            assert len(commits) != 2 or go_on.wait(20.0)

    def lose_patience():
        with pytest.raises(StoreUnavailable) as caught:
            store.claim(ask("impatient"))
        errors.append(str(caught.value))

    store = SQLiteStore(path, timeout=20.0, trace=hang_in_the_second_commit)
    store.counts()
    combiner = store._executor
    first, second = (threading.Thread(target=store.claim, args=(ask(n),)) for n in (1, 2))
    impatient = threading.Thread(target=lose_patience)
    with write_lock(path) as holder:
        first.start()
        wait_until(lambda: combiner.leaders and not combiner.waiting.members)
        second.start()
        wait_until(lambda: len(combiner.waiting.members) == 1)
        combiner._timeout = 1.0
        impatient.start()
        wait_until(lambda: len(combiner.waiting.members) == 2)
        holder.execute("ROLLBACK")
        impatient.join()
    go_on.set()
    first.join()
    second.join()
    assert "the transaction may still be committed" in errors[0]
    assert store.get(identity("impatient")) is not None
    store.close()


def led_by_another(combiner):
    leader = Turn()
    combiner.leaders = frozenset({leader})
    return leader


def test_an_interrupted_caller_hands_the_lead_on(path):
    store = SQLiteStore(path)
    store.counts()
    combiner = store._executor
    leader = led_by_another(combiner)

    def interrupted(turn):
        raise KeyboardInterrupt

    combiner.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        store.claim(ask(1))
    assert not combiner.waiting.members

    def interrupted_when_appointed(turn):
        combiner.leave(leader)
        assert combiner.leaders == {turn}
        raise KeyboardInterrupt

    combiner.wait = interrupted_when_appointed
    with pytest.raises(KeyboardInterrupt):
        store.claim(ask(2))
    assert not combiner.leaders
    del combiner.wait
    finish(store, 3)
    assert store.get(identity(2)) is None
    store.close()


def test_an_interrupt_while_the_lead_is_handed_on_leaves_the_store_with_a_leader(path):
    store = SQLiteStore(path, timeout=0.5)
    combiner = store._executor

    def interrupted(turn):
        del combiner.leave
        raise KeyboardInterrupt

    combiner.leave = interrupted
    with pytest.raises(KeyboardInterrupt):
        store.claim(ask(1))
    finish(store, 2)
    store.close()


def test_one_who_was_appointed_twice_leads_once(path):
    store = SQLiteStore(path)
    store.counts()
    combiner = store._executor
    leader = led_by_another(combiner)

    def appointed_by_two(turn):
        combiner.leave(leader)
        combiner.leave(leader)

    combiner.wait = appointed_by_two
    finish(store, 1)
    store.close()


def test_an_interrupt_before_the_commit_leaves_nobody_with_an_answer_that_was_undone(path):
    def interrupted(connection, group):
        drive_batch(connection, group)
        raise KeyboardInterrupt

    store = SQLiteStore(path)
    store.counts()
    session = store._executor._session
    drive_batch, session._drive_batch = session._drive_batch, interrupted
    jobs = [Job([store._verbs.claim(ask(number))]) for number in range(2)]
    with pytest.raises(KeyboardInterrupt):
        session.run(jobs, lambda _: None)
    for job in jobs:
        assert [type(outcome) for outcome in job.outcomes] == [StoreUnavailable]
    session._drive_batch = drive_batch
    assert store.counts().processing == 0
    store.close()


def test_an_interrupt_after_the_commit_leaves_the_others_their_answers(path):
    class Interrupted:
        """A connection that is told to stop as soon as it has committed."""

        def __init__(self, connection):
            self._connection = connection

        def __getattr__(self, name):
            return getattr(self._connection, name)

        def execute(self, sql):
            self._connection.execute(sql)
            if sql == "COMMIT":
                raise KeyboardInterrupt

    store = SQLiteStore(path)
    store.counts()
    session = store._executor._session
    session._connection = Interrupted(session._connection)
    jobs = [Job([store._verbs.claim(ask(number))]) for number in range(2)]
    assert isinstance(session.run(jobs, lambda _: None), KeyboardInterrupt)
    assert all(isinstance(job.outcomes[0], Claimed) for job in jobs)
    assert store.counts().processing == 2
    store.close()


def test_an_interrupt_during_the_transaction_frees_everybody(path):
    def trace(sql):
        if sql.startswith("INSERT") and interrupt.is_set():
            interrupt.clear()
            store._executor._session._connection.interrupt()

    interrupt = threading.Event()
    store = SQLiteStore(path, trace=trace)
    store.counts()
    interrupt.set()
    with pytest.raises(StoreUnavailable, match="interrupted"):
        store.claim(ask(1))
    finish(store, 1)
    store.close()


def test_a_transaction_left_open_by_an_interrupt_is_undone(path):
    store = SQLiteStore(path)
    store.claim(ask(1))
    connection = store._executor._session._connection
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM idempotent_record")
    assert store.complete(identity(1), ask(1).owner, RESULT, 60.0)
    store.close()


def test_a_failing_commit_fails_everyone_in_it(path):
    connection = sqlite3.connect(path, isolation_level=None)
    store = SQLiteStore(connection=connection, timeout=0.1)
    store.counts()
    # In rollback-journal mode a reader that stays makes COMMIT fail, after all statements ran.
    connection.execute("PRAGMA busy_timeout = 100")
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM idempotent_record").fetchall()
    answers = store.send([ask(1), ask(2)])
    assert [type(answer) for answer in answers] == [StoreUnavailable, StoreUnavailable]
    assert answers[0] is not answers[1]
    reader.close()
    assert store.counts().processing == 0
    finish(store, 1)
    connection.close()


def test_a_forked_child_and_its_parent_lose_no_commit(path):
    store = SQLiteStore(path)
    finish(store, "parent before")

    def child():
        finish(store, "child")
        return store.counts().succeeded

    assert in_a_fork(child) == "2"
    finish(store, "parent after")
    store.close()
    again = SQLiteStore(path)
    assert again.counts().succeeded == 3
    again.close()


def test_a_child_keeps_its_commits_when_the_parent_closes_the_file_first(path):
    store = SQLiteStore(path)
    finish(store, "parent")
    child_wrote, parent_closed = forked.Event(), forked.Event()

    def work():
        finish(store, "child, while the parent has it open")
        child_wrote.set()
        parent_closed.wait(20.0)
        finish(store, "child, after the parent closed it")

    child = start_fork(work)
    assert child_wrote.wait(20.0)
    finish(store, "parent again")
    store.close()
    parent_closed.set()
    child.join()
    after = SQLiteStore(path)
    assert after.counts().succeeded == 4
    after.close()


def test_a_fork_waits_for_the_transaction_of_another_thread(path):
    in_transaction, go_on = threading.Event(), threading.Event()

    def trace(sql):
        if sql.startswith("INSERT"):
            in_transaction.set()
            go_on.wait(20.0)

    store = SQLiteStore(path, trace=trace)
    worker = threading.Thread(target=store.claim, args=(ask(1),))
    worker.start()
    in_transaction.wait(20.0)
    threading.Timer(0.1, go_on.set).start()
    assert in_a_fork(lambda: store.counts().processing) == "1"
    worker.join()
    finish(store, 2)
    store.close()


def test_a_child_forked_in_a_transaction_that_does_not_end_refuses(path):
    store = SQLiteStore(path, timeout=0.05)
    store.counts()
    session = store._executor._session
    with session._lock:
        answer = in_a_fork(store.counts)
    assert "forked during a transaction" in answer
    finish(store, 1)
    store.close()


def test_a_closed_store_says_so(path):
    store = SQLiteStore(path)
    finish(store, 1)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="is closed"):
        store.get(identity(1))


def test_a_large_result_that_does_not_fit_refuses_itself_alone(path):
    store = SQLiteStore(path)
    store.send([ask(1), ask(2)])
    connection = store._executor._session._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    large = Encoded("json", b"x" * 1_000_000)
    owner = ask(1).owner
    answers = store.send(
        [
            CompleteRequest(identity(1), owner, large, 60.0),
            CompleteRequest(identity(2), owner, RESULT, 60.0),
        ]
    )
    assert isinstance(answers[0], StoreFull)
    assert answers[1] is True
    assert store.counts().succeeded == 1
    store.close()


class TimeLimit(Exception):
    """What the handler of a worker's soft time limit raises: an ordinary exception."""


@pytest.mark.parametrize("kind", [TimeLimit, KeyboardInterrupt])
def test_an_exception_that_strikes_the_thread_that_works_for_all_is_its_own_alone(
    path, monkeypatch, kind
):
    store = SQLiteStore(path, timeout=60)
    store.counts()
    outcomes, struck = {}, []

    def claim(number):
        try:
            outcomes[number] = type(store.claim(ask(number)))
        except (TimeLimit, KeyboardInterrupt) as error:
            outcomes[number] = type(error)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(3)]
    drive = sqlite_session.drive

    def strike(*args, **kwargs):
        if threading.current_thread() is not threads[0] and not struck:
            struck.append(threading.current_thread())
            raise kind
        return drive(*args, **kwargs)

    monkeypatch.setattr(sqlite_session, "drive", strike)
    with write_lock(path):
        for number, thread in enumerate(threads):
            thread.start()
            # The first one leads and waits for the file; the others wait for it, in one queue.
            wait_until(lambda n=number: len(store._executor.waiting.members) == n)
            wait_until(lambda: store._executor.leaders)
    for thread in threads:
        thread.join(60)
    assert struck
    assert outcomes == {0: Claimed, 1: kind, 2: Claimed}
    store.close()


def test_an_exception_that_comes_again_is_the_error_of_its_own_operation(path, monkeypatch):
    store = SQLiteStore(path)
    drive = sqlite_session.drive

    def broken(connection, operation, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(sqlite_session, "drive", broken)
    with pytest.raises(ZeroDivisionError):
        store.claim(ask(1))
    monkeypatch.setattr(sqlite_session, "drive", drive)
    finish(store, 1)
    store.close()


def test_a_failure_of_the_second_run_reaches_the_callers(path, monkeypatch):
    store = SQLiteStore(path)
    store.counts()
    session = store._executor._session

    def torn(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(session, "_write", torn)
    with pytest.raises(ZeroDivisionError):
        store.claim(ask(1))
    monkeypatch.undo()
    finish(store, 1)
    store.close()


@pytest.mark.parametrize("before", [True, False])
def test_a_leader_that_is_interrupted_beside_its_transaction_leaves_the_others_to_the_next(
    path, monkeypatch, before
):
    store = SQLiteStore(path, timeout=60)
    store.counts()
    combiner, outcomes = store._executor, {}
    run = combiner._session.run

    def claim(number):
        try:
            outcomes[number] = type(store.claim(ask(number)))
        except KeyboardInterrupt as error:
            outcomes[number] = type(error)

    threads = [threading.Thread(target=claim, args=[number]) for number in range(1, 5)]

    def interrupted(batch, answer):
        if len(batch) == 1 and not combiner.waiting.members:
            for number, thread in enumerate(threads, 1):
                thread.start()
                wait_until(lambda n=number: len(combiner.waiting.members) == n)
            return run(batch, answer)
        monkeypatch.undo()
        if not before:
            # Three have their answers, two of them were told so.
            run(batch[:3], lambda turns: answer(turns[:2]))
        raise KeyboardInterrupt

    monkeypatch.setattr(combiner._session, "run", interrupted)
    assert isinstance(store.claim(ask(0)), Claimed)
    for thread in threads:
        thread.join(60)
    assert outcomes == {1: KeyboardInterrupt, 2: Claimed, 3: Claimed, 4: Claimed}
    store.close()
