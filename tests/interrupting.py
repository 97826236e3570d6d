"""An exception at a chosen step of a call, as a signal handler would raise it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import semel

PACKAGE = str(Path(semel.__file__).parent)

Step = tuple[CodeType, str, int]


class TimeLimit(Exception):
    """What the handler of a worker's soft time limit raises: an ordinary exception."""


class Trace:
    """Lists the steps of a call, or raises at one of them."""

    def __init__(
        self,
        strike_at: Step | None = None,
        error: BaseException | None = None,
        *,
        within: tuple[str, ...] = (PACKAGE,),
    ) -> None:
        self.steps: dict[Step, None] = {}
        self.struck = threading.Event()
        self._strike_at = strike_at
        self._within = within
        """The folders whose lines are steps."""
        self._errors = [] if error is None else [error]

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if event == "call" and not code.co_filename.startswith(self._within):
            return None
        if event in ("call", "line", "return"):
            step = (code, event, frame.f_lineno)
            self.steps[step] = None
            if step == self._strike_at and self._errors:
                self.struck.set()
                raise self._errors.pop()
        return self

    def run(self, function: Callable[[], object]) -> object:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return next(_confined(function))
        finally:
            sys.settrace(before)

    async def awaited(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Await it; what the loop calls meanwhile is traced, too."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return await asyncio.get_running_loop().create_task(coroutine)
        finally:
            sys.settrace(before)


def _confined(function: Callable[[], object]) -> Iterator[object]:
    """Call it in a generator, which has its own `sys.exc_info`.

    CPython 3.11 does not restore it when a trace function raises at the line of an `except`: the
    thread's later exceptions would have the one that was handled there as their context.
    """
    yield function()
