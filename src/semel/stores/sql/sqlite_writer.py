"""Who runs the transaction that many callers share: a thread among them, or a writer thread.

Threads: a caller that finds nobody at work leads. It runs its own operations at once, with no
hand-over to another thread. Callers that come while it commits queue up; the first of them leads
next and takes the whole queue into one transaction. So an idle store answers directly, and a busy
one shares its commits.

Tasks: SQLite's calls block, so they run in a thread; one thread, because one connection writes at a
time anyway. What is asked for while it commits goes into its next transaction. The thread starts
with the first call and ends with `close`; also when nothing is asked for any more, until the next
call. So a store that nobody closed, because its event loop is gone, leaves nothing behind; and when
the store itself is gone, the thread ends at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.loops import running_loop
from semel.stores.sql.sqlite_session import Job, Session
from semel.stores.sql.verbs import Operation

MOST_TURNS = 256
"""Callers served by one transaction; more would make the first of them wait for the last."""


class _Turn(Job):
    """A job whose thread sleeps until it is answered, or until it is its turn to lead."""

    __slots__ = ("awake", "leads")

    def __init__(self, operations: Sequence[Operation[Any]]) -> None:
        super().__init__(operations)
        self.leads = False
        self.awake = threading.Lock()
        self.awake.acquire()  # a lock released by another thread: the cheapest wake-up there is


class Combiner:
    """Runs the operations of many threads on one session."""

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        self._timeout = timeout
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[_Turn] = deque()
        self._led = False
        """Whether someone leads. Nobody does exactly when the queue is empty."""

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them."""
        turn = _Turn(operations)
        try:
            with self._mutex:
                self._queue.append(turn)
                turn.leads, self._led = not self._led, True
            if turn.leads or self._wait(turn):
                self._lead()
        except BaseException:
            # Out of patience, or interrupted: the others must not wait for one that left.
            self._leave(turn)
            raise
        return turn.outcomes

    def close(self) -> None:
        """Close the session, after the transaction that is running; who is queued is refused."""
        self._session.close()

    def _lead(self) -> None:
        batch: list[_Turn] = []
        try:
            with self._mutex:
                batch = list(islice(self._queue, MOST_TURNS))  # noted before they are taken
                for _ in batch:
                    self._queue.popleft()
            interruption = self._session.run(batch, _wake)
        except BaseException:
            # Interrupted on the way there or back: the next leader serves those without an answer.
            with self._mutex:
                left = [turn for turn in batch if not turn.leads and turn not in self._queue]
                self._queue.extendleft(turn for turn in reversed(left) if not turn.done)
            _wake([turn for turn in left if turn.done])
            raise
        finally:
            with self._mutex:
                self._appoint()
        try:
            if interruption is not None:
                raise interruption
        finally:
            del interruption  # its traceback has this frame, too

    def _appoint(self) -> None:
        self._led = bool(self._queue)
        if self._led and not self._queue[0].leads:
            self._queue[0].leads = True
            self._queue[0].awake.release()

    def _wait(self, turn: _Turn) -> bool:
        """Sleep until answered (False) or appointed to lead (True)."""
        if turn.awake.acquire(timeout=self._timeout):
            return turn.leads
        what = "nothing was done" if turn.take() else "the transaction may still be committed"
        raise StoreUnavailable(
            f"the SQLite database {self._session.place} did not answer within "
            f"{self._timeout:g} s; {what}"
        )

    def _leave(self, turn: _Turn) -> None:
        with self._mutex:
            if turn in self._queue:
                self._queue.remove(turn)
            if turn.leads:
                # Perhaps again: what interrupted it may have come while it handed the lead on. Two
                # who lead do no harm, for the session lets in one of them at a time.
                self._appoint()

    def before_fork(self) -> None:
        """Do nothing: whoever leads works on the session, which comes to rest by itself."""

    def after_fork_in_parent(self) -> None:
        """Do nothing: see `before_fork`."""

    def after_fork_in_child(self) -> None:
        """Start with an empty queue: the threads that waited in it are not here."""
        self._fresh()


def _wake(turns: list[_Turn]) -> None:
    for turn in turns:
        # The leader is awake; so is one that was woken before an interruption of this loop.
        if not turn.leads and turn.awake.locked():
            turn.awake.release()


# --- tasks --------------------------------------------------------------------------------

MOST_JOBS = 1024
"""Jobs after which a transaction takes no more. What one turn of a loop has brought comes as a
whole, so there may be nearly twice as many."""

QUIET = 30.0
"""Seconds without a call after which the thread ends and the file is closed."""


class _Awaited(Job):
    """A job whose task awaits a future of its loop."""

    __slots__ = ("answered", "asked", "loop")

    def __init__(self, operations: Sequence[Operation[Any]]) -> None:
        super().__init__(operations)
        self.loop = running_loop()
        self.answered: asyncio.Future[list[Any]] = self.loop.create_future()
        self.asked = time.monotonic()


