"""What SQLite does in fewer statements than a look and a write: the verbs of a first execution.

Inside a transaction nobody else writes, so a claim may insert first and a complete may update
first. What is not as simple as that is read and judged, as every other verb is.
"""

from __future__ import annotations

from functools import partial

from semel.core import judge
from semel.core.records import Claim, ClaimRequest, CompleteRequest
from semel.stores.sql.sqlite_table import SQLiteTable
from semel.stores.sql.verbs import Operation, Verb, Verbs


class SQLiteVerbs(Verbs):
    """The verbs of the store SPI on one table of SQLite."""

    def __init__(self, table: SQLiteTable) -> None:
        super().__init__(table)
        self._sqlite = table

    def claim(self, ask: ClaimRequest) -> Operation[Claim]:
        """Ask to run the operation."""
        judged = super().claim(ask)
        # Without a transaction it is only looked for: a replay needs no more.
        return Operation(partial(self._insert_first, ask, judged), judged.peek, look=judged.start)

    def complete(self, ask: CompleteRequest) -> Operation[bool]:
        """Store the owner's success."""
        judged = super().complete(ask)
        return Operation(partial(self._update_first, ask, judged), judged.peek)

    def _insert_first(self, ask: ClaimRequest, judged: Operation[Claim]) -> Verb[Claim]:
        answer, record = judge.first_claim(ask, self._sqlite.now())
        reply = yield self._sqlite.insert(record)
        if reply.changed:
            return answer
        return (yield from judged.start())

    def _update_first(self, ask: CompleteRequest, judged: Operation[bool]) -> Verb[bool]:
        reply = yield self._sqlite.complete(ask)
        return reply.changed > 0 or (yield from judged.start())
