"""Many threads, one transaction: whoever comes first works for those who come meanwhile.

A caller that finds nobody at work leads: it runs its own operations at once, with no hand-over to
another thread. Callers that come while it commits queue up; the first of them leads next and takes
the whole queue into one transaction. So an idle store answers directly, and a busy one shares
its commits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks
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
