"""The card network: it moves the money, and keeps a ledger that semel knows nothing of.

Like the real ones, it honours a token of its caller: the same token again moves no money. The
ledger holds every order that arrived, those that moved nothing too.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from semel import Attempt

from .storm import Request

TABLE = """
CREATE TABLE IF NOT EXISTS ledger (
    arrival INTEGER PRIMARY KEY,
    charge  INTEGER NOT NULL,  -- the arrival that moved the money: this one, or an earlier one
    token   TEXT NOT NULL,
    key     TEXT NOT NULL,
    cents   INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    fence   INTEGER NOT NULL,
    pid     INTEGER NOT NULL
)
"""


@dataclass(frozen=True)
class Receipt:
    """What the client gets for a payment, however often it asks."""

    charge: int
    cents: int


@dataclass(frozen=True)
class Entry:
    """A line of the ledger."""

    arrival: int
    charge: int
    key: str
    cents: int
    attempt: int
    fence: int
    pid: int

    def __str__(self) -> str:
        return f"{self.cents} cents by process {self.pid} in attempt {self.attempt}"

    @property
    def moved_money(self) -> bool:
        """False when the token had come before."""
        return self.arrival == self.charge


class CardNetwork:
    """One connection to the card network."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = sqlite3.connect(ledger, isolation_level=None, timeout=30)
        # Processes die here, the machine does not: nothing needs to be on the disk at once.
        self._ledger.execute("PRAGMA synchronous = OFF")
        self._ledger.execute(TABLE)

    def charge(self, request: Request, token: str, attempt: Attempt) -> Receipt:
        """Move the money, once per token."""
        with self._ledger:
            self._ledger.execute("BEGIN IMMEDIATE")
            charge, arrival = self._ledger.execute(
                "SELECT min(arrival) FILTER (WHERE token = ?), coalesce(max(arrival), 0) + 1"
                " FROM ledger",
                (token,),
            ).fetchone()
            if charge is None:
                charge = arrival
            cents = request.payment.cents
            self._ledger.execute(
                "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    arrival,
                    charge,
                    token,
                    request.key,
                    cents,
                    attempt.number,
                    attempt.fence,
                    os.getpid(),
                ),
            )
        return Receipt(charge, cents)

    def entries(self) -> list[Entry]:
        """Read the ledger."""
        return [
            Entry(*row)
            for row in self._ledger.execute(
                "SELECT arrival, charge, key, cents, attempt, fence, pid"
                " FROM ledger ORDER BY arrival"
            )
        ]

    def close(self) -> None:
        """Hang up."""
        self._ledger.close()


def call(ledger: Path) -> contextlib.closing[CardNetwork]:
    """Connect to the card network for the length of a with block."""
    return contextlib.closing(CardNetwork(ledger))
