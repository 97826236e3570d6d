"""The statements that write many records at once, and commit once.

This module writes SQL. It runs none. It keeps to what both servers understand.

Bytes stand in the text as hexadecimal literals: a digest is written once and used twice, and the
drivers' own quoting takes twice the time. Texts, and results, which may be large, are parameters.
An insert of many is also written for one row, to be prepared, with the rows apart from it.

An UPDATE finds its rows by their digests, in their order. It is told so: in a small table a server
would rather read, and lock, every row. It has one CASE for a column; a join with a list of members
takes a server half as long again, which notes the rows that it finds before it changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from semel.core.records import ClaimRequest, CompleteRequest, RenewRequest, State
from semel.stores.sql.mysql.table import NOW, READ_COLUMNS, READ_NOW, MySQLTable
from semel.stores.sql.rows import FORMAT, stamp
from semel.stores.sql.verbs import Reply, Statement

T = TypeVar("T")

_RUNNING: Final = int(State.PROCESSING)

ALL_NEW: Final = 1 << 61
SOME_MET: Final = 1 << 62
"""What an insert of many leaves in LAST_INSERT_ID(), added to its fence: that it made every row, or
that it met one. Beyond what a counting column of the application's own would leave there; and not
the count of rows, since connections differ in what they count."""

_NOTE_FENCE: Final = f"LAST_INSERT_ID({ALL_NEW} + {READ_NOW}) - {ALL_NEW}"
_NOTE_MET: Final = f"IF(LAST_INSERT_ID({SOME_MET} + {READ_NOW}), digest, digest)"
_UNLESS_ALL_NEW: Final = f"LAST_INSERT_ID() NOT BETWEEN {ALL_NEW} AND {SOME_MET} AND "
_MADE_HERE: Final = f"fence + {SOME_MET} = LAST_INSERT_ID()"


class Bulk(Statement):
    """A statement for one row, with `?` for its values; the parameters are the rows."""

    __slots__ = ()


UNABLE: Final = Reply([], 0)
"""The answer to a `Bulk` that this server, or this connection, does not take: nothing was done."""


class BatchStatements:
    """The statements for many, on one table. The members come by their digests."""

    def __init__(self, table: MySQLTable) -> None:
        self._table = table
        own = "".join(f", {name}" for name in table.own_names)
        self._insert = (
            f"INSERT INTO {table.quoted} (digest, prefix, idem_key, biz_type, "  # noqa: S608 - a checked name
            "payload_hash, status, created_at, updated_at, "
            f"owner, number, fence, hold, lease_until, format{own}) VALUES "
        )
        self._own = ", %s" * len(table.own_names)
        self._insert_row = {
            hashed: f"{self._insert}(?, ?, ?, ?, {'?' if hashed else 'NULL'}, {_RUNNING}, "
            f"{NOW}, {NOW}, ?, 1, IF(?, {_NOTE_FENCE}, {READ_NOW}), ?, {_later('?')}, {FORMAT}) "
            f"ON DUPLICATE KEY UPDATE digest = {_NOTE_MET}"
            for hashed in (True, False)
        }
        self._read = f"SELECT digest, {READ_COLUMNS}, {READ_NOW}, "

    def claim(self, asks: Mapping[bytes, ClaimRequest]) -> Statement:
        """Insert what is new; if that is not all, read what is there, and what this insert made."""
        rows: list[str] = []
        values: list[object] = []
        fence = _NOTE_FENCE  # by the first row, before any can be met; it is the same for all
        for digest, ask in asks.items():
            rows.append(
                f"({literal(digest)}, %s, %s, %s, {literal(ask.fingerprint)}, {_RUNNING}, "
                f"{NOW}, {NOW}, {literal(ask.owner)}, 1, {fence}, {ask.hold:d}, "
                f"{_later(str(stamp(ask.lease)))}, {FORMAT}{self._own})"
            )
            values += self._table.prefix, ask.identity.key, ask.identity.scope
            values += self._table.filled(ask).values()
            fence = READ_NOW
        return Statement(
            f"{self._insert}{', '.join(rows)} ON DUPLICATE KEY UPDATE digest = {_NOTE_MET}",
            tuple(values),
            writes=True,
            then=self._look(asks, _MADE_HERE, _UNLESS_ALL_NEW),
        )

    def claim_in_bulk(self, asks: Mapping[bytes, ClaimRequest]) -> Bulk:
        """Insert what is new, as `claim` does; what is there has to be read by `read_after`.

        Not for a table with columns of the application's own: their values may be of any type, and
        the driver would not write them as it does in a text.
        """
        # A column without any value has no type, and the driver would not send it.
        hashed = any(ask.fingerprint is not None for ask in asks.values())
        rows: list[tuple[object, ...]] = []
        for digest, ask in asks.items():
            fingerprint = (ask.fingerprint,) if hashed else ()
            names = (digest, self._table.prefix, ask.identity.key, ask.identity.scope)
            notes_fence = not rows
            lease = stamp(ask.lease)
            rows.append((*names, *fingerprint, ask.owner, notes_fence, ask.hold, lease))
        return Bulk(self._insert_row[hashed], tuple(rows), writes=True)

    def read_after(self, digests: Iterable[bytes], noted: int) -> Statement:
        """Read what is there, and what the insert made that noted this in LAST_INSERT_ID()."""
        return self._look(digests, f"fence = {noted - SOME_MET}")

    def read(self, digests: Iterable[bytes]) -> Statement:
        """Read what is there, locking nothing."""
        return self._look(digests, "0")

    def _look(self, digests: Iterable[bytes], made_here: str, condition: str = "") -> Statement:
        return Statement(
            f"{self._read}{made_here} FROM {self._table.quoted} "
            f"WHERE {condition}digest IN ({_listed(digests)})",
            (),
            writes=False,
        )

    def owners(self, digests: Iterable[bytes], state: State) -> Statement:
        """Read who owns the records that are in this state, and have not expired."""
        return Statement(
            f"SELECT digest, owner FROM {self._table.quoted} "  # noqa: S608 - a checked name
            f"WHERE digest IN ({_listed(digests)}) AND status = {int(state)} "
            f"AND (expire_at IS NULL OR expire_at > {NOW})",
            (),
            writes=False,
        )

    def complete(self, asks: Mapping[bytes, CompleteRequest]) -> Statement:
        """Store the success of running owners."""
        results = [ask.result for ask in asks.values()]
        data, data_values = _each(asks, [result.data for result in results])
        codec, codec_values = _each(asks, [result.codec for result in results])
        ttl, ttl_values = _each(asks, [stamp(ask.ttl) for ask in asks.values()])
        return self._by_owner(
            asks,
            f"status = {int(State.SUCCEEDED)}, result_payload = {data}, codec = {codec}, "
            f"lease_until = NULL, expire_at = {_later(ttl)}",
            (*data_values, *codec_values, *ttl_values),
        )

    def renew(self, asks: Mapping[bytes, RenewRequest]) -> Statement:
        """Extend the leases of running owners."""
        lease, values = _each(asks, [stamp(ask.lease) for ask in asks.values()])
        return self._by_owner(asks, f"lease_until = {_later(lease)}", (*values,))

    def _by_owner(
        self,
        asks: Mapping[bytes, CompleteRequest] | Mapping[bytes, RenewRequest],
        changes: str,
        values: tuple[object, ...],
    ) -> Statement:
        # As one value: digests are of one length, and pairs cost a server two microseconds a row.
        owned = _listed(digest + ask.owner for digest, ask in asks.items())
        return Statement(
            f"UPDATE {self._table.quoted} FORCE INDEX (PRIMARY) "  # noqa: S608 - a checked name
            f"SET {changes}, updated_at = {NOW} WHERE digest IN ({_listed(asks)}) "
            f"AND CONCAT(digest, owner) IN ({owned}) AND status = {_RUNNING}",
            values,
            writes=True,
        )


def _each(digests: Iterable[bytes], values: list[T]) -> tuple[str, list[T]]:
    """Write what gives each row the value of its member, and the parameters that this takes."""
    if values.count(values[0]) == len(values):
        return "%s", values[:1]
    cases = " ".join(f"WHEN {literal(digest)} THEN %s" for digest in digests)
    return f"CASE digest {cases} END", values


def literal(value: bytes | None) -> str:
    """Write bytes for the text of a statement."""
    return "NULL" if value is None else f"x'{value.hex()}'"


def _listed(digests: Iterable[bytes]) -> str:
    return ", ".join(map(literal, digests))


def _later(microseconds: str) -> str:
    return f"{NOW} + INTERVAL {microseconds} MICROSECOND"
