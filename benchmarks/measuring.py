"""What is measured: the operation, who makes it run once, and a lap of so many calls.

A lap is one contender's turn: it calls for each key, by so many callers at once. `racing` lets
contenders take turns.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
)
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct

from benchmarks.figures import Role, version_of

Kind: TypeAlias = Literal["first", "replay"]
BOTH: tuple[Kind, ...] = ("first", "replay")

Go: TypeAlias = Callable[[Sequence[str], int, Kind], float]
"""Calls for each key, by so many callers; returns the seconds it took."""
AsyncGo: TypeAlias = Callable[[Sequence[str], int, Kind], Awaitable[float]]

Opened = TypeVar("Opened")

RESULT = "x" * 98
"""100 bytes as JSON."""


class Effort(Struct, frozen=True):
    """How much is enough: the real thing, or a smoke test of it."""

    smoke: bool = False
    big: bool = False
    """Whether the largest table was asked for."""

    @property
    def durable(self) -> bool:
        """Whether databases flush each commit."""
        return not self.smoke

    @property
    def lap(self) -> float:
        """How long a lap should take, in seconds."""
        return 0.0 if self.smoke else 0.2

    @property
    def crowd_lap(self) -> float:
        """How long a lap of many threads should take, in seconds."""
        return 0.0 if self.smoke else 0.5

    def rounds(self, usual: int) -> int:
        """How many rounds."""
        return 1 if self.smoke else usual

    def callers(self, numbers: Sequence[int]) -> Sequence[int]:
        """How many callers at once, in one race after the other."""
        return (min(numbers[-1], 4),) if self.smoke else numbers

    def count(self, usual: int, smoke: int) -> int:
        """How many of something else."""
        return smoke if self.smoke else usual


class Work:
    """The operation that must run once per key."""

    def __init__(self, result: str = RESULT, seconds: float = 0.0) -> None:
        self.result = result
        self.seconds = seconds
        self.ended: list[float] = []
        """When each run ended. Appending is atomic, also among threads."""

    def run(self) -> str:
        """Run it in a thread."""
        if self.seconds:
            time.sleep(self.seconds)
        self.ended.append(time.monotonic())
        return self.result

    async def arun(self) -> str:
        """Run it in a task."""
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.ended.append(time.monotonic())
        return self.result


class Place(Struct):
    """Where a contender works, and on what."""

    url: str
    work: Work


class Contender(Struct, Generic[Opened], frozen=True):
    """Somebody who takes part."""

    name: str
    role: Role
    open: Callable[[Place], Opened]
    package: str | None = None
    """What must be installed; its version stands in the report."""
    kinds: tuple[Kind, ...] = BOTH
    works: bool = True
    """Whether it calls the operation: the floors only move bytes."""

    @property
    def title(self) -> str:
        """The name with the version."""
        return f"{self.name} {version_of(self.package)}" if self.package else self.name


ThreadContender: TypeAlias = Contender[AbstractContextManager[Go]]
TaskContender: TypeAlias = Contender[AbstractAsyncContextManager[AsyncGo]]


def present(
    contenders: Sequence[Contender[Opened]],
) -> tuple[list[Contender[Opened]], list[str]]:
    """Those who can take part, and a sentence for each who cannot."""
    here = [one for one in contenders if one.package is None or version_of(one.package)]
    missing = [
        f"{one.name}: {one.package} is not installed" for one in contenders if one not in here
    ]
    return here, missing


# --- laps --------------------------------------------------------------------------------


class ThreadLap:
    """A lap of a call, by threads."""

    def __init__(self, call: Callable[[str], Any]) -> None:
        self._call = call
        self.each: list[float] = []
        """How long each call of the last lap took, in seconds, if there were several callers."""

    def __call__(self, keys: Sequence[str], callers: int, kind: Kind) -> float:
        """Call for each key; returns the seconds that it took."""
        del kind
        if callers == 1:
            call = self._call
            start = time.perf_counter()
            for key in keys:
                call(key)
            return time.perf_counter() - start
        self.each = []
        return _by_threads(self._call, keys, callers, self.each)


def calling(call: Callable[[str], Any]) -> Go:
    """Make a lap of a call, by threads."""
    return ThreadLap(call)


def _by_threads(
    call: Callable[[str], Any], keys: Sequence[str], callers: int, each: list[float]
) -> float:
    errors: list[BaseException] = []
    ready = threading.Barrier(callers + 1)
    clock = time.perf_counter

    def caller(share: Sequence[str]) -> None:
        ready.wait()
        try:
            for key in share:
                start = clock()
                call(key)
                each.append(clock() - start)
        except BaseException as error:  # noqa: BLE001 - told by the thread that counts the time
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(keys[n::callers],)) for n in range(callers)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


def awaiting(call: Callable[[str], Awaitable[Any]]) -> AsyncGo:
    """Make a lap of a call, by tasks."""

    async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
        del kind
        rest = iter(keys)

        async def caller() -> None:
            for key in rest:
                await call(key)

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return time.perf_counter() - start

    return go
