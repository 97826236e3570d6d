"""The statements that write many records at once, and commit once.

This module writes SQL. It runs none. It keeps to what both servers understand.

Bytes stand in the text as hexadecimal literals: a digest is written once and used twice, and the
drivers' own quoting takes twice the time. Texts, and results, which may be large, are parameters.

An UPDATE goes through the members in their order and finds each row by its digest. It is told so:
in a small table a server would rather read, and lock, every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from semel.core.records import ClaimRequest, CompleteRequest, RenewRequest, State
from semel.stores.sql.mysql.table import NOW, READ_COLUMNS, READ_NOW, MySQLTable
from semel.stores.sql.rows import FORMAT, stamp
from semel.stores.sql.verbs import Statement

_RUNNING: Final = int(State.PROCESSING)


class BatchStatements:
    """The statements for many, on one table. The members come by their digests."""

    def __init__(self, table: MySQLTable) -> None:
        self._table = table
        own = "".join(f", {name}" for name in table.own_names)
        self._insert = (
            f"INSERT INTO {table.name} (digest, prefix, idem_key, biz_type, "  # noqa: S608 - a checked name
            "payload_hash, status, created_at, updated_at, "
            f"owner, number, fence, hold, lease_until, format{own}) VALUES "
        )
        self._own = ", %s" * len(table.own_names)
        self._read = f"SELECT digest, {READ_COLUMNS}, {READ_NOW}, "

    def claim(self, asks: Mapping[bytes, ClaimRequest]) -> Statement:
        """Insert what is new; either way, read what is there, and whether this insert made it."""
        rows: list[str] = []
        values: list[object] = []
        for digest, ask in asks.items():
            rows.append(
                f"({literal(digest)}, %s, %s, %s, {literal(ask.fingerprint)}, {_RUNNING}, "
                f"{NOW}, {NOW}, {literal(ask.owner)}, 1, {self._table.new_fence}, {ask.hold:d}, "
                f"{_later(str(stamp(ask.lease)))}, {FORMAT}{self._own})"
            )
            values += self._table.prefix, ask.identity.key, ask.identity.scope
            values += self._table.filled(ask).values()
        return Statement(
            f"{self._insert}{', '.join(rows)} ON DUPLICATE KEY UPDATE digest = digest",
            tuple(values),
            writes=True,
            then=self._look(asks, self._table.made_here),
        )

    def read(self, digests: Iterable[bytes]) -> Statement:
        """Read what is there, locking nothing."""
        return self._look(digests, "0")

    def _look(self, digests: Iterable[bytes], made_here: str) -> Statement:
        return Statement(
            f"{self._read}{made_here} FROM {self._table.name} WHERE digest IN ({_listed(digests)})",
            (),
            writes=False,
        )

    def owners(self, digests: Iterable[bytes], state: State) -> Statement:
        """Read who owns the records that are in this state, and have not expired."""
        return Statement(
            f"SELECT digest, owner FROM {self._table.name} "  # noqa: S608 - a checked name
            f"WHERE digest IN ({_listed(digests)}) AND status = {int(state)} "
            f"AND (expire_at IS NULL OR expire_at > {NOW})",
            (),
            writes=False,
        )

    def complete(self, asks: Mapping[bytes, CompleteRequest]) -> Statement:
        """Store the success of running owners."""
        return self._by_owner(
            f"t.status = {int(State.SUCCEEDED)}, t.result_payload = v.data, t.codec = v.codec, "
            f"t.lease_until = NULL, t.expire_at = {_later('v.ttl')}",
            "SELECT {} AS digest, {} AS owner, %s AS data, %s AS codec, {} AS ttl",
            [(digest, ask.owner, stamp(ask.ttl)) for digest, ask in asks.items()],
            tuple(value for ask in asks.values() for value in (ask.result.data, ask.result.codec)),
        )

    def renew(self, asks: Mapping[bytes, RenewRequest]) -> Statement:
        """Extend the leases of running owners."""
        return self._by_owner(
            f"t.lease_until = {_later('v.lease')}",
            "SELECT {} AS digest, {} AS owner, {} AS lease",
            [(digest, ask.owner, stamp(ask.lease)) for digest, ask in asks.items()],
            (),
        )

    def _by_owner(
        self,
        changes: str,
        member: str,
        members: list[tuple[bytes, bytes, int]],
        values: tuple[object, ...],
    ) -> Statement:
        listed = " UNION ALL ".join(
            member.format(literal(digest), literal(owner), span) for digest, owner, span in members
        )
        return Statement(
            f"UPDATE ({listed}) v "  # noqa: S608 - a checked name
            f"STRAIGHT_JOIN {self._table.name} t FORCE INDEX (PRIMARY) "
            f"ON t.digest = v.digest AND t.owner = v.owner SET {changes}, t.updated_at = {NOW} "
            f"WHERE t.status = {_RUNNING}",
            values,
            writes=True,
        )


def literal(value: bytes | None) -> str:
    """Write bytes for the text of a statement."""
    return "NULL" if value is None else f"x'{value.hex()}'"


def _listed(digests: Iterable[bytes]) -> str:
    return ", ".join(map(literal, digests))


def _later(microseconds: str) -> str:
    return f"{NOW} + INTERVAL {microseconds} MICROSECOND"
