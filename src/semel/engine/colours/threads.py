"""The primitives for threads; `tasks` has the same names, and those that only a loop needs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from inspect import CORO_CREATED, getcoroutinestate
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from semel.engine.colours.leaders import (
    AFTER_FAILURE,
    LATE,
    LEAD,
    Answer,
    Leaders,
    NoTimer,
    Reply,
    SharedRun,
    one_for,
)
from semel.errors import ConfigError, about
from semel.events import logger

if TYPE_CHECKING:
    from semel.core.attempts import Lease
    from semel.core.records import Identity

T = TypeVar("T")

sleep = time.sleep

CHECK_EVERY = 1.0
"""Seconds after which a thread that shares an execution looks whether it is still led."""


def background(tasks: set[Any], step: Callable[[], object], lease: Lease | None = None) -> None:
    """Do this, which ends the attempt of this lease; a thread does it at once."""
    step()
    if lease is not None:
        lease.handed_over = True


def start_beside(step: Callable[[], object], otherwise: Callable[[], object]) -> threading.Thread:
    """Do this beside the caller. The process does not end before it is done.

    `otherwise` is called if no thread can be started, or if the process would not wait for it: in
    a function that `atexit` calls.
    """
    caller = threading.current_thread()  # makes a foreign thread known to `can_go_on`
    thread = threading.Thread(target=step, name="semel-closing", daemon=False)
    try:
        if caller.is_alive():
            thread.start()
        else:
            otherwise()
    except (RuntimeError, MemoryError):
        otherwise()
    return thread


def can_go_on(leases: Collection[Lease]) -> bool:
    """Return whether one of these attempts may still be ended by its thread.

    At the end of the process only threads that it waits for go on.
    """
    if not leases:
        return False
    ending = not threading.main_thread().is_alive()
    alive = {
        thread.ident
        for thread in threading.enumerate()
        if thread.is_alive() and not (ending and thread.daemon)
    }
    return any(lease.thread in alive for lease in leases)


def drain(tasks: set[Any], timeout: float) -> None:
    """Threads leave nothing in the background."""


def finished(value: T, identity: Identity) -> T:
    """Reject a coroutine."""
    return unawaited(value, identity) if isinstance(value, CoroutineType) else value


def unawaited(value: CoroutineType[Any, Any, Any], identity: Identity) -> NoReturn:
    """Reject a coroutine that would never be awaited: unless it was begun, nothing has run."""
    rejection = ConfigError(
        "the function returned a coroutine instead of a value: await it there, "
        "or use an AsyncIdempotency"
    )
    rejection.nothing_ran = getcoroutinestate(value) == CORO_CREATED
    value.close()
    raise about(rejection, identity)


def ready(value: T) -> T:
    """Return what is available at once."""
    return value


class Waiter:
    """Where one thread waits for the execution it shares."""

    __slots__ = ("_lock", "_reply", "_run")

    def __init__(self, run: SharedRun[Waiter]) -> None:
        self._run = run
        self._reply: Reply | None = None
        # Not an Event: an exception raised inside `Event.wait` may leave its lock held, and the
        # thread that sets it would wait for ever.
        self._lock = threading.Lock()
        self._lock.acquire()

    def done(self) -> bool:
        """Return whether it was answered already."""
        return self._reply is not None

    def give(self, reply: Reply) -> None:
        """Wake the waiting thread with this."""
        self._reply = reply
        self._lock.release()

    def wait(self, seconds: float) -> Reply | None:
        """Sleep until there is a reply, or the time runs out."""
        self._lock.acquire(timeout=seconds)
        return self.reply()

    def reply(self) -> Reply | None:
        """Return the reply to this waiter, or to all of its run."""
        return self._reply or self._run.answer


class SharedRuns:
    """Threads that share one execution: one leads and asks the store, the others wait for it."""

    def __init__(self, leaders: Leaders[Waiter]) -> None:
        self._leaders = leaders
        self.forgets = leaders.forgets
        self.lead, self.end = leaders.lead, leaders.end  # no function around them: each call asks

    def join(self, place: Hashable, caller: object, timeout: float | None) -> Reply:
        """Wait for the leader's answer; lead when there is none any more."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        leaders = self._leaders
        try:
            while (waiter := leaders.take_lead(place, caller, Waiter)) is not None:
                while (
                    reply := waiter.wait(max(0.0, min(CHECK_EVERY, end - time.monotonic())))
                ) is None:
                    if time.monotonic() >= end and leaders.leave(place, waiter):
                        return LATE
                    if leaders.is_orphaned(place, caller, waiter):
                        reply = waiter.reply()  # perhaps an answer came since the last look
                        break
                if reply is not None:
                    return reply
        except BaseException:
            self.pass_on(place, caller)
            raise
        return LEAD

    def give(self, waiting: Iterable[Waiter], answer: Answer) -> None:
        """Wake these calls with the answer."""
        for waiter in waiting:
            waiter.give(answer)

    def pass_on(self, place: Hashable, caller: object) -> None:
        """Let the next call lead, if this one does; nothing was stored that could be shared.

        An interrupted call stops waiting by this, too.
        """
        mine = self._leaders.waiter_of(place, caller)
        if mine is not None:
            self._leaders.leave(place, mine)
        waiter = self._leaders.next_leader(place, caller)
        if waiter is not None:
            waiter.give(LEAD)


class Timer:
    """One thread that calls `tick` when it is due; it ends when nothing is."""

    def __init__(self, tick: Callable[[], float]) -> None:
        self._tick = tick
        # The lock is acquired directly, not through the Condition: `Condition.__enter__` is Python
        # code, and an exception raised there by a signal handler would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self.next = math.inf
        """When it is there next; a later time need not be asked for."""

    def due(self, at: float) -> None:
        """Be there at this time (of the monotonic clock) or before; raises `NoTimer`."""
        if at < self.next:
            with self._lock:
                if at < self.next:  # else it was stopped meanwhile, or comes earlier anyway
                    if self._thread is None or not self._thread.is_alive():
                        self._thread = self._started()
                    self._changed.notify()
                    # Last: after an exception on the way here, the next call tries again.
                    self.next = at

    def _started(self) -> threading.Thread:
        """Start a thread; one that is not noted as the timer's, because of an exception, ends."""
        thread = threading.Thread(target=self._run, name="semel-timer", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            raise NoTimer(
                f"no thread could be started to renew the lease ({error}): nothing ran. Look at "
                "the limits of memory and of processes, then try again"
            ) from error
        return thread

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._lock:
            self.next = -math.inf  # Nothing is due before that: it never starts again.
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            self._serve(me)
        finally:
            with self._lock:
                if self._thread is me:  # something was raised into this thread: another replaces it
                    self._thread, self.next = None, math.inf
                    self.due(time.monotonic() + AFTER_FAILURE)

    def _serve(self, me: threading.Thread) -> None:
        while True:
            with self._lock:
                while self._thread is me and self.next > time.monotonic():
                    if self.next == math.inf:
                        self._thread = None
                        break
                    self._changed.wait(self.next - time.monotonic())
                if self._thread is not me:
                    return
                # A time that is asked for during the tick counts: `due` compares with infinity.
                self.next = math.inf
            following = time.monotonic() + AFTER_FAILURE
            try:
                following = self._tick()
            except BaseException:  # noqa: BLE001 - whatever it is, attempts must be renewed
                with suppress(BaseException):
                    logger.exception("timer failed; it goes on")
            with self._lock:
                self.next = min(self.next, following)


def shared_runs_of(store: object) -> SharedRuns:
    """Engines on the same store share its running executions."""
    return SharedRuns(one_for(store, Leaders))
