"""The commands stuck and watch: which attempts are abandoned, for how long, by whom, and why.

Both list every abandoned attempt, or those of one scope, as long as there are not too many. How
long one must have been stuck to count (`--older-than`) decides about the exit code alone, and
`doctor` warns by the same rule.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from semel.cli.formatting import STUCK, as_json, columns, duration, fields, stuck_row
from semel.cli.store import LIMIT, hint_if_empty, open_engine
from semel.cli.terminal import Screen, coloured, say
from semel.core.observers import printable
from semel.core.records import Record
from semel.errors import StoreError
from semel.repair.maintenance import ALERT_AFTER, store_of
from semel.sync import Idempotency


class Abandoned(Struct, frozen=True):
    """The abandoned attempts of a store, the oldest first."""

    records: list[Record]
    more: bool
    """There are more than were asked for."""
    scope: str | None = None
    """The only scope that was asked for."""
    elsewhere: int = 0
    """How many there are in other scopes, unless there are `more`."""

    def counts(self, older_than: float = ALERT_AFTER) -> bool:
        """Return whether one has been stuck for so long that a person has to look at it."""
        return any(record.abandoned_for >= older_than for record in self.records)

    @property
    def text(self) -> str:
        """How many there are, and since when."""
        if not self.records:
            inside = "" if self.scope is None else f" in {printable(self.scope)}"
            others = f"; {self.elsewhere} in other scopes" if self.elsewhere else ""
            return f"nothing is stuck{inside}{others}"
        held = sum(record.hold for record in self.records)
        more, least = ("more than ", "at least ") if self.more else ("", "")
        return (
            f"{more}{len(self.records)} stuck, {least}{held} of them held, the oldest for "
            f"{duration(max(record.abandoned_for for record in self.records))}"
        )


def abandoned(store: Any, limit: int = LIMIT, scope: str | None = None) -> Abandoned:
    """Ask a store what is abandoned, of all scopes or of one."""
    asked = limit + 1
    while True:
        found = store.stuck(limit=asked)
        chosen = [record for record in found if scope in {None, record.scope}]
        if len(chosen) > limit or len(found) < asked:
            others = len(found) - len(chosen)
            return Abandoned(chosen[:limit], len(chosen) > limit, scope, others)
        asked *= 4  # those of other scopes are older


def stuck(options: Namespace) -> int:
    """List abandoned attempts; the exit code says whether one has been stuck for too long."""
    with open_engine(options) as engine:
        found = abandoned(store_of(engine), options.limit, options.scope)
        hint = None if found.records else hint_if_empty(engine, options)
    if options.json:
        print(as_json([_fields(record) for record in found.records]))
    else:
        print(_table(found))
    if found.more:
        say(f"there are more than {options.limit}: see --limit")
    if hint is not None:
        say(hint)
    return 1 if found.counts(options.older_than) else 0


def _fields(record: Record) -> dict[str, Any]:
    return {**fields(record), "stuck_seconds": round(record.abandoned_for, 3)}


def _table(found: Abandoned) -> str:
    if not found.records:
        return found.text
    return columns(STUCK, map(stuck_row, found.records), colour=coloured(sys.stdout))


def watch(options: Namespace) -> int:
    """Show what is stuck, and show it again, until Ctrl-C or as often as was asked for."""
    with open_engine(options) as engine, _interrupted_by_sigterm():
        look, left = _Look(engine, options), options.count
        try:
            with Screen() as screen:
                while True:
                    code, lines = look()
                    screen.draw([time.strftime("%Y-%m-%d %H:%M:%S %Z"), *lines])
                    left = None if left is None else left - 1
                    if left == 0:
                        return code
                    time.sleep(options.every)
        except KeyboardInterrupt:  # the way to end it
            return 0


class _Look:
    """Looks at what is stuck; returns an exit code and the lines to show."""

    def __init__(self, engine: Idempotency, options: Namespace) -> None:
        self._engine = engine
        self._store = store_of(engine)
        self._options = options
        self._may_be_wrong = True
        """The store has had no record so far."""

    def __call__(self) -> tuple[int, list[str]]:
        options = self._options
        try:
            found = abandoned(self._store, options.limit, options.scope)
            hint = self._hint(found)
        except StoreError as error:  # which may be what the operator is waiting for the end of
            return 1, ["store unreachable; trying again", "", str(error)]
        lines = [found.text]
        if hint is not None:
            lines.append(hint)
        if found.records:
            lines += ["", *_table(found).splitlines()]
        return int(found.counts(options.older_than)), lines

    def _hint(self, found: Abandoned) -> str | None:
        # Not again once there was a record: to look for the first one can be much work.
        ask = self._may_be_wrong and not found.records
        hint = hint_if_empty(self._engine, self._options) if ask else None
        self._may_be_wrong = hint is not None
        return hint


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end it as Ctrl-C does: the terminal has to be put in order."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
