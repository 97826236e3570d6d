"""The business: a book of payments in SQLite. It knows nothing of HTTP, and nothing of idempotency.

Called twice, `pay` charges twice: that nobody does so is the work of the integrations around it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CURRENCIES = ("EUR", "USD")
LARGEST = 1_000_000

TABLE = """
CREATE TABLE IF NOT EXISTS payments (
    number INTEGER PRIMARY KEY,
    account TEXT NOT NULL,
    amount INTEGER NOT NULL,
    currency TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'charged'
)
"""


class Refused(Exception):
    """The business says no; nothing was written."""


class NotFound(Exception):
    """There is no such payment."""


@dataclass(frozen=True)
class Payment:
    """A line of the book; amounts are in cents."""

    number: int
    account: str
    amount: int
    currency: str
    state: str


class Book:
    """The payments, in a file."""

    def __init__(self, file: Path | str) -> None:
        self._file = str(file)
        with self._open() as db:
            db.execute(TABLE)

    def pay(self, account: str, amount: int, currency: str) -> Payment:
        """Charge an account."""
        if currency not in CURRENCIES:
            raise Refused(f"the currency must be one of {', '.join(CURRENCIES)}")
        if not 0 < amount <= LARGEST:
            raise Refused(f"the amount must be from 1 to {LARGEST}")
        with self._open() as db:
            row = db.execute(
                "INSERT INTO payments (account, amount, currency) VALUES (?, ?, ?) RETURNING *",
                (account, amount, currency),
            ).fetchone()
        return Payment(*row)

    def refund(self, number: int) -> Payment:
        """Give the money back."""
        with self._open() as db:
            row = db.execute(
                "UPDATE payments SET state = 'refunded' WHERE number = ? AND state = 'charged' "
                "RETURNING *",
                (number,),
            ).fetchone()
        if row is None:
            raise Refused(f"payment {self.find(number).number} was refunded before")
        return Payment(*row)

    def find(self, number: int) -> Payment:
        """Look a payment up."""
        with self._open() as db:
            row = db.execute("SELECT * FROM payments WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise NotFound(f"there is no payment {number}")
        return Payment(*row)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self._file, timeout=30)
        try:
            with db:
                yield db
        finally:
            db.close()
