"""Who runs the transaction that many callers share: a thread among them, or a writer thread.

Threads: a caller that finds no other at work leads. It runs its own operations at once, with no
hand-over to another thread. Callers that come while it commits queue up; the first of them leads
next and takes the whole queue into one transaction (`thread_batching`). So an idle store answers
directly, and a busy one shares its commits.

Tasks: SQLite's calls block, so they run in a thread; one thread, because one connection writes at a
time anyway. What is asked for while it commits goes into its next transaction. The thread starts
with the first call and ends with `close`; also when nothing is asked for any more, until the next
call. So a store that is not closed, since its event loop is gone, leaves nothing behind; and when
the store itself is gone, the thread ends at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.errors import StoreUnavailable
from semel.stores.batching import NextBatches, running_loop
from semel.stores.sql.sqlite_session import PENDING, Job, Session
from semel.stores.thread_batching import ThreadQueue, Turn

MOST_WAITERS = 256
"""Callers served by one transaction; more would make the first of them wait for the last."""


class _Waiter(Job, Turn):
    """A job whose thread sleeps until it is answered, or until it is its turn to lead."""

    weight = 1

    def __init__(self, operations: Sequence[Any]) -> None:
        Job.__init__(self, operations)
        Turn.__init__(self)


class Combiner(ThreadQueue[_Waiter]):
    """Runs the operations of many threads on one session."""

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        self._timeout = timeout
        nobody: NextBatches[_Waiter] = NextBatches(MOST_WAITERS, MOST_WAITERS)
        super().__init__(nobody)

    def run(self, operations: Sequence[Any]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them."""
        notice_fork()
        while True:
            waiter = _Waiter(operations)
            self.take_turn(waiter)
            outcomes = waiter.outcomes
            if PENDING not in outcomes:  # else its leader was interrupted before or after the work
                return outcomes

    def close(self) -> None:
        """Close the session after the running transaction; callers in the queue are rejected."""
        notice_fork()
        self._session.close()

    def serve(self, leader: _Waiter) -> None:
        """Run the jobs of the leader's batch in one transaction."""
        interruption = self._session.run(leader.batch, _release)
        leader.batch = (leader,)  # the others have their answers
        try:
            if interruption is not None:
                raise interruption
        finally:
            del interruption  # its traceback has this frame, too

    def wait(self, turn: _Waiter) -> None:
        """Sleep for as long as a call may take."""
        if not turn.sleep(self._timeout):
            raise turn.given_up(self._session.place, self._timeout)

    def wait_for_answer(self, turn: _Waiter) -> None:
        """Do not: it is out of time, and one connection does all in its order."""


def _release(waiters: list[_Waiter]) -> None:
    for waiter in waiters:
        waiter.release()


# --- tasks --------------------------------------------------------------------------------

MOST_JOBS = 1024
"""Jobs after which a transaction takes no more. What one turn of a loop has brought comes as a
whole, so there may be nearly twice as many."""

QUIET = 30.0
"""Seconds without a call after which the thread ends and the file is closed."""


class _Awaited(Job):
    """A job whose task awaits a future of its loop."""

    __slots__ = ("answered", "loop", "since")

    def __init__(self, operations: Sequence[Any]) -> None:
        super().__init__(operations)
        self.loop = running_loop()
        self.answered: asyncio.Future[list[Any]] = self.loop.create_future()
        self.since = time.monotonic()


class _LoopQueue:
    """What the tasks of one loop have asked for, in their order."""

    __slots__ = ("new", "waiting")

    def __init__(self) -> None:
        self.new: list[_Awaited] = []
        """Not handed to the thread yet."""
        self.waiting: deque[_Awaited] = deque()
        """All, while one of them may run out of time."""


