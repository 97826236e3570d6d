"""Virtual time: an event loop whose clock stands still while anything is ready to run.

This module is the only place that reaches into the engines' clock. The engines read the time by the
name `monotonic`, which `virtual_time` replaces in their modules; nothing in `semel` knows of it.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

TICK = 1e-9
"""What every step takes: with no time at all, a timer could spin on a rounding error."""

MOST_STEPS = 200_000

PARTS = ("semel.engine.", "semel.core.attempts", "semel.core.")
"""Where the engines for asyncio are written."""

OF_THREADS = ("semel.engine._sync.", "semel.engine.colours.threads")

_loops: list[SimLoop] = []
"""The loop whose time it is now."""


def now() -> float:
    """The time of the simulation that runs; zero outside of one."""
    return _loops[-1].now if _loops else 0.0


class _Time:
    """The module `time`, for those that do not import `monotonic` by its name."""

    monotonic = staticmethod(now)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextmanager
def virtual_time() -> Iterator[None]:
    """Let the engines for asyncio read the time of the simulation."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(PARTS) and not name.startswith(OF_THREADS)
    ]
    patches = [patch.object(m, "monotonic", now) for m in modules if hasattr(m, "monotonic")]
    patches += [patch.object(m, "time", _Time()) for m in modules if vars(m).get("time") is time]
    assert patches, "the engines read the time by another name now"
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


@dataclass(eq=False)
class Process:
    """What pauses and crashes as a whole."""

    name: str
    dead: bool = False
    paused_until: float = -1.0
    held_up: list[asyncio.Handle] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)

    def stood_still(self, start: float, end: float) -> bool:
        """Whether it was paused at any moment between these two."""
        return any(begun <= end and over >= start for begun, over in self.pauses)


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)
"""Whose code runs."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs one callback at a time; those of a paused process wait, those of a dead one are dropped."""

    def __init__(self, dice: Random, *, shuffled: bool) -> None:
        super().__init__()
        self.now = 0.0
        self.end = 400.0
        self.steps = 0
        self.livelocked = False
        self._dice = dice
        self._shuffled = shuffled
        self._clock_resolution = TICK
        self.set_exception_handler(lambda *_: None)

    def time(self) -> float:
        return self.now

    def live(self) -> None:
        """Run until nothing is left to do, or the end of time."""
        _loops.append(self)
        try:
            self.run_forever()
        finally:
            _loops.pop()

    def resume(self, process: Process) -> None:
        process.paused_until = -1.0
        held_up, process.held_up = process.held_up, []
        self._ready.extend(held_up)

    def _process_events(self, _: object) -> None:
        """There are none: nothing here waits for a socket."""

    def _write_to_self(self) -> None:
        """There is nobody to wake: one thread does it all."""

    def _run_once(self) -> None:
        self._take_due()
        self.steps += 1
        if self.steps > MOST_STEPS:
            self.livelocked = True
            self.stop()
        if not self._ready or self._stopping:
            return
        handle = self._next()
        if handle.cancelled():
            return
        process = handle._context.get(PROCESS)
        if process is not None:
            if process.dead:
                return
            if process.paused_until > self.now:
                process.held_up.append(handle)
                return
        self.now += TICK
        handle._run()

    def _take_due(self) -> None:
        """Let time pass, if nothing is ready, and take the timers that are due."""
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
        if not self._ready:
            if not scheduled or scheduled[0].when() > self.end:
                self.stop()
                return
            self.now = max(self.now, scheduled[0].when())
        due = []
        while scheduled and scheduled[0].when() <= self.now + 1e-12:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            due.append(handle)
        if len(due) > 1:
            self._dice.shuffle(due)  # timers of the same moment come in any order
        self._ready.extend(due)

    def _next(self) -> asyncio.Handle:
        ready = self._ready
        if self._shuffled and len(ready) > 1 and self._dice.random() < 0.3:
            place = self._dice.randrange(len(ready))
            handle: asyncio.Handle = ready[place]
            del ready[place]
            return handle
        first: asyncio.Handle = ready.popleft()
        return first
