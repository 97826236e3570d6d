"""How coverage.py measures tests: it must not stop them for ever, and need not see all of them.

Its tracer takes a lock at every call of a function that it measures, in every thread. A fork copies
that lock: if another thread has it at that moment, the child waits for it at its first call of
semel, for ever. An exception of a signal handler may also leave it taken.

And it makes calls of semel five times as slow, and all other programs half as fast. So modules that
live thousands of histories, kill processes at random or test something else than semel itself ask
for the fixture `not_measured`: what they reach, other tests reach, too, and not by luck.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType

from coverage import Coverage


def unmeasured() -> dict[str, str]:
    """The environment of a program that forks while its threads call semel: nobody measures it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


def measure_without_lock() -> None:
    """Go on measuring this process, if anybody does, with no lock that a fork could copy.

    The lock keeps two threads from adding the same file at a time. A file of semel is added when it
    is imported, which one thread does. Two functions of Python less at every call also save a sixth
    of the time of a call that is measured.
    """
    measuring = Coverage.current()
    if measuring is not None:
        collector = measuring._collector
        collector.data_lock = None
        for each in (collector, *collector.tracers):  # the tracers of new threads ask the collector
            each.lock_data = each.unlock_data = NoneType  # which does nothing when it is called


@contextmanager
def not_measured() -> Iterator[None]:
    """Measure neither this process nor those that it starts, for a while."""
    measuring = Coverage.current()
    if measuring is None:
        yield
        return
    hidden = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    measuring.stop()
    measuring.save()  # a new start would not know that there is something to save
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        measuring.start()
        os.environ.update(hidden)
