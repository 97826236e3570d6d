"""What the verbs do for many members at once: one statement, and a judgement of each row.

They are generators, as in `verbs`. A member that the statement leaves open is `ALONE`: it is asked
for by the verb for one member, which knows every case. The members must be different identities.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

from semel.core import judge
from semel.core.records import Busy, Claim, Claimed, ClaimRequest, CompleteRequest, RenewRequest
from semel.errors import StoreError, StoreUnavailable
from semel.stores.batching import ALONE, Alone, Request
from semel.stores.sql.locks import ASK_AGAIN_AFTER
from semel.stores.sql.postgres.batches import BatchStatements, Seen
from semel.stores.sql.postgres.patience import concerns_all
from semel.stores.sql.postgres.statements import check_size
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.rows import Row
from semel.stores.sql.verbs import OwnColumns, Verb, operation, record_of

A = TypeVar("A", bound=Request)
T = TypeVar("T")

MOST_TOGETHER: Final = 512
"""Members of one statement. Each holds an advisory lock until the commit, and a server has room for
some thousands of those, for all its sessions."""

LOCKED: Final = "an open transaction has this record locked; nothing was written"


class PostgresBatchVerbs(PostgresVerbs):
    """The verbs for one member and for many, on one table."""

    def __init__(
        self,
        table: str,
        prefix: str,
        columns: OwnColumns,
        waiting: Container[UUID],
        patience: float,
    ) -> None:
        """`patience`: how long a batch may wait for a lock that is no transaction of ours."""
        super().__init__(table, prefix, columns, waiting)
        self._batches = BatchStatements(table)
        self._patience = f"{max(1, round(patience * 1000))}ms"

    @property
    def has_own_columns(self) -> bool:
        """Whether the application's functions fill columns of their own."""
        return bool(self._table.columns)

    @operation(peek=False)
    def claim_together(
        self, asks: Sequence[ClaimRequest]
    ) -> Verb[list[Claim | StoreError | Alone]]:
        """Claim what is new, and judge what is there."""
        digests, ordered = self._in_order(asks)
        reply = yield self._batches.claim(
            **self._named_together(digests, ordered),
            prefix=self._table.prefix,
            fingerprints=[ask.fingerprint for ask in ordered],
            owners=[ask.owner for ask in ordered],
            leases=[ask.lease for ask in ordered],
            holds=[ask.hold for ask in ordered],
        )
        told = {row[1]: row for row in reply.rows}
        answers = {
            ask.identity: self._answer(ask, digest, told.get(digest))
            for digest, ask in zip(digests, ordered, strict=True)
        }
        return [answers[ask.identity] for ask in asks]

    def _answer(
        self, ask: ClaimRequest, digest: bytes, told: Row | None
    ) -> Claim | StoreError | Alone:
        if told is None:
            return ALONE  # another one was inserted while the statement ran
        seen, _, waited_for, *row = told
        if seen == Seen.WRITTEN:
            return Claimed(1, row[-1])
        if seen == Seen.LOCKED:
            return Busy(ASK_AGAIN_AFTER)
        try:
            record = record_of(tuple(row), ask.identity)
        except StoreError as damage:
            return damage
        answer, _ = judge.claim(record, ask, record.now)
        if isinstance(answer, Claimed):
            return ALONE  # it has to be written over, on its newest version
        if isinstance(answer, Busy) and not waited_for and UUID(bytes=digest) in self._waiting:
            return ALONE  # it has to be noted that somebody waits
        return answer

    @operation(peek=False)
    def complete_together(
        self, asks: Sequence[CompleteRequest]
    ) -> Verb[list[bool | StoreError | Alone]]:
        """Store the success of attempts that run."""
        digests, ordered = self._in_order(asks)
        results = [ask.result.data for ask in ordered]
        check_size(sum(map(len, results)))  # too much together, each is asked for alone
        reply = yield self._batches.complete(
            **self._named_together(digests, ordered),
            owners=[ask.owner for ask in ordered],
            results=results,
            codecs=[ask.result.codec for ask in ordered],
            ttls=[ask.ttl for ask in ordered],
        )
        ended = {row[0] for row in reply.rows}
        done = {
            ask.identity for digest, ask in zip(digests, ordered, strict=True) if digest in ended
        }
        return [True if ask.identity in done else ALONE for ask in asks]

    @operation(peek=False)
    def renew_together(self, asks: Sequence[RenewRequest]) -> Verb[list[bool | StoreError]]:
        """Extend leases. What an open transaction has is not waited for, for the others' sake."""
        digests, ordered = self._in_order(asks)
        reply = yield self._batches.renew(
            **self._named_together(digests, ordered),
            owners=[ask.owner for ask in ordered],
            leases=[ask.lease for ask in ordered],
        )
        told: dict[bytes, bool] = dict(reply.rows)
        answers = {
            ask.identity: told.get(digest) for digest, ask in zip(digests, ordered, strict=True)
        }
        return [
            StoreUnavailable(LOCKED)
            if (renewed := answers[ask.identity]) is False
            else renewed is True
            for ask in asks
        ]

    def _in_order(self, asks: Sequence[A]) -> tuple[list[bytes], list[A]]:
        """Sort by digest, the one order for everybody: two batches then never deadlock."""
        by_digest = {self.short_digest(ask.identity): ask for ask in asks}
        digests = sorted(by_digest)
        return digests, [by_digest[digest] for digest in digests]

    def _named_together(self, digests: list[bytes], asks: Sequence[Request]) -> dict[str, Any]:
        return {
            "digests": digests,
            "keys": [ask.identity.key for ask in asks],
            "scopes": [ask.identity.scope for ask in asks],
            "locks": [lock_number(digest) for digest in digests],
            "patience": self._patience,
        }


def each_its_own(outcome: list[T] | Exception, count: int) -> list[T | StoreError | Alone]:
    """Turn the outcome of a batch into one for each of its members."""
    if isinstance(outcome, StoreUnavailable) and concerns_all(outcome):
        return [StoreUnavailable(*outcome.args) for _ in range(count)]
    if isinstance(outcome, Exception):
        return [ALONE] * count  # the member that it belongs to meets it again
    return [*outcome]


def parts(asks: Sequence[A]) -> Iterator[Sequence[A]]:
    """Part what is too much for one statement."""
    for start in range(0, len(asks), MOST_TOGETHER):
        yield asks[start : start + MOST_TOGETHER]


def left_open(asks: Sequence[T], answers: Sequence[object]) -> list[T]:
    """List the members that have to be asked for again."""
    return [ask for ask, answer in zip(asks, answers, strict=True) if answer is ALONE]


def filled_in(answers: Sequence[T | Alone], later: Iterable[T]) -> list[T]:
    """Put the later answers in the places that were left open."""
    rest = iter(later)
    return [next(rest) if answer is ALONE else answer for answer in answers]


def all_differ(asks: Sequence[Request]) -> bool:
    """Whether no identity is there twice: else their order matters, and one statement has none."""
    return len({ask.identity for ask in asks}) == len(asks)


def lock_number(digest: bytes) -> int:
    """Name the advisory lock of a record."""
    return int.from_bytes(digest[:8], "big", signed=True)