class _Desk:
    """What the tasks of one loop have asked for, in their order."""

    __slots__ = ("new", "waiting")

    def __init__(self) -> None:
        self.new: list[_Awaited] = []
        """Not handed to the thread yet."""
        self.waiting: deque[_Awaited] = deque()
        """All, while one of them may run out of patience."""


class Writer:
    """Runs the operations of many tasks on one session."""

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        # Twice: the writer may wait that long for another process before it turns to this job.
        self._patience = 2 * timeout
        self._closed = False
        self._dropped = False
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._mutex = threading.Lock()
        self._queue: SimpleQueue[list[_Awaited]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._farewell: _Awaited | None = None
        """The last job, an empty one: `close` waits for it, and the thread ends with it."""
        self._desks: dict[asyncio.AbstractEventLoop, _Desk] = {}

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them.

        A caller that is cancelled is freed at once; its operations are carried out all the same.
        """
        return await self.asked(operations)

    def asked(self, operations: Sequence[Operation[Any]]) -> asyncio.Future[list[Any]]:
        """Ask the thread to run the operations."""
        job = _Awaited(operations)
        if self._closed:
            raise self._refusal()
        desk = self._desks.get(job.loop)
        if desk is None:
            for loop in self._desks.copy():
                if loop.is_closed():  # and will not look after its desk any more
                    self._desks.pop(loop, None)
            desk = self._desks[job.loop] = _Desk()
            job.loop.call_later(self._patience, self._look, job.loop)
        if not desk.new:
            # When all who are awake now have asked: they go into one transaction, and the thread,
            # which Python may let run at any moment, does not begin with a few of them.
            job.loop.call_soon(self._hand_over, desk)
        desk.new.append(job)
        waiting = desk.waiting
        while waiting and waiting[0].answered.done():
            waiting.popleft()  # its results are not ours to keep
        waiting.append(job)
        return job.answered

    def _hand_over(self, desk: _Desk) -> None:
        jobs, desk.new = desk.new, []
        with self._mutex:
            if self._closed:  # by another loop
                _refuse(jobs, self._refusal())
                return
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="semel-sqlite", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    place = self._session.place
                    _refuse(jobs, StoreUnavailable(f"no thread for the store on {place}: {error}"))
                    return
                self._thread = thread
            for begin in range(0, len(jobs), MOST_JOBS):
                self._queue.put(jobs[begin : begin + MOST_JOBS])

    def _refusal(self) -> StoreUnavailable:
        return StoreUnavailable(f"the store on {self._session.place} is closed")

    async def close(self) -> None:
        """Finish what was asked for, then end the thread and close the session."""
        desk = self._desks.get(running_loop()) if self._desks else None
        if desk is not None and not self._closed:
            self._hand_over(desk)
        with self._mutex:
            self._closed = True
            if self._thread is not None and self._farewell is None:
                self._farewell = _Awaited(())
                self._queue.put([self._farewell])
        if self._thread is None or self._farewell is None:
            self._session.close()
        else:
            # Shielded: a second caller may wait for the same farewell.
            await asyncio.shield(self._farewell.answered)
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
        while (batch := self._collect()) and batch[-1] is not self._farewell:
            self._session.run(batch, _tell)
        if not batch:
            self._session.rest()
            return
        *rest, farewell = batch
        if rest:
            self._session.run(rest, _tell)
        self._session.close()
        _tell([farewell])

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

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Jobs are served in their order: one alarm, for the oldest, is enough for a loop."""
        jobs, now = self._desks.get(loop, _Desk()).waiting, time.monotonic()
        while jobs and (jobs[0].answered.done() or now >= jobs[0].asked + self._patience):
            self._give_up(jobs.popleft())
        if jobs:
            loop.call_later(jobs[0].asked + self._patience - now, self._look, loop)
        else:
            self._desks.pop(loop, None)

    def _give_up(self, job: _Awaited) -> None:
        if not job.answered.done():
            what = "nothing was done" if job.take() else "the transaction may still be committed"
            job.answered.set_exception(
                StoreUnavailable(
                    f"the SQLite database {self._session.place} did not answer within "
                    f"{self._patience:g} s; {what}"
                )
            )

    def before_fork(self) -> None:
        """Do nothing: the thread works on the session, which comes to rest by itself."""

    def after_fork_in_parent(self) -> None:
        """Do nothing: see `before_fork`."""

    def after_fork_in_child(self) -> None:
        """Start without a thread: the parent's is not here, nor are the tasks it served."""
        self._fresh()


def _refuse(jobs: Sequence[_Awaited], error: StoreUnavailable) -> None:
    for job in jobs:
        if not job.answered.done():
            job.answered.set_exception(error)


def _tell(jobs: Sequence[_Awaited]) -> None:
    """Wake the callers: once per loop, not once per caller."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Awaited]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, answered in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, answered)


def _settle(jobs: Sequence[_Awaited]) -> None:
    for job in jobs:
        if not job.answered.done():  # cancelled, or out of patience
            job.answered.set_result(job.outcomes)
