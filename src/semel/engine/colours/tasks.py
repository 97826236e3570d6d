"""The primitives for asyncio; `threads` has the same names."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import time
from _thread import get_ident
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterable
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import ReferenceType, ref

from semel.engine.colours.leaders import (
    AFTER_FAILURE,
    LATE,
    LEAD,
    Answer,
    Leaders,
    LeadersOfLoops,
    Reply,
    one_for,
)
from semel.errors import ConfigError, about
from semel.events import logger
from semel.stores.batching import loop_here, running_loop

if TYPE_CHECKING:
    from semel.core.attempts import Lease
    from semel.core.records import Identity

T = TypeVar("T")

sleep = asyncio.sleep

CHECK_EVERY = 1.0
"""Seconds after which tasks that share an execution are looked at: are they still led?"""

Waiter: TypeAlias = "asyncio.Future[Reply | None]"
"""Where one task waits for the execution it shares; on None it finds out who leads."""


def background(
    tasks: set[asyncio.Task[Any]],
    step: Callable[[], Coroutine[Any, Any, object]],
    lease: Lease | None = None,
) -> None:
    """Do this, which ends the attempt of this lease, after its caller is gone.

    `tasks` keeps it alive until then. If it is canceled or fails, the lease is no longer handed
    over: the timer ends it.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return  # The loop was torn down under the call: as if the process had crashed.
    task = loop.create_task(step())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    if lease is not None:
        lease.handed_over = True
        task.add_done_callback(partial(_take_back, lease))


