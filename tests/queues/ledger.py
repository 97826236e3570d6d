"""What workers do with an order, and where they note it: outside the library, in a file.

An order says what its handler has to do (`plan`). A handler that must be met in the middle of its
work waits for a file, which the test writes: a race is brought about by hand.

delivered   a message reached the handler of semel        verdict    what it said about it
began       the handler of the application was called     effect     and did its work
ready       a worker takes messages                       log        a warning of semel's
starved     a worker did not run for so long              renewed    the store has renewed a lease
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from semel import current_attempt

PATIENCE = 60.0
"""For what takes a moment, on a machine whose cores others may keep busy."""
PAUSE = 0.01
ALL = "all"


class Refused(Exception):
    """What an order's handler raises."""


class Note(NamedTuple):
    """One line of the file."""

    what: str
    order: str
    worker: int
    """The process group, which is the id of the worker."""
    at: float
    """By the machine's monotonic clock: the same for all processes."""
    more: dict[str, Any]


class Ledger:
    """A folder with the file of notes, and the files that handlers wait for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "notes"
        self._file.touch()
        self._read: list[Note] = []
        self._offset = 0

    def note(self, what: str, order: str = "", **more: Any) -> None:
        """One line, in one write: processes that share a file do not mix."""
        told = [what, order, os.getpgrp(), time.monotonic(), more]
        line = json.dumps(told).encode() + b"\n"
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def notes(self, what: str, order: str | None = None) -> list[Note]:
        with self._file.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]  # a line that is being written is read the next time
        self._read += [Note(*json.loads(line)) for line in new.splitlines()]
        self._offset += len(new)
        return [one for one in self._read if one.what == what and order in {None, one.order}]

    def count(self, what: str, order: str | None = None) -> int:
        return len(self.notes(what, order))

    def verdicts(self, order: str) -> list[str]:
        return [note.more["kind"] for note in self.notes("verdict", order)]

    def wait_for(self, what: str, order: str, times: int = 1) -> list[Note]:
        """Wait until there are so many of these notes."""
        eventually(lambda: self.count(what, order) >= times, f"{what} of {order}, {times} times")
        return self.notes(what, order)

    def let_go(self, order: str = ALL) -> None:
        """Let the handler of an order go on."""
        (self.folder / f"go-{order}").touch()

    def goes(self, order: str) -> bool:
        return any((self.folder / f"go-{name}").exists() for name in (order, ALL))


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(PAUSE)


# --- in a worker ---------------------------------------------------------------------------------


def steps(ledger: Ledger, order: str, plan: str, retries: int) -> Iterator[float]:
    """Do what the plan of an order says; each step that comes out is a time to wait.

    After its effect an order may linger, for a moment or for the seconds that its plan names.
    """
    attempt = current_attempt()
    assert attempt is not None
    ledger.note("began", order, number=attempt.number, retries=retries)
    match plan:
        case "wait":
            while not ledger.goes(order):
                yield PAUSE
        case "fail once" if ledger.count("began", order) == 1:
            raise Refused(f"{order} is refused once")
        case "poison":
            raise Refused(f"{order} is refused")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    ledger.note(
        "effect", order, number=attempt.number, fence=attempt.fence, owner=attempt.owner.hex()
    )
    if plan.startswith("linger"):
        yield float(plan.removeprefix("linger") or PAUSE)


def handle(ledger: Ledger, order: str, plan: str, retries: int = 0) -> str:
    for seconds in steps(ledger, order, plan, retries):
        time.sleep(seconds)
    return f"{order} is done"


async def handle_async(ledger: Ledger, order: str, plan: str) -> str:
    for seconds in steps(ledger, order, plan, 0):
        await asyncio.sleep(seconds)
    return f"{order} is done"
