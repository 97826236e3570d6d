"""Stores that kill their process beside a verb; twins for threads and asyncio."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from semel.core.records import Claimed
from semel.testing import AsyncFaultyStore, FaultyStore


class End:
    """A moment that the process does not survive the `at`th time.

    "before claim", "after being claimed", "before complete", "after complete", ...
    """

    def __init__(self, moment: str | None, at: int) -> None:
        self._moment = moment
        self._at = at
        self._times = itertools.count(1)

    def reached(self, moment: str) -> None:
        if moment == self._moment and next(self._times) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def _after(verb: str, answer: object) -> str:
    return "after being claimed" if isinstance(answer, Claimed) else f"after {verb}"


class DeadlyStore(FaultyStore):
    """For threads."""

    def __init__(self, store: Any, moment: str | None, at: int = 1) -> None:
        super().__init__(store)
        self._end = End(moment, at)

    def _meet(self, verb, apply, /, *args, **kwargs):
        self._end.reached(f"before {verb}")
        answer = super()._meet(verb, apply, *args, **kwargs)
        self._end.reached(_after(verb, answer))
        return answer


class AsyncDeadlyStore(AsyncFaultyStore):
    """For asyncio."""

    def __init__(self, store: Any, moment: str | None, at: int = 1) -> None:
        super().__init__(store)
        self._end = End(moment, at)

    async def _meet(self, verb, apply, /, *args, **kwargs):
        self._end.reached(f"before {verb}")
        answer = await super()._meet(verb, apply, *args, **kwargs)
        self._end.reached(_after(verb, answer))
        return answer
