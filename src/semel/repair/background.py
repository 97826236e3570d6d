"""What differs by nature between threads and tasks: a loop in the background, asking a resolver."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from random import random

from semel.core.records import Record

logger = logging.getLogger(__name__)

_FAILED = "a reconciliation failed; it is tried again"


class Background:
    """Repeats a step in a thread, until it is stopped."""

    def __init__(self, every: float) -> None:
        self._every = every
        self.one_at_a_time = threading.Lock()
        self.stopping = threading.Event()
        self.running: threading.Thread | None = None

    def start(self, step: Callable[[Callable[[], bool]], object]) -> None:
        """Do the step now, and again and again; it can ask whether it has to end early."""
        if self.running is None:
            self.stopping.clear()
            running = threading.Thread(
                target=self._run, args=(step,), name="semel-reconciler", daemon=True
            )
            try:
                running.start()
            except BaseException:
                self.stopping.set()  # an interruption may have come after the thread began
                raise
            self.running = running

    def stop(self) -> None:
        """Wait for the end of a step in progress."""
        running, self.running = self.running, None
        if running is not None:
            self.stopping.set()
            running.join()

    def _run(self, step: Callable[[Callable[[], bool]], object]) -> None:
        while True:
            try:
                step(self.stopping.is_set)
            except Exception:
                logger.exception(_FAILED)
            if self.stopping.wait(_jittered(self._every)):
                return


class AsyncBackground:
    """Repeats a step in a task, until it is stopped."""

    def __init__(self, every: float) -> None:
        self._every = every
        self.one_at_a_time = asyncio.Lock()
        self.stopping = asyncio.Event()
        self.running: asyncio.Task[None] | None = None

    def start(self, step: Callable[[Callable[[], bool]], Awaitable[object]]) -> None:
        """Do the step now, and again and again; it can ask whether it has to end early."""
        if self.running is None:
            self.stopping.clear()
            self.running = asyncio.create_task(self._run(step), name="semel-reconciler")

    async def stop(self) -> None:
        """Wait for the end of a step in progress."""
        running, self.running = self.running, None
        if running is not None:
            self.stopping.set()
            await running

    async def _run(self, step: Callable[[Callable[[], bool]], Awaitable[object]]) -> None:
        while True:
            try:
                await step(self.stopping.is_set)
            except Exception:
                logger.exception(_FAILED)
            try:
                await asyncio.wait_for(self.stopping.wait(), _jittered(self._every))
            except TimeoutError:
                continue
            return


def _jittered(seconds: float) -> float:
    # Many processes that start together should not all look together.
    return seconds * (0.75 + random() / 2)  # noqa: S311 - no secret


def consult(resolver: Callable[[Record], object], record: Record) -> object:
    """Ask a resolver."""
    return resolver(record)


async def aio_consult(resolver: Callable[[Record], object], record: Record) -> object:
    """Ask a resolver."""
    answer: object
    if inspect.iscoroutinefunction(resolver):
        answer = resolver(record)
    else:  # It asks other systems: a plain function would hold up the event loop.
        answer = await asyncio.to_thread(resolver, record)
    return await answer if inspect.isawaitable(answer) else answer