def _take_back(lease: Lease, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or task.exception() is not None:
        lease.handed_over = False


def start_beside(
    step: Callable[[], Coroutine[Any, Any, object]],
    otherwise: Callable[[], Coroutine[Any, Any, object]],
) -> asyncio.Task[Any]:
    """Do this beside the caller, which keeps the task."""
    return asyncio.get_running_loop().create_task(step())


def can_go_on(leases: Collection[Lease]) -> bool:
    """Return whether one of these attempts may still end: on a loop that runs, any may."""
    return bool(leases)


Cancellations: TypeAlias = tuple[asyncio.Task[Any], int]


def cancellations(guard: LoopGuard, awaited: object = None) -> Cancellations | None:
    """Count how often this task was canceled so far; `raise_if_cancelled` compares.

    None if a bare future is `awaited`: a task that is canceled then gets `CancelledError` for
    sure, even if the future is done by then.
    """
    if type(awaited) is asyncio.Future:
        return None
    task = asyncio.current_task(guard.loop)
    return None if task is None else (task, task.cancelling())


def raise_if_cancelled(before: Cancellations | None) -> None:
    """Stop after all, when a cancellation since `before` was swallowed on the way.

    In Python 3.11 `asyncio.wait_for` does that if what it waits for ends at the same moment, and
    drivers use it.
    """
    if before is not None:
        task, count = before
        if task.cancelling() > count:
            raise asyncio.CancelledError


def is_cancelled() -> bool:
    """Return whether the running task itself was canceled, and not what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def drain(tasks: set[asyncio.Task[Any]], timeout: float) -> None:
    """Wait for background work, for at most `timeout` seconds."""
    if tasks:
        await asyncio.wait(set(tasks), timeout=timeout)


def finished(value: Awaitable[T], _: Identity | None = None) -> Awaitable[T]:
    """Return what to await; a plain function, against its type, has returned its value."""
    if isinstance(value, CoroutineType) or inspect.isawaitable(value):
        return value
    return ready(cast("T", value))


def unawaited(value: T, _: Identity) -> T:
    """Return a coroutine that an async function gave instead of awaiting it: it cannot be kept."""
    return value


async def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run a plain function of the application in a thread beside the loop."""
    return await asyncio.to_thread(without_stop_iteration(function), *args, **kwargs)


def without_stop_iteration(function: Callable[..., T]) -> Callable[..., T]:
    """Let a StopIteration leave a function as a RuntimeError, as it leaves a coroutine (PEP 479).

    No future of asyncio takes one: a task that waits for such a thread would wait for ever.
    """

    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("a plain function raised StopIteration") from error

    return call


async def ready(value: T) -> T:
    """Return what is available at once."""
    return value


class LoopGuard:
    """The event loop that an engine belongs to: the first one that uses it."""

    __slots__ = ("loop", "settle")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.settle: Callable[[asyncio.AbstractEventLoop], None] | None = None
        """Told of the loop, when it is known."""

    def check(self, identity: Identity | None = None) -> None:
        """Reject another loop: connections and waiters cannot follow.

        `identity` is what the caller asks for, if it asks for one operation.
        """
        # A loop of asyncio's knows the thread that runs it now, and a thread runs one loop at a
        # time. (`get_running_loop` asks the system, until 3.12.) A forked child has a new guard.
        if getattr(self.loop, "_thread_id", None) == get_ident():
            return
        running = running_loop()
        if self.loop is None:
            self.loop = running
            if self.settle is not None:
                self.settle(running)
        elif self.loop is not running:
            foreign = ConfigError(
                "this AsyncIdempotency belongs to another event loop: make one for each loop, or, "
                "in tests, use semel.testing.in_memory, which lets each test have its own"
            )
            raise foreign if identity is None else about(foreign, identity)


class SharedRuns:
    """Tasks of one loop that share one execution: one asks the store, the others wait for it.

    Several loops may use one store: each has places of its own, for a future belongs to its loop.
    """

    def __init__(self, leaders: LeadersOfLoops, guard: LoopGuard) -> None:
        self._guard = guard
        self._waiting: dict[Waiter, tuple[Hashable, ReferenceType[Any]]] = {}
        """The calls of this engine that wait, by their waiters; for `_check`."""
        self._checking: asyncio.TimerHandle | None = None
        self.forgets = leaders.forgets
        self._take(Leaders())  # until the loop is known nobody waits
        guard.settle = lambda loop: self._take(leaders.of(loop))

    def _take(self, leaders: Leaders[Waiter]) -> None:
        self._leaders = leaders
        self.lead, self.end = leaders.lead, leaders.end  # no function around them: each call asks

    async def join(self, place: Hashable, caller: object, timeout: float | None) -> Reply:
        """Wait for the leader's answer; lead when there is none any more."""
        end = None if timeout is None else time.monotonic() + timeout
        leaders = self._leaders
        loop = asyncio.get_running_loop()
        while (
            waiter := leaders.take_lead(place, caller, lambda _: loop.create_future())
        ) is not None:
            try:
                reply = await self._wait(place, caller, waiter, end)
            except BaseException:
                leaders.leave(place, waiter)
                self.pass_on(place, caller)  # The lead may have been given to a canceled call.
                raise
            if reply is not None:
                return reply
        return LEAD

    async def _wait(
        self, place: Hashable, caller: object, waiter: Waiter, end: float | None
    ) -> Reply | None:
        """Wait for a reply; None when the leader is gone."""
        self._waiting[waiter] = place, ref(caller)
        try:
            if self._checking is None:
                self._check_later()
            if end is None:
                return await waiter
            await asyncio.wait((waiter,), timeout=max(0.0, end - time.monotonic()))
        finally:
            self._waiting.pop(waiter, None)
        if not waiter.done():
            self._leaders.leave(place, waiter)
            return LATE
        return waiter.result()

    def _check_later(self) -> None:
        self._checking = asyncio.get_running_loop().call_later(CHECK_EVERY, self._check)

    def _check(self) -> None:
        """Wake those whose leader ended without saying so; one timer serves all that wait."""
        self._checking = None
        if self._waiting:
            self._check_later()  # first: it goes on, whatever interrupts this one
        for waiter, (place, caller) in tuple(self._waiting.items()):
            if not waiter.done() and self._leaders.is_orphaned(place, caller(), waiter):
                waiter.set_result(None)

    def give(self, waiting: Iterable[Waiter], answer: Answer) -> None:
        """Wake these calls with the answer."""
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(answer)

    def pass_on(self, place: Hashable, caller: object) -> None:
        """Let the next call lead, if this one does; nothing was stored that could be shared."""
        if loop_here() is not self._guard.loop:
            return  # The loop was torn down under the call, and under those that wait.
        waiter = self._leaders.next_leader(place, caller)
        if waiter is not None:
            waiter.set_result(LEAD)


class Timer:
    """Calls `tick` when it is due: a call-back while nothing is due, a task while it ticks."""

    def __init__(self, tick: Callable[[], Awaitable[float]]) -> None:
        self._tick = tick
        self._handle: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.next = math.inf
        """When it is there next; a later time need not be asked for."""

    def due(self, at: float) -> None:
        """Be there at this time (of the monotonic clock) or before."""
        if at < self.next:
            if self._ticking is None:
                self._schedule(at)
            self.next = at  # last: after an exception on the way here, the next call tries again

    async def stop(self) -> None:
        """End the timer and wait for a tick that is under way."""
        self.next = -math.inf
        if self._handle is not None:
            self._handle.cancel()
        if self._ticking is not None:
            await asyncio.wait((self._ticking,))

    def _schedule(self, at: float) -> None:
        # The new one is there before the old one goes: an exception between them leaves one.
        before = self._handle
        if math.isfinite(at):
            loop = asyncio.get_running_loop()
            wait = max(0.0, at - time.monotonic())
            self._handle = loop.call_later(wait, self._start)
        if before is not None:
            before.cancel()

    def _start(self) -> None:
        self.next = math.inf
        # By no factory of the application: one that begins tasks at once (Python 3.12 has it) may
        # have ended this one before it is noted here, and the timer would wait for it for ever.
        self._ticking = asyncio.Task(self._run(), loop=asyncio.get_running_loop())

    async def _run(self) -> None:
        following = time.monotonic() + AFTER_FAILURE
        try:
            following = await self._tick()
        except Exception:  # noqa: BLE001 - a bug must not leave attempts unrenewed
            logger.exception("timer failed; it goes on")
        finally:
            # Also when every task of the loop is canceled: attempts may still be running.
            self._ticking = None
            self.next = min(self.next, following)
            self._schedule(self.next)


def mark_coroutine_function(function: Any) -> None:
    """Let frameworks see that calling this object returns a coroutine."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    if sys.version_info < (3, 12):
        # There asyncio looks for a mark of its own, and inspect for the parts of a function.
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001
        function.__code__ = type(function).__call__.__code__
        function.__defaults__ = function.__kwdefaults__ = None


def shared_runs_of(store: object, guard: LoopGuard) -> SharedRuns:
    """Engines on the same store share its running executions."""
    return SharedRuns(one_for(store, LeadersOfLoops), guard)