class Writer(ForkAware):
    """Runs the operations of many tasks on one session."""

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        # Twice: the writer may wait that long for another process before it turns to this job.
        self._longest_wait = 2 * timeout
        self._closed = False
        self._dropped = False
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._mutex = threading.Lock()
        self._queue: SimpleQueue[list[_Awaited]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_job: _Awaited | None = None
        """The last job, an empty one: `close` waits for it, and the thread ends with it."""
        self._loops: dict[asyncio.AbstractEventLoop, _LoopQueue] = {}

    async def run(self, operations: Sequence[Any]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them.

        A caller that is canceled is freed at once; its operations are carried out all the same.
        """
        return await self.submit(operations)

    def submit(self, operations: Sequence[Any]) -> asyncio.Future[list[Any]]:
        """Ask the thread to run the operations."""
        notice_fork()
        job = _Awaited(operations)
        if self._closed:
            raise self._closed_error()
        queue = self._loops.get(job.loop)
        if queue is None:
            for loop in self._loops.copy():
                if loop.is_closed():  # and will not call `_check_waiting` any more
                    self._loops.pop(loop, None)
            queue = self._loops[job.loop] = _LoopQueue()
            job.loop.call_later(self._longest_wait, self._check_waiting, job.loop)
        if not queue.new:
            # When all who are awake now have asked: they go into one transaction, and the thread,
            # which Python may let run at any moment, does not begin with a few of them.
            job.loop.call_soon(self._hand_over, queue)
        queue.new.append(job)
        waiting = queue.waiting
        while waiting and waiting[0].answered.done():
            waiting.popleft()  # its results are not ours to keep
        waiting.append(job)
        return job.answered

    def _hand_over(self, queue: _LoopQueue) -> None:
        jobs, queue.new = queue.new, []
        with self._mutex:
            if self._closed:  # by another loop
                _reject(jobs, self._closed_error())
                return
            # Something may have been raised in it that nobody could answer for.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._serve, name="semel-sqlite", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    place = self._session.place
                    _reject(jobs, StoreUnavailable(f"no thread for the store on {place}: {error}"))
                    return
                self._thread = thread
            for begin in range(0, len(jobs), MOST_JOBS):
                self._queue.put(jobs[begin : begin + MOST_JOBS])

    def _closed_error(self) -> StoreUnavailable:
        return StoreUnavailable(f"the store on {self._session.place} is closed")

    async def close(self) -> None:
        """Finish what was asked for, then end the thread and close the session."""
        notice_fork()
        queue = self._loops.get(running_loop()) if self._loops else None
        if queue is not None and not self._closed:
            self._hand_over(queue)
        with self._mutex:
            self._closed = True
            if self._thread is not None and self._last_job is None:
                self._last_job = _Awaited(())
                self._queue.put([self._last_job])
        if self._thread is None or self._last_job is None:
            self._session.close()
        else:
            # Shielded: a second caller may wait for the same job.
            await asyncio.shield(self._last_job.answered)
            self._thread.join()

    def drop(self) -> None:
        """End the thread when it has done what was asked for: the store is gone, and not closed."""
        # Without the lock: the garbage collector calls this, and the thread may have it just then.
        self._dropped = True
        self._queue.put([])

    def _serve(self) -> None:
        with self._mutex:
            if self._thread is not threading.current_thread():
                return  # its start was interrupted, and the next call has started another
        while (batch := self._collect()) and batch[-1] is not self._last_job:
            self._session.run(batch, _notify)
        if not batch:
            self._session.rest()
            return
        *rest, last_job = batch
        if rest:
            self._session.run(rest, _notify)
        self._session.close()
        _notify([last_job])

    def _collect(self) -> list[_Awaited]:
        """Take what was asked for; if that is nothing, the thread is dismissed."""
        batch: list[_Awaited] = []
        while not batch:
            try:
                batch += self._queue.get(timeout=0.0 if self._dropped else QUIET)
            except Empty:
                with self._mutex:
                    if self._queue.empty():
                        self._thread = None
                        return []
            with suppress(Empty):
                while len(batch) < MOST_JOBS:
                    batch += self._queue.get_nowait()
        return batch

    def _check_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Jobs are served in their order: one alarm, for the oldest, is enough for a loop."""
        jobs, now = self._loops.get(loop, _LoopQueue()).waiting, time.monotonic()
        while jobs and (jobs[0].answered.done() or now >= jobs[0].since + self._longest_wait):
            job = jobs.popleft()
            if not job.answered.done():
                error = job.given_up(self._session.place, self._longest_wait)
                job.answered.set_exception(error)
        if jobs:
            loop.call_later(jobs[0].since + self._longest_wait - now, self._check_waiting, loop)
        else:
            self._loops.pop(loop, None)

    def after_fork_in_child(self) -> None:
        """Start without a thread: the parent's is not here, nor are the tasks it served."""
        self._fresh()


def _reject(jobs: Sequence[_Awaited], error: StoreUnavailable) -> None:
    for job in jobs:
        if not job.answered.done():
            job.answered.set_exception(error)


def _notify(jobs: Sequence[_Awaited]) -> None:
    """Wake the callers: once per loop, not once per caller."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Awaited]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, answered in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_set_results, answered)


def _set_results(jobs: Sequence[_Awaited]) -> None:
    for job in jobs:
        if not job.answered.done():  # cancelled, or out of time
            job.answered.set_result(job.outcomes)
