"""How it is measured: contenders take turns, round by round, on keys of their own.

The number of calls in a lap is chosen by a lap before the first round, so that a lap takes about
as long for everybody. Each round begins with another contender. A contender that calls the
operation must have called it once per new key and never for a known one: a benchmark of wrong
answers is refused.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from typing import Any, Generic

from benchmarks.figures import Lane, Race
from benchmarks.measuring import (
    BOTH,
    Contender,
    Effort,
    Go,
    Kind,
    Opened,
    Place,
    TaskContender,
    ThreadContender,
    ThreadLap,
    Work,
)

MOST_CALLS = 32768
WARM_UP = -1
CROWD_ROUNDS = 21
LONGEST = 60.0
"""Seconds that a race may take; then it ends, after `FEWEST` rounds at least."""
FEWEST = 5


class _Turn(Generic[Opened]):
    """One contender during a race: its keys, its samples, and the check of its work."""

    def __init__(self, contender: Contender[Opened], work: Work, callers: int) -> None:
        self.contender = contender
        self.samples: dict[Kind, list[float]] = {kind: [] for kind in contender.kinds}
        self.tails: dict[Kind, list[float]] = {kind: [] for kind in contender.kinds}
        """The time within which 99 of 100 calls of a lap had their answer, in milliseconds."""
        self.calls = 2 * callers
        self._work = work
        self._numbers = itertools.count()
        self._callers = callers
        self._label = os.urandom(4).hex()

    def keys(self) -> list[str]:
        """New keys, of 36 characters."""
        return [f"{self._label}-{next(self._numbers):027d}" for _ in range(self.calls)]

    def begin(self) -> None:
        self._work.ended.clear()
        gc.collect()

    def end(self, kind: Kind, seconds: float, each: Sequence[float] = ()) -> None:
        runs = len(self._work.ended)
        expected = self.calls if kind == "first" else 0
        if self.contender.works and runs != expected:
            raise AssertionError(
                f"{self.contender.name}: {runs} runs for {self.calls} calls ({kind})"
            )
        self.samples[kind].append(self.calls / seconds)
        if len(each) > 1:
            self.tails[kind].append(statistics.quantiles(each, n=100)[-1] * 1000)

    def settle(self, lap: float) -> None:
        """Choose the number of calls by what the laps so far have shown; forget these."""
        slowest = min(samples[-1] for samples in self.samples.values())
        least, most = 4 * self._callers, max(4 * self._callers, MOST_CALLS)
        self.calls = int(min(most, max(least, slowest * lap))) if lap else self._callers
        for samples in (*self.samples.values(), *self.tails.values()):
            samples.clear()


def race(
    contenders: Sequence[ThreadContender],
    place: Place,
    *,
    callers: int,
    rounds: int,
    effort: Effort,
) -> tuple[Race, Race]:
    """Let threads race; returns first executions and replays, in calls per second.

    Threads that share batches need a while to get into step, so many of them race in long laps.
    """
    lap = effort.lap if callers == 1 else effort.crowd_lap
    turns = _raced(contenders, place, callers, _rounds(rounds), lap)
    return _races(turns, callers, "threads")


def race_of_a_crowd(
    contenders: Sequence[ThreadContender], place: Place, *, callers: int, effort: Effort
) -> tuple[Race, Race, Race, Race]:
    """Let many threads race in many laps; returns the rates, and the times of the slowest calls."""
    rounds = effort.rounds(CROWD_ROUNDS)
    turns = _raced(contenders, place, callers, (WARM_UP, *range(rounds)), effort.crowd_lap)
    first, replay = _races(turns, callers, "threads")
    tails = [
        Race(
            f"99 % within: {one.what}",
            "ms",
            [
                Lane(turn.contender.title, turn.contender.role, turn.tails[kind])
                for turn in turns
                if turn.tails.get(kind)
            ],
            more_is_better=False,
        )
        for kind, one in zip(BOTH, (first, replay), strict=True)
    ]
    return first, replay, tails[0], tails[1]


def _raced(
    contenders: Sequence[ThreadContender],
    place: Place,
    callers: int,
    rounds: Iterable[int],
    lap: float,
) -> list[_Turn[AbstractContextManager[Go]]]:
    with ExitStack() as stack:
        goes = {one.name: stack.enter_context(one.open(place)) for one in contenders}
        turns = [_Turn(one, place.work, callers) for one in contenders]
        for number in rounds:
            for turn in _rotated(turns, number):
                go = goes[turn.contender.name]
                keys = turn.keys()
                for kind in turn.contender.kinds:
                    turn.begin()
                    seconds = go(keys, callers, kind)
                    turn.end(kind, seconds, go.each if isinstance(go, ThreadLap) else ())
                if number == WARM_UP:
                    turn.settle(lap)
    return turns


async def async_race(
    contenders: Sequence[TaskContender],
    place: Place,
    *,
    callers: int,
    rounds: int,
    effort: Effort,
) -> tuple[Race, Race]:
    """Let tasks race; returns first executions and replays, in calls per second."""
    async with AsyncExitStack() as stack:
        goes = {one.name: await stack.enter_async_context(one.open(place)) for one in contenders}
        turns = [_Turn(one, place.work, callers) for one in contenders]
        for number in _rounds(rounds):
            for turn in _rotated(turns, number):
                keys = turn.keys()
                for kind in turn.contender.kinds:
                    turn.begin()
                    turn.end(kind, await goes[turn.contender.name](keys, callers, kind))
                if number == WARM_UP:
                    turn.settle(effort.lap)
    return _races(turns, callers, "tasks")


def _rounds(rounds: int) -> Iterator[int]:
    """Number the rounds; a machine that is too busy gets fewer of them."""
    yield WARM_UP
    end = time.monotonic() + LONGEST
    for number in range(rounds):
        if number >= FEWEST and time.monotonic() > end:
            return
        yield number


def _rotated(turns: Sequence[_Turn[Opened]], number: int) -> Iterator[_Turn[Opened]]:
    first = max(0, number) % len(turns)
    return itertools.chain(turns[first:], turns[:first])


def _races(turns: Sequence[_Turn[Any]], callers: int, kind_of_caller: str) -> tuple[Race, Race]:
    who = f"{callers} {kind_of_caller}" if callers > 1 else "1 caller"
    names: dict[Kind, str] = {"first": f"first, {who}", "replay": f"replay, {who}"}
    made = [
        Race(
            names[kind],
            "/s",
            [
                Lane(turn.contender.title, turn.contender.role, turn.samples[kind])
                for turn in turns
                if kind in turn.samples
            ],
        )
        for kind in BOTH
    ]
    return made[0], made[1]
