"""When the machine itself stood still: a virtual one is not given its cores all the time.

One process for each core, before everything else in line, sleeps half a millisecond at a time and
notes when it was woken late. What a measured call waited for then is the machine's, not ours.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeAlias

NAP = 0.0005
LATE = 0.0005
"""Seconds beyond its nap after which a core is said to have stood still."""
FIRST, SECOND = 50, 5
"""Real-time priorities: of the watch, and of what is measured."""

Interval: TypeAlias = tuple[float, float]


def before_others(priority: int = SECOND) -> bool:
    """Run this process, and what it starts, before all others; tells whether that is allowed."""
    with suppress(OSError, AttributeError):  # not allowed, or no such thing here
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        return True
    return False


class Stalls:
    """The moments, by `time.perf_counter`, at which some core stood still."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def within(self, start: float, end: float) -> float:
        """How long the machine stood still between two moments."""
        first = max(0, bisect_right(self.intervals, (start, start)) - 1)
        lost = 0.0
        for began, ended in self.intervals[first:]:
            if began >= end:
                break
            lost += max(0.0, min(end, ended) - max(start, began))
        return lost


@contextmanager
def watched() -> Iterator[Stalls]:
    """Watch every core; the stalls are there when the watch has ended."""
    stalls = Stalls()
    spawn = multiprocessing.get_context("spawn")
    watches = []
    for core in sorted(os.sched_getaffinity(0)):
        here, there = multiprocessing.Pipe()
        process = spawn.Process(target=_watch, args=(core, there), daemon=True)
        process.start()
        there.close()
        here.recv()
        watches.append((process, here))
    try:
        yield stalls
    finally:
        found: list[Interval] = []
        for process, line in watches:
            line.send(None)
            found += line.recv()
            process.join()
        stalls.intervals = merged(found)


def _watch(core: int, line: Connection) -> None:
    os.sched_setaffinity(0, {core})
    before_others(FIRST)
    line.send(None)
    late: list[Interval] = []
    while not line.poll():
        asleep = time.perf_counter() + NAP
        time.sleep(NAP)
        awake = time.perf_counter()
        if awake - asleep > LATE:
            late.append((asleep, awake))
    line.recv()
    line.send(late)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Join intervals that overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
