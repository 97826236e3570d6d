"""How coverage.py measures tests that fork and that raise anywhere, without stopping them for ever.

Its tracer takes a lock at every call of a function that it measures, in every thread. A fork copies
that lock: if another thread has it at that moment, the child waits for it at its first call of
semel, for ever. An exception of a signal handler may also leave it taken.
"""

from __future__ import annotations

import os

from coverage import Coverage


def unmeasured() -> dict[str, str]:
    """The environment of a program that forks while its threads call semel: nobody measures it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


def measure_without_lock() -> None:
    """Go on measuring this process, if anybody does, with no lock that a fork could copy.

    The lock keeps two threads from adding the same file at a time. A file of semel is added when it
    is imported, which one thread does.
    """
    measuring = Coverage.current()
    if measuring is not None:
        measuring._collector.data_lock = None
