"""Requests in tasks of their own, which nobody's cancellation ends.

Whoever waits for one awaits a future that the task itself resolves at its end. That is what
`asyncio.shield` does, with fewer turns of the loop: a request that runs has one such task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from semel.events import logger

T = TypeVar("T")

_LAST_REQUESTS: Final = 5.0
"""Seconds that requests which nobody waits for may take to end when the server stops."""


class Aside:
    """The tasks that run, kept alive until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a request; whoever begins it ends or leaves it."""
        task = asyncio.get_running_loop().create_task(request)
        self._tasks.add(task)
        return task

    def end(self, task: asyncio.Task[Any]) -> None:
        """Forget a task that has ended."""
        self._tasks.discard(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Let a task go on for which nobody waits any more; an error of it is only logged."""
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[Any]) -> None:
        self.end(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a request whose client had gone raised", exc_info=task.exception())

    async def drain(self) -> None:
        """Wait for the last of them, but not for ever."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_REQUESTS)
